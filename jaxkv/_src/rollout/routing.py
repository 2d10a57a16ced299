"""The experts that tokens used, which a trainer is to use again.

A model keeps them beside its K/V, in `jaxkv.kv.ExpertIdPages`, so those of
cached prefixes are there, too. When a sequence leaves its slot, its pages may
soon be another one's. What they say is written down then.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import read_tokens
from jaxkv._src.kv.pools import Pools
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.sequences import Sequences


def check_experts(sizes: CacheConfig, kv: Pools, config: RolloutConfig) -> None:
  """Raises unless the memory has the experts that a rollout is to keep.

  Raises:
    ValueError: it has not, or loses them while a sequence runs.
  """
  if not config.experts:
    return
  pool = kv[-1] if isinstance(kv, tuple) else kv
  if not isinstance(pool, ExpertIdPages):
    raise ValueError(
      "`kv` must have ExpertIdPages as its last pool with"
      f" RolloutConfig.experts, got {type(pool).__name__}; make it with "
      "jaxkv.models.init_kv(experts=True)."
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
  """Of tokens [Q, W] that never ran: [Q, W, J, k]; None if none are kept."""
  if not config.experts:
    return None
  pool = _pool(kv)
  shape = (*tokens.shape, pool.num_layers, pool.width)
  return jnp.full(shape, -1, pool.read_dtype)


def with_experts(
  sequences: Sequences, kv: Pools, cache: CacheState, rows: Array
) -> Sequences:
  """Sequences with the experts that stand in the pages of their slots.

  What is known of tokens that a slot has not computed yet stays: those of a
  sequence that entered again.

  Args:
    sequences: all sequences.
    kv: the memory.
    cache: who owns which pages.
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
    found = read_tokens(pool, table[slot][None], cache.length[slot][None])
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
