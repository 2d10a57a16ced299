"""Records the experts of tokens, for a trainer to replay.

The model stores them beside its K/V, in `jaxkv.kv.ExpertIdPages`, so cached
prefixes have them too. They are read when a sequence leaves its slot, before
its pages are reused.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import read_expert_ids
from jaxkv._src.kv.pools import Pools
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.sequences import Sequences


def check_experts(sizes: CacheConfig, kv: Pools, config: RolloutConfig) -> None:
  """Raises ValueError unless the memory records experts, if requested."""
  if not config.record_experts:
    return
  pool = kv[-1] if isinstance(kv, tuple) else kv
  if not isinstance(pool, ExpertIdPages):
    raise ValueError(
      "`kv` must have ExpertIdPages as its last pool with"
      f" RolloutConfig.record_experts, got {type(pool).__name__}; make it with "
      "jaxkv.models.init_kv(record_experts=True)."
    )
  kind = sizes.groups[pool.group]
  if kind.skips_pages:
    raise ValueError(
      "`ExpertIdPages.group` must be a group that keeps its pages in a rollout,"
      f" got {pool.group}, {kind}; use one of FullAttention."
    )


def unknown_experts(
  kv: Pools, tokens: Array, config: RolloutConfig
) -> Array | None:
  """Returns -1 for all tokens, [Q, W, J, k]; None without experts."""
  if not config.record_experts:
    return None
  pool = _pool(kv)
  shape = (*tokens.shape, pool.num_layers, pool.width)
  return jnp.full(shape, -1, pool.read_dtype)


def with_experts(
  sequences: Sequences, kv: Pools, cache: CacheState, rows: Array
) -> Sequences:
  """Copies the experts of slots' pages to their sequences.

  Tokens that a resumed sequence has not computed again keep theirs.

  Args:
    sequences: all sequences.
    kv: the memory.
    cache: the cache.
    rows: int32[B], the row of the sequence in each slot, Q for none.
  """
  if sequences.experts is None:
    return sequences
  pool, none = _pool(kv), sequences.length.shape[0]
  width = sequences.tokens.shape[1]
  columns = -(-width // pool.page_size)
  table = cache.page_table[:, pool.group, :columns]

  def trip(loop: tuple[Array, Array]) -> tuple[Array, Array]:
    # A slot at a time: all of them would be as much memory as their sequences.
    rows, experts = loop
    slot = jnp.argmax(rows < none).astype(jnp.int32)
    row = rows[slot]
    found = read_expert_ids(pool, table[slot][None], cache.length[slot][None])
    found, before = found[0, :width], experts[row]
    found = jnp.where(found < 0, before, found)
    return rows.at[slot].set(none), experts.at[row].set(found)

  _, experts = lax.while_loop(
    lambda loop: jnp.any(loop[0] < none),
    trip,
    sharding.match_varying_axes((rows, sequences.experts)),
  )
  return dataclasses.replace(sequences, experts=experts)


def _pool(kv: Pools) -> ExpertIdPages:
  pool = kv[-1] if isinstance(kv, tuple) else kv
  assert isinstance(pool, ExpertIdPages)  # See `check_experts`.
  return pool
