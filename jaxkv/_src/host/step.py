"""Transitions of a manager's state, built from the cache's mechanisms."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import in_range
from jaxkv._src.cache.steps import reserve
from jaxkv._src.cache.steps.publish import publish
from jaxkv._src.cache.steps.reserve import Reservation
from jaxkv._src.cache.verbs.free import drop_behind
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.cache.verbs.reset import reset_prefix_cache
from jaxkv._src.host.atomic import transition
from jaxkv._src.host.lookup import Prompt
from jaxkv._src.host.lookup import fetched

NEW_PAGES = 2
"""New pages that a result holds, besides those that T tokens fill."""

CACHED = 2**30
"""Added to the id of a page that is cached."""


class Call(NamedTuple):
  """The arguments of R requests, served in order."""

  slots: Array  # int32[R], as all fields; out of range for padding
  behind: Array  # tokens computed before the new ones, here or elsewhere
  external: Array  # the part of `behind` whose K/V comes from elsewhere
  room: Array  # tokens that need pages, lookahead included
  tokens: Array  # the part of `room` that recurrent groups count: no lookahead
  encoder: Array  # encoder tokens that need pages
  whole: Array  # tokens that must fit now, or nothing is done; 0: no condition
  keep_free: Array  # pages that must stay free, also for a whole sequence
  reserved: Array  # further pages that must stay free
  publish: Array  # tokens to publish up to; may be below the published ones
  prompt_length: Array  # as in `SlotHashes`
  boundary: Array  # as in `SlotHashes`
  since: Array  # `PrefixIndex.clock` bits at the step's start, see `_unwritten`


class RequestHits(NamedTuple):
  """Cached pages with which a request begins."""

  stop: Array  # int32[1, G], the number of pages
  pages: Array  # int32[1, G, M], the null page behind a window


class Advanced(NamedTuple):
  """The results of R requests, on the host."""

  ok: np.ndarray  # bool[R]
  sound: np.ndarray  # bool[R], true if the hits hold the request's tokens
  length: np.ndarray  # int32[R], tokens published
  begin: np.ndarray  # int32[R, G], the first new column
  stop: np.ndarray  # int32[R, G], one past the last
  pages: np.ndarray  # int32[R, G, W], the first new pages, see `CACHED`


@transition
def begin(
  state: CacheState,
  packed: Array,
  prompt: Prompt | None,
  *,
  caps: tuple[int, ...],
) -> tuple[CacheState, Array]:
  """Attaches a request's hits to an empty slot, allocates and publishes.

  Args:
    state: the cache.
    packed: int32[X], the fields of `Call` for one row and of `RequestHits`, and
      bool[G]: groups whose new pages `take_new_pages` omits.
    prompt: from `look_up`; None without prefix caching.
    caps: the most pages that one sequence ever holds, by group.

  Returns:
    The cache, and the result for `fetch`. Arguments and result are one array
    each, because each array that is moved costs as much as this one.
  """
  config = state.config
  groups, columns = config.num_groups, config.pages_per_slot
  widths = np.cumsum([len(Call._fields), groups, groups * columns])
  fields, stop, pages, silent = jnp.split(packed, widths)
  call = Call(*fields[:, None])
  hits = RequestHits(stop[None], pages.reshape(1, groups, columns))
  if prompt is None:
    prompt = _nothing_hashed(config, call)
  rows, asked = _rows_of(state, call)
  plan = _plan(state, call, hits, rows.read(state.num_pages), asked)
  sound = _sound(state, call, hits, prompt)
  asked &= sound & ~_unwritten(state, call, hits)
  asked &= _whole_fits(state, call, hits, plan, caps)
  state, ok = _reserve(state, call, rows, plan, asked, hits)
  plan = plan.of(ok)
  hashes = hashing.start_slots(
    state.hashes,
    rows,
    ok,
    prompt.root,
    prompt_length=call.prompt_length,
    boundary=call.boundary,
  )
  state = dataclasses.replace(state, hashes=hashes)
  counts = _publishable(state, call, rows, plan, ok, prompt.tokens)
  state, _ = publish(state, rows, prompt.tokens, counts, plan.hit, prompt.keys)
  state = _silence(state, call, silent[None] != 0, plan)
  return state, _packed(state, call, rows, plan, ok, sound, columns)


@transition
def advance(
  state: CacheState, packed: Array, *, num_rows: int, caps: tuple[int, ...]
) -> tuple[CacheState, Array]:
  """Recycles, allocates and publishes for requests that have slots.

  Requests are served in order, each all-or-nothing, except that all free their
  pages behind windows first. All allocate before any publishes.

  Args:
    state: the cache.
    packed: int32[X], the fields of `Call`, each for all rows; bool[G] for a
      single row, as for `begin`; and the tokens after the published ones.
    num_rows: R.
    caps: as for `begin`; empty if `whole` is 0 in all rows.
  """
  num_fields = len(Call._fields) * num_rows
  fields, rest = packed[:num_fields], packed[num_fields:]
  call = Call(*fields.reshape(-1, num_rows))
  rows, asked = _rows_of(state, call)
  held = rows.read(state.num_pages)
  begins = asked & (held[:, state.config.first_self_group] == 0)
  plan = _plan(state, call, None, held, begins)
  if caps:
    asked &= _whole_fits(state, call, None, plan, caps)
  state, _ = drop_behind(state, rows, call.behind, asked & ~plan.begins)
  state, ok = _reserve(state, call, rows, plan, asked, None)
  plan = plan.of(ok)
  if num_rows == 1:
    silent, rest = jnp.split(rest, [state.config.num_groups])
    state = _silence(state, call, silent[None] != 0, plan)
  tokens = rest.reshape(num_rows, -1)
  counts = _publishable(state, call, rows, plan, ok, tokens)
  state, _ = publish(state, rows, tokens, counts)
  width = tokens.shape[1] // min(state.config.page_sizes) + NEW_PAGES
  width = min(width, state.config.pages_per_slot)
  return state, _packed(state, call, rows, plan, ok, ok, width)


def _rows_of(state: CacheState, call: Call) -> tuple[SlotRows, Array]:
  """Returns the rows of a call, and bool[R]: rows that are not padding."""
  asked = in_range(state, call.slots)
  return SlotRows(call.slots, False, ~asked, ~asked), asked


def _nothing_hashed(config: CacheConfig, call: Call) -> Prompt:
  """Returns a prompt without keys, as long as a slot."""
  shape = (*call.slots.shape, config.slot_tokens)
  none = jnp.zeros((1, hashing.KEY_WORDS), jnp.uint32)
  return Prompt(jnp.zeros(shape, jnp.int32), none[:, :0, None], none)


def _reserve(
  state: CacheState,
  call: Call,
  rows: SlotRows,
  plan: Reservation,
  asked: Array,
  hits: RequestHits | None,
) -> tuple[CacheState, Array]:
  """Allocates a plan's pages; bool[R]: the rows that succeeded."""
  code = jnp.where(asked, Status.OK, Status.SKIPPED).astype(jnp.int32)
  state, code = reserve.reserve(
    state,
    rows,
    plan,
    code,
    hits=None if hits is None else hits.pages,
    keep_free=call.keep_free + call.reserved,
  )
  return state, code == Status.OK


