"""Schedules the tokens of a step and packs them into one call of the model.

A call has a single column for each slot, then draft columns, then chunk
columns. A slot that decodes uses its single column. Tokens of other slots, in
queue order, fill the chunk columns and then the single columns that are idle.
"""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.engine.config import RolloutConfig

CHUNK_ROWS = 8
"""The maximum number of sequences with tokens in the chunk columns."""


class Width(NamedTuple):
  """The width of a call: its numbers of columns besides the single columns.

  Attributes:
    drafts: the number of draft columns.
    prompts: the number of chunk columns.
    records: True if the model returns the logits of all columns, so that
      log-probs of given tokens can be recorded.
  """

  drafts: int
  prompts: int
  records: bool = False

  @property
  def columns(self) -> int:
    """The number of columns besides the single columns."""
    return self.drafts + self.prompts


DECODE_ONLY = Width(drafts=0, prompts=0)
"""The width of a call in which each slot computes at most one token."""


class Drafts(NamedTuple):
  """Draft tokens of each slot.

  Attributes:
    tokens: int32[B, K], the draft tokens.
    counts: int32[B], the number of draft tokens, at most K.
    found: bool[B], slots with an n-gram match, or with tokens from a `Draft`.
  """

  tokens: Array
  counts: Array
  found: Array


class Work(NamedTuple):
  """Tokens of a step, for B slots and at most D draft columns.

  Attributes:
    counts: int32[B], the number of tokens of each slot, without drafts.
    is_complete: bool[B], slots that compute all their missing tokens, after
      which a sequence samples the next one.
    width: int32[], the chosen width, an index into the tuple from `widths`.
    order: int32[B], slots that prefill, in queue order; then the other slots.
    chunks: int32[B], the number of tokens in chunk columns of each slot, in the
      order of `order`.
    slots: int32[B + D], the slot whose token is in each single column, then in
      each draft column; B for none.
    offsets: int32[B + D], the number of the slot's uncommitted tokens before
      the column's token.
    last: int32[B], the column of each slot's last token, ignoring drafts.
    drafts: int32[B], the number of drafts of each slot; None without
      speculation.
    begins: int32[B], the index of each slot's first draft among all drafts.
  """

  counts: Array
  is_complete: Array
  width: Array
  order: Array
  chunks: Array
  slots: Array
  offsets: Array
  last: Array
  drafts: Array | None = None
  begins: Array | None = None


def widths(config: RolloutConfig, *, records: bool) -> tuple[Width, ...]:
  """Returns all widths that a call can have, see `Counters.calls`.

  A quarter of `prefill_chunk` makes the end of a prompt cheap. A quarter below
  64 would save little, and the model is compiled for each width. `records` is
  True if the queue has `log_probs_from`. Then a width with chunk columns exists
  with the logits of all columns, and with those of the last tokens.
  """
  prompts = [(columns, False) for columns in _sizes(config.prefill_chunk, 64)]
  if records:
    chunk = config.prefill_chunk
    # A call without chunk columns has few columns, so one width serves both.
    prompts = [(0, True), (chunk, False), (chunk, True)]
    if not config.max_new_tokens:
      # No sequence decodes, so each call has prompt tokens.
      prompts = prompts[1:]
  drafts = (0,)
  if config.draft_tokens:
    drafts = _sizes(config.draft_columns, 2)
  pairs = itertools.product(drafts, prompts)
  return tuple(Width(columns, *prompt) for columns, prompt in pairs)


