"""Pages of all requests in one group (SEMANTICS 4.6 to 4.9)."""

import dataclasses
from typing import Any

from tests.model_of_the_cache.reference_kinds import Rules
from tests.model_of_the_cache.reference_kinds import admission_cap
from tests.model_of_the_cache.reference_kinds import ceil_div
from tests.model_of_the_cache.reference_kinds import reachable
from tests.model_of_the_cache.reference_kinds import skipped_tokens
from tests.model_of_the_cache.reference_pool import NULL
from tests.model_of_the_cache.reference_pool import ReferencePool
from tests.model_of_the_cache.reference_request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
  """What one allocation asks of a group.

  Attributes:
    request_id: whose.
    hit: pages found by the lookup.
    behind: tokens computed, here or elsewhere, before the new ones.
    external: how many of them are computed elsewhere.
    tokens: behind them and new.
    slots: tokens to have room for, lookahead included.
    encoder: tokens of the encoder.
  """

  request_id: str
  hit: list[int]
  behind: int
  external: int
  tokens: int
  slots: int
  encoder: int


class Tables:
  """Page tables of an attention group.

  Attributes:
    tables: request -> its pages; NULL is one that is not needed any more.
    num_cached: request -> leading places that have been considered for
      publication; absent until the first hit or the first full page.
  """

  def __init__(self, index: int, group: Any, pool: ReferencePool, rules: Rules):
    self.index, self.group, self.pool, self.rules = index, group, pool, rules
    self.size = group.page_size
    self.tables: dict[str, list[int]] = {}
    self.num_cached: dict[str, int] = {}

  def need(self, demand: Demand, capped: bool = False) -> int:
    """Pages that leave the free queue if the demand is met."""
    required = ceil_div(demand.slots, self.size)
    cap = admission_cap(self.group, self.rules)
    if capped and cap is not None:
      required = min(required, cap)
    table = self.tables.get(demand.request_id, [])
    if demand.request_id in self.num_cached:
      return max(required - len(table), 0)
    skipped = self._skipped_pages(demand.behind)
    held = max(skipped, len(demand.hit) + len(table))
    return max(required - held, 0) + self._unheld(demand.hit[skipped:])

  def _skipped_pages(self, tokens):
    return skipped_tokens(self.group, tokens) // self.size

  def _unheld(self, pages):
    return sum(page != NULL and self.pool.refs[page] == 0 for page in pages)

  def recycle(self, request_id: str, tokens: int) -> None:
    """Gives back what nothing behind the first `tokens` looks at."""
    table = self.tables.get(request_id, [])
    released = []
    for place in range(min(self._skipped_pages(tokens), len(table)))[::-1]:
      if table[place] == NULL:
        break
      released.append(table[place])
      table[place] = NULL
    self.pool.release(released)

  def attach(self, demand: Demand) -> None:
    """Starts a table with the hit, as far as it is still needed."""
    skipped = self._skipped_pages(demand.behind)
    pages = demand.hit[skipped:]
    self.pool.touch(pages)
    table = [NULL] * skipped + pages
    self.tables[demand.request_id] = table
    self.num_cached[demand.request_id] = len(table)

  def attach_external(self, demand: Demand) -> None:
    """Pages for tokens that come from elsewhere."""
    skipped = skipped_tokens(self.group, demand.behind)
    if min(demand.behind - skipped, demand.external) <= 0:
      return
    table = self.tables[demand.request_id]
    missing = ceil_div(demand.behind, self.size) - len(table)
    table += self.pool.pop(max(missing, 0))

  def grow(self, demand: Demand) -> list[int]:
    """Pages for the new tokens and the lookahead; what was appended."""
    table = self.tables.setdefault(demand.request_id, [])
    missing = ceil_div(demand.slots, self.size) - len(table)
    popped = self.pool.pop(max(missing, 0))
    table += popped
    return popped

  def publish(self, request: Request, keys: list[tuple], tokens: int) -> None:
    """Makes the full pages of the first `tokens` findable."""
    # Defect 3: no partial entry for the end of a prompt in larger pages.
    full = self._publishable(len(keys), tokens)
    start = self.num_cached.get(request.request_id, 0)
    if start >= full:
      return
    table = self.tables[request.request_id]
    for place in range(start, full):
      if table[place] == NULL:
        continue
      if reachable(self.group, place, request, self.rules):
        last = (place + 1) * self.size // self.rules.hash_size - 1
        self._publish(table[place], (self.index, keys[last]))
    self.num_cached[request.request_id] = full

  def _publish(self, page, key):
    self.pool.publish(page, key)

  def _publishable(self, num_keys, tokens):
    """In a C hybrid pages that no hit can end at wait."""
    rules = self.rules
    if rules.classic:
      return tokens // self.size
    limit = tokens
    if rules.hybrid:
      limit = tokens // rules.align * rules.align
      if rules.eagle and limit > 0:
        limit = min(tokens, limit + self.size)
    return min(limit, num_keys * rules.hash_size) // self.size

  def free(self, request_id: str) -> None:
    """Gives everything back, the last page first."""
    self.pool.release(self.tables.pop(request_id, [])[::-1])
    self.num_cached.pop(request_id, None)

  def new_step(self) -> None:
    """A new step begins."""

  def num_common(self, request_id: str) -> int:
    """Leading pages that every request with pages holds (K)."""
    holders = sum(map(bool, self.tables.values()))
    shared = 0
    for page in self.tables.get(request_id, []):
      if self.pool.refs[page] != holders:
        break
      shared += 1
    return shared


