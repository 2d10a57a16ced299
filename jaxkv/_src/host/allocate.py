"""Admits requests, and allocates all pages that their tokens need, or none.

The steps are in vLLM's order: free the pages outside windows, compare the need
with the free pages, attach the hit, pop new pages, publish full pages.
"""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from jaxkv._src.host import prefix_lookup
from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.demand import Demand
from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.prefix_lookup import HashedTokens
from jaxkv._src.host.publish import publish
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState

Hits = Sequence[list[int]]
"""The pages of a hit by group, from column 0 on. 0 is the null page."""


class _Growth(NamedTuple):
  """The growth of a table: first <= hit <= external <= fresh <= stop."""

  group: LayerGroup
  first: int  # one past the leading null columns of a hit; else 0
  hit: int  # one past the hit; for a running request, past the old table
  external: int  # one past the new pages for external tokens
  fresh: int  # the first column of the other new pages
  stop: int  # one past the last column of the new table
  moved: int  # the number of scratch pages that move to just before `fresh`

  @property
  def num_fresh(self) -> int:
    """The number of pages to pop."""
    return self.external - self.hit + self.stop - self.fresh


Plan = list[_Growth]


def admit(
  state: HostState,
  request: Any,
  fields: RequestFields,
  hit: CachePages,
  num_found: int,
  demand: Demand,
) -> CachePages | None:
  """Gives a request a slot, the pages of its hit, and new pages.

  The pages of `hit` hold the first `num_found` tokens of the request.

  Returns:
    The new pages. None, with nothing changed, if the request has to wait.

  Raises:
    ValueError: the pages of the hit do not hold the request's tokens, or a
      token is not a 32-bit integer.
    RuntimeError: `max_requests` requests are admitted already.
  """
  config = state.config
  if not state.vacant:
    raise RuntimeError(
      f"`max_requests` must be more than {config.num_slots} to admit another "
      "request; free a request first, or make the CacheManager with a larger "
      "number."
    )
  hashed = None
  if config.prefix_caching:
    hashed = hit.lookup
    if hashed is None or not hashed.serves(
      fields, demand.publish, state.secret
    ):
      hashed = prefix_lookup.hash_tokens(state, fields, demand.publish)
  if not prefix_lookup.holds_tokens(
    state, demand.hits, hashed, demand.num_computed
  ):
    raise ValueError(
      "`new_computed_pages` must hold the tokens that "
      f"{fields.request_id!r} begins with, got {hit}; look up the hit again."
    )
  # Added to `state.held` only after the allocation, which can fail.
  held = HeldSequence(
    fields.request_id,
    state.vacant[-1],
    tables=[[] for _ in state.groups],
    skipped=[0] * len(state.groups),
    request=request,
    prompt_length=fields.num_prompt_tokens,
    boundary=fields.shared_prefix_boundary or hit.shared_prefix_boundary,
  )
  pages = allocate(state, held, demand, demand.hits, hashed)
  if pages is None:
    return None
  state.undo_log.replace(state, vacant=state.vacant[:-1])
  state.undo_log.save_key(state.held, fields.request_id)
  state.held[fields.request_id] = held
  state.pool.count("queried_tokens", fields.num_tokens)
  state.pool.count("hit_tokens", num_found)
  if config.prefix_caching and not fields.skips_lookup:
    is_preempted = fields.status == "preempted"
    counted = state.statistics.counting(
      fields.num_tokens, num_found, is_preempted=is_preempted
    )
    state.undo_log.replace(state, statistics=counted)
  return pages


