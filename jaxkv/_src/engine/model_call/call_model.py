"""Packs the tokens of a step into one row, and calls the model with them."""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.state import CacheState
from jaxkv._src.engine import schedule
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import check_result
from jaxkv._src.engine.hooks import rows_of
from jaxkv._src.engine.model_call.given_log_probs import record_given
from jaxkv._src.engine.model_call.given_log_probs import rows_of_columns
from jaxkv._src.engine.schedule import Drafts
from jaxkv._src.engine.schedule import Width
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pools_of
from jaxkv._src.kv.share import share
from jaxkv._src.kv.view import Batch
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import packed_positions


class Logits(NamedTuple):
  """Logits of a call.

  Attributes:
    last: [B, V], of each slot's last token, excluding drafts.
    drafts: [D, V], of the drafts; None without speculation.
  """

  last: Array | None
  drafts: Array | None


@jax.named_scope("model")
def call_model(
  params: Any,
  state: RolloutState,
  work: Work,
  *,
  model: Model,
  widths: tuple[Width, ...],
  drafts: Drafts | None = None,
  draft_logits: Array | None = None,
) -> tuple[RolloutState, Logits]:
  """Calls the model with the tokens of a step, in the scheduled width.

  `work.width` is an index into `widths`, and `draft_logits` [D, V] a buffer for
  the logits of `drafts`.

  Returns:
    The state, with K/V and log-probs of the tokens; and the logits.
  """
  queue, memory = state.queue, state.memory
  call = _StepCall(params, state, work, drafts, widths, model)
  recorded = (queue.log_probs, queue.records)
  last_logits = None
  if len(widths) > 1:
    # The loops below carry `last_logits`, so its final shape is needed here.
    carry = Logits(None, draft_logits), recorded
    logits = jax.eval_shape(lambda kv: call.run(0, (kv, *carry))[1], memory.kv)
    last_logits = jnp.zeros(logits.last.shape, logits.last.dtype)

  def run_from(index: int, carry: Any) -> Any:
    """Calls the model in `work.width`, which is an index >= `index`."""
    if index == len(widths) - 1:
      return call.run(index, carry)
    # `lax.cond` and `lax.switch` would copy the memory.
    carry = loops.at_most_once(
      work.width == index, functools.partial(call.run, index), carry
    )
    # Nested, because a GPU waits for the host at each loop, even an empty one.
    with jax.named_scope("rare/wider"):
      return loops.at_most_once(
        work.width > index, functools.partial(run_from, index + 1), carry
      )

  carry = memory.kv, Logits(last_logits, draft_logits), recorded
  kv, logits, (values, records) = run_from(0, carry)
  queue = dataclasses.replace(queue, log_probs=values, records=records)
  return replaced(state, queue=queue, kv=kv), logits