def _sizes(largest: int, smallest: int) -> tuple[int, ...]:
  quarter = -(-largest // 4)
  return (0, quarter, largest) if quarter >= smallest else (0, largest)


def schedule(
  missing: Array,
  prefills: Array,
  sort_keys: Array,
  all_widths: tuple[Width, ...],
  drafts: Array | None = None,
  *,
  one_part: bool = False,
  width: Array | None = None,
  axis: str | None = None,
) -> Work:
  """Chooses the tokens of a step.

  To limit padding, a width is chosen only if tokens fill three quarters of its
  columns. But if prompt tokens do not fit into the idle single columns, at
  least the smallest width with chunk columns is chosen. Drafts without a column
  are dropped.

  Each slot could compute `missing`, int32[B], tokens. The tokens of slots in
  `prefills`, bool[B], may wait for a later step, and those with the lowest of
  `sort_keys`, int32[B], come first. Other slots have at most one token, and
  `drafts`, int32[B], drafts. `one_part` computes prompt tokens in chunk columns
  only, as recurrent layers require. `width`, int32[], is the index in
  `all_widths`; None chooses one, without regard to `Width.records`. `axis` is
  `RolloutConfig.lockstep_axis`.
  """
  num_slots = missing.shape[0]
  slot = jnp.arange(num_slots, dtype=jnp.int32)
  decodes = (missing > 0) & ~prefills
  prefills &= missing > 0
  # Sequences that are earlier in the queue get tokens first, so that they end
  # first. Slots without prompt tokens come last.
  sort_key = jnp.where(prefills, sort_keys, indexing.NOWHERE)
  order = jnp.argsort(sort_key, stable=True).astype(jnp.int32)
  waiting = jnp.where(prefills, missing, 0)[order]
  ends = jnp.cumsum(waiting, dtype=jnp.int32)
  first_tokens = ends - waiting
  num_prompt_tokens = ends[-1]
  idle = num_slots - jnp.sum(decodes, dtype=jnp.int32)
  # A recurrent layer passes its state along a row of a view. Single columns and
  # chunk columns are in different rows, so a sequence must not use both.
  if one_part:
    idle = sharding.zeros_like(idle)
  # The view of chunks has CHUNK_ROWS rows, one for each sequence.
  max_chunks = ends[:CHUNK_ROWS][-1]
  if width is None:
    columns = jnp.asarray(_prompt_sizes(all_widths), jnp.int32)
    overflow = jnp.minimum(num_prompt_tokens - idle, max_chunks)
    # A width that is less than three quarters full would compute more padding
    # than several calls of the next smaller width.
    is_filled = (4 * overflow >= 3 * columns) & (columns > 0)
    width = jnp.sum(is_filled, dtype=jnp.int32)
    width = jnp.where(overflow > 0, jnp.maximum(width, 1), 0)
    width = jnp.minimum(width, columns.shape[0] - 1)
    width = sharding.largest_of_shards(width, axis)
  else:
    columns = jnp.asarray([w.prompts for w in all_widths], jnp.int32)
  num_chunks = jnp.minimum(columns[width], max_chunks)
  num_columns = jnp.minimum(num_prompt_tokens, num_chunks + idle)
  counts = jnp.clip(num_columns - first_tokens, 0, waiting)
  chunks = jnp.clip(num_chunks - first_tokens, 0, waiting)
  # The single columns that no decoding slot uses get prompt tokens.
  rank = jnp.cumsum(~decodes, dtype=jnp.int32) - 1
  items = loops.locate(counts, num_chunks + rank)
  fits = ~decodes & items.valid & (num_chunks + rank < num_columns)
  slots = jnp.where(fits, order.at[items.row].get(mode="clip"), num_slots)
  vacant = jnp.where(decodes, indexing.NOWHERE, rank)
  column_of_rank = indexing.put(slot, vacant, values=slot)
  final = first_tokens + counts - 1

  def by_slot(by_order: Array) -> Array:
    return jnp.zeros_like(order).at[order].set(by_order)

  counts = jnp.where(decodes, 1, by_slot(counts))
  work = Work(
    counts=counts,
    is_complete=counts > 0,
    width=width,
    order=order,
    chunks=chunks,
    slots=jnp.where(decodes, slot, slots),
    offsets=jnp.where(fits, items.offset, 0),
    last=slot,
  )
  first_column = jnp.int32(num_slots)
  if drafts is not None:
    drafts = jnp.where(decodes, drafts, 0)
    work, num_drafts = _with_drafts(work, drafts, all_widths, axis)
    first_column += num_drafts
  # Chunk columns come after the single columns and the draft columns.
  last_columns = jnp.where(
    final < num_chunks,
    first_column + final,
    column_of_rank.at[jnp.maximum(final - num_chunks, 0)].get(mode="clip"),
  )
  return work._replace(last=jnp.where(decodes, slot, by_slot(last_columns)))


def _prompt_sizes(all_widths: tuple[Width, ...]) -> list[int]:
  return sorted({width.prompts for width in all_widths})


def with_records(
  work: Work,
  all_widths: tuple[Width, ...],
  records: Array,
  axis: str | None,
) -> Work:
  """Returns the work of `schedule` in a width with the logits of all columns.

  If `records`, bool[], is False, the logits of the last tokens suffice.
  """
  prompt_sizes = _prompt_sizes(all_widths)
  widths_per_draft = len(all_widths) // len({w.drafts for w in all_widths})
  draft_index = work.width // len(prompt_sizes)
  prompt_index = work.width % len(prompt_sizes)
  has_chunk = jnp.asarray(prompt_sizes)[prompt_index] > 0
  records = sharding.any_shard(records, axis) & has_chunk
  index = draft_index * widths_per_draft + prompt_index
  return work._replace(width=index + records.astype(jnp.int32))


def decode_work(going: Array, offsets: Array) -> Work:
  """Returns the work of a call in which slots in `going` decode one token.

  `offsets`, int32[B], are the numbers of uncommitted tokens before the token.
  """
  num_slots = going.shape[0]
  slot = jnp.arange(num_slots, dtype=jnp.int32)
  counts = going.astype(jnp.int32)
  return Work(
    counts=counts,
    is_complete=going,
    width=jnp.zeros((), jnp.int32),
    order=slot,
    chunks=jnp.zeros_like(counts),
    slots=jnp.where(going, slot, num_slots),
    offsets=offsets,
    last=slot,
  )


def _with_drafts(
  work: Work, drafts: Array, all_widths: tuple[Width, ...], axis: str | None
) -> tuple[Work, Array]:
  """Returns the work with draft columns, and the number of these columns."""
  columns = jnp.asarray(sorted({w.drafts for w in all_widths}), jnp.int32)
  num_prompt_widths = len(_prompt_sizes(all_widths))
  num_drafts = jnp.sum(drafts, dtype=jnp.int32)
  width = jnp.sum(
    (4 * num_drafts >= 3 * columns) & (columns > 0), dtype=jnp.int32
  )
  width = sharding.largest_of_shards(width, axis)
  column = jnp.arange(all_widths[-1].drafts, dtype=jnp.int32)

  def place_drafts() -> tuple[Array, Array, Array, Array]:
    first_columns = jnp.cumsum(drafts, dtype=jnp.int32) - drafts
    counts = jnp.clip(columns[width] - first_columns, 0, drafts)
    items = loops.locate(counts, column)
    slots = jnp.where(items.valid, items.row, no_slot)
    offsets = jnp.where(items.valid, items.offset + 1, 0)
    return slots, offsets, counts, first_columns

  def no_drafts() -> tuple[Array, Array, Array, Array]:
    zeros = sharding.zeros_like(drafts)
    offsets = (column & 0) + zeros[0]
    return offsets + no_slot, offsets, zeros, zeros

  no_slot = jnp.int32(drafts.shape[0])
  # Most steps have no drafts, and then need no search by `locate`.
  slots, offsets, drafts, starts = lax.cond(width > 0, place_drafts, no_drafts)
  work = work._replace(
    width=work.width + width * num_prompt_widths,
    slots=jnp.concatenate([work.slots, slots]),
    offsets=jnp.concatenate([work.offsets, offsets]),
    drafts=drafts,
    begins=starts,
  )
  return work, columns[width]