def allocate(
  state: HostState,
  held: HeldSequence,
  demand: Demand,
  hits: Hits | None = None,
  hashed: HashedTokens | None = None,
) -> CachePages | None:
  """Allocates and publishes pages; returns None if the request has to wait.

  For a new request, `hits` has its hit's pages, and `hashed` its hashed tokens
  (None without prefix caching). For a running request, both are None.
  """
  plan = _plan(state, held, demand, hits)
  if demand.whole and not _whole_fits(state, held, demand, plan, hits):
    return None
  # As in vLLM, pages outside windows are freed even if too few pages are free
  # afterwards. The plan stays valid, because the tables keep their lengths.
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
  """Pops a running request's pages; returns the plan, or None if it waits.

  The plan is empty if all tokens fit the pages that the request has.
  """
  if demand.room <= held.room:
    return []
  plan = _plan(state, held, demand, None)
  return plan if _apply(state, held, demand, plan, None) else None


def _apply(
  state: HostState,
  held: HeldSequence,
  demand: Demand,
  plan: Plan,
  hits: Hits | None,
) -> bool:
  """Attaches the hit and pops new pages; False if the request has to wait."""
  pool = state.pool
  # For few groups, a list takes less time than a generator.
  need = sum([growth.num_fresh for growth in plan])
  if hits is not None:
    need += _num_free(state, plan, hits)
  if need > pool.num_free - demand.keep_free - demand.reserved:
    return False
  if hits is not None:
    # The model writes the state in this step, so the request must wait.
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
    _pop(state, held, plan)
  return True


