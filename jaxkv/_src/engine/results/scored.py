"""The result of `score`."""

import dataclasses

import jax
from jax import Array

from jaxkv._src.cache.state import Outcome


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Outcome):
  """Log-probs of G completions, of up to R tokens, of each of N prompts.

  Columns past the end of a completion are 0. The other columns of a failed
  group are NaN, or 0 in `top_tokens`. A completion whose length is out of range
  counts as R tokens long.

  Attributes:
    code: the `Status` of each prompt with its completions.  # int32[N]
    log_probs: the log-prob of each token.  # float32[N, G, R]
    entropy: the entropy in nats of the distribution of each token; None if not
      requested.  # float32[N, G, R]
    top_tokens: the X most likely tokens at each position, most likely first;
      None if not requested.  # int32[N, G, R, X]
    top_log_probs: the log-probs of `top_tokens`.  # float32[N, G, R, X]
    computed_tokens: tokens that the model computed for each group, without
      padding.  # int32[N]
    cached_tokens: tokens of each group that lookups found in the cache. If
      slots or pages are scarce, a group is looked up several times, and the
      tokens of all lookups are added. After a preemption a lookup can also find
      tokens of a completion.  # int32[N]
  """

  log_probs: Array
  entropy: Array | None
  top_tokens: Array | None
  top_log_probs: Array | None
  computed_tokens: Array
  cached_tokens: Array
