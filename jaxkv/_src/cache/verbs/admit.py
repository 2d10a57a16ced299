"""match and admit: sequences enter, with whatever of them is cached."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache import masked
from jaxkv._src.cache.checks import check_array
from jaxkv._src.cache.checks import check_sequences
from jaxkv._src.cache.checks import mask_or_all
from jaxkv._src.cache.duplicates import named_before
from jaxkv._src.cache.groups import recurrent
from jaxkv._src.cache.groups.sizes import encoder_or_none
from jaxkv._src.cache.groups.sizes import overfull
from jaxkv._src.cache.groups.sizes import pages_for
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import reserve as grants
from jaxkv._src.cache.pool.page_pool import PagePool
from jaxkv._src.cache.prefix import longest_prefix
from jaxkv._src.cache.prefix.longest_prefix import Prefix
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import SlotHashes
from jaxkv._src.cache.state import counted
from jaxkv._src.cache.state import in_range
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import with_sequences
from jaxkv._src.cache.status import Code
from jaxkv._src.cache.status import first_code
from jaxkv._src.cache.status import is_failure
from jaxkv._src.cache.status import sticky
from jaxkv._src.cache.verb import verb


class Matched(NamedTuple):
  """What `match` found; P = T // S.

  Attributes:
    num_cached: int32[R], tokens of the longest cached prefix.
    pages: int32[G, R, P], its pages; NO_PAGE behind it, and before it where a
      window or a chunk needs none.
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
  one must be computed to give logits. All groups must be able to go on from the
  prefix: a sliding window needs only the pages of its last window. Changes
  nothing and counts nothing.

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
  found = longest_prefix.find(state, tokens, lengths, salts, everyone)
  if found is None:
    pages = jnp.full(
      (config.num_groups, rows, columns), config.no_page, jnp.int32
    )
    return Matched(jnp.zeros((rows,), jnp.int32), pages)
  return Matched(found.num_cached, longest_prefix.attached(config, found))


@verb
def admit(
  state: CacheState,
  slots: Array,
  tokens: Array,
  lengths: Array,
  salts: Array | None = None,
  mask: Array | None = None,
  room: Array | None = None,
  keep_free: Array | None = None,
  num_encoder_tokens: Array | None = None,
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
    room: int32[R], at least 1: tokens behind the cached prefix that get pages
      now, where a prompt is computed in chunks and `allocate` makes room for
      the later ones; None for all.
    keep_free: int32[R], not negative: pages that must still be free when the
      sequence has its own, for those that run already (a watermark), for the
      rest of a prompt that begins with less room, or for anybody else; None
      for none.
    num_encoder_tokens: int32[R], tokens of the encoder, for groups of
      `CrossAttention`; None for none.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT, SLOT_IN_USE (also for a slot
    named twice), BAD_LENGTH (of length, room, keep_free or the encoder's
    tokens), SLOT_FULL or OUT_OF_PAGES.

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
  mask = mask_or_all(mask, tokens.shape[0], "sequence")
  room, keep_free = _checked(slots, lengths, room, keep_free)
  encoder = encoder_or_none(config, num_encoder_tokens, slots.shape)
  bad = _bad_length(tokens, lengths, room, keep_free, encoder)
  code = _static_code(state, slots, bad, jnp.maximum(lengths, encoder), mask)
  found = longest_prefix.find(state, tokens, lengths, salts, code == Code.OK)
  num_cached = lengths & 0 if found is None else found.num_cached
  # The smaller of the two sums, without computing one that may not fit.
  begun = num_cached + jnp.minimum(room, lengths - num_cached)
  begun, encoder = (jnp.where(code == Code.OK, n, 0) for n in (begun, encoder))
  total = pages_for(config, begun, encoder)
  full = (code == Code.OK) & overfull(config, total)
  code = jnp.where(full, jnp.int32(Code.SLOT_FULL), code)
  hits = total & 0 if found is None else found.stop
  fresh = recurrent.first_fresh(config, hits, total, jnp.ones_like(full))
  need = jnp.sum(jnp.maximum(total - fresh, 0), axis=1, dtype=jnp.int32)
  granted = _grant(state, found, need, code == Code.OK, keep_free)
  code = jnp.where(
    (code == Code.OK) & ~granted, jnp.int32(Code.OUT_OF_PAGES), code
  )
  hits, total = (
    jnp.where(granted[:, None], columns, 0) for columns in (hits, total)
  )
  place = masked.where_valid(granted, slots)
  state = _attached(state, slots, found, granted)
  first = hits if found is None else found.first
  pool, table, evicted = _grown(state, place, hits, total)
  num_cached = jnp.where(granted, num_cached, 0)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=state.num_pages.at[:, place].set(total.T, mode="drop"),
    first_page=state.first_page.at[:, place].set(first.T, mode="drop"),
    length=masked.put(state.length, place, values=num_cached),
    hashes=_started(state, place, lengths, found),
    pool=pool,
    stats=counted(
      state.stats,
      queries=jnp.where(granted, lengths, 0),
      hits=num_cached,
      popped=jnp.where(granted, need, 0),
      evicted=evicted,
      failed=is_failure(code),
    ),
    error=sticky(state.error, code),
  )
  return state, Admitted(code, num_cached)


