"""Allocates pages for the tokens of a request: all of them, or none.

The order of the steps is that of vLLM: free the pages behind windows, count the
pages that are needed, attach the hit, pop the others, publish full pages.
"""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.lookup import HashedTokens
from jaxkv._src.host.publish import publish
from jaxkv._src.host.sequences import HeldSequence
from jaxkv._src.host.state import HostState
from jaxkv._src.host.types import CachePages


class Demand(NamedTuple):
  """The sizes of an allocation, all in tokens unless it says otherwise."""

  num_computed: int = 0  # computed before the new ones, here or elsewhere
  external: int = 0  # the part of `behind` whose K/V comes from elsewhere
  room: int = 0  # tokens that need pages, lookahead included
  tokens: int = 0  # the part of `room` that recurrent groups count
  encoder: int = 0  # tokens of the encoder that need pages
  whole: int = 0  # tokens that must fit now, or nothing is done; 0: none
  keep_free: int = 0  # pages that must stay free
  reserved: int = 0  # further pages, which a whole sequence may count on
  publish: int = 0  # tokens that are final
  silent: Sequence[int] = ()  # groups whose new pages need no zeroing


class _Growth(NamedTuple):
  """The columns of a group after an allocation, in ascending order."""

  group: LayerGroup
  first: int  # one past the leading null pages
  hit: int  # one past the pages that are attached or held already
  external: int  # one past the pages for tokens from elsewhere
  fresh: int  # the first column of the other new pages
  stop: int  # one past the last column
  moved: int  # scratch pages that move to the columns before `fresh`

  @property
  def num_fresh(self) -> int:
    """The number of pages to pop."""
    return self.external - self.hit + self.stop - self.fresh


def advance(
  state: HostState, held: HeldSequence, request: Any, demand: Demand
) -> CachePages | None:
  """Allocates for a request that holds pages; None if too few are free."""
  plan = reserve(state, held, demand)
  if plan is None:
    return None
  publish(state, held, request, demand.publish)
  return new_pages(state, held, plan)


def reserve(
  state: HostState, held: HeldSequence, demand: Demand
) -> list[_Growth] | None:
  """Frees pages behind windows, and pops pages; None if too few are free."""
  # A request can hold a slot without pages, if its first call needed none.
  # Its tables then grow as those of a new request.
  begins = not held.tables[state.config.first_self_group]
  if demand.whole and not _whole_fits(state, held, demand, begins):
    return None
  # Pages behind windows are freed even if the allocation then fails, as in
  # vLLM. So the free pages are counted after this step.
  if not begins:
    drop_behind(state, held, demand.num_computed)
  return grow(state, held, demand)


def grow(
  state: HostState, held: HeldSequence, demand: Demand
) -> list[_Growth] | None:
  """Pops the pages of a request that has a slot; None if too few are free."""
  begins = not held.tables[state.config.first_self_group]
  plan, need = [], 0
  for group in state.groups:
    columns = len(held.tables[group.number])
    stop = group.columns_for(demand.room, demand.tokens, demand.encoder)
    if stop > columns:
      fresh, moved = group.first_fresh(columns, stop, begins=begins)
      plan.append(_Growth(group, 0, columns, columns, fresh, stop, moved))
      need += stop - fresh
  if need > state.pool.num_free - demand.keep_free - demand.reserved:
    return None
  if plan:
    _grow(state, held, plan, demand.silent)
  return plan


def advance_quietly(
  state: HostState, held: HeldSequence, num_computed: int, room: int, final: int
) -> bool:
  """Serves a request that needs, frees and fills no page, as most do.

  Args:
    state: the state.
    held: the pages of the request.
    num_computed: tokens computed before the new ones, and not in flight.
    room: tokens that need pages.
    final: tokens that become final.

  Returns:
    False, without a change, if the request must be served by `advance`.
  """
  # The three conditions are those under which `reserve` and `publish` would do
  # nothing but set the length.
  if room > held.room:
    return False
  for group in state.skipping:
    if group.skipped_pages(num_computed) > held.skipped[group.number]:
      return False
  before = held.length
  if final > before:
    size = state.config.page_size
    if final // size > before // size:
      return False
    # `save_attribute` would look the value up again; this is the hottest line.
    state.undo_log.record((setattr, held, "length", before))
    held.length = final
  return True


