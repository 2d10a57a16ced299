"""Transitions and queries of a pool's state.

A reference taken through a pool, not by a request, is a pin. A page outside the
free queue without references is loose: one pin holds it in the state, and its
queue position marks it, until its holder appends it to the queue. So the
invariants of a cache hold for every pool.

Each transition is all-or-nothing. It returns a `Refusal` and the page refused.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import roots
from jaxkv._src.host import pins
from jaxkv._src.host.atomic import Atomic
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.atomic import query
from jaxkv._src.host.atomic import transition

_LOOSE = indexing.NOWHERE - 1
"""The position of a loose page: no entry of the queue is there."""


class Refusal(enum.IntEnum):
  """The reason for which a transition did nothing."""

  NONE = 0
  TOO_FEW = 1
  NOT_QUEUED = 2
  NOT_LOOSE = 3
  LOOSE = 4
  NOT_PINNED = 5
  NO_REFERENCE = 6
  HAS_HASH = 7
  NAMED_TWICE = 8
  IN_USE = 9


_ERRORS: dict[Refusal, tuple[type[Exception], str]] = {
  Refusal.TOO_FEW: (ValueError, "Cannot get so many free pages; {page} left."),
  Refusal.NOT_QUEUED: (
    RuntimeError,
    "Page {page} must stand in the free queue to be removed from it.",
  ),
  Refusal.NOT_LOOSE: (
    RuntimeError,
    "Page {page} must stand outside of the free queue, without a reference, "
    "to be appended to it; give references back with free_pages.",
  ),
  Refusal.LOOSE: (
    RuntimeError,
    "Page {page} must stand in the free queue to be touched without a "
    "reference; append it first.",
  ),
  Refusal.NOT_PINNED: (
    RuntimeError,
    "Page {page} must have as many references of the pool as are given back; "
    "CacheManager.free gives back those of a request.",
  ),
  Refusal.NO_REFERENCE: (
    RuntimeError,
    "Page {page} must have a reference to lose one.",
  ),
  Refusal.HAS_HASH: (RuntimeError, "Page {page} must have no hash to get one."),
  Refusal.NAMED_TWICE: (ValueError, "Page {page} must be named once."),
}


@atomic
def change(holder: Atomic, specialized: Any, *args: Any, **static: Any) -> Any:
  """Runs a transition of this file and returns int32[X], its answer.

  Raises:
    RuntimeError, ValueError: it refused.
  """
  answer = np.asarray(holder.run(specialized, *args, **static))
  refusal = Refusal(int(answer[0]))
  if refusal in _ERRORS:
    error, text = _ERRORS[refusal]
    raise error(text.format(page=int(answer[1])))
  return answer[1:]


@atomic
def read(holder: Atomic, specialized: Any, *args: Any) -> Any:
  """Runs a query and copies its answer to the host."""
  return jax.device_get(holder.ask(specialized, *args))


@transition
def take_new(
  state: CacheState, count: Array, *, width: int
) -> tuple[CacheState, Array]:
  """Pops `count` pages, at most `width`, with a reference and no hash each.

  Returns the cache, and int32[2 + width]: the pages after the first two
  numbers.
  """
  free = state.pool.queue.num_free
  pool, pages = pins.take(state.pool, count, width)
  code = jnp.where(count > free, Refusal.TOO_FEW, Refusal.NONE)
  state = dataclasses.replace(state, pool=pool)
  return state, jnp.concatenate([_answer(code, free), pages])


@transition
def touch(state: CacheState, pages: Array) -> tuple[CacheState, Array]:
  """Adds a reference to pages int32[X]; free pages leave the queue."""
  pool, valid = state.pool, pages > 0
  loose = valid & _is_loose(pool, pages) & (_references(pool, pages) == 0)
  code, page = _first((loose, Refusal.LOOSE), pages=pages)
  valid &= code == Refusal.NONE
  pool = page_pool.hold(pins.add(pool, pages, valid, 1), pages, valid)
  return dataclasses.replace(state, pool=pool), _answer(code, page)


@transition
def release(state: CacheState, pages: Array) -> tuple[CacheState, Array]:
  """Removes a reference from pages int32[X]; those without any are queued."""
  pool, valid = state.pool, pages > 0
  place = indexing.where_valid(valid, pages)
  given = indexing.add(sharding.zeros_like(pool.pin_count), place, values=1)
  own = indexing.take(pool.pin_count, pages) - _num_loose(pool, pages)
  missing = valid & (indexing.take(given, pages) > own)
  code, page = _first((missing, Refusal.NOT_PINNED), pages=pages)
  pool = _dropped(pool, pages, valid & (code == Refusal.NONE))
  return dataclasses.replace(state, pool=pool), _answer(code, page)


@transition
def take_out(state: CacheState, pages: Array) -> tuple[CacheState, Array]:
  """Removes pages int32[X] from the queue and makes them loose."""
  pool, valid = state.pool, pages > 0
  code, page = _first(
    (_named_again(pages), Refusal.NAMED_TWICE),
    (valid & ~page_pool.is_free(pool, pages), Refusal.NOT_QUEUED),
    pages=pages,
  )
  pool = _loosened(pool, pages, valid & (code == Refusal.NONE))
  return dataclasses.replace(state, pool=pool), _answer(code, page)


@transition
def take_front(
  state: CacheState, count: Array, *, width: int
) -> tuple[CacheState, Array]:
  """Removes the first pages from the queue; returns as `take_new`."""
  pool, free = state.pool, state.pool.queue.num_free
  wanted = jnp.where(count > free, 0, count)
  queued = free_queue.in_order(pool.queue)[:width]
  queued = jnp.pad(queued, (0, width - queued.shape[0]))
  pages = jnp.where(jnp.arange(width, dtype=jnp.int32) < wanted, queued, 0)
  pool = _loosened(pool, pages, pages > 0)
  code = jnp.where(count > free, Refusal.TOO_FEW, Refusal.NONE)
  state = dataclasses.replace(state, pool=pool)
  return state, jnp.concatenate([_answer(code, free), pages])


@transition
def put_back(state: CacheState, pages: Array) -> tuple[CacheState, Array]:
  """Appends loose pages int32[X] to the queue."""
  pool, valid = state.pool, pages > 0
  idle = _is_loose(pool, pages) & (_references(pool, pages) == 0)
  code, page = _first(
    (_named_again(pages), Refusal.NAMED_TWICE),
    (valid & ~idle, Refusal.NOT_LOOSE),
    pages=pages,
  )
  pool = _dropped(pool, pages, valid & (code == Refusal.NONE))
  return dataclasses.replace(state, pool=pool), _answer(code, page)


@transition
def add_reference(state: CacheState, pages: Array) -> tuple[CacheState, Array]:
  """Adds a reference to a page int32[1], free, loose or in use."""
  pool, valid = state.pool, pages > 0
  loose = valid & _is_loose(pool, pages)
  place = indexing.where_valid(loose, pages)
  position = indexing.put(pool.queue.position, place, values=indexing.NOWHERE)
  queue = dataclasses.replace(pool.queue, position=position)
  # The pin that held the loose page is the reference now.
  pool = dataclasses.replace(pool, queue=queue)
  pool = pins.add(pool, pages, valid & ~loose, 1)
  pool = page_pool.hold(pool, pages, valid & ~loose)
  return dataclasses.replace(state, pool=pool), _answer(Refusal.NONE, 0)


@transition
def remove_reference(
  state: CacheState, pages: Array
) -> tuple[CacheState, Array]:
  """Removes a reference from a page int32[1]; the last makes it loose."""
  pool = state.pool
  own = indexing.take(pool.pin_count, pages) - _num_loose(pool, pages)
  references = _references(pool, pages)
  code, page = _first(
    (references < 1, Refusal.NO_REFERENCE),
    (own < 1, Refusal.NOT_PINNED),
    pages=pages,
  )
  valid = code == Refusal.NONE
  last = valid & (references == 1)
  pool = _dropped(pool, pages, valid & ~last)
  pool = _marked(pool, pages, last)
  return dataclasses.replace(state, pool=pool), _answer(code, page)


@transition
def publish(
  state: CacheState,
  pages: Array,
  keys: Array,
  tokens: Array,
  groups: Array,
) -> tuple[CacheState, Array]:
  """Gives pages int32[X] their hashes, in order.

  X is a multiple of INSERT_WINDOW. `keys` is uint32[X, 4], `tokens` is
  int32[X, S] and `groups` is int32[X].
  """
  pool = state.pool
  assert pool.index is not None
  code, page = _first(
    (_named_again(pages), Refusal.NAMED_TWICE),
    ((pages > 0) & page_pool.is_cached(pool, pages), Refusal.HAS_HASH),
    pages=pages,
  )
  valid = (pages > 0) & (code == Refusal.NONE)

  def insert(index, some):
    pages, keys, tokens, valid = some
    return prefix_index.insert(index, pages, keys, tokens, valid, valid), None

  parts = jax.tree.map(
    lambda x: x.reshape(-1, prefix_index.INSERT_WINDOW, *x.shape[1:]),
    (pages, keys, tokens, valid),
  )
  index, _ = lax.scan(insert, pool.index, parts)
  log = pool.events
  if log is not None:
    place = indexing.where_valid(valid, pages)
    group_of = indexing.put(log.group_of, place, values=groups)
    log = dataclasses.replace(log, group_of=group_of)
  pool = dataclasses.replace(pool, index=index, events=log)
  return dataclasses.replace(state, pool=pool), _answer(code, page)


@transition
def evict(state: CacheState, pages: Array) -> tuple[CacheState, Array]:
  """Removes the hashes of pages int32[X], all different."""
  pool, _ = page_pool.unpublish(state.pool, pages, pages > 0)
  return dataclasses.replace(state, pool=pool), _answer(Refusal.NONE, 0)


@transition
def reset(state: CacheState) -> tuple[CacheState, Array]:
  """Removes all hashes, if all pages are free."""
  num_free, usable = state.pool.queue.num_free, state.config.num_pages - 1
  done = num_free == usable
  pool = page_pool.clear(state.pool, done)
  code = jnp.where(done, Refusal.NONE, Refusal.IN_USE)
  state = dataclasses.replace(state, pool=pool)
  return state, _answer(code, jnp.where(done, 1, 0))


@query
def num_free(state: CacheState) -> Array:
  """Returns int32[], the number of free pages."""
  return state.pool.queue.num_free


@query
def queued(state: CacheState) -> tuple[Array, Array]:
  """Returns the number of free pages, and int32[C]: their ids, then 0."""
  return state.pool.queue.num_free, free_queue.in_order(state.pool.queue)


@query
def references(state: CacheState, pages: Array) -> Array:
  """Returns int32[X], references of pages."""
  return _references(state.pool, pages)


@query
def are_hashed(state: CacheState, pages: Array) -> Array:
  """Returns bool[X]: pages with a hash."""
  return page_pool.is_cached(state.pool, pages)


@query
def hashes(state: CacheState, pages: Array) -> tuple[Array, ...]:
  """Reads the hashes of pages int32[X].

  Returns bool[X], True for pages with a hash; uint32[X], the number of pages
  published since; uint32[X, 4], keys; and int32[X], groups.
  """
  index, log = state.pool.index, state.pool.events
  assert index is not None
  group = sharding.zeros_like(pages)
  if log is not None:
    group = indexing.take(log.group_of, pages)
  age = index.clock - prefix_index.stamp_of(index, pages)
  cached = prefix_index.contains(index, pages)
  return cached, age, prefix_index.key_of(index, pages), group


@query
def tokens_of(state: CacheState, pages: Array) -> Array:
  """Returns int32[X, S], tokens of pages with a hash."""
  index = state.pool.index
  assert index is not None
  return indexing.take(index.tokens, pages)


@query
def find(state: CacheState, keys: Array, tokens: Array) -> Array:
  """Returns int32[X], the first page with each key and tokens; 0 for none."""
  index = state.pool.index
  assert index is not None
  return prefix_index.lookup(index, keys, tokens)


@query
def chain(state: CacheState, tokens: Array, salt: Array) -> Array:
  """Returns uint32[P, 4], the keys of a sequence's pages in all groups.

  `tokens` is int32[1, P, S], `salt` uint32[1, 4].
  """
  assert state.secret is not None
  root = jnp.broadcast_to(roots(state, salt), salt.shape)
  return hashing.row_keys(state.secret, root, tokens)[0]


def _references(pool: PoolState, pages: Array) -> Array:
  """Returns int32[X], without the pins of loose pages."""
  return indexing.take(pool.ref_count, pages) - _num_loose(pool, pages)


def _is_loose(pool: PoolState, pages: Array) -> Array:
  return indexing.take(pool.queue.position, pages) == _LOOSE


def _num_loose(pool: PoolState, pages: Array) -> Array:
  """Returns int32[X], pins that hold loose pages, 0 or 1."""
  return _is_loose(pool, pages).astype(jnp.int32)


def _dropped(pool: PoolState, pages: Array, valid: Array) -> PoolState:
  pool = pins.add(pool, pages, valid, -1)
  pool = page_pool.reserve(pool, jnp.sum(valid, dtype=jnp.int32))
  return page_pool.drop(pool, pages, sharding.zeros_like(pages), valid)[0]


def _loosened(pool: PoolState, pages: Array, valid: Array) -> PoolState:
  pool = page_pool.hold(pins.add(pool, pages, valid, 1), pages, valid)
  return _marked(pool, pages, valid)


def _marked(pool: PoolState, pages: Array, valid: Array) -> PoolState:
  place = indexing.where_valid(valid, pages)
  position = indexing.put(pool.queue.position, place, values=_LOOSE)
  queue = dataclasses.replace(pool.queue, position=position)
  return dataclasses.replace(pool, queue=queue)


def _named_again(pages: Array) -> Array:
  """Returns bool[X]: pages that occur earlier, without the null page."""
  return (pages > 0) & (indexing.num_earlier(pages) > 0)


def _first(
  *reasons: tuple[Array, Refusal], pages: Array
) -> tuple[Array, Array]:
  """Returns the first reason that applies to a page, and that page."""
  code, page = jnp.int32(Refusal.NONE), jnp.int32(0)
  for met, refusal in reversed(reasons):
    some = jnp.any(met)
    code = jnp.where(some, jnp.int32(refusal), code)
    page = jnp.where(some, pages[jnp.argmax(met)], page)
  return code, page


def _answer(code: Any, page: Any) -> Array:
  return jnp.stack([jnp.asarray(one, jnp.int32) for one in (code, page)])
