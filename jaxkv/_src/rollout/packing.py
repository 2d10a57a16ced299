"""Which tokens a step computes, and where they stand in its packed call.

Every slot that decodes has a column of its own. Prompt tokens fill the columns
of the slots that do not, and C further ones, in the order of their sequences.
C is one of a few widths, so a step without prompts costs what decoding costs.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import ops
from jaxkv._src.cache.state import CacheState
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv.kv import PackedView
from jaxkv.kv import View

CHUNK_ROWS = 8
"""The most sequences with tokens among the C columns of a step."""


class Work(NamedTuple):
  """The tokens of a step; B slots, W widths.

  Attributes:
    counts: int32[B], tokens of each slot.
    width: int32[], the width that was chosen, 0 .. W - 1.
    order: int32[B], slots that prefill, oldest sequence first; then others.
    chunks: int32[B], tokens among the C columns, of the slots in `order`.
    slots: int32[B], the slot whose token is in each single column; B for none.
    offsets: int32[B], tokens of that slot before that one in this step.
    last: int32[B], the column of each slot's last token.
  """

  counts: Array
  width: Array
  order: Array
  chunks: Array
  slots: Array
  offsets: Array
  last: Array


def widths(config: RolloutConfig) -> tuple[int, ...]:
  """Columns for prompt tokens beside the single ones, ascending from 0.

  A quarter of a chunk, so that the end of a prompt costs little; but no width
  of less than 64, which would save little on an accelerator, and each width is
  a call of the model to be compiled.
  """
  chunk = config.prefill_chunk
  quarter = -(-chunk // 4)
  return (0, quarter, chunk) if quarter >= 64 else (0, chunk)


def schedule(
  missing: Array, prefills: Array, turns: Array, sizes: tuple[int, ...]
) -> Work:
  """Chooses the tokens of a step.

  A width is taken only if prompts fill three quarters of it, or if it is the
  smallest, so few columns are padding.

  Args:
    missing: int32[B], tokens that each slot could compute; 0 for none.
    prefills: bool[B], slots whose tokens need not be computed in this step.
      The others have one token.
    turns: int32[B], a number for each slot; lower ones come first.
    sizes: from `widths`.
  """
  num_slots = missing.shape[0]
  slot = jnp.arange(num_slots, dtype=jnp.int32)
  decodes = (missing > 0) & ~prefills
  prefills &= missing > 0
  later = jnp.where(prefills, turns, ops.NOWHERE)
  order = jnp.argsort(later, stable=True).astype(jnp.int32)
  waiting = jnp.where(prefills, missing, 0)[order]
  ends = jnp.cumsum(waiting, dtype=jnp.int32)
  begins, total = ends - waiting, ends[-1]
  idle = num_slots - jnp.sum(decodes, dtype=jnp.int32)
  most = ends[:CHUNK_ROWS][-1]
  beyond = jnp.minimum(total - idle, most)
  columns = jnp.asarray(sizes, jnp.int32)
  filled = (4 * beyond >= 3 * columns) & (columns > 0)
  width = jnp.sum(filled, dtype=jnp.int32)
  width = jnp.where(beyond > 0, jnp.maximum(width, 1), 0)
  size = jnp.minimum(columns[width], most)
  taken = jnp.minimum(total, size + idle)
  counts = jnp.clip(taken - begins, 0, waiting)
  chunks = jnp.clip(size - begins, 0, waiting)
  # Single columns that no decoding slot uses, and prompt tokens for them.
  rank = jnp.cumsum(~decodes, dtype=jnp.int32) - 1
  items = ops.locate(counts, size + rank)
  spare = ~decodes & items.valid & (size + rank < taken)
  slots = jnp.where(spare, order.at[items.row].get(mode="clip"), num_slots)
  vacant = jnp.where(decodes, ops.NOWHERE, rank)
  place = ops.put(slot, vacant, values=slot)
  final = begins + counts - 1
  last = jnp.where(
    final < size,
    num_slots + final,
    place.at[jnp.maximum(final - size, 0)].get(mode="clip"),
  )

  def by_slot(ordered: Array) -> Array:
    return jnp.zeros_like(order).at[order].set(ordered)

  return Work(
    counts=jnp.where(decodes, 1, by_slot(counts)),
    width=width,
    order=order,
    chunks=chunks,
    slots=jnp.where(decodes, slot, slots),
    offsets=jnp.where(spare, items.offset, 0),
    last=jnp.where(decodes, slot, by_slot(last)),
  )


def single_views(cache: CacheState, work: Work) -> tuple[View, ...]:
  """The single columns' tokens in each group."""
  valid = work.slots < cache.config.num_slots
  starts = ops.take(cache.length, work.slots) + work.offsets
  return _views(cache, work.slots, starts, valid.astype(jnp.int32))


def chunk_views(cache: CacheState, work: Work) -> tuple[View, ...]:
  """The rows of the other columns in each group."""
  slots = work.order[:CHUNK_ROWS]
  starts, counts = ops.take(cache.length, slots), work.chunks[:CHUNK_ROWS]
  return _views(cache, slots, starts, counts)


def _views(
  cache: CacheState, slots: Array, starts: Array, counts: Array
) -> tuple[View, ...]:
  tables = ops.take(cache.page_table, slots, fill=cache.config.no_page)
  return tuple(
    View(page_table=tables[:, group], starts=starts, counts=counts)
    for group in range(cache.config.num_groups)
  )


def packed(
  single: tuple[View, ...], chunks: tuple[View, ...] | None
) -> tuple[PackedView, ...]:
  """The views of a call, one for each group."""
  rows = chunks or (None,) * len(single)
  return tuple(
    PackedView(decode=decode, prefill=prefill)
    for decode, prefill in zip(single, rows, strict=True)
  )
