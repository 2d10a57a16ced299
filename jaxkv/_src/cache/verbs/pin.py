"""touch, pin, unpin, evict: single pages are held, let go or dropped."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.pool.page_table import Ranges
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import mask_or_all
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.steps.find import find_prefix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned(Outcome):
  """What `pin` did; P = T // S. A row is OK if a prefix is held.

  Attributes:
    code: a `Status` for each sequence.  # int32[R]
    num_cached_tokens: tokens of the prefix that is held now.  # int32[R]
    pages: its pages, NO_PAGE elsewhere: the argument for `unpin`.
      # int32[R, G, P]
  """

  num_cached_tokens: Array
  pages: Array


@verb
def touch(
  state: CacheState, pages: Array, *, mask: Array | None = None
) -> tuple[CacheState, Outcome]:
  """Takes one reference (a pin) on every page named.

  A free page that is cached leaves the free queue, so it cannot be evicted.
  `unpin` gives the reference back.

  Args:
    state: the cache.
    pages: int32[...], pages in use or cached; repeats count. NO_PAGE is passed
      over.
    mask: bool[...], the pages that count; None for all.

  Returns:
    The cache, and per page OK, SKIPPED (masked out, or NO_PAGE), BAD_PAGE or
    NOT_CACHED (neither in use nor cached).

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, out = jaxkv.touch(state, [3])
    >>> jaxkv.Status(int(out.code[0])).name
    'NOT_CACHED'
  """
  names = _names(state, pages, mask)
  if names.size == 0:
    return state, Outcome(code=pages)
  known = (indexing.take(state.pool.ref_count, names) > 0) | (
    page_pool.is_cached(state.pool, names)
  )
  code = _first_code(state, names, (~known, Status.NOT_CACHED))
  pool = _hold(state.pool, names, code == Status.OK)
  return _finished(state, pool, code, pages)


@verb
def pin(
  state: CacheState,
  tokens: Array,
  lengths: Array,
  *,
  salts: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Pinned]:
  """Holds the cached prefixes of sequences against eviction.

  `match` and `touch` in one. Pin a system prompt that must stay after the first
  sequence with it was committed.

  Args:
    state: the cache.
    tokens: int32[R, T], padded at the end.
    lengths: int32[R], 1 .. T; at most `length - 1` tokens are held.
    salts: uint32[R, 4], see `salt`; None for no salt.
    mask: bool[R], the rows that count; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_LENGTH or NOT_CACHED (no page of the
    sequence is cached). `unpin(state, out.pages)` lets go.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, [3])
    >>> state, _ = jaxkv.commit(state, [[7, 8, 9]], [3])
    >>> state, out = jaxkv.pin(state, [[7, 8, 9]], [3])
    >>> out.pages.tolist(), out.num_cached_tokens.tolist()
    ([[[1]]], [2])
  """
  config = state.config
  asked = mask_or_all(mask, tokens)
  bad = (lengths < 1) | (lengths > tokens.shape[1])
  found = find_prefix(state, tokens, lengths, asked & ~bad, salts)
  code = first_code(
    (~asked, Status.SKIPPED),
    (bad, Status.BAD_LENGTH),
    (found.num_cached_tokens == 0, Status.NOT_CACHED),
  )
  pages = found.attached_pages(config, tokens.shape[1] // config.page_size)
  names = pages.reshape(-1)
  pool = _hold(state.pool, names, names < config.no_page)
  out = Pinned(
    code=code, num_cached_tokens=found.num_cached_tokens, pages=pages
  )
  return dataclasses.replace(state, pool=pool), out


@verb
def unpin(
  state: CacheState, pages: Array, *, mask: Array | None = None
) -> tuple[CacheState, Outcome]:
  """Gives back one pin on every page named.

  Along the last axis the last page goes first, as in `free`, so a prefix
  outlives its tail; the other axes go in order.

  Args:
    state: the cache.
    pages: int32[...], such as `Pinned.pages`; repeats count. NO_PAGE is passed
      over.
    mask: bool[...], the pages that count; None for all.

  Returns:
    The cache, and per page OK, SKIPPED (masked out, or NO_PAGE), BAD_PAGE or
    NOT_PINNED.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, out = jaxkv.unpin(state, [3])
    >>> jaxkv.Status(int(out.code[0])).name
    'NOT_PINNED'
  """
  names = _names(state, pages, mask)
  if names.size == 0:
    return state, Outcome(code=pages)
  columns = pages.shape[-1] if pages.ndim else 1
  earlier, later = _repeats(names, columns)
  pins = indexing.take(state.pool.pin_count, names)
  code = _first_code(state, names, (earlier >= pins, Status.NOT_PINNED))
  given = code == Status.OK
  # Of several pins of one page only the last one given back can free it.
  last = given & ((later == 0) | (earlier == pins - 1))
  pool = dataclasses.replace(
    state.pool,
    pin_count=_less(state.pool.pin_count, names, given),
    ref_count=_less(state.pool.ref_count, names, given & ~last),
  )
  # The pins are released as if they were rows of a page table.
  table = jnp.where(last, names, jnp.int32(state.config.no_page))
  table = table.reshape(-1, 1, columns)
  some = jnp.any(given.reshape(-1, columns), axis=1)
  zeros = jnp.zeros(some.shape, jnp.int32)
  ranges = Ranges(
    slot=jnp.arange(some.shape[0], dtype=jnp.int32),
    group=zeros,
    start=zeros,
    stop=jnp.where(some, columns, zeros),
  )
  pool, _ = page_table.shrink(
    pool, table, ranges, replacement=state.config.no_page
  )
  return _finished(state, pool, code, pages)


@verb
def evict(
  state: CacheState, pages: Array, *, mask: Array | None = None
) -> tuple[CacheState, Outcome]:
  """Drops pages from the prefix index: they can no longer be hit.

  References stay, and a free page keeps its position in the queue.

  Args:
    state: the cache.
    pages: int32[...], cached pages. NO_PAGE is passed over.
    mask: bool[...], the pages that count; None for all.

  Returns:
    The cache, and per page OK, SKIPPED (masked out, or NO_PAGE), BAD_PAGE or
    NOT_CACHED (also for a page named twice).

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, [2])
    >>> state, _ = jaxkv.commit(state, [[7, 8]], [2])
    >>> state, out = jaxkv.evict(state, [1])
    >>> out.ok.tolist(), jaxkv.cached_pages(state)
    ([True], [])
  """
  names = _names(state, pages, mask)
  if names.size == 0:
    return state, Outcome(code=pages)
  again = indexing.num_earlier(names) > 0
  missing = ~page_pool.is_cached(state.pool, names) | again
  code = _first_code(state, names, (missing, Status.NOT_CACHED))
  # The count of free pages depends on every earlier read of the index.
  place = loops.read_before(state.pool.queue.num_free, names)
  pool, _ = page_pool.unpublish(state.pool, place, code == Status.OK)
  return _finished(state, pool, code, pages)


def _names(state: CacheState, pages: Array, mask: Array | None) -> Array:
  """int32[X]: the pages in one row, NO_PAGE for those masked out."""
  if mask is not None:
    pages = jnp.where(mask, pages, jnp.int32(state.config.no_page))
  return pages.reshape(-1)


def _first_code(
  state: CacheState, names: Array, last: tuple[Array, Status]
) -> Array:
  no_page = state.config.no_page
  return first_code(
    (names == no_page, Status.SKIPPED),
    ((names < 1) | (names > no_page), Status.BAD_PAGE),
    last,
  )


def _repeats(names: Array, columns: int) -> tuple[Array, Array]:
  """int32[X] each: equal names released earlier and later than each one.

  Rows of so many columns are released in order, each from its end.
  """

  def turned(values: Array) -> Array:
    return values.reshape(-1, columns)[:, ::-1].reshape(-1)

  released = turned(names)
  later = indexing.num_earlier(released[::-1])[::-1]
  return turned(indexing.num_earlier(released)), turned(later)


def _hold(pool: PoolState, names: Array, valid: Array) -> PoolState:
  place = indexing.where_valid(valid, names)
  pool = dataclasses.replace(
    pool, pin_count=indexing.add(pool.pin_count, place, values=1)
  )
  return page_pool.hold(pool, names, valid)


def _less(counts: Array, names: Array, valid: Array) -> Array:
  """int32[N]: the counts, one less for every valid name."""
  return indexing.add(counts, indexing.where_valid(valid, names), values=-1)


def _finished(
  state: CacheState, pool: PoolState, code: Array, pages: Array
) -> tuple[CacheState, Outcome]:
  state = dataclasses.replace(state, pool=pool)
  return state, Outcome(code=code.reshape(pages.shape))
