"""Calls the model with the tokens of a step, packed into one row."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.exact import log_probs
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.shared_prefix import share
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import packed_positions
from jaxkv._src.rollout import packing
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.packing import Width
from jaxkv._src.rollout.packing import Work
from jaxkv._src.rollout.rows import Rows
from jaxkv._src.rollout.rows import rows_of
from jaxkv._src.rollout.sequences import Records
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.sampling.logits import as_logits
from jaxkv._src.sampling.logits import check_all_logits
from jaxkv._src.sampling.logits import check_logits


class Model(Protocol):
  """A function that computes the logits of the tokens of a step.

  It writes the keys and values of all tokens into the pool, attends through
  `jaxkv.kv`, and returns logits of the columns that need them.
  `functools.partial(jaxkv.models.forward, config=decoder)` is one, and
  `all_logits` converts a function that returns logits of every token.
  """

  def __call__(
    self,
    params: Any,
    tokens: Array,
    positions: Array,
    kv: Any,
    views: Any,
    columns: Array,
    rows: Rows,
    /,
  ) -> tuple[Array, Any]:
    """Returns logits and the new K/V memory.

    Args:
      params: weights, as `generate` received them.
      tokens: int32[1, C], the tokens of all sequences in one row.
      positions: int32[1, C], the position of each token in its sequence.
      kv: K/V memory, as `init` received it: a pool or a tuple of pools.
      views: a `jaxkv.kv.PackedView` for each group of the cache.
      columns: int32[X], columns of the tokens whose logits are needed.
      rows: the sequence of each column.

    Returns:
      Logits [X, V] of any float dtype, which are sampled from in float32, and
      `kv` with the same structure, shapes and dtypes.
    """
    ...


def all_logits(model: Callable[..., tuple[Array, Any]]) -> Model:
  """Converts a function that returns logits of all tokens to a `Model`.

  Args:
    model: `(params, tokens int32[1, C], positions int32[1, C], kv, views) ->
      (logits [1, C, V], kv)`.

  Raises:
    ValueError: during the call, if the logits have the wrong shape.
  """

  def call(
    params: Any,
    tokens: Array,
    positions: Array,
    kv: Pools,
    views: Any,
    columns: Array,
    rows: Rows,
  ) -> tuple[Array, Pools]:
    del rows
    logits, kv = model(params, tokens, positions, kv, views)
    check_all_logits(logits, tokens.shape[1])
    return logits[0].at[columns].get(mode="clip"), kv

  return call


def check_model(model: Any) -> None:
  """Raises TypeError unless `model` is callable."""
  if not callable(model):
    raise TypeError(
      "`model` must be a function, see `Model`, got "
      f"{type(model).__name__}; give functools.partial(models.forward, "
      "config=config)."
    )


def check_numerics(config: RolloutConfig, model: Model) -> None:
  """Raises ValueError if a `functools.partial` model has other numerics."""
  if not isinstance(model, functools.partial):
    return
  theirs = getattr(model.keywords.get("config"), "numerics", None)
  if theirs is not None and theirs != config.numerics:
    raise ValueError(
      f'`RolloutConfig.numerics` must be "{theirs}", as the model\'s, got '
      f'"{config.numerics}".'
    )


class Logits(NamedTuple):
  """Logits of a step.

  Attributes:
    last: [B, V], of each slot's last token, excluding drafts.
    drafts: [D, V], of the drafts; None without speculation.
  """

  last: Array
  drafts: Array | None


def call(
  params: Any,
  state: RolloutState,
  work: Work,
  guesses: Array | None,
  sizes: tuple[Width, ...],
  room: Array | None,
  *,
  model: Model,
) -> tuple[Pools, Logits, Records]:
  """Calls the model with the tokens of a step, in the scheduled width.

  Args:
    params: the model's parameters.
    state: the sequences in the slots.
    work: the tokens.
    guesses: int32[B, K], drafts of each slot; None without speculation.
    sizes: from `packing.widths`.
    room: a buffer for the logits of drafts, from `room_for_drafts`.
    model: see `Model`.

  Returns:
    The memory, the logits, and the records with log-probs of prompt tokens.
  """
  num_slots, none = state.running.shape[0], state.sequences.length.shape[0]
  single = packing.single_views(state.cache, work)
  starts = single[0].starts
  tokens = _singles(state, work, starts, guesses)

  def once(
    kv: Pools, records: Records, width: Width
  ) -> tuple[Array, Pools, Records]:
    rows = num_slots + width.drafts
    views, owners = _first(single, rows), work.slots[:rows]
    if not width.drafts:
      views = _shared(state, views)
    inputs, places, chunks = tokens[:rows], starts[:rows], None
    if width.prompts:
      chunks = packing.chunk_views(state.cache, work)
      row, positions = packed_positions(chunks[0], width.prompts)
      theirs = indexing.take(work.order, row, fill=num_slots)
      more = _tokens(state, theirs, positions)
      inputs = jnp.concatenate([inputs, more])
      places = jnp.concatenate([places, jnp.maximum(positions, 0)])
      owners = jnp.concatenate([owners, theirs])
    drafts = jnp.arange(num_slots, rows, dtype=jnp.int32)
    wanted = jnp.concatenate([work.last, drafts])
    columns = _columns(state, wanted, inputs.shape[0])
    numbers = indexing.take(state.running, owners, fill=none)
    logits, kv = model(
      params,
      inputs[None],
      places[None],
      kv,
      packing.packed(views, chunks),
      columns,
      rows_of(state.sequences, state.user, numbers),
    )
    check_logits(logits, columns.shape[0])
    if columns is not wanted:
      records = _with_prompts(state, records, logits, numbers, places)
      logits = logits.at[wanted].get(mode="clip")
    return logits, kv, records

  records = state.sequences.records
  shape = jax.eval_shape(lambda kv: once(kv, records, sizes[0])[0], state.kv)
  last = jnp.zeros((num_slots, shape.shape[1]), shape.dtype)
  carry = state.kv, Logits(last, room), records
  for number, width in enumerate(sizes):

    def trip(carry: Any, width: Width = width) -> Any:
      kv, (_, drafts), records = carry
      logits, kv, records = once(kv, records, width)
      if width.drafts and drafts is not None:
        own = logits[num_slots:]
        drafts = lax.dynamic_update_slice(drafts, own, (0, 0))
      return kv, Logits(logits[:num_slots], drafts), records

    # A conditional, or a switch, would copy the memory.
    carry = loops.at_most_once(work.width == number, trip, carry)
  return carry


def room_for_drafts(
  params: Any, state: RolloutState, *, model: Model
) -> Array | None:
  """Returns zeros [D, V] for the logits of drafts; None without speculation."""
  most = packing.most_drafts(packing.widths(state.config))
  if not most:
    return None
  shape = shape_of_logits(params, state, model=model)
  return jnp.zeros((most, shape.shape[1]), shape.dtype)


def shape_of_logits(params: Any, state: RolloutState, *, model: Model) -> Any:
  """Returns the shape [B, V] and the dtype of the model's logits."""
  slots = state.running.shape[0]
  sizes = packing.widths(state.config)

  def logits(state: RolloutState) -> Array:
    nothing = jnp.zeros((slots,), jnp.int32)
    drafts = nothing if packing.most_drafts(sizes) else None
    work = packing.schedule(nothing, nothing > 0, nothing, sizes, drafts)
    guesses = None
    if drafts is not None:
      guesses = jnp.zeros((slots, state.config.draft_tokens), jnp.int32)
    return call(params, state, work, guesses, sizes, None, model=model)[1].last

  return jax.eval_shape(logits, state)