def drop_behind(state: HostState, held: HeldSequence, tokens: int) -> None:
  """Frees the pages to which no token after the first `tokens` attends."""
  if not held.tables[state.options.first_self_group]:
    return
  for group in state.skipping:
    group_id = group.number
    table = held.tables[group_id]
    # Columns before `start` are null already. If `tokens` is smaller than in an
    # earlier call, `stop` can be less than `start`.
    start = held.skipped[group_id]
    stop = min(group.skipped_pages(tokens), len(table))
    if group.keeps_last_page and held.length >= group.size:
      stop = min(stop, held.length // group.size - 1)
    if stop <= start:
      continue
    pages = table[start:stop]
    state.undo_log.save_items(table, range(start, stop))
    state.undo_log.save_items(held.skipped, [group_id])
    table[start:stop] = [0] * (stop - start)
    held.skipped[group_id] = stop
    # The last page is freed first, so that it is evicted before its prefix.
    state.pool.release(reversed(pages))


def num_needed_pages(
  state: HostState,
  columns: Sequence[int],
  tokens: tuple[int, int, int],
  *,
  is_new: bool,
  capped: bool,
) -> int:
  """Computes `CacheManager.num_needed_pages` from the columns of each group.

  `tokens` are the arguments of `LayerGroup.columns_for`. `is_new` is True if
  the request has no page yet, except for encoder tokens.
  """
  needed = 0
  for group, num_held in zip(state.groups, columns, strict=True):
    required = limit = group.columns_for(*tokens)
    if group.holds_states:
      # The columns before the running state hold the null page.
      limit = 1 + (group.scratch if is_new else 0)
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
  """True if enough pages are free for all `demand.whole` tokens of a sequence.

  As in vLLM, a group needs a page for each of its first `most_pages` columns,
  except those that it holds, hits or skips. A recurrent group needs at most one
  page, and for a new request also the scratch pages.
  """
  is_new = not held.tables[state.options.first_self_group]
  columns = [growth.hit for growth in plan]
  for group in state.groups if is_new else ():
    num_hits = len(hits[group.number]) if hits is not None else 0
    if group.holds_states:
      columns[group.number] = num_hits
    else:
      num_skipped = group.skipped_pages(demand.num_computed)
      columns[group.number] = max(columns[group.number], num_skipped)
  tokens = demand.whole, demand.whole, demand.encoder
  need = num_needed_pages(state, columns, tokens, is_new=is_new, capped=True)
  if hits is not None:
    need += _num_free(state, plan, hits)
  return need + demand.keep_free <= state.pool.num_free


def _plan(
  state: HostState, held: HeldSequence, demand: Demand, hits: Hits | None
) -> Plan:
  """Plans the growth of a request's tables."""
  is_new = not held.tables[state.options.first_self_group]
  attaches = hits is not None and (any(hits) or demand.external > 0)
  plan = []
  for group in state.groups:
    first = 0
    external = hit = len(held.tables[group.number])
    if hits is not None and attaches:
      # Columns outside a window are null, even after the end of the hit.
      skipped = group.skipped_tokens(demand.num_computed)
      first = skipped // group.size
      external = hit = max(first, len(hits[group.number]))
      is_loaded = demand.external > 0 and demand.num_computed > skipped
      if is_loaded and not group.holds_encoder:
        external = max(hit, -(-demand.num_computed // group.size))
    stop = group.columns_for(demand.room, demand.tokens, demand.encoder)
    stop = max(stop, external)
    fresh, moved = group.first_fresh(external, stop, is_new=is_new)
    plan.append(_Growth(group, first, hit, external, fresh, stop, moved))
  return plan


def _pop(state: HostState, held: HeldSequence, plan: Plan) -> None:
  """Pops every group's pages for external tokens, then all other new pages."""
  pool = state.pool
  # Page numbers depend on this order, which is vLLM's.
  for growth in plan:
    table = held.tables[growth.group.number]
    state.undo_log.save_length(table)
    table += pool.pop(growth.external - growth.hit)
  for growth in plan:
    table = held.tables[growth.group.number]
    # Only recurrent groups have null pages between other pages.
    if growth.group.holds_states:
      _place_scratch(state, table, growth)
    table += pool.pop(growth.stop - growth.fresh)
  state.undo_log.replace(held, room=room_of(state, held))


def room_of(state: HostState, held: HeldSequence) -> int:
  """Returns the number of tokens that fit the tables of a request."""
  return min(
    group.room(len(held.tables[group.number]))
    for group in state.groups
    if not group.holds_encoder
  )


def _place_scratch(state: HostState, table: list[int], growth: _Growth) -> None:
  """Appends null columns, and moves scratch pages to the last of them."""
  start = growth.fresh - growth.moved
  # The scratch pages are in the last columns of the old table.
  first_scratch = len(table) - growth.group.scratch
  table += [0] * (growth.fresh - len(table))
  moved = range(first_scratch, first_scratch + growth.moved)
  state.undo_log.save_items(table, moved)
  for offset, column in enumerate(moved):
    table[start + offset] = table[column]
    table[column] = 0


def new_pages(state: HostState, held: HeldSequence, plan: Plan) -> CachePages:
  """Returns the pages in a plan's columns from `external` on."""
  if not plan:
    return CachePages(tuple([[] for _ in state.groups]))
  cached = state.pool.is_cached
  pages = [
    table[growth.external :]
    for table, growth in zip(held.tables, plan, strict=True)
  ]
  # `unhashed` omits null pages and the pages that this call has published.
  unhashed = [
    [page for page in column if page and not cached[page]] for column in pages
  ]
  return CachePages(tuple(pages), tuple(unhashed))


def _num_free(state: HostState, plan: Plan, hits: Hits) -> int:
  """Counts the free pages that a hit uses: one per free or offloaded page."""
  # Restoring an offloaded page takes a free page, as attaching a free page
  # does.
  counts = state.pool.ref_count
  num_pages = state.config.total_pages
  return sum(
    1
    for growth, pages in zip(plan, hits, strict=True)
    for page in pages[growth.first : growth.hit]
    if page and (page >= num_pages or not counts[page])
  )


def _is_unwritten(state: HostState, hits: Hits) -> bool:
  """True if a hit ends with a state that was published in this step.

  The model has not written this state yet.
  """
  pool = state.pool
  for group, pages in zip(state.groups, hits, strict=True):
    if group.holds_states and pages and pool.is_cached[pages[-1]]:
      stamps = [pool.stamp[page] for page in pool.equal_pages(pages[-1])]
      if max(stamps) >= state.step_clock:
        return True
  return False
