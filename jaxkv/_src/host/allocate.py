"""Allocates pages for the tokens of a request: all of them, or none.

The order of the steps is that of vLLM: free the pages behind windows, count the
pages that are needed, attach the hit, pop the others, publish full pages.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxkv._src.host.arguments import Demand
from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.prefix_lookup import HashedTokens
from jaxkv._src.host.publish import publish
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState
from jaxkv._src.host.types import CachePages

Hits = Sequence[list[int]]
"""The pages with which a new request begins, by group."""


class _Growth(NamedTuple):
  """The columns of a group after an allocation, in ascending order."""

  group: LayerGroup
  first: int  # one past the leading null pages of a new request
  hit: int  # one past the pages that are attached or held already
  external: int  # one past the pages for tokens from elsewhere
  fresh: int  # the first column of the other new pages
  stop: int  # one past the last column
  moved: int  # scratch pages that move to the columns before `fresh`

  @property
  def num_fresh(self) -> int:
    """The number of pages to pop."""
    return self.external - self.hit + self.stop - self.fresh


Plan = list[_Growth]


def allocate(
  state: HostState,
  held: HeldSequence,
  demand: Demand,
  hits: Hits | None = None,
  hashed: HashedTokens | None = None,
) -> CachePages | None:
  """Allocates for a request; None if too few pages are free.

  A new request has empty tables. It begins with the pages `hits`, and its
  tokens up to `demand.publish` are hashed if there is prefix caching.
  """
  plan = _plan(state, held, demand, hits)
  if demand.whole and not _whole_fits(state, held, demand, plan, hits):
    return None
  # Pages behind windows are freed even if the allocation then fails, as in
  # vLLM. So the free pages are counted after this step. The lengths of tables,
  # and so the plan, stay as they are.
  if hits is None:
    drop_behind(state, held, demand.num_computed)
  if not _apply(state, held, demand, plan, hits):
    return None
  first = None
  if hashed is not None:
    held.root = hashed.root
    first = [growth.hit for growth in plan]
  publish(state, held, demand.publish, hashed, first)
  return new_pages(state, held, plan)


def grow(state: HostState, held: HeldSequence, demand: Demand) -> Plan | None:
  """Pops the pages of a running request; None if too few are free."""
  plan = _plan(state, held, demand, None)
  return plan if _apply(state, held, demand, plan, None) else None


def _apply(
  state: HostState,
  held: HeldSequence,
  demand: Demand,
  plan: Plan,
  hits: Hits | None,
) -> bool:
  """Attaches the hit and pops the other pages; False if too few are free."""
  pool = state.pool
  # Lists, because a generator takes longer for so few groups.
  need = sum([growth.num_fresh for growth in plan])
  if hits is not None:
    need += _num_free(state, plan, hits)
  if need > pool.num_free - demand.keep_free - demand.reserved:
    return False
  if hits is not None:
    # Refused for this step only: the scheduler tries the request again.
    if _is_unwritten(state, hits):
      return False
    # All groups attach their hits before any page is popped. Otherwise a new
    # page of one group could evict the hit of another.
    attached = pool.hold_hits(
      [
        pages[growth.first : growth.hit]
        for growth, pages in zip(plan, hits, strict=True)
      ]
    )
    for growth, pages in zip(plan, attached, strict=True):
      held.tables[growth.group.number] = [0] * growth.first + pages
      held.skipped[growth.group.number] = growth.first
  if any([growth.stop > growth.hit for growth in plan]):
    _pop(state, held, plan, demand.silent)
  return True


def drop_behind(state: HostState, held: HeldSequence, tokens: int) -> None:
  """Frees the pages that a request does not need after some tokens."""
  if not held.tables[state.config.first_self_group]:
    return
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
    state.undo_log.save_items(held.skipped, [number])
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
  state.undo_log.save_length(state.vacant)
  state.vacant.append(held.slot)


def num_needed_pages(
  state: HostState,
  columns: Sequence[int],
  tokens: tuple[int, int, int],
  *,
  begins: bool,
  capped: bool,
) -> int:
  """Counts the pages that a request needs besides those that it holds.

  Args:
    state: the state.
    columns: the columns that it holds, by group.
    tokens: the arguments of `LayerGroup.columns_for`.
    begins: True if no column holds its own tokens yet.
    capped: counts for a window the most pages that a request holds at once.
  """
  needed = 0
  for group, num_held in zip(state.groups, columns, strict=True):
    required = limit = group.columns_for(*tokens)
    if group.holds_states:
      # The columns between two states hold the null page.
      limit = 1 + (group.scratch if begins else 0)
    elif capped:
      required = min(required, group.most_pages)
    needed += min(max(required - num_held, 0), limit)
  return needed


def _whole_fits(
  state: HostState,
  held: HeldSequence,
  demand: Demand,
  plan: Plan,
  hits: Hits | None,
) -> bool:
  """True if all tokens of a sequence fit, without those that it gives back.

  As in vLLM, a sequence counts the most pages that it holds at once, without
  those that a hit or a window covers. A recurrent group counts its running
  state, even if another one arrives for external tokens, and scratch pages.
  """
  begins = not held.tables[state.config.first_self_group]
  columns = [growth.hit for growth in plan]
  for group in state.groups if begins else ():
    num_hits = len(hits[group.number]) if hits is not None else 0
    if group.holds_states:
      columns[group.number] = num_hits
    else:
      num_skipped = group.skipped_pages(demand.num_computed)
      columns[group.number] = max(columns[group.number], num_skipped)
  tokens = demand.whole, demand.whole, demand.encoder
  need = num_needed_pages(state, columns, tokens, begins=begins, capped=True)
  if hits is not None:
    need += _num_free(state, plan, hits)
  return need + demand.keep_free <= state.pool.num_free


def _plan(
  state: HostState, held: HeldSequence, demand: Demand, hits: Hits | None
) -> Plan:
  """Plans the tables of a request."""
  begins = not held.tables[state.config.first_self_group]
  attaches = hits is not None and (any(hits) or demand.external > 0)
  plan = []
  for group in state.groups:
    first, hit = 0, len(held.tables[group.number])
    external = hit
    if hits is not None and attaches:
      # A window needs no page for the tokens behind it, hit or not.
      skipped = group.skipped_tokens(demand.num_computed)
      first = skipped // group.size
      external = hit = max(first, len(hits[group.number]))
      is_loaded = demand.external > 0 and demand.num_computed > skipped
      if is_loaded and not group.holds_encoder:
        external = max(hit, -(-demand.num_computed // group.size))
    stop = group.columns_for(demand.room, demand.tokens, demand.encoder)
    stop = max(stop, external)
    fresh, moved = group.first_fresh(external, stop, begins=begins)
    plan.append(_Growth(group, first, hit, external, fresh, stop, moved))
  return plan


def _pop(
  state: HostState, held: HeldSequence, plan: Plan, silent: Sequence[int]
) -> None:
  """Pops the new pages, those for external tokens of all groups first."""
  pool, log = state.pool, state.undo_log
  # vLLM pops the pages for loaded tokens of all groups before any other page,
  # and page numbers depend on this order.
  for growth in plan:
    table = held.tables[growth.group.number]
    log.save_length(table)
    table += pool.pop(growth.external - growth.hit)
  for growth in plan:
    table = held.tables[growth.group.number]
    # Only states have gaps between their columns.
    if growth.group.holds_states:
      _place_scratch(state, table, growth)
    table += pool.pop(growth.stop - growth.fresh)
    if growth.group.number in silent:
      new = [page for page in table[growth.hit :] if page]
      pool.mark_new(new, is_new=False)
  log.replace(held, room=room_of(state, held))


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


def new_pages(state: HostState, held: HeldSequence, plan: Plan) -> CachePages:
  """Returns the pages of a plan after those of hits and external tokens."""
  cached = state.pool.is_cached
  pages = [
    table[growth.external :]
    for table, growth in zip(held.tables, plan, strict=True)
  ]
  # Pages that `publish` cached in this call are left out.
  unhashed = [[page for page in column if not cached[page]] for column in pages]
  return CachePages(tuple(pages), tuple(unhashed))


def _num_free(state: HostState, plan: Plan, hits: Hits) -> int:
  """Counts the pages of a hit that cost a free page: free ones, host pages."""
  counts, num_pages = state.pool.ref_count, state.config.num_pages
  return sum(
    1
    for growth, pages in zip(plan, hits, strict=True)
    for page in pages[growth.first : growth.hit]
    if page and (page >= num_pages or not counts[page])
  )


def _is_unwritten(state: HostState, hits: Hits) -> bool:
  """True if a hit is a state that was published in this step.

  Its request computes the state in the same step, so it is not readable yet.
  """
  pool = state.pool
  for group, pages in zip(state.groups, hits, strict=True):
    if group.holds_states and pages and pool.is_cached[pages[-1]]:
      stamps = [pool.stamp[page] for page in pool.equal_pages(pages[-1])]
      if max(stamps) >= state.step_clock:
        return True
  return False
