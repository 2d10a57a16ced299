"""touch, pin, unpin, evict: single pages against eviction, or for it."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.checks import check_array
from jaxkv._src.cache.checks import check_sequences
from jaxkv._src.cache.checks import mask_or_all
from jaxkv._src.cache.duplicates import num_earlier
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool.page_pool import PagePool
from jaxkv._src.cache.pool.page_table import Rows
from jaxkv._src.cache.prefix import longest_prefix
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import counted
from jaxkv._src.cache.status import Code
from jaxkv._src.cache.status import first_code
from jaxkv._src.cache.status import is_failure
from jaxkv._src.cache.status import sticky
from jaxkv._src.cache.verb import verb


class PageCodes(NamedTuple):
  """What became of every page named.

  Attributes:
    code: int32[...], a `Code` for each.
  """

  code: Array

  @property
  def ok(self) -> Array:
    """bool[...]: whether it was done."""
    return self.code == Code.OK


class Pinned(NamedTuple):
  """What `pin` did; P = T // S.

  Attributes:
    code: int32[R], a `Code` a sequence.
    num_cached: int32[R], tokens of the prefix that is held now.
    pages: int32[G, R, P], its pages, NO_PAGE elsewhere: what `unpin` takes.
  """

  code: Array
  num_cached: Array
  pages: Array

  @property
  def ok(self) -> Array:
    """bool[R]: whether a prefix is held."""
    return self.code == Code.OK


@verb
def touch(state: CacheState, pages: Array) -> tuple[CacheState, PageCodes]:
  """Takes one reference (a pin) on every page named.

  A free page that is cached leaves the free queue, so that it cannot be
  evicted. `unpin` gives the reference back.

  Args:
    state: the cache.
    pages: int32[...], pages in use or cached; repeats count. NO_PAGE is
      passed over.

  Returns:
    The cache, and per page OK, SKIPPED (NO_PAGE), BAD_PAGE or NOT_CACHED
    (neither in use nor cached).

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, out = jaxkv.touch(state, jnp.asarray([3], jnp.int32))
    >>> jaxkv.Code(int(out.code[0])).name
    'NOT_CACHED'
  """
  check_array("pages", pages, None, jnp.int32)
  if pages.size == 0:
    return state, PageCodes(pages)
  names = pages.reshape(-1)
  known = (masked.take(state.pool.ref_count, names) > 0) | (
    page_pool.is_cached(state.pool, names)
  )
  code = _page_code(state, names, (~known, Code.NOT_CACHED))
  state = _finished(state, _pinned(state.pool, names, code == Code.OK), code)
  return state, PageCodes(code.reshape(pages.shape))


@verb
def pin(
  state: CacheState,
  tokens: Array,
  lengths: Array,
  salts: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Pinned]:
  """Holds the cached prefixes of sequences against eviction.

  `match` and `touch` in one. A system prompt that must stay is pinned after
  the first sequence with it was committed.

  Args:
    state: the cache.
    tokens: int32[R, T], padded at the end.
    lengths: int32[R], 1 .. T; at most `length - 1` tokens are held.
    salts: uint32[R, 4], see `salt`; None for no salt.
    mask: bool[R], the rows that count; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_LENGTH or NOT_CACHED (nothing of it
    is cached). Give `pages` to `unpin` to let go.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> tokens = jnp.asarray([[7, 8, 9]], jnp.int32)
    >>> three = jnp.asarray([3], jnp.int32)
    >>> state, _ = jaxkv.allocate(state, three)
    >>> state, _ = jaxkv.commit(state, tokens, three)
    >>> state, out = jaxkv.pin(state, tokens, three)
    >>> out.pages.tolist(), out.num_cached.tolist()
    ([[[1]]], [2])
  """
  check_sequences(tokens, lengths, salts)
  config = state.config
  rows, columns = tokens.shape[0], tokens.shape[1] // config.page_size
  mask = mask_or_all(mask, rows, "sequence")
  bad = (lengths < 1) | (lengths > tokens.shape[1])
  found = longest_prefix.find(state, tokens, lengths, salts, mask & ~bad)
  num_cached = lengths & 0 if found is None else found.num_cached
  code = first_code(
    (~mask, Code.SKIPPED),
    (bad, Code.BAD_LENGTH),
    (num_cached == 0, Code.NOT_CACHED),
  )
  shape = (config.num_groups, rows, columns)
  held = jnp.full(shape, config.no_page, jnp.int32)
  if found is not None:
    held = longest_prefix.attached(config, found)
  names = held.reshape(-1)
  pool = _pinned(state.pool, names, names < config.no_page)
  state = _finished(state, pool, code)
  return state, Pinned(code, num_cached, held)


@verb
def unpin(state: CacheState, pages: Array) -> tuple[CacheState, PageCodes]:
  """Gives back one pin on every page named.

  Along the last axis the last page goes first, as `free` does, so that a
  prefix outlives its tail; the other axes go in order.

  Args:
    state: the cache.
    pages: int32[...], such as `Pinned.pages`; repeats count. NO_PAGE is passed
      over.

  Returns:
    The cache, and per page OK, SKIPPED (NO_PAGE), BAD_PAGE or NOT_PINNED.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, out = jaxkv.unpin(state, jnp.asarray([3], jnp.int32))
    >>> jaxkv.Code(int(out.code[0])).name
    'NOT_PINNED'
  """
  check_array("pages", pages, None, jnp.int32)
  if pages.size == 0:
    return state, PageCodes(pages)
  config = state.config
  columns = pages.shape[-1] if pages.ndim else 1
  table = pages.reshape(-1, columns)
  names = table.reshape(-1)
  # In the order of release, which is that of the rows, each from its end.
  backwards = table[:, ::-1].reshape(-1)
  earlier = num_earlier(backwards).reshape(table.shape)[:, ::-1].reshape(-1)
  later = num_earlier(backwards[::-1])[::-1]
  later = later.reshape(table.shape)[:, ::-1].reshape(-1)
  pins = masked.take(state.pool.pin_count, names)
  code = _page_code(state, names, (earlier >= pins, Code.NOT_PINNED))
  given = code == Code.OK
  # Of several pins of a page only the last one given back can set it free.
  last = given & ((later == 0) | (earlier == pins - 1))
  place = masked.where_valid(given, names)
  pool = dataclasses.replace(
    state.pool,
    pin_count=masked.add(state.pool.pin_count, place, values=-1),
    ref_count=masked.add(
      state.pool.ref_count,
      masked.where_valid(given & ~last, names),
      values=-1,
    ),
  )
  table = jnp.where(last, names, jnp.int32(config.no_page))
  given = jnp.any(given.reshape(-1, columns), axis=1)
  zeros = jnp.zeros(given.shape, jnp.int32)
  rows = Rows(
    group=zeros,
    slot=jnp.arange(zeros.shape[0], dtype=jnp.int32),
    start=zeros,
    stop=jnp.where(given, columns, zeros),
  )
  pool, _ = page_table.shrink(
    pool,
    table.reshape(1, -1, columns),
    rows,
    unhashed_first=config.unhashed_first,
    cleared=config.no_page,
  )
  return _finished(state, pool, code), PageCodes(code.reshape(pages.shape))


@verb
def evict(state: CacheState, pages: Array) -> tuple[CacheState, PageCodes]:
  """Drops pages from the prefix index: they can no longer be hit.

  References stay, and a free page keeps its place in the queue.

  Args:
    state: the cache.
    pages: int32[...], cached pages. NO_PAGE is passed over.

  Returns:
    The cache, and per page OK, SKIPPED (NO_PAGE), BAD_PAGE or NOT_CACHED (also
    for a page named twice).

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> two = jnp.asarray([2], jnp.int32)
    >>> state, _ = jaxkv.allocate(state, two)
    >>> state, _ = jaxkv.commit(state, jnp.zeros((1, 2), jnp.int32), two)
    >>> state, out = jaxkv.evict(state, jnp.asarray([1], jnp.int32))
    >>> out.ok.tolist(), jaxkv.cached_pages(state)
    ([True], [])
  """
  check_array("pages", pages, None, jnp.int32)
  if pages.size == 0:
    return state, PageCodes(pages)
  names = pages.reshape(-1)
  again = num_earlier(names) > 0
  missing = ~page_pool.is_cached(state.pool, names) | again
  code = _page_code(state, names, (missing, Code.NOT_CACHED))
  # Earlier verbs that read the index leave their mark in the queue's count.
  place = masked.after(state.pool.queue.num_free, names)
  pool, _ = page_pool.unpublish(state.pool, place, code == Code.OK)
  return _finished(state, pool, code), PageCodes(code.reshape(pages.shape))


def _page_code(
  state: CacheState, names: Array, last: tuple[Array, Code]
) -> Array:
  no_page = state.config.no_page
  return first_code(
    (names == no_page, Code.SKIPPED),
    ((names < 1) | (names > no_page), Code.BAD_PAGE),
    last,
  )


def _pinned(pool: PagePool, names: Array, valid: Array) -> PagePool:
  pool = dataclasses.replace(
    pool,
    pin_count=masked.add(
      pool.pin_count, masked.where_valid(valid, names), values=1
    ),
  )
  return page_pool.hold(pool, names, valid)


def _finished(state: CacheState, pool: PagePool, code: Array) -> CacheState:
  return dataclasses.replace(
    state,
    pool=pool,
    stats=counted(state.stats, failed=is_failure(code)),
    error=sticky(state.error, code),
  )