def _publishable(
  state: CacheState,
  call: Call,
  rows: SlotRows,
  plan: Reservation,
  ok: Array,
  tokens: Array,
) -> Array:
  """Returns int32[R], the number of tokens to publish."""
  room = state.config.sizes.tokens_with_room(plan.stop)
  counts = jnp.minimum(call.publish, room) - rows.read(state.length)
  return jnp.where(ok, jnp.clip(counts, 0, tokens.shape[1]), 0)


def _packed(
  state: CacheState,
  call: Call,
  rows: SlotRows,
  plan: Reservation,
  ok: Array,
  sound: Array,
  width: int,
) -> Array:
  """Packs the results for `fetch` into int32[X]."""
  columns = jnp.arange(width, dtype=jnp.int32)[None, None]
  columns = columns + plan.external[..., None]
  group = jnp.arange(state.config.num_groups, dtype=jnp.int32)[None, :, None]
  pages = indexing.take(
    state.page_table, call.slots[:, None, None], group, columns
  )
  if state.pool.index is not None:
    cached = prefix_index.contains(state.pool.index, pages)
    pages = pages + jnp.where(cached, jnp.int32(CACHED), 0)
  parts = (ok, sound, rows.read(state.length), plan.external, plan.stop, pages)
  return jnp.concatenate([x.astype(jnp.int32).reshape(-1) for x in parts])


def fetch(packed: Array, num_rows: int, num_groups: int) -> Advanced:
  """Unpacks the result of `begin` or `advance`, on the host."""
  flat, pairs = fetched(packed), num_rows * num_groups
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


def _plan(
  state: CacheState,
  call: Call,
  hits: RequestHits | None,
  held: Array,
  begins: Array,
) -> Reservation:
  """Plans the columns of each row; `held` is int32[R, G]."""
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
    reached = elementwise.quotient(call.behind + (size - 1), size)
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
  """Returns int32[R, G], columns for `room`, or `tokens` if recurrent."""
  return jnp.where(
    recurrent.holds_states(config),
    config.sizes.columns_for(tokens, encoder),
    config.sizes.columns_for(room, encoder),
  )


