"""Records the experts of tokens, for a trainer to replay.

The model writes expert ids into `jaxkv.kv.ExpertIdPages`, beside the K/V, so
cached prefixes have expert ids too. When a sequence leaves its slot, its expert
ids are copied to the queue, because other sequences may reuse its pages.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.queue import NOT_SAMPLED
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.slots import Slots
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import read_expert_ids
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pools_of


def check_experts(sizes: CacheConfig, kv: Pools, config: RolloutConfig) -> None:
  """Raises ValueError if `config` records experts that `kv` cannot store."""
  if not config.record_experts:
    return
  pool = pools_of(kv)[-1]
  if not isinstance(pool, ExpertIdPages):
    raise ValueError(
      "`kv` must have ExpertIdPages as its last pool with"
      f" RolloutConfig.record_experts, got {type(pool).__name__}; make it with "
      "jaxkv.models.init_kv(record_experts=True)."
    )
  kind = sizes.groups[pool.group]
  if kind.skips_pages:
    raise ValueError(
      "`ExpertIdPages.group` must be a group that keeps all of its pages, got "
      f"{pool.group}, {kind}; use a FullAttention group."
    )


def unknown_experts(
  kv: Pools, tokens: Array, config: RolloutConfig
) -> Array | None:
  """Returns the initial `Queue.experts`, all -1; None without such records."""
  if not config.record_experts:
    return None
  pool = _pool(kv)
  shape = (*tokens.shape, pool.num_layers, pool.width)
  return jnp.full(shape, -1, pool.read_dtype)


def save_full_pages(
  queue: Queue, slots: Slots, kv: Pools, cache: CacheState, counts: Array
) -> Queue:
  """Saves the expert ids of slots that fill a page, if pages can be merged.

  The next `counts`, int32[B], tokens of each slot are about to be committed.
  With `CacheConfig.merge_duplicates`, a page of another sequence can then
  replace the page of a slot. Its tokens are equal, but their experts may not.
  """
  if queue.experts is None or not cache.config.merge_duplicates:
    return queue
  lengths = cache.length + counts
  page_size = cache.config.page_size
  num_full_pages = elementwise.quotient(cache.length, page_size)
  fills = elementwise.quotient(lengths, page_size) > num_full_pages
  rows = jnp.where(fills, slots.row, queue.no_row)
  return save_experts(queue, kv, cache, rows, lengths)


def save_experts(
  queue: Queue,
  kv: Pools,
  cache: CacheState,
  rows: Array,
  lengths: Array | None = None,
) -> Queue:
  """Copies expert ids from the pages of slots to queue rows `rows`, int32[B].

  The row is Q for a slot that is not copied. The pages of a slot have the ids
  of `lengths`, int32[B], tokens; None for `cache.length`.

  A token keeps its ids in the queue if the next token was sampled: the log-prob
  of the next token was computed with them, before a preemption or with other
  weights. Tokens that are not recomputed yet have no ids in the pages, and keep
  their ids, too.
  """
  if queue.experts is None:
    return queue
  lengths = cache.length if lengths is None else lengths
  pool, no_row = _pool(kv), queue.no_row
  columns = -(-queue.width // pool.page_size)
  table = cache.page_table[:, pool.group, :columns]

  def save_one(loop: tuple[Array, Array]) -> tuple[Array, Array]:
    # One slot at a time, because the ids of all slots would need much memory.
    rows, experts = loop
    slot = jnp.argmax(rows < no_row).astype(jnp.int32)
    row = rows[slot]
    ids = read_expert_ids(pool, table[slot][None], lengths[slot][None])
    ids, before = ids[0, : queue.width], experts[row]
    is_sampled = queue.versions[row] != NOT_SAMPLED
    predicts_sampled = jnp.roll(is_sampled, -1).at[-1].set(False)
    stays = (before >= 0) & predicts_sampled[:, None, None]
    ids = jnp.where((ids < 0) | stays, before, ids)
    return rows.at[slot].set(no_row), experts.at[row].set(ids)

  _, experts = lax.while_loop(
    lambda loop: jnp.any(loop[0] < no_row),
    save_one,
    sharding.match_varying_axes((rows, queue.experts)),
  )
  return dataclasses.replace(queue, experts=experts)


def _pool(kv: Pools) -> ExpertIdPages:
  pool = pools_of(kv)[-1]
  assert isinstance(pool, ExpertIdPages)  # See `check_experts`.
  return pool
