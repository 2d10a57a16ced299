"""The result of `score`."""

import dataclasses

import jax
from jax import Array

from jaxkv._src.cache.state import Outcome


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Outcome):
  """Log-probs of G completions of each of N prompts.

  Padding is 0. All tokens of a failed group are NaN, and 0 in `top_tokens`; if
  the length of a completion is out of range, all its columns are. X is
  `top_log_probs`.

  Attributes:
    code: the `Status` of each group; `ok` is True for OK.  # int32[N]
    log_probs: the log-prob of each token.  # float32[N, G, R]
    entropy: the entropy of each token's distribution in nats; None if not
      requested.  # float32[N, G, R]
    top_tokens: the most likely tokens at each position, descending; None if not
      requested.  # int32[N, G, R, X]
    top_log_probs: their log-probs.  # float32[N, G, R, X]
    computed_tokens: tokens that the model computed for each group, without
      padding.  # int32[N]
    cached_tokens: tokens of each prompt found in the cache, summed over all
      lookups: one, or several if slots or pages are scarce.  # int32[N]
  """

  log_probs: Array
  entropy: Array | None
  top_tokens: Array | None
  top_log_probs: Array | None
  computed_tokens: Array
  cached_tokens: Array
