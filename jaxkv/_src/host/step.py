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
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind
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
  """What R requests ask for, in order.

  Attributes:
    slots: their slots; out of range for a row that does not count.
    behind: tokens computed before the new ones, here or elsewhere.
    external: the part of `behind` that comes from elsewhere.
    room: tokens that must have room, lookahead included.
    tokens: the part of `room` that recurrent groups count: no lookahead.
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

  slots: Array  # int32[R], as all fields
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
  """Pages that R requests begin with, if their slots are empty."""

  salts: Array  # uint32[R, 4]
  stop: Array  # int32[R, G], how many pages
  pages: Array  # int32[R, G, M], the null page where a window has moved on
  silent: Array  # bool[R, G], whether `take_new_pages` leaves new pages out


class Advanced(NamedTuple):
  """What became of R requests; arrays on the host."""

  ok: np.ndarray  # bool[R]
  sound: np.ndarray  # bool[R], whether the hits hold the request's tokens
  length: np.ndarray  # int32[R], tokens published
  begin: np.ndarray  # int32[R, G], the first new column
  stop: np.ndarray  # int32[R, G], one past the last
  pages: np.ndarray  # int32[R, G, W], the first new pages


@functools.partial(transition, static_argnames=("caps", "begins"))
def advance(
  state: CacheState,
  packed: Array,
  *,
  caps: tuple[int, ...],
  begins: bool,
) -> tuple[CacheState, Array]:
  """Recycles, attaches hits, allocates and publishes.

  Requests are served in order, all-or-nothing. What fell behind a window is
  given back even where nothing can be allocated. All requests give back first,
  then all take pages, then all publish.

  Args:
    state: the cache.
    packed: int32[X], the fields of `Call`; of `RequestHits` if `begins`; and
      the tokens after those published, all tokens of a request that begins.
    caps: the most pages that one sequence ever holds, by group.
    begins: whether there is one row, and its slot may be empty; else there is
      one for every slot.

  Returns:
    The cache, and what became of the rows, for `fetch`. One array comes and
    one goes, because each array that is moved costs as much as this one.
  """
  config = state.config
  call, hits, tokens = _unpacked(config, packed, begins)
  asked = in_range(state, call.slots)
  rows = Rows(call.slots, False, ~asked, ~asked)
  held = rows.read(state.num_pages)
  plan = _plan(
    state, call, hits, held, asked & (held[:, config.first_self_group] == 0)
  )
  sound = jnp.ones_like(asked)
  if hits is not None:
    sound = _sound(state, call, hits, tokens)
    asked &= sound & ~_unwritten(state, call, hits)
    asked &= _whole_fits(state, call, hits, plan, held, caps)
  state, _ = drop_behind(state, rows, call.behind, asked & ~plan.begins)
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
      plan.begins,
      root,
      prompt_length=call.prompt_length,
      boundary=call.boundary,
    )
    state = dataclasses.replace(state, hashes=hashes)
  length = rows.read(state.length)
  room = config.sizes.tokens_with_room(plan.stop)
  counts = jnp.minimum(call.publish, room) - length
  counts = jnp.where(ok, jnp.clip(counts, 0, tokens.shape[1]), 0)
  final = rules.final_pages(config, length)
  known = jnp.where(plan.begins[:, None], plan.hit, final)
  state, _ = publish(state, rows, tokens, counts, known)
  if hits is not None:
    state = _silence(state, call, hits, plan)
  width = config.pages_per_slot if hits is not None else NEW_PAGES
  columns = jnp.arange(width, dtype=jnp.int32)[None, None]
  columns = columns + plan.external[..., None]
  group = jnp.arange(config.num_groups, dtype=jnp.int32)[None, :, None]
  pages = ops.take(state.page_table, call.slots[:, None, None], group, columns)
  parts = (ok, sound, rows.read(state.length), plan.external, plan.stop, pages)
  parts = [part.astype(jnp.int32).reshape(-1) for part in parts]
  return state, jnp.concatenate(parts)


def fetch(packed: Array, num_rows: int, num_groups: int) -> Advanced:
  """What `advance` packed, on the host.

  Polls for a while before it blocks: waking a thread that sleeps costs as much
  as a decode step takes on a CPU.
  """
  for _ in range(_POLLS):
    if packed.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
      break
  flat, pairs = np.asarray(packed), num_rows * num_groups
  pages = 3 * num_rows + 2 * pairs
  ok, sound, length = flat[: 3 * num_rows].reshape(3, num_rows)
  columns = flat[3 * num_rows : pages].reshape(2, num_rows, num_groups)
  return Advanced(
    ok=ok != 0,
    sound=sound != 0,
    length=length,
    begin=columns[0],
    stop=columns[1],
    pages=flat[pages:].reshape(num_rows, num_groups, -1),
  )


def _unpacked(
  config: CacheConfig, packed: Array, begins: bool
) -> tuple[Call, RequestHits | None, Array]:
  """What the host has packed; the tokens are int32[R, T]."""
  groups, columns = config.num_groups, config.pages_per_slot
  num_rows, num_fields = 1 if begins else config.num_slots, len(Call._fields)
  widths = [num_fields]
  if begins:
    widths += [hashing.KEY_WORDS, groups, groups * columns, groups]
  stops = np.cumsum(widths) * num_rows
  fields, *parts, tokens = jnp.split(packed, stops)
  call = Call(*fields.reshape(num_fields, num_rows))
  tokens = tokens.reshape(num_rows, -1)
  if not begins:
    return call, None, tokens
  salts, stop, pages, silent = (part.reshape(num_rows, -1) for part in parts)
  salts = lax.bitcast_convert_type(salts, jnp.uint32)
  pages = pages.reshape(num_rows, groups, columns)
  return call, RequestHits(salts, stop, pages, silent != 0), tokens


def _plan(
  state: CacheState,
  call: Call,
  hits: RequestHits | None,
  held: Array,
  begins: Array,
) -> Reservation:
  """The columns that rows ask for; `held` is int32[R, G]."""
  config = state.config
  required = _columns(config, call.room, call.tokens, call.encoder)
  if hits is None:
    return reserve.reservation(state, hit=held, stop=required, begins=begins)
  skipped = config.sizes.skipped_pages(call.behind)
  attaches = jnp.any(hits.stop > 0, axis=1) | (call.external > 0)
  attaches = (begins & attaches)[:, None]
  hit = jnp.where(attaches, jnp.maximum(skipped, hits.stop), held)

  def arriving(kind: GroupKind, size: int) -> Array:
    arrives = call.behind > kind.num_skipped_tokens(call.behind)
    arrives &= (call.external > 0) & (not kind.holds_encoder)
    reached = ops.quotient(call.behind + (size - 1), size)
    return jnp.where(arrives, reached, 0)

  external = jnp.where(attaches, config.sizes.by_group(arriving), 0)
  return reserve.reservation(
    state,
    first=jnp.where(attaches, skipped, 0),
    hit=hit,
    external=jnp.maximum(hit, external),
    stop=required,
    begins=begins,
  )


def _columns(
  config: CacheConfig, room: Array, tokens: Array, encoder: Array
) -> Array:
  """int32[R, G]: columns for `room`; for `tokens` in recurrent groups."""
  return jnp.where(
    recurrent.holds_states(config),
    config.sizes.columns_for(tokens, encoder),
    config.sizes.columns_for(room, encoder),
  )


def _whole_fits(
  state: CacheState,
  call: Call,
  hits: RequestHits,
  plan: Reservation,
  held: Array,
  caps: tuple[int, ...],
) -> Array:
  """bool[R]: rows whose whole sequences have room, where that is asked.

  As in vLLM, a sequence counts the pages it ever holds at once, without those
  that a hit or a window covers.
  """
  config = state.config
  required = _columns(config, call.whole, call.whole, call.encoder)
  required = jnp.minimum(required, jnp.asarray(caps, jnp.int32)[None])
  whole = reserve.reservation(
    state,
    first=plan.first,
    hit=plan.hit,
    external=plan.external,
    stop=required,
    begins=plan.begins,
  )
  skipped = config.sizes.skipped_pages(call.behind)
  covered = jnp.maximum(skipped, plan.hit)
  covered = jnp.where(plan.begins[:, None], covered, held)
  need = jnp.where(
    recurrent.holds_states(config),
    whole.num_fresh,
    jnp.maximum(required - covered, 0),
  )
  woken = reserve.woken(state, plan, hits.pages)
  need += jnp.sum(woken, axis=2, dtype=jnp.int32)
  need = jnp.sum(need, axis=1, dtype=jnp.int32) + call.keep_free
  return (call.whole == 0) | (need <= state.pool.queue.num_free)


def _unwritten(state: CacheState, call: Call, hits: RequestHits) -> Array:
  """bool[R]: whether a state among the hits was published in this step.

  Its request computes it in the same step, so nobody can read it yet.
  """
  index = state.pool.index
  if index is None or not recurrent.has_states(state.config):
    return jnp.zeros(call.slots.shape, bool)
  last = jnp.maximum(hits.stop - 1, 0)[..., None]
  page = jnp.take_along_axis(hits.pages, last, axis=2)[..., 0]
  page = jnp.where(hits.stop > 0, page, 0).reshape(-1)
  keys = prefix_index.key_of(index, page)
  tokens = ops.take(index.tokens, page)
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
  config, index, secret = state.config, state.pool.index, state.secret
  first = config.sizes.skipped_pages(call.behind)
  used = ops.between(first, hits.stop, hits.pages.shape[2])
  if index is None or secret is None:
    return ~jnp.any(used, axis=(1, 2))

  def compare() -> Array:
    columns = tokens.shape[1] // config.page_size
    held = tokens[:, : columns * config.page_size]
    held = held.reshape(-1, columns, config.page_size)
    root = roots(state, hits.salts)
    chain = hashing.row_keys(secret, root, held)
    sound = jnp.ones(call.slots.shape, bool)
    for group in range(config.num_groups):
      keys = hashing.keys_of_group(config, secret, chain, group)
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


def _silence(
  state: CacheState, call: Call, hits: RequestHits, plan: Reservation
) -> CacheState:
  """Takes fresh pages of silent groups out of what `take_new_pages` tells.

  A page found stays: another request may have got it as new.
  """
  if state.pool.new is None:
    return state
  pages = ops.take(state.page_table, call.slots)
  fresh = ops.between(plan.hit, plan.stop, pages.shape[2])
  fresh &= hits.silent[..., None] & (pages > 0)
  place = ops.where_valid(fresh, pages)
  new = ops.put(state.pool.new, place, values=False)
  pool = dataclasses.replace(state.pool, new=new)
  return dataclasses.replace(state, pool=pool)


@functools.partial(jax.jit, compiler_options=CPU_COMPILER_OPTIONS)
def look_up(
  state: CacheState, tokens: Array, length: Array, salt: Array
) -> tuple[Array, Array, Array, Array]:
  """The longest cached prefix of one request.

  Args:
    state: a cache with prefix caching.
    tokens: int32[1, T].
    length: int32[1].
    salt: uint32[1, 4].

  Returns:
    Its tokens, int32[]; the boundary, see `SlotHashes`, int32[]; the number of
    its pages, int32[G]; and the pages, int32[G, P].
  """
  config = state.config
  found = longest_prefix.find(state, tokens, length, length > 0, salt)
  pages = found.attached_pages(config, found.pages.shape[2])[0]
  pages = jnp.where(pages < config.no_page, pages, 0)
  return found.num_cached_tokens[0], found.boundary[0], found.stop[0], pages


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
def reset(state: CacheState) -> CacheState:
  """Takes all pages out of the index, of a cache in which none is held."""
  return reset_prefix_cache(state)[0]
