"""touch, pin, unpin, evict: hold, release or unpublish pages."""

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
from jaxkv._src.cache.steps.longest_hit import find_prefix
from jaxkv._src.cache.steps.reserve import grant
from jaxkv._src.cache.steps.reserve import hold_hits
from jaxkv._src.cache.steps.reserve import reservation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned(Outcome):
  """The result of `pin`; a row is OK if its prefix is pinned. P is T // S.

  Attributes:
    code: a `Status` for each sequence.  # int32[R]
    num_cached_tokens: tokens of the pinned prefix.  # int32[R]
    pages: the pinned page of each column; NO_PAGE past the end of the prefix,
      and in columns that a group does not need. Pass this array to `unpin`.
      # int32[R, G, P]
  """

  num_cached_tokens: Array
  pages: Array


@verb
def touch(
  state: CacheState, pages: Array, *, mask: Array | None = None
) -> tuple[CacheState, Outcome]:
  """Adds one reference (a pin) to each given page.

  A free page that is cached leaves the free queue, so it cannot be evicted.
  `unpin` removes the reference. To pin offloaded pages, use `pin`.

  Args:
    state: the cache.
    pages: int32[...], pages in use or cached; a repeated page gets one pin for
      each occurrence. NO_PAGE is ignored.
    mask: bool[...], the pages to process; None for all.

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
  flat_pages = _flatten(state, pages, mask)
  if flat_pages.size == 0:
    return state, Outcome(code=pages)
  is_held = (indexing.take(state.pool.ref_count, flat_pages) > 0) | (
    page_pool.is_cached(state.pool, flat_pages)
  )
  code = _first_code(state, flat_pages, (~is_held, Status.NOT_CACHED))
  pool = _hold(state.pool, flat_pages, code == Status.OK)
  return _result(state, pool, code, pages)


@verb
def pin(
  state: CacheState,
  tokens: Array,
  lengths: Array,
  *,
  salts: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Pinned]:
  """Pins the cached prefixes of sequences, so that they cannot be evicted.

  Combines `match` and `touch`. Hits in offload memory return to the device. To
  keep a system prompt cached, commit a sequence that begins with this prompt,
  then pin the prompt.

  Args:
    state: the cache.
    tokens: int32[R, T], padded at the end.
    lengths: int32[R], 1 .. T. As in `match`, at most `length - 1` tokens are
      pinned. To pin the last page of a prompt of whole pages, append a token.
    salts: uint32[R, 4], see `salt`; None for no salt.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_LENGTH, NOT_CACHED (no prefix
    of at most `length - 1` tokens is cached) or OUT_OF_PAGES (too few pages are
    free for hits in offload memory). `unpin(state, out.pages)` releases the
    prefix.

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
  prefix = find_prefix(state, tokens, lengths, asked & ~bad, salts)
  code = first_code(
    (~asked, Status.SKIPPED),
    (bad, Status.BAD_LENGTH),
    (prefix.num_cached_tokens == 0, Status.NOT_CACHED),
  )
  pages = prefix.attached_pages(config, tokens.shape[1] // config.page_size)
  num_cached_tokens = prefix.num_cached_tokens
  if state.pool.offload is None:
    flat_pages = pages.reshape(-1)
    pool = _hold(state.pool, flat_pages, flat_pages < config.no_page)
  else:
    plan = reservation(
      state,
      hit=prefix.stop,
      first=prefix.first,
      stop=prefix.stop,
      begins=code == Status.OK,
    )
    code = grant(state, plan, code, hits=prefix.pages)
    is_served = (code == Status.OK)[:, None, None]
    state, pages = hold_hits(
      state, pages, is_served & (pages != config.no_page)
    )
    pages = jnp.where(is_served, pages, config.no_page)
    num_cached_tokens = jnp.where(code == Status.OK, num_cached_tokens, 0)
    pin_count = indexing.add(state.pool.pin_count, pages.reshape(-1), values=1)
    pool = dataclasses.replace(state.pool, pin_count=pin_count)
  out = Pinned(code=code, num_cached_tokens=num_cached_tokens, pages=pages)
  return dataclasses.replace(state, pool=pool), out


@verb
def unpin(
  state: CacheState, pages: Array, *, mask: Array | None = None
) -> tuple[CacheState, Outcome]:
  """Removes one pin from each given page.

  The pages along the last axis are released in reverse order, as in `free`, so
  that the end of a prefix is evicted before its start. The other axes are
  processed in ascending order.

  Args:
    state: the cache.
    pages: int32[...], such as `Pinned.pages`; a repeated page loses one pin for
      each occurrence. NO_PAGE is ignored.
    mask: bool[...], the pages to process; None for all.

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
  flat_pages = _flatten(state, pages, mask)
  if flat_pages.size == 0:
    return state, Outcome(code=pages)
  columns = pages.shape[-1] if pages.ndim else 1
  earlier, later = _repeats(flat_pages, columns)
  pins = indexing.take(state.pool.pin_count, flat_pages)
  code = _first_code(state, flat_pages, (earlier >= pins, Status.NOT_PINNED))
  is_served = code == Status.OK
  # If a call removes several pins of a page, only the last removal can free the
  # page. `shrink` below drops the reference of this pin, so that pages enter
  # the free queue in release order. The other references are dropped here.
  is_last = is_served & ((later == 0) | (earlier == pins - 1))
  pool = dataclasses.replace(
    state.pool,
    pin_count=_decrement(state.pool.pin_count, flat_pages, is_served),
    ref_count=_decrement(
      state.pool.ref_count, flat_pages, is_served & ~is_last
    ),
  )
  # `shrink` releases the pins as if they were rows of a page table.
  table = jnp.where(is_last, flat_pages, jnp.int32(state.config.no_page))
  table = table.reshape(-1, 1, columns)
  has_pins = jnp.any(is_served.reshape(-1, columns), axis=1)
  zeros = jnp.zeros(has_pins.shape, jnp.int32)
  ranges = Ranges(
    slot=jnp.arange(has_pins.shape[0], dtype=jnp.int32),
    group=zeros,
    start=zeros,
    stop=jnp.where(has_pins, columns, zeros),
  )
  pool, _ = page_table.shrink(
    pool, table, ranges, replacement=state.config.no_page
  )
  return _result(state, pool, code, pages)


@verb
def evict(
  state: CacheState, pages: Array, *, mask: Array | None = None
) -> tuple[CacheState, Outcome]:
  """Removes pages from the prefix index, so that no lookup finds them.

  The references to the pages stay, and free pages keep their queue positions.

  Args:
    state: the cache.
    pages: int32[...], cached pages on the device or in offload memory, with the
      numbers of `Matched.pages`. NO_PAGE is ignored.
    mask: bool[...], the pages to process; None for all.

  Returns:
    The cache, and per page OK, SKIPPED (masked out, or NO_PAGE), BAD_PAGE or
    NOT_CACHED (not cached, or a repeat of an earlier page).

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
  flat_pages = _flatten(state, pages, mask)
  if flat_pages.size == 0:
    return state, Outcome(code=pages)
  is_repeated = indexing.num_earlier(flat_pages) > 0
  is_missing = ~page_pool.is_cached(state.pool, flat_pages) | is_repeated
  last_page = max(state.config.num_numbers - 1, state.config.no_page)
  code = _first_code(
    state, flat_pages, (is_missing, Status.NOT_CACHED), last_page
  )
  # Earlier verbs of the same program read the index, and `num_free` depends on
  # these reads. This dependency on `num_free` places the write after the reads,
  # so XLA updates the index in place and does not copy it.
  evicted_pages = loops.read_before(state.pool.queue.num_free[0], flat_pages)
  pool, _ = page_pool.unpublish(state.pool, evicted_pages, code == Status.OK)
  return _result(state, pool, code, pages)


def _flatten(state: CacheState, pages: Array, mask: Array | None) -> Array:
  """Returns int32[X]: the flattened pages, NO_PAGE if masked out."""
  if mask is not None:
    pages = jnp.where(mask, pages, jnp.int32(state.config.no_page))
  return pages.reshape(-1)


def _first_code(
  state: CacheState,
  flat_pages: Array,
  case: tuple[Array, Status],
  last_page: int | None = None,
) -> Array:
  config = state.config
  no_page = config.no_page
  is_page = config.numbers.are_given(flat_pages)
  if last_page is not None:
    is_page |= (flat_pages > no_page) & (flat_pages <= last_page)
  return first_code(
    (flat_pages == no_page, Status.SKIPPED),
    (~is_page, Status.BAD_PAGE),
    case,
  )


def _repeats(flat_pages: Array, columns: int) -> tuple[Array, Array]:
  """Counts the earlier and the later releases of each page, int32[X] each."""
  # Rows of `columns` pages are released in order, and each row from its end.

  def reverse_rows(values: Array) -> Array:
    return values.reshape(-1, columns)[:, ::-1].reshape(-1)

  released = reverse_rows(flat_pages)
  later = indexing.num_earlier(released[::-1])[::-1]
  return reverse_rows(indexing.num_earlier(released)), reverse_rows(later)


def _hold(pool: PoolState, flat_pages: Array, valid: Array) -> PoolState:
  held_pages = indexing.where_valid(valid, flat_pages)
  pool = dataclasses.replace(
    pool, pin_count=indexing.add(pool.pin_count, held_pages, values=1)
  )
  return page_pool.hold(pool, flat_pages, valid)


def _decrement(counts: Array, flat_pages: Array, valid: Array) -> Array:
  """Returns int32[N]: the counts, reduced by one for each valid page."""
  return indexing.add(
    counts, indexing.where_valid(valid, flat_pages), values=-1
  )


def _result(
  state: CacheState, pool: PoolState, code: Array, pages: Array
) -> tuple[CacheState, Outcome]:
  state = dataclasses.replace(state, pool=pool)
  return state, Outcome(code=code.reshape(pages.shape))