def begin(
  state: HostState,
  held: HeldSequence,
  request: Any,
  hits: Sequence[list[int]],
  demand: Demand,
  hashed: HashedTokens | None,
) -> CachePages | None:
  """Allocates for a request without pages; None if too few are free.

  Args:
    state: the state.
    held: the new request, whose tables are empty.
    request: the scheduler's object.
    hits: the pages with which it begins, by group.
    demand: the sizes.
    hashed: its tokens up to `demand.publish`; None without prefix caching.
  """
  pool = state.pool
  plan = _plan(state, demand, hits)
  hit_pages = [
    hits[growth.group.number][growth.first : growth.hit] for growth in plan
  ]
  # A hit that no request holds leaves the free queue, so it costs a free page.
  num_free_hits = _num_free(state, hit_pages)
  if demand.whole and not _whole_fits(
    state, held, demand, True, plan, hits, num_free_hits
  ):
    return None
  need = num_free_hits + sum(growth.num_fresh for growth in plan)
  if need > pool.num_free - demand.keep_free - demand.reserved:
    return None
  # Refused for this step only: the scheduler tries the request again.
  if _is_unwritten(state, hits):
    return None
  # All groups attach their hits before any page is popped. Otherwise a new page
  # of one group could evict the hit of another.
  for growth, pages in zip(plan, hit_pages, strict=True):
    held.tables[growth.group.number] = [0] * growth.first + pages
    held.skipped[growth.group.number] = growth.first
  for pages in hit_pages:
    pool.hold(pages)
  _grow(state, held, plan, demand.silent)
  if hashed is not None:
    held.root = hashed.root
  first = [growth.hit for growth in plan]
  publish(state, held, request, demand.publish, hashed, first)
  return new_pages(state, held, plan)


