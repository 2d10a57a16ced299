"""One transition of the state for scheduled requests, and a few smaller ones.

Built from the mechanisms of the cache, as its verbs are. The state is donated:
a manager keeps the newest one only.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.cache import ops
from jaxkv._src.cache.algorithms import longest_prefix
from jaxkv._src.cache.algorithms import reserve
from jaxkv._src.cache.algorithms.publish import publish
from jaxkv._src.cache.algorithms.reserve import Reservation
from jaxkv._src.cache.kinds import GroupKind
from jaxkv._src.cache.ops import Rows
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix import rules
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import in_range
from jaxkv._src.cache.state import roots
from jaxkv._src.cache.verbs.free import drop_behind
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.cache.verbs.reset import reset_prefix_cache
from jaxkv._src.cpu_options import CPU_COMPILER_OPTIONS

NEW_PAGES = 2
"""New pages of a group and a request that `advance` returns at once."""

_POLLS = 2000

transition = functools.partial(
  jax.jit, donate_argnums=0, compiler_options=CPU_COMPILER_OPTIONS
)
"""Compiles a function of a state, its first argument, which it consumes."""


class Call(NamedTuple):
  """What R requests ask for, in order; int32[R] each.

  Attributes:
    slots: their slots; out of range for a row that does not count.
    behind: tokens computed before the new ones, here or elsewhere.
    external: those of them that come from elsewhere.
    room: tokens that must have room.
    tokens: those of them that recurrent groups count, without lookahead.
    encoder: tokens of the encoder that must have pages.
    whole: tokens for which there must be pages now, or nothing is done; 0 for
      no such condition.
    keep_free: pages that must stay free, also for a whole sequence.
    reserved: pages that must stay free besides.
    publish: tokens to publish up to; none if fewer than are published.
    prompt_length, boundary: see `SlotHashes`.
    since: value of `PrefixIndex.clock` when the scheduling step began, as bits;
      states published after it are not written yet.
  """

  slots: Array
  behind: Array
  external: Array
  room: Array
  tokens: Array
  encoder: Array
  whole: Array
  keep_free: Array
  reserved: Array
  publish: Array
  prompt_length: Array
  boundary: Array
  since: Array


class RequestHits(NamedTuple):
  """Pages that requests begin with; P of them at most.

  Attributes:
    pages: int32[R, G, P], the null page where a window has moved on.
    stop: int32[R, G], how many.
    salts: uint32[R, 4].
  """

  pages: Array
  stop: Array
  salts: Array


class Advanced(NamedTuple):
  """What became of R requests; numpy arrays on the host.

  Attributes:
    ok: bool[R].
    sound: bool[R], whether the hits given hold the tokens of the request.
    length: int32[R], tokens published.
    begin: int32[R, G], the first new column.
    stop: int32[R, G], one past the last.
    pages: int32[R, G, M], their page tables, where hits were given; else
      int32[R, G, NEW_PAGES], the first new pages.
  """

  ok: np.ndarray
  sound: np.ndarray
  length: np.ndarray
  begin: np.ndarray
  stop: np.ndarray
  pages: np.ndarray


@functools.partial(transition, static_argnames="caps")
def advance(
  state: CacheState,
  fields: Array,
  begin: tuple[Array, Array, Array] | None,
  tokens: Array,
  *,
  caps: tuple[int, ...],
) -> tuple[CacheState, Array]:
  """Recycles, attaches hits, allocates and publishes.

  Requests are served in order, all-or-nothing. What fell behind a window is
  given back even where nothing can be allocated. All requests give back first,
  then all take pages, then all publish.

  Args:
    state: the cache.
    fields: int32[F, R], the fields of `Call`.
    begin: the fields of `RequestHits`, for requests whose slots are empty;
      None if every request holds pages.
    tokens: int32[R, T], those after the ones published; all tokens of a
      request that begins.
    caps: the most pages that one sequence ever holds, by group.

  Returns:
    The cache, and what became of the rows, for `unpacked`: one array, because
    each array that is fetched costs as much as this one.
  """
  config, call = state.config, Call(*fields)
  hits = None if begin is None else RequestHits(*begin)
  asked = in_range(state, call.slots)
  rows = Rows(call.slots, False, ~asked, ~asked)
  held = rows.read(state.num_pages)
  begins = asked & (held[:, config.first_self_group] == 0)
  holds = jnp.ones_like(asked)
  if hits is not None:
    holds = _sound(state, call, hits, tokens)
    asked &= holds & _whole_fits(state, call, hits, held, begins, caps)
  state, _ = drop_behind(state, rows, call.behind, asked & ~begins)
  plan = _plan(
    state, call, hits, held, begins, _columns(state, call, call.room)
  )
  if hits is not None and recurrent.has_states(config):
    asked &= ~_unwritten(state, call, hits)
  code = jnp.where(asked, Status.OK, Status.SKIPPED).astype(jnp.int32)
  state, code = reserve.reserve(
    state,
    rows,
    plan,
    code,
    hits=None if hits is None else hits.pages,
    keep_free=call.keep_free + call.reserved,
  )
  ok = code == Status.OK
  plan = plan.of(ok)
  if hits is not None:
    root = roots(state, hits.salts)
    hashes = hashing.start_slots(
      state.hashes,
      rows,
      ok & begins,
      root,
      prompt_length=call.prompt_length,
      boundary=call.boundary,
    )
    state = dataclasses.replace(state, hashes=hashes)
  state = _publish(state, call, rows, plan, ok, tokens)
  columns = jnp.arange(config.pages_per_slot, dtype=jnp.int32)[None, None]
  if hits is None:
    columns = jnp.arange(NEW_PAGES, dtype=jnp.int32)[None, None]
    columns = columns + plan.external[..., None]
  group = jnp.arange(config.num_groups, dtype=jnp.int32)[None, :, None]
  pages = ops.take(state.page_table, call.slots[:, None, None], group, columns)
  length = rows.read(state.length)
  packed = (ok, holds, length, plan.external, plan.stop, pages)
  packed = [part.astype(jnp.int32).reshape(-1) for part in packed]
  return state, jnp.concatenate(packed)


def unpacked(packed: Array, num_rows: int, num_groups: int) -> Advanced:
  """What `advance` packed, on the host.

  Polls for a while before it blocks: waking a thread that sleeps costs as much
  as a decode step takes on a CPU.
  """
  for _ in range(_POLLS):
    if packed.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
      break
  flat, pairs = np.asarray(packed), num_rows * num_groups
  rows = flat[: 3 * num_rows].reshape(3, num_rows)
  columns = flat[3 * num_rows : 3 * num_rows + 2 * pairs]
  begin, stop = columns.reshape(2, num_rows, num_groups)
  pages = flat[3 * num_rows + 2 * pairs :]
  return Advanced(
    ok=rows[0] != 0,
    sound=rows[1] != 0,
    length=rows[2],
    begin=begin,
    stop=stop,
    pages=pages.reshape(num_rows, num_groups, -1),
  )


def _plan(
  state: CacheState,
  call: Call,
  hits: RequestHits | None,
  held: Array,
  begins: Array,
  required: Array,
) -> Reservation:
  """The columns of rows that require so many, int32[R, G]."""
  config = state.config
  if hits is None:
    return reserve.reservation(state, hit=held, stop=required, begins=begins)
  skipped = config.sizes.skipped_pages(call.behind)
  attaches = jnp.any(hits.stop > 0, axis=1) | (call.external > 0)
  attaches = (begins & attaches)[:, None]
  hit = jnp.where(attaches, jnp.maximum(skipped, hits.stop), held)
  arriving = config.sizes.by_group(
    lambda kind, _: call.behind > kind.num_skipped_tokens(call.behind)
  )
  arriving &= attaches & (call.external > 0)[:, None]
  arriving &= ~config.sizes.holds_encoder(arriving)
  reached = config.sizes.by_group(
    lambda _, size: ops.quotient(call.behind + (size - 1), size)
  )
  return reserve.reservation(
    state,
    first=jnp.where(attaches, skipped, 0),
    hit=hit,
    external=jnp.where(arriving, jnp.maximum(hit, reached), hit),
    stop=required,
    begins=begins,
  )


def _columns(state: CacheState, call: Call, room: Array) -> Array:
  """int32[R, G]: columns for `room`; for the tokens in recurrent groups."""
  tokens = jnp.minimum(room, call.tokens)

  def columns(kind: GroupKind, size: int) -> Array:
    counts = call.encoder if kind.holds_encoder else room
    return kind.num_columns(tokens if kind.holds_states else counts, size)

  return state.config.sizes.by_group(columns)


def _whole_fits(
  state: CacheState,
  call: Call,
  hits: RequestHits,
  held: Array,
  begins: Array,
  caps: tuple[int, ...],
) -> Array:
  """bool[R]: rows whose whole sequences have room, where that is asked.

  As in vLLM, a sequence counts the pages it ever holds at once, without those
  that a hit or a window covers.
  """
  whole = call._replace(tokens=call.whole)
  required = _columns(state, whole, call.whole)
  required = jnp.minimum(required, jnp.asarray(caps, jnp.int32)[None])
  plan = _plan(state, call, hits, held, begins, required)
  skipped = state.config.sizes.skipped_pages(call.behind)
  covered = jnp.where(begins[:, None], jnp.maximum(skipped, plan.hit), held)
  need = jnp.where(
    recurrent.holds_states(state.config),
    plan.num_fresh,
    jnp.maximum(required - covered, 0),
  )
  woken = reserve.woken(state, plan, hits.pages)
  woken &= begins[:, None, None]
  need += jnp.sum(woken, axis=2, dtype=jnp.int32)
  need = jnp.sum(need, axis=1, dtype=jnp.int32) + call.keep_free
  fits = need <= state.pool.queue.num_free
  if recurrent.has_states(state.config):
    fits &= ~_unwritten(state, call, hits)
  return (call.whole == 0) | fits


def _unwritten(state: CacheState, call: Call, hits: RequestHits) -> Array:
  """bool[R]: whether a state among the hits was published in this step.

  Its request computes it in the same step, so nobody can read it yet.
  """
  index = state.pool.index
  if index is None:
    return jnp.zeros(call.slots.shape, bool)
  last = jnp.maximum(hits.stop - 1, 0)[..., None]
  page = jnp.take_along_axis(hits.pages, last, axis=2)[..., 0]
  page = jnp.where(hits.stop > 0, page, 0).reshape(-1)
  keys, tokens = (
    prefix_index.key_of(index, page),
    ops.take(index.tokens, page),
  )
  newest = prefix_index.lookup(index, keys, tokens, newest=True)
  age = index.clock - prefix_index.stamp_of(index, newest)
  since = index.clock - lax.bitcast_convert_type(call.since, jnp.uint32)
  unwritten = age.reshape(hits.stop.shape) <= since[:, None]
  unwritten &= (hits.stop > 0) & recurrent.holds_states(state.config)
  return jnp.any(unwritten, axis=1)


def _sound(
  state: CacheState, call: Call, hits: RequestHits, tokens: Array
) -> Array:
  """bool[R]: whether the pages of hits hold what their requests begin with.

  After the lookup they may have been evicted and handed to another request.
  """
  config, index = state.config, state.pool.index
  first = config.sizes.skipped_pages(call.behind)[..., None]
  column = jnp.arange(hits.pages.shape[2], dtype=jnp.int32)[None, None]
  used = (column >= first) & (column < hits.stop[..., None])
  if index is None:
    return ~jnp.any(used, axis=(1, 2))

  def compare() -> Array:
    columns = tokens.shape[1] // config.page_size
    held = tokens[:, : columns * config.page_size]
    held = held.reshape(-1, columns, config.page_size)
    root = roots(state, hits.salts)
    chain = hashing.row_keys(config, root, held)
    sound = jnp.ones(call.slots.shape, bool)
    for group in range(config.num_groups):
      keys = hashing.keys_of_group(config, chain, group)
      width = min(hits.pages.shape[2], keys.shape[1])
      pages, own = hits.pages[:, group, :width], used[:, group, :width]
      same = prefix_index.key_of(index, pages) == keys[:, :width]
      same = jnp.all(same, axis=2) & prefix_index.contains(index, pages)
      sound &= jnp.all(same | ~own, axis=1)
      sound &= ~jnp.any(used[:, group, width:], axis=1)
    return sound

  return lax.cond(
    jnp.any(used), compare, lambda: jnp.ones(call.slots.shape, bool)
  )


def _publish(
  state: CacheState,
  call: Call,
  rows: Rows,
  plan: Reservation,
  ok: Array,
  tokens: Array,
) -> CacheState:
  """Publishes the rows that are OK, up to where the call says."""
  length = rows.read(state.length)
  room = state.config.sizes.tokens_with_room(plan.stop)
  counts = jnp.minimum(call.publish, room) - length
  counts = jnp.where(ok, jnp.clip(counts, 0, tokens.shape[1]), 0)
  known = jnp.where(
    plan.begins[:, None], plan.hit, rules.final_pages(state.config, length)
  )
  return publish(state, rows, tokens, counts, known)[0]


class Found(NamedTuple):
  """What is cached of a request.

  Attributes:
    num_tokens: int32[].
    boundary: int32[], see `SlotHashes.shared_prefix_boundary`.
    stop: int32[G].
    pages: int32[G, P].
  """

  num_tokens: Array
  boundary: Array
  stop: Array
  pages: Array


@functools.partial(jax.jit, compiler_options=CPU_COMPILER_OPTIONS)
def look_up(
  state: CacheState, tokens: Array, length: Array, salt: Array
) -> Found:
  """Finds the longest cached prefix of one request.

  Args:
    state: a cache with prefix caching.
    tokens: int32[1, T].
    length: int32[1].
    salt: uint32[1, 4].
  """
  config = state.config
  found = longest_prefix.find(state, tokens, length, length > 0, salt)
  pages = found.attached_pages(config, found.pages.shape[2])
  return Found(
    num_tokens=found.num_cached_tokens[0],
    boundary=found.boundary[0],
    stop=found.stop[0],
    pages=jnp.where(pages < config.no_page, pages, 0)[0],
  )


@transition
def release(state: CacheState, slots: Array) -> CacheState:
  """Frees the sequences in slots int32[R], in order."""
  return free(state, slots=slots)[0]


@transition
def evict(state: CacheState, pages: Array) -> CacheState:
  """Takes pages int32[X], all different, out of the index if they are in it."""
  valid = (pages > 0) & (pages < state.config.num_pages)
  pool, _ = page_pool.unpublish(state.pool, pages, valid)
  return dataclasses.replace(state, pool=pool)


@transition
def forget_new(state: CacheState, pages: Array) -> CacheState:
  """Takes pages int32[X] out of what `take_new_pages` tells."""
  if state.pool.new is None:
    return state
  place = ops.where_valid(pages > 0, pages)
  new = ops.put(state.pool.new, place, values=False)
  return dataclasses.replace(
    state, pool=dataclasses.replace(state.pool, new=new)
  )


@transition
def reset(state: CacheState) -> CacheState:
  """Takes all pages out of the index, of a cache in which none is held."""
  return reset_prefix_cache(state)[0]
