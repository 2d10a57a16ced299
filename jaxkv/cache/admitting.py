"""match and admit: sequences enter, with whatever of them is cached."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv.cache import grants
from jaxkv.cache import indexing
from jaxkv.cache import page_pool
from jaxkv.cache import page_table
from jaxkv.cache import prefix as prefixes
from jaxkv.cache import ragged
from jaxkv.cache.arguments import check_array
from jaxkv.cache.arguments import check_sequences
from jaxkv.cache.arguments import mask_or_all
from jaxkv.cache.codes import Code
from jaxkv.cache.codes import first_code
from jaxkv.cache.codes import is_failure
from jaxkv.cache.codes import sticky
from jaxkv.cache.duplicates import named_before
from jaxkv.cache.prefix import Prefix
from jaxkv.cache.ragged import Items
from jaxkv.cache.state import CacheState
from jaxkv.cache.state import SlotHashes
from jaxkv.cache.state import counted
from jaxkv.cache.state import in_range
from jaxkv.cache.state import is_empty
from jaxkv.cache.state import pages_for
from jaxkv.cache.verbs import verb


class Matched(NamedTuple):
  """What `match` found; P = T // S.

  Attributes:
    num_cached: int32[R], tokens of the longest cached prefix.
    pages: int32[G, R, P], its pages, then NO_PAGE.
  """

  num_cached: Array
  pages: Array


class Admitted(NamedTuple):
  """What `admit` did.

  Attributes:
    code: int32[R], a `Code` a sequence.
    num_cached: int32[R], tokens whose K/V is there already: prefill starts
      after them.
  """

  code: Array
  num_cached: Array

  @property
  def ok(self) -> Array:
    """bool[R]: whether the sequence is in its slot."""
    return self.code == Code.OK


@verb
def match(
  state: CacheState, tokens: Array, lengths: Array, salts: Array | None = None
) -> Matched:
  """Finds the longest cached prefix of every sequence.

  Only full pages are cached, and at most `length - 1` tokens are found, since
  one must be computed to give logits. A page counts only if every group has
  it. Changes nothing and counts nothing.

  Args:
    state: the cache.
    tokens: int32[R, T], padded at the end.
    lengths: int32[R]; a length outside of 1 .. T finds nothing.
    salts: uint32[R, 4], see `salt`; sequences of different salts share
      nothing. None for no salt.

  Returns:
    Tokens found, and their pages.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> tokens = jnp.asarray([[7, 8, 9, 10]], jnp.int32)
    >>> four = jnp.asarray([4], jnp.int32)
    >>> state, _ = jaxkv.allocate(state, four)
    >>> state, _ = jaxkv.commit(state, tokens, four)
    >>> jaxkv.match(state, tokens, four).num_cached.tolist()
    [2]
  """
  check_sequences(tokens, lengths, salts)
  config = state.config
  rows, columns = tokens.shape[0], tokens.shape[1] // config.page_size
  everyone = jnp.ones((rows,), bool)
  found = prefixes.find(state, tokens, lengths, salts, everyone)
  if found is None:
    pages = jnp.full(
      (config.num_groups, rows, columns), config.no_page, jnp.int32
    )
    return Matched(jnp.zeros((rows,), jnp.int32), pages)
  column = jnp.arange(columns, dtype=jnp.int32)
  inside = column[None] < found.num_pages[:, None]
  pages = jnp.where(inside[None], found.pages, jnp.int32(config.no_page))
  return Matched(found.num_pages * config.page_size, pages)


@verb
def admit(
  state: CacheState,
  slots: Array,
  tokens: Array,
  lengths: Array,
  salts: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Admitted]:
  """Puts sequences into empty slots, on top of what is cached of them.

  The longest cached prefix is attached (its pages are shared, not copied) and
  pages for the rest are allocated. `length` becomes the number of cached
  tokens; the caller computes the K/V of the others and commits them.

  All-or-nothing per sequence, in row order; one that does not fit changes
  nothing, and a later one that needs fewer pages may still be served. The
  batch differs from one call after the other in three ways: all lookups see
  the cache as it was before the call; the hits of all sequences that are
  served are touched before any page is taken, so that none evicts what another
  one hits; and a slot named twice is refused the second time even if the first
  sequence found no pages.

  Args:
    state: the cache.
    slots: int32[R], empty slots.
    tokens: int32[R, T], padded at the end.
    lengths: int32[R], 1 .. T.
    salts: uint32[R, 4], see `salt`; None for no salt.
    mask: bool[R], the rows that count; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT, SLOT_IN_USE (also for a slot
    named twice), BAD_LENGTH, SLOT_FULL or OUT_OF_PAGES.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=2, pages_per_slot=4))
    >>> tokens = jnp.asarray([[7, 8, 9, 10]], jnp.int32)
    >>> four = jnp.asarray([4], jnp.int32)
    >>> one = jnp.asarray([1], jnp.int32)
    >>> state, out = jaxkv.admit(state, one, tokens, four)
    >>> out.ok.tolist(), out.num_cached.tolist(), state.num_pages.tolist()
    ([True], [0], [[0, 2]])
  """
  config = state.config
  check_sequences(tokens, lengths, salts)
  check_array("slots", slots, (tokens.shape[0],), jnp.int32)
  mask = mask_or_all(mask, tokens.shape[0], "sequence")
  code = _static_code(state, slots, tokens, lengths, mask)
  found = prefixes.find(state, tokens, lengths, salts, code == Code.OK)
  hits = jnp.zeros_like(lengths) if found is None else found.num_pages
  total = pages_for(config, jnp.where(code == Code.OK, lengths, 0))
  need = (total - hits) * config.num_groups
  granted = _grant(state, found, need, code == Code.OK)
  code = jnp.where(
    (code == Code.OK) & ~granted, jnp.int32(Code.OUT_OF_PAGES), code
  )
  hits, total = jnp.where(granted, hits, 0), jnp.where(granted, total, 0)
  need = jnp.where(granted, need, 0)
  state = _attached(state, slots, found, hits)
  columns = (slots.shape[0], config.num_groups)
  pool, table, evicted = page_table.grow(
    state.pool,
    state.page_table,
    page_table.rows_of(
      slots,
      jnp.broadcast_to(hits[:, None], columns),
      jnp.broadcast_to(total[:, None], columns),
    ),
  )
  place = indexing.where_valid(granted, slots)
  num_cached = hits * config.page_size
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=state.num_pages.at[:, place].set(total, mode="drop"),
    length=indexing.put(state.length, place, values=num_cached),
    hashes=_started(state, place, found),
    pool=pool,
    stats=counted(
      state.stats,
      queries=jnp.where(granted, lengths, 0),
      hits=num_cached,
      popped=need,
      evicted=evicted,
      failed=is_failure(code),
    ),
    error=sticky(state.error, code),
  )
  return state, Admitted(code, num_cached)


def _static_code(
  state: CacheState, slots: Array, tokens: Array, lengths: Array, mask: Array
) -> Array:
  """Codes of the rows that can be refused without looking at the pool."""
  config = state.config
  too_long = lengths > tokens.shape[1]
  code = first_code(
    (~mask, Code.SKIPPED),
    (~in_range(state, slots), Code.BAD_SLOT),
    (~is_empty(state, slots), Code.SLOT_IN_USE),
    ((lengths < 1) | too_long, Code.BAD_LENGTH),
    (lengths > config.slot_tokens, Code.SLOT_FULL),
  )
  taken = mask & named_before(slots, code == Code.OK)
  return jnp.where(taken, jnp.int32(Code.SLOT_IN_USE), code)


def _grant(
  state: CacheState, found: Prefix | None, need: Array, asked: Array
) -> Array:
  """bool[R]: the rows served, one after the other.

  A row costs the pages it pops and those of its hits that stand in the free
  queue, unless an earlier row that is served takes them out of it already.
  Rows share hits from the left, so that counting columns tells how many.
  """
  available = state.pool.queue.num_free
  if found is None or found.pages.shape[-1] == 0:
    return grants.in_order(need, asked, available)
  columns = jnp.arange(found.pages.shape[-1], dtype=jnp.int32)
  hit = columns[None] < jnp.where(asked, found.num_pages, 0)[:, None]
  free = hit[None] & page_pool.is_free(state.pool, found.pages)
  free = jnp.cumsum(
    jnp.sum(free, axis=0, dtype=jnp.int32), axis=1, dtype=jnp.int32
  )
  free = jnp.pad(free, ((0, 0), (1, 0)))
  upper = need + free[:, -1]

  def one_by_one() -> Array:
    pages = found.pages[0]
    shared = jnp.sum(
      hit[:, None] & hit[None] & (pages[:, None] == pages[None]),
      axis=-1,
      dtype=jnp.int32,
    )

    def serve(carry, row):
      granted, left = carry
      touched = jnp.max(jnp.where(granted, shared[row], 0))
      cost = need[row] + free[row, -1] - free[row, touched]
      ok = asked[row] & (cost <= left)
      return (granted.at[row].set(ok), left - jnp.where(ok, cost, 0)), None

    rows = jnp.arange(need.shape[0], dtype=jnp.int32)
    (granted, _), _ = lax.scan(serve, (asked & False, available), rows)
    return granted

  all_fit = jnp.sum(jnp.where(asked, upper, 0), dtype=jnp.int32) <= available
  return lax.cond(all_fit, lambda: asked, one_by_one)


def _attached(
  state: CacheState, slots: Array, found: Prefix | None, hits: Array
) -> CacheState:
  """Touches the hits and writes them into the page table."""
  if found is None or found.pages.shape[-1] == 0:
    return state
  groups = state.config.num_groups

  def attach(carry, items: Items):
    pool, table = carry
    row, group = items.row // groups, items.row % groups
    offset = indexing.where_valid(items.valid, items.offset)
    pages = indexing.take(found.pages, group, row, offset)
    slot = indexing.take(slots, row, fill=indexing.NOWHERE)
    table = indexing.put(table, group, slot, offset, values=pages)
    return page_pool.hold(pool, pages, items.valid), table

  pool, table = ragged.for_each(
    jnp.repeat(hits, groups), attach, (state.pool, state.page_table)
  )
  return dataclasses.replace(state, pool=pool, page_table=table)


def _started(
  state: CacheState, place: Array, found: Prefix | None
) -> SlotHashes | None:
  """The hashes with admitted slots at the end of their cached prefix."""
  if state.hashes is None or found is None:
    return None
  return dataclasses.replace(
    state.hashes,
    root=indexing.put(state.hashes.root, place, values=found.root),
    chain=indexing.put(state.hashes.chain, place, values=found.chain),
  )