class CrossTables(Tables):
  """Pages of an encoder's tokens, taken once and never cached (3.4)."""

  def need(self, demand: Demand, capped: bool = False) -> int:
    """As in `Tables`."""
    held = len(self.tables.get(demand.request_id, []))
    return max(ceil_div(demand.encoder, self.size) - held, 0)

  def attach_external(self, demand: Demand) -> None:
    """Tokens from elsewhere are those of the decoder."""

  def grow(self, demand: Demand) -> list[int]:
    """As in `Tables`."""
    table = self.tables.setdefault(demand.request_id, [])
    new = self.pool.pop(self.need(demand))
    table += new
    return new


class RecurrentTables(Tables):
  """Snapshots of a recurrent state, each at the place of its last token.

  Attributes:
    grown: requests that have had their first growth.
    last: request -> place of the state from which the last growth went on.
    retired: request -> places before it have been given back.
    written: keys published in this step, whose states are not there yet.
  """

  def __init__(self, index: int, group: Any, pool: ReferencePool, rules: Rules):
    super().__init__(index, group, pool, rules)
    self.grown: set[str] = set()
    self.last: dict[str, int] = {}
    self.retired: dict[str, int] = {}
    self.written: set[tuple] = set()

  def need(self, demand: Demand, capped: bool = False) -> int:
    """As in `Tables`; more than there is when the hit is not written yet."""
    hit = demand.hit
    if hit and self.pool.key.get(hit[-1]) in self.written:
      return len(self.pool.refs) + 1
    first = demand.request_id not in self.grown
    most = 1 + (self.group.num_speculative if first else 0)
    held = len(hit) + len(self.tables.get(demand.request_id, []))
    external = 0
    if demand.external and demand.request_id not in self.num_cached:
      # Defect 1: the page of the external state counts too, and a hit state
      # before it is not attached.
      skipped = self._skipped_pages(demand.behind)
      held, hit = max(skipped, held), hit[skipped:]
      external = ceil_div(demand.behind, self.size) - held
      held += external
    growth = self._required(demand) - held
    growth = min(growth, most) if growth > 0 else growth
    return external + growth + self._unheld(hit)

  def _required(self, demand):
    return ceil_div(demand.tokens, self.size) + self.group.num_speculative

  def recycle(self, request_id: str, tokens: int) -> None:
    """Gives back all states but the one to go on from."""
    table = self.tables.get(request_id, [])
    mark = self.retired.get(request_id, 0)
    end = min((tokens - 1) // self.size, len(table))
    places = list(range(mark, end))[::-1]
    self._drop(table, places)
    self.retired[request_id] = max(mark, end)
    last = self.last.get(request_id)
    if last is not None and last < ceil_div(tokens, self.size) - 1:
      self._drop(table, [last])

  def _drop(self, table, places):
    self.pool.release([table[place] for place in places])
    for place in places:
      table[place] = NULL

  def grow(self, demand: Demand) -> list[int]:
    """Moves the scratch pages to the end and adds what is missing there."""
    name, scratch = demand.request_id, self.group.num_speculative
    table = self.tables.setdefault(name, [])
    required, before = self._required(demand), len(table)
    first = name not in self.grown
    self.grown.add(name)
    if required <= before:
      return []
    if not first:
      self.last[name] = before - 1 - scratch
    elif before > 0:
      self.last[name] = before - 1
    running = required - scratch - 1
    table += [NULL] * (running - before)
    if not first:
      for place in range(before - scratch, min(before, running)):
        table.append(table[place])
        table[place] = NULL
    table += self.pool.pop(required - len(table))
    return table[before:]

  def _publish(self, page, key):
    super()._publish(page, key)
    self.written.add(key)

  def free(self, request_id: str) -> None:
    """As in `Tables`."""
    super().free(request_id)
    self.grown.discard(request_id)
    self.last.pop(request_id, None)
    self.retired.pop(request_id, None)

  def new_step(self) -> None:
    """What was published before is written now."""
    self.written.clear()