def _bad_length(
  tokens: Array,
  lengths: Array,
  room: Array,
  keep_free: Array,
  encoder: Array,
) -> Array:
  """bool[R]: rows of which a number is out of its range."""
  bad = (jnp.minimum(lengths, room) < 1) | (lengths > tokens.shape[1])
  return bad | (jnp.minimum(keep_free, encoder) < 0)


def _checked(
  slots: Array, lengths: Array, room: Array | None, keep_free: Array | None
) -> tuple[Array, Array]:
  """Room and pages to keep, int32[R] both, as given or not."""
  check_array("slots", slots, lengths.shape, jnp.int32)
  room = lengths if room is None else room
  check_array("room", room, lengths.shape, jnp.int32)
  keep_free = jnp.zeros_like(lengths) if keep_free is None else keep_free
  check_array("keep_free", keep_free, lengths.shape, jnp.int32)
  return room, keep_free


def _static_code(
  state: CacheState,
  slots: Array,
  bad_length: Array,
  longest: Array,
  mask: Array,
) -> Array:
  """Codes of the rows that can be refused without looking at the pool."""
  code = first_code(
    (~mask, Code.SKIPPED),
    (~in_range(state, slots), Code.BAD_SLOT),
    (~is_empty(state, slots), Code.SLOT_IN_USE),
    (bad_length, Code.BAD_LENGTH),
    (longest > state.config.slot_tokens, Code.SLOT_FULL),
  )
  taken = mask & named_before(slots, code == Code.OK)
  return jnp.where(taken, jnp.int32(Code.SLOT_IN_USE), code)


def _grant(
  state: CacheState,
  found: Prefix | None,
  need: Array,
  asked: Array,
  keep: Array,
) -> Array:
  """bool[R]: the rows served, one after the other.

  A row costs the pages it pops and those of its hits that stand in the free
  queue, unless an earlier row that is served takes them out of it already.
  """
  available = state.pool.queue.num_free
  if found is None or found.pages.shape[-1] == 0:
    return grants.in_order(need, asked, available, keep)
  hit = longest_prefix.inside(found) & asked[None, :, None]
  free = hit & page_pool.is_free(state.pool, found.pages)
  upper = need + jnp.sum(free, axis=(0, 2), dtype=jnp.int32)

  def one_by_one() -> Array:
    def serve(carry, row):
      granted, left = carry
      # A page is the same column of every sequence that hits it.
      same = hit & (found.pages == found.pages[:, row][:, None])
      touched = jnp.any(same & granted[None, :, None], axis=1)
      cost = need[row] + jnp.sum(free[:, row] & ~touched, dtype=jnp.int32)
      ok = asked[row] & (cost <= left - keep[row])
      return (granted.at[row].set(ok), left - jnp.where(ok, cost, 0)), None

    rows = jnp.arange(need.shape[0], dtype=jnp.int32)
    (granted, _), _ = lax.scan(serve, (asked & False, available), rows)
    return granted

  most = jnp.max(jnp.where(asked, keep, 0))
  total = jnp.sum(jnp.where(asked, upper, 0), dtype=jnp.int32)
  all_fit = total <= available - most
  return lax.cond(all_fit, lambda: asked, one_by_one)


def _attached(
  state: CacheState, slots: Array, found: Prefix | None, granted: Array
) -> CacheState:
  """Touches the hits and writes them into the page table."""
  if found is None or found.pages.shape[-1] == 0:
    return state
  first, stop = (
    jnp.where(granted[:, None], columns, 0)
    for columns in (found.first, found.stop)
  )
  pool, table = page_table.attach(
    state.pool, state.page_table, slots, first, stop, found.pages
  )
  if state.config.recycles:
    table = page_table.fill_before(table, slots, first, 0)
  return dataclasses.replace(state, pool=pool, page_table=table)


def _grown(
  state: CacheState, place: Array, hits: Array, total: Array
) -> tuple[PagePool, Array, Array]:
  """Pages behind the hits; the pool, the table, and how many were cached."""
  config, begins = state.config, jnp.ones(place.shape, bool)
  fresh = recurrent.first_fresh(config, hits, total, begins)
  table = recurrent.spread(config, state.page_table, place, hits, total, begins)
  rows = page_table.rows_of(place, fresh, total)
  return page_table.grow(state.pool, table, rows)


def _started(
  state: CacheState, place: Array, lengths: Array, found: Prefix | None
) -> SlotHashes | None:
  """The hashes with admitted slots at the end of their cached prefix."""
  if state.hashes is None or found is None:
    return None
  return with_sequences(
    state.hashes,
    place,
    root=found.root,
    chain=found.chain,
    prompt=lengths,
    junction=found.junction,
  )