class _StepCall:
  """The tokens of a step, for a call of the model in one of the widths."""

  def __init__(
    self,
    params: Any,
    state: RolloutState,
    work: Work,
    drafts: Drafts | None,
    widths: tuple[Width, ...],
    model: Model,
  ):
    self._params = params
    self._model = model
    self._config = state.config
    self._widths = widths
    self._queue = state.queue
    self._slots = slots = state.slots
    self._cache = cache = state.memory.cache
    self._work = work
    exists = work.slots < slots.size
    starts = indexing.take(cache.length, work.slots) + work.offsets
    self._single = _views(cache, work.slots, starts, exists.astype(jnp.int32))
    self._tokens = self._single_tokens(drafts)

  def run(self, index: int, carry: Any) -> Any:
    """Calls the model in the width `index`.

    `carry` has the K/V memory; `Logits`; `Queue.log_probs` and `Queue.records`.

    Returns:
      `carry` with the results of the call.
    """
    kv, (_, of_drafts), recorded = carry
    width = self._widths[index]
    num_slots = self._slots.size
    batch = self._batch(kv, width)
    columns = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    drafts = jnp.arange(num_slots, num_slots + width.drafts, dtype=jnp.int32)
    last_columns = jnp.concatenate([self._work.last, drafts])
    if not width.records:
      columns = last_columns
    batch = dataclasses.replace(batch, columns=columns)
    logits, new_kv = self._model(self._params, batch, kv)
    check_result(logits, new_kv, kv, columns.shape[0])
    kv = kv if new_kv is None else new_kv
    if width.records:
      recorded = record_given(
        recorded,
        self._queue,
        rows=batch.rows.numbers,
        positions=batch.positions[0],
        logits=logits,
        config=self._config,
      )
      logits = logits.at[last_columns].get(mode="clip")
    if width.drafts and of_drafts is not None:
      of_drafts = lax.dynamic_update_slice(
        of_drafts, logits[num_slots:], (0, 0)
      )
    return kv, Logits(logits[:num_slots], of_drafts), recorded

  def _batch(self, kv: Pools, width: Width) -> Batch:
    """Returns the batch of a width, with `columns` still to be set."""
    num_slots = self._slots.size
    work = self._work
    cache = self._cache
    singles = num_slots + width.drafts
    views = jax.tree.map(lambda array: array[:singles], self._single)
    slot_of = work.slots[:singles]
    if not width.drafts:
      views = self._with_shared_pages(kv, views)
    tokens = self._tokens[:singles]
    positions = self._single[0].starts[:singles]
    chunks: tuple[View | None, ...] = (None,) * len(views)
    if width.prompts:
      slots_of_rows = work.order[: schedule.CHUNK_ROWS]
      starts = indexing.take(cache.length, slots_of_rows)
      num_tokens = work.chunks[: schedule.CHUNK_ROWS]
      chunks = _views(cache, slots_of_rows, starts, num_tokens)
      row, chunk_positions = packed_positions(chunks[0], width.prompts)
      # Padding columns have a row past the last one, so they get no slot.
      chunk_slots = indexing.take(slots_of_rows, row, fill=num_slots)
      chunk_tokens = self._tokens_at(chunk_slots, chunk_positions)
      tokens = jnp.concatenate([tokens, chunk_tokens])
      # Padding has position -1, for which a model may have no embedding.
      chunk_positions = jnp.maximum(chunk_positions, 0)
      positions = jnp.concatenate([positions, chunk_positions])
      slot_of = jnp.concatenate([slot_of, chunk_slots])
    queue_rows = indexing.take(
      self._slots.row, slot_of, fill=self._queue.no_row
    )
    # A model may read values of a sequence, such as its adapter.
    rows = rows_of(self._queue, queue_rows)
    if width.records:
      rows = rows_of_columns(self._queue, rows, positions)
    return Batch(
      tokens=tokens[None],
      positions=positions[None],
      views=tuple(
        PackedView(decode=single, prefill=chunk)
        for single, chunk in zip(views, chunks, strict=True)
      ),
      rows=rows,
    )

  def _single_tokens(self, drafts: Drafts | None) -> Array:
    """Returns the tokens of single and draft columns, int32[B + D]."""
    work = self._work
    num_slots = self._slots.size
    tokens = self._tokens_at(work.slots, self._single[0].starts)
    if drafts is None:
      return tokens
    # A decoding slot's token has offset 0, and its first draft has offset 1.
    draft_index = work.offsets[num_slots:] - 1
    draft = indexing.take(drafts.tokens, work.slots[num_slots:], draft_index)
    return jnp.concatenate([tokens[:num_slots], draft])

  def _tokens_at(self, slots: Array, positions: Array) -> Array:
    """Returns the tokens at positions of slots, int32[X]; 0 for no slot."""
    rows = indexing.take(self._slots.row, slots, fill=self._queue.no_row)
    return indexing.take(self._queue.tokens, rows, positions)

  def _with_shared_pages(
    self, kv: Pools, views: tuple[View, ...]
  ) -> tuple[View, ...]:
    """Returns views with `shared` set for forks, see `jaxkv.kv.share`."""
    num_slots = self._slots.size
    samples = self._config.num_samples
    pools = [
      pool
      for pool in pools_of(kv)
      if isinstance(pool, KVPages) and pool.v is not None
    ]
    if samples == 1 or not pools:
      return views
    return tuple(
      view
      if group_kind.skips_pages
      else share(
        pools[0],
        view,
        num_clusters=-(-num_slots // samples),
        cluster_size=samples,
      )
      for group_kind, view in zip(self._cache.config.groups, views, strict=True)
    )


def shape_of_logits(params: Any, state: RolloutState, *, model: Model) -> Any:
  """Returns the shape [B, V] and the dtype of the model's logits."""

  def last_logits(state: RolloutState) -> Array:
    zeros = jnp.zeros((state.slots.size,), jnp.int32)
    work = schedule.decode_work(zeros > 0, zeros)
    widths = (schedule.DECODE_ONLY,)
    _, logits = call_model(params, state, work, model=model, widths=widths)
    assert logits.last is not None  # It is None only before the call.
    return logits.last

  return jax.eval_shape(last_logits, state)


def _views(
  cache: CacheState, slots: Array, starts: Array, num_tokens: Array
) -> tuple[View, ...]:
  """Returns a view of `slots` int32[R] for each group; slot B is padding."""
  tables = indexing.take(cache.page_table, slots, fill=cache.config.no_page)
  return tuple(
    View(
      page_table=tables[:, group],
      starts=starts,
      num_tokens=num_tokens,
      kind=group_kind,
    )
    for group, group_kind in enumerate(cache.config.groups)
  )