def _whole_fits(
  state: CacheState,
  call: Call,
  hits: RequestHits | None,
  plan: Reservation,
  caps: tuple[int, ...],
) -> Array:
  """Returns bool[R]: rows whose whole sequences fit, where `whole` asks for it.

  As in vLLM, a sequence counts the most pages that it holds at once, without
  those that a hit or a window covers. A recurrent group counts its running
  state, even if another one arrives for external tokens, and the scratch pages.
  """
  config = state.config
  required = _columns(config, call.whole, call.whole, call.encoder)
  required = jnp.minimum(required, jnp.asarray(caps, jnp.int32)[None])
  begins = plan.begins[:, None]
  skipped = config.sizes.skipped_pages(call.behind)
  covered = jnp.where(begins, jnp.maximum(skipped, plan.hit), plan.hit)
  found = plan.hit if hits is None else jnp.where(begins, hits.stop, plan.hit)
  states = recurrent.holds_states(config)
  need = jnp.maximum(required - jnp.where(states, found, covered), 0)
  scratch = [kind.num_speculative for kind in config.groups]
  scratch = jnp.asarray(scratch, jnp.int32)[None]
  most = 1 + jnp.where(begins, scratch, 0)
  need = jnp.where(states, jnp.minimum(need, most), need)
  if hits is not None:
    free_hits = reserve.free_hits(state, plan, hits.pages)
    need += jnp.sum(free_hits, axis=2, dtype=jnp.int32)
  need = jnp.sum(need, axis=1, dtype=jnp.int32) + call.keep_free
  return (call.whole == 0) | (need <= state.pool.queue.num_free)


def _unwritten(state: CacheState, call: Call, hits: RequestHits) -> Array:
  """Returns bool[R]: rows with a hit on a state that this step published.

  Its request computes the state in the same step, so it is not readable yet.
  """
  index = state.pool.index
  if index is None or not recurrent.has_states(state.config):
    return jnp.zeros(call.slots.shape, bool)
  last = jnp.maximum(hits.stop - 1, 0)[..., None]
  page = jnp.take_along_axis(hits.pages, last, axis=2)[..., 0]
  page = jnp.where(hits.stop > 0, page, 0).reshape(-1)
  keys = prefix_index.key_of(index, page)
  tokens = indexing.take(index.tokens, page)
  newest = prefix_index.lookup(index, keys, tokens, newest=True)
  age = index.clock - prefix_index.stamp_of(index, newest)
  since = index.clock - lax.bitcast_convert_type(call.since, jnp.uint32)
  unwritten = age.reshape(hits.stop.shape) <= since[:, None]
  unwritten &= (hits.stop > 0) & recurrent.holds_states(state.config)
  return jnp.any(unwritten, axis=1)


def _sound(
  state: CacheState, call: Call, hits: RequestHits, prompt: Prompt
) -> Array:
  """Returns bool[R]: rows whose hits hold the tokens of the request.

  After the lookup a page may have been evicted and given to another request.
  """
  config, index, secret = state.config, state.pool.index, state.secret
  first = config.sizes.skipped_pages(call.behind)
  used = indexing.between(first, hits.stop, hits.pages.shape[2])
  if index is None or secret is None:
    return ~jnp.any(used, axis=(1, 2))

  def compare() -> Array:
    sound = jnp.ones(call.slots.shape, bool)
    for group in range(config.num_groups):
      keys = hashing.keys_of_group(config, secret, prompt.keys, group)
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
  state: CacheState, call: Call, silent: Array, plan: Reservation
) -> CacheState:
  """Hides fresh pages of silent groups from `take_new_pages`.

  Pages of a hit stay listed: another request may have received them as new.
  """
  if state.pool.new is None:
    return state
  pages = indexing.take(state.page_table, call.slots)
  fresh = indexing.between(plan.hit, plan.stop, pages.shape[2])
  fresh &= silent[..., None] & (pages > 0)
  place = indexing.where_valid(fresh, pages)
  new = indexing.put(state.pool.new, place, values=False)
  pool = dataclasses.replace(state.pool, new=new)
  return dataclasses.replace(state, pool=pool)


@transition
def release(state: CacheState, slots: Array) -> tuple[CacheState, None]:
  """Frees the sequences in slots int32[R], in order."""
  return free(state, slots=slots)[0], None


@transition
def evict(state: CacheState, pages: Array) -> tuple[CacheState, None]:
  """Removes pages int32[X], all different, from the index."""
  valid = (pages > 0) & (pages < state.config.num_pages)
  pool, _ = page_pool.unpublish(state.pool, pages, valid)
  return dataclasses.replace(state, pool=pool), None


@transition
def reset(state: CacheState) -> tuple[CacheState, None]:
  """Removes all pages from the index; no page may be held."""
  return reset_prefix_cache(state)[0], None