def drop_behind(state: HostState, held: HeldSequence, tokens: int) -> None:
  """Frees the pages that a request does not need after some tokens."""
  for group in state.skipping:
    number, table = group.number, held.tables[group.number]
    # Pages before `start` were freed earlier, also if fewer tokens count now: a
    # window does not move back.
    start = held.skipped[number]
    stop = min(group.skipped_pages(tokens), len(table))
    if group.keeps_last_page and held.length >= group.size:
      stop = min(stop, held.length // group.size - 1)
    if stop <= start:
      continue
    pages = table[start:stop]
    state.undo_log.save_items(table, range(start, stop))
    state.undo_log.save_list(held.skipped)
    table[start:stop] = [0] * (stop - start)
    held.skipped[number] = stop
    # The last page is freed first, so that it is evicted before its prefix.
    state.pool.release(reversed(pages))


def release(state: HostState, held: HeldSequence) -> None:
  """Frees all pages of a request, group by group, the last page first."""
  for table in held.tables:
    # Group by group, as vLLM frees: of the pages without a key, those of the
    # last group are evicted first.
    state.pool.release(reversed(table))
  vacate(state, held)


def vacate(state: HostState, held: HeldSequence) -> None:
  """Makes the slot of a removed request vacant."""
  state.undo_log.save_list(state.vacant)
  state.vacant.append(held.slot)


def num_needed_pages(
  state: HostState,
  held: HeldSequence | None,
  demand: Demand,
  *,
  capped: bool,
) -> int:
  """Counts the pages that a request needs besides those that it holds."""
  needed = 0
  for group in state.groups:
    num_held = len(held.tables[group.number]) if held is not None else 0
    columns = group.columns_for(demand.room, demand.tokens, demand.encoder)
    if group.holds_states:
      # The columns between two states hold the null page.
      limit = 1 + (0 if num_held else group.scratch)
      needed += min(max(columns - num_held, 0), limit)
      continue
    if capped:
      columns = min(columns, group.most_pages)
    needed += max(columns - num_held, 0)
  return needed


def _plan(
  state: HostState, demand: Demand, hits: Sequence[list[int]]
) -> list[_Growth]:
  """Plans the tables of a request that begins with hits."""
  attaches = any(hits) or demand.external > 0
  plan = []
  for group in state.groups:
    first = external = hit = 0
    if attaches:
      # A window needs no page for the tokens behind it, hit or not.
      skipped = group.skipped_tokens(demand.num_computed)
      first = skipped // group.size
      external = hit = max(first, len(hits[group.number]))
      is_loaded = demand.external > 0 and demand.num_computed > skipped
      if is_loaded and not group.holds_encoder:
        external = max(hit, -(-demand.num_computed // group.size))
    stop = group.columns_for(demand.room, demand.tokens, demand.encoder)
    stop = max(stop, external)
    fresh, moved = group.first_fresh(external, stop, begins=True)
    plan.append(_Growth(group, first, hit, external, fresh, stop, moved))
  return plan


def _grow(
  state: HostState,
  held: HeldSequence,
  plan: list[_Growth],
  silent: Sequence[int],
) -> None:
  """Pops the new pages, those for external tokens of all groups first."""
  pool, log = state.pool, state.undo_log
  # vLLM pops the pages for loaded tokens of all groups before any other page,
  # and page numbers depend on this order.
  for growth in plan:
    if growth.external > growth.hit:
      table = held.tables[growth.group.number]
      log.save_length(table)
      table += pool.pop(growth.external - growth.hit)
  for growth in plan:
    if growth.stop > growth.external:
      group, table = growth.group, held.tables[growth.group.number]
      log.save_length(table)
      # Only states have gaps between their columns.
      if group.holds_states:
        _place_scratch(state, table, growth)
      table += pool.pop(growth.stop - growth.fresh)
  log.save_attribute(held, "room")
  held.room = room_of(state, held)
  for growth in plan:
    if growth.group.number in silent:
      table = held.tables[growth.group.number]
      pool.hide_new([page for page in table[growth.hit :] if page])


def room_of(state: HostState, held: HeldSequence) -> int:
  """Returns the number of tokens that fit the tables of a request."""
  return min(
    group.room(len(held.tables[group.number]))
    for group in state.groups
    if not group.holds_encoder
  )


def _place_scratch(state: HostState, table: list[int], growth: _Growth) -> None:
  """Adds null pages, and moves scratch pages behind the running state."""
  held, scratch = len(table), growth.group.scratch
  start = growth.fresh - growth.moved
  table += [0] * (growth.fresh - held)
  moved = range(held - scratch, held - scratch + growth.moved)
  state.undo_log.save_items(table, moved)
  # The old and the new columns may overlap, so the pages move one by one.
  for offset, column in enumerate(moved):
    table[start + offset] = table[column]
    table[column] = 0


def new_pages(
  state: HostState, held: HeldSequence, plan: list[_Growth]
) -> CachePages:
  """Returns the pages of a plan after those of hits and external tokens."""
  cached = state.pool.is_cached
  pages: tuple[list[int], ...] = tuple([] for _ in state.groups)
  # Pages that `publish` cached in this call are left out.
  unhashed: tuple[list[int], ...] = tuple([] for _ in state.groups)
  for growth in plan:
    number = growth.group.number
    pages[number].extend(held.tables[number][growth.external :])
    unhashed[number].extend(page for page in pages[number] if not cached[page])
  return CachePages(pages, unhashed)


def _whole_fits(
  state: HostState,
  held: HeldSequence,
  demand: Demand,
  begins: bool,
  plan: list[_Growth] | None = None,
  hits: Sequence[list[int]] | None = None,
  num_free_hits: int = 0,
) -> bool:
  """True if all tokens of a sequence fit, without those that it gives back."""
  need = num_free_hits + _whole_need(state, held, demand, begins, plan, hits)
  return need + demand.keep_free <= state.pool.num_free


def _whole_need(
  state: HostState,
  held: HeldSequence,
  demand: Demand,
  begins: bool,
  plan: list[_Growth] | None = None,
  hits: Sequence[list[int]] | None = None,
) -> int:
  """Counts the pages that a whole sequence still needs.

  As in vLLM, a sequence counts the most pages that it holds at once, without
  those that a hit or a window covers. A recurrent group counts its running
  state, even if another one arrives for external tokens, and scratch pages.
  """
  need = 0
  for group in state.groups:
    required = group.columns_for(demand.whole, demand.whole, demand.encoder)
    # A window gives pages back while its sequence runs, so a whole sequence
    # never holds more than this at once.
    required = min(required, group.most_pages)
    hit = len(held.tables[group.number])
    if plan is not None:
      hit = plan[group.number].hit
    if group.holds_states:
      num_found = len(hits[group.number]) if hits is not None else hit
      limit = 1 + (group.scratch if begins else 0)
      need += min(max(required - num_found, 0), limit)
      continue
    if begins:
      hit = max(hit, group.skipped_pages(demand.num_computed))
    need += max(required - hit, 0)
  return need


def _num_free(state: HostState, hit_pages: Sequence[list[int]]) -> int:
  counts = state.pool.ref_count
  return sum(
    1 for pages in hit_pages for page in pages if page and not counts[page]
  )


def _is_unwritten(state: HostState, hits: Sequence[list[int]]) -> bool:
  """True if a hit is a state that was published in this step.

  Its request computes the state in the same step, so it is not readable yet.
  """
  pool = state.pool
  for group, pages in zip(state.groups, hits, strict=True):
    if group.holds_states and pages and pages[-1]:
      page = pages[-1]
      if not pool.is_cached[page]:
        continue
      newest = pool.find_all(pool.content[page].digest, group.number)[-1]
      if pool.stamp[newest] >= state.step_clock:
        return True
  return False