def _columns(state: RolloutState, wanted: Array, size: int) -> Array:
  """Returns the columns that need logits: all if prompts are recorded."""
  if state.config.prompt_log_probs:
    return jnp.arange(size, dtype=jnp.int32)
  return wanted


def _with_prompts(
  state: RolloutState,
  records: Records,
  logits: Array,
  numbers: Array,
  places: Array,
) -> Records:
  """Records log-probs of tokens that were not sampled.

  Args:
    state: the sequences.
    records: their records.
    logits: [X, V], of every column.
    numbers: int32[X], the row of each column's sequence.
    places: int32[X], the position of each column's token.
  """
  sequences, raw = state.sequences, records.raw_log_probs
  if raw is None:
    return records
  after = places + 1
  said = after < indexing.take(sequences.length, numbers)
  version = indexing.take(sequences.versions, numbers, after)
  said &= version == queue.NOT_DRAWN
  token = indexing.take(sequences.tokens, numbers, after)
  heat = jnp.ones(token.shape, jnp.float32)
  own = log_probs.of_tokens(as_logits(logits), token, heat)
  place = indexing.where_valid(said, numbers)
  raw = indexing.put(raw, place, after, values=own)
  return dataclasses.replace(records, raw_log_probs=raw)


def _first(views: tuple[View, ...], rows: int) -> tuple[View, ...]:
  return tuple(
    View(
      page_table=view.page_table[:rows],
      starts=view.starts[:rows],
      num_tokens=view.num_tokens[:rows],
    )
    for view in views
  )


def _shared(state: RolloutState, views: tuple[View, ...]) -> tuple[View, ...]:
  """Returns views that mark the pages that forks share, where that pays."""
  num_slots, samples = state.running.shape[0], state.config.num_samples
  kv = _pages_to_share(state.kv)
  if samples == 1 or kv is None:
    return views
  return tuple(
    view
    if kind.skips_pages
    else share(
      kv,
      view,
      num_clusters=-(-num_slots // samples),
      cluster_size=samples,
    )
    for kind, view in zip(state.cache.config.groups, views, strict=True)
  )


def _pages_to_share(memory: Pools) -> KVPages | None:
  """Returns the first K/V pool, whose sizes decide if sharing pays."""
  pools = memory if isinstance(memory, tuple) else (memory,)
  for pool in pools:
    if isinstance(pool, KVPages) and pool.v is not None:
      return pool
  return None


def _singles(
  state: RolloutState, work: Work, starts: Array, guesses: Array | None
) -> Array:
  """Returns the tokens of the single columns, int32[B + D]."""
  tokens = _tokens(state, work.slots, starts)
  if guesses is None:
    return tokens
  num_slots = guesses.shape[0]
  number = work.offsets[num_slots:] - 1
  guess = indexing.take(guesses, work.slots[num_slots:], number)
  return jnp.concatenate([tokens[:num_slots], guess])


def _tokens(state: RolloutState, slots: Array, positions: Array) -> Array:
  """Returns tokens of the sequences in slots, int32[X]; 0 for an empty slot."""
  none = state.sequences.length.shape[0]
  numbers = indexing.take(state.running, slots, fill=none)
  return indexing.take(state.sequences.tokens, numbers, positions)
