"""What `score` takes and gives."""

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
  """A cache and its memory, for `score` where there is no rollout.

  Such as those of a reference model:

    ScoreState(
      cache=jaxkv.init(sizes), kv=jaxkv.models.init_kv(config, sizes)
    )

  Attributes:
    cache: who owns which pages; with at least one empty slot.
    kv: their contents, in one pool or in a tuple of pools.
  """

  cache: CacheState
  kv: Pools


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Outcome):
  """What a model thinks of G completions of each of N prompts.

  Where a completion has no token, all is 0. In groups that are not OK, as `ok`
  says, each token has NaN, and 0 in `top_tokens`; so has every column of a
  completion with a length that is out of range. X is `top_log_probs`.

  Attributes:
    code: a `Status` for each group; `ok` is True where it is OK.  # int32[N]
    log_probs: of each token.  # float32[N, G, R]
    entropy: of the distribution of each token, at the `temperature` of `score`,
      in nats; None if not asked for.  # float32[N, G, R]
    top_tokens: the most likely tokens in the place of each one, descending;
      None if not asked for.  # int32[N, G, R, X]
    top_log_probs: of those.  # float32[N, G, R, X]
    computed_tokens: tokens that the model computed for each group, without
      padding.  # int32[N]
    cached_tokens: tokens of each prompt that were found in the cache, summed
      over all times that it was looked up: once, but where slots or pages are
      few.  # int32[N]
  """

  log_probs: Array
  entropy: Array | None
  top_tokens: Array | None
  top_log_probs: Array | None
  computed_tokens: Array
  cached_tokens: Array


class Given(NamedTuple):
  """The groups.

  Attributes:
    prompts: int32[N, P].
    prompt_lengths: int32[N].
    completions: int32[N, G, R].
    lengths: int32[N, G].
    salts: uint32[N, 4]; None for none.
    user: a pytree of arrays [N, ...].
    busy: bool[B], slots that are not to be used, empty or not.
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
    """int32[...]: tokens of one group; 0 where there is none.

    Args:
      group: int32[].
      samples: int32[...], of no matter for a prompt's tokens.
      positions: int32[...].
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
  """Zeros for all groups, whose statuses are int32[N] so far."""
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
