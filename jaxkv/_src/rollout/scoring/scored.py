"""Arguments and results of `score`."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.kv.pools import Pools


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreState:
  """A cache and its memory, for `score` without a rollout.

  For example, of a reference model:

    ScoreState(
      cache=jaxkv.init(sizes), kv=jaxkv.models.init_kv(config, sizes)
    )

  Attributes:
    cache: a cache with at least one empty slot.
    kv: its K/V memory: a pool or a tuple of pools.
  """

  cache: CacheState
  kv: Pools


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


class Given(NamedTuple):
  """Arguments of `score`.

  Attributes:
    prompts: int32[N, P].
    prompt_lengths: int32[N].
    completions: int32[N, G, R].
    lengths: int32[N, G].
    salts: uint32[N, 4]; None for no salts.
    user: a pytree of arrays [N, ...].
    busy: bool[B], slots that may not be used.
    temperature: float32[]; None for 1.
  """

  prompts: Array
  prompt_lengths: Array
  completions: Array
  lengths: Array
  salts: Array | None
  user: Any
  busy: Array
  temperature: Array | None

  def tokens(self, group: Array, samples: Array, positions: Array) -> Array:
    """Returns tokens of one group at int32[...] samples and positions.

    Positions inside the prompt ignore `samples`; positions beyond the end give
    0.
    """
    length = self.prompt_lengths[group]
    return jnp.where(
      positions < length,
      indexing.take(self.prompts, group, positions),
      indexing.take(self.completions, group, samples, positions - length),
    )


def nothing_scored(
  given: Given, code: Array, *, entropy: bool, top_log_probs: int
) -> Scored:
  """Returns zeros for all groups, with the initial statuses `code`."""
  shape, groups = given.completions.shape, given.prompts.shape[:1]
  top = (*shape, top_log_probs)
  return Scored(
    code=code,
    log_probs=jnp.zeros(shape, jnp.float32),
    entropy=jnp.zeros(shape, jnp.float32) if entropy else None,
    top_tokens=jnp.zeros(top, jnp.int32) if top_log_probs else None,
    top_log_probs=jnp.zeros(top, jnp.float32) if top_log_probs else None,
    computed_tokens=jnp.zeros(groups, jnp.int32),
    cached_tokens=jnp.zeros(groups, jnp.int32),
  )
