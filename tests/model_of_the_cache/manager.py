"""The reference systems' cache manager, request by request.

It behaves as vLLM 0.33.0, except for defects of vLLM, which comments name.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np

from jaxkv import GroupKind
from jaxkv.results import Moves
from tests.model_of_the_cache import lookup
from tests.model_of_the_cache import sequences
from tests.model_of_the_cache.groups import Group
from tests.model_of_the_cache.groups import Rules
from tests.model_of_the_cache.groups import ceil_div
from tests.model_of_the_cache.pool import NULL
from tests.model_of_the_cache.pool import Pool
from tests.model_of_the_cache.sequences import Sequence


@dataclasses.dataclass
class Request:
  """A sequence as its scheduler sees it.

  Attributes:
    request_id: the name of the request.
    token_ids: prompt and output.
    num_prompt_tokens: the number of prompt tokens.
    num_computed_tokens: the number of tokens with K/V.
    num_in_flight_tokens: computed tokens whose step is not finished yet.
    status: waiting, running or preempted.
    cache_salt, lora_name: requests that differ in one share no page.
    mm: not used.
    prompt_logprobs: True if the whole prompt is computed, without a lookup.
    shared_prefix_boundary: junction of the last lookup.
  """

  request_id: str
  token_ids: list[int]
  num_prompt_tokens: int
  num_computed_tokens: int = 0
  num_in_flight_tokens: int = 0
  status: str = "waiting"
  cache_salt: str | None = None
  lora_name: str | None = None
  mm: Any = None
  prompt_logprobs: bool = False
  shared_prefix_boundary: int = 0

  @property
  def num_tokens(self) -> int:
    """The number of tokens so far."""
    return len(self.token_ids)


@dataclasses.dataclass
class CachePages:
  """Pages by group; 0 is the null page."""

  pages: tuple[list[int], ...]

  def get_page_ids(self) -> tuple[list[int], ...]:
    """Returns page ids by group."""
    return self.pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
  """The sizes of one allocation.

  Attributes:
    hits: pages found by the lookup, by group.
    behind: tokens computed before the new ones, here or elsewhere.
    external: tokens of these that are computed elsewhere.
    tokens: computed tokens and new tokens.
    slots: tokens to make room for, lookahead included.
    encoder: tokens of the encoder.
  """

  hits: Listed[list[int]]
  behind: int
  external: int
  tokens: int
  slots: int
  encoder: int


@dataclasses.dataclass
class Entry:
  """The cache entries of a request.

  Attributes:
    sequence: its pages and the tokens of their keys.
    considered: for each group, the leading columns considered for publication;
      None until the first hit or the first full page.
    grew: True if room was made for the request before.
  """

  sequence: Sequence
  considered: list[int | None]
  grew: bool = False


class ReferenceManager:
  """A cache manager in plain Python: the pages of requests, and cached pages.

  Args:
    num_pages: pages, the null page 0 included.
    groups: kinds, each with its page size.
    max_model_len: tokens of the longest sequence.
    enable_caching: True to publish pages and find them again.
    use_eagle: True if a draft model needs the last page computed again.
    policy: "current" or "classic".
    prefix_retention_interval: see `Rules.retention`.
    watermark: the fraction of pages that new requests leave free.
    max_in_flight: tokens that steps in flight may write; None for
      `max_model_len`.
    max_encoder_tokens: tokens of the longest encoder input; not used.
    offload_pages: offloaded pages, which the reference systems do not have.
    offload_policy, page_bytes: the pages that move there, see `CacheConfig`.
  """

  def __init__(
    self,
    num_pages: int,
    groups: Listed[GroupKind],
    max_model_len: int,
    enable_caching: bool = True,
    use_eagle: bool = False,
    *,
    policy: str = "current",
    prefix_retention_interval: int | None = None,
    watermark: float = 0.0,
    max_in_flight: int | None = None,
    max_encoder_tokens: int | None = None,
    offload_pages: int = 0,
    offload_policy: Any = "always",
    page_bytes: int = 0,
  ):
    page_sizes = [group.page_size for group in groups]
    self.rules = Rules(
      page_size=math.gcd(*page_sizes),
      align=math.lcm(*page_sizes),
      classic=policy == "classic",
      draft=use_eagle,
      retention=prefix_retention_interval,
    )
    self.groups = [Group(item, item.page_size, self.rules) for item in groups]
    max_restored = {"always": math.inf, "never": 0}.get(offload_policy)
    if max_restored is None:
      max_restored = offload_policy.max_pages(page_bytes, min(page_sizes))
    self.pool = Pool(
      (num_pages,), policy == "current", (offload_pages,), max_restored
    )
    self.caching = enable_caching
    self.watermark = watermark
    self.longest = max_model_len
    self.in_flight = max_model_len if max_in_flight is None else max_in_flight
    self.entries: dict[str, Entry] = {}
    # Keys published in this step, whose states are not computed yet.
    self.written: set[tuple] = set()

  def _entry(self, request_id: str) -> Entry:
    """Returns the entries of a request, empty for an unknown one."""
    empty = Sequence([[] for _ in self.groups], [], ())
    return self.entries.get(request_id, Entry(empty, [None] * len(self.groups)))

  def get_computed_pages(self, request: Request) -> tuple[CachePages, int]:
    """Finds the longest cached prefix that leaves a token to compute."""
    request.shared_prefix_boundary = 0
    if not self.caching or request.prompt_logprobs:
      return CachePages(tuple([] for _ in self.groups)), 0
    tokens = request.token_ids
    hit = lookup.find(self.groups, self.pool, _root(request), tokens)
    if not self.rules.classic:
      request.shared_prefix_boundary = hit.junction
    return CachePages(tuple(hit.tables())), hit.tokens

  def allocate_slots(
    self,
    request: Request,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_pages: CachePages | None = None,
    num_lookahead_tokens: int = 0,
    num_external_computed_tokens: int = 0,
    delay_cache_pages: bool = False,
    full_sequence_must_fit: bool = False,
    reserved_pages: int = 0,
    has_scheduled_requests: bool = True,
    num_encoder_tokens: int = 0,
  ) -> CachePages | None:
    """Allocates pages for new tokens; returns None if too few are free."""
    external = num_external_computed_tokens
    if num_new_tokens + external + num_new_computed_tokens == 0:
      raise ValueError("nothing to allocate for")
    num_computed = (
      request.num_computed_tokens + num_new_computed_tokens + external
    )
    num_past = min(num_computed, self.longest)
    tokens = num_past + num_new_tokens
    hits = new_computed_pages and new_computed_pages.get_page_ids()
    demand = Demand(
      hits=hits or [[] for _ in self.groups],
      behind=num_computed,
      external=external,
      tokens=tokens,
      slots=min(tokens + num_lookahead_tokens, self.longest),
      encoder=num_encoder_tokens,
    )
    room = len(self.pool.free[0])
    if has_scheduled_requests and request.status in ("waiting", "preempted"):
      room -= int(self.watermark * len(self.pool.refs))
    name = request.request_id
    if full_sequence_must_fit:
      whole = min(request.num_tokens, self.longest)
      full = dataclasses.replace(demand, tokens=whole, slots=whole)
      if self.need(name, full, capped=True) > room:
        return None
    num_free = len(self.pool.free[0])
    settled = max(0, num_past - request.num_in_flight_tokens)
    self.remove_skipped_pages(name, settled)
    room += len(self.pool.free[0]) - num_free
    if self.need(name, demand) > room - reserved_pages:
      return None
    entry = self.entries.setdefault(name, self._entry(name))
    self._attach(entry, demand)
    new = self._grow(entry, demand)
    if not delay_cache_pages:
      self._publish(request, min(tokens, request.num_tokens))
    return CachePages(new)

  def need(self, request_id: str, demand: Demand, capped: bool = False) -> int:
    """Counts the pages that leave the free queue to satisfy a demand.

    Args:
      request_id: the request.
      demand: the sizes of its allocation.
      capped: True to limit each group to its maximal pages at any time.
    """
    entry = self._entry(request_id)
    num_pages = 0
    for index, group in enumerate(self.groups):
      if group.is_cross:
        pages = entry.sequence.pages[index]
        num_pages += max(group.pages_for(0, demand.encoder) - len(pages), 0)
      elif group.holds_states:
        num_pages += self._needed_states(index, entry, demand, capped)
      else:
        num_pages += self._needed_pages(index, entry, demand, capped)
    return num_pages

  def _needed_pages(self, index, entry, demand, capped):
    group = self.groups[index]
    hit = demand.hits[index]
    required = group.pages_for(demand.slots)
    limit = group.most_pages(self.longest, self.in_flight)
    if capped and limit is not None:
      required = min(required, limit)
    count = len(entry.sequence.pages[index])
    if entry.considered[index] is not None:
      return max(required - count, 0)
    skipped = group.skipped_pages(demand.behind)
    num_held = max(skipped, len(hit) + count)
    return max(required - num_held, 0) + self._unheld(hit[skipped:])

  def _needed_states(self, index, entry, demand, capped):
    """Returns more pages than exist if the hit is not written yet."""
    group = self.groups[index]
    hit = demand.hits[index]
    if hit and self.pool.keys.get(hit[-1]) in self.written:
      return len(self.pool.refs) + 1
    limit = 1 if entry.grew else 1 + group.scratch
    num_held = len(hit) + len(entry.sequence.pages[index])
    external = 0
    if demand.external and entry.considered[index] is None:
      # Unlike vLLM, this also counts the external state's page, and attaches
      # no hit state before it. A whole sequence holds one state in the end.
      skipped = group.skipped_pages(demand.behind)
      hit = hit[skipped:]
      if not capped:
        num_held = max(skipped, num_held)
        external = ceil_div(demand.behind, group.size) - num_held
        num_held += external
    growth = group.pages_for(demand.tokens) - num_held
    growth = min(growth, limit) if growth > 0 else growth
    return external + growth + self._unheld(hit)

  def _unheld(self, pages):
    return sum(
      page != NULL
      and (self.pool.is_offloaded(page) or self.pool.refs[page] == 0)
      for page in pages
    )

  def _attach(self, entry, demand):
    """Attaches the hit and pages for external tokens, once for each request."""
    if not any(demand.hits) and not demand.external:
      return
    if any(considered is not None for considered in entry.considered):
      return
    # Classic vLLM proceeds group by group, and may pop a later group's hit.
    hits = [
      hit[group.skipped_pages(demand.behind) :]
      for group, hit in zip(self.groups, demand.hits, strict=True)
    ]
    attached = iter(self.pool.hold_hits([*itertools.chain(*hits)]))
    for index, group in enumerate(self.groups):
      skipped = group.skipped_pages(demand.behind)
      pages = [next(attached) for _ in demand.hits[index][skipped:]]
      entry.sequence.pages[index] = [NULL] * skipped + pages
      entry.considered[index] = skipped + len(pages)
    for group, pages in zip(self.groups, entry.sequence.pages, strict=True):
      num_needed = demand.behind - group.skipped_tokens(demand.behind)
      # An encoder's pages do not hold tokens of the decoder.
      if not group.is_cross and min(num_needed, demand.external) > 0:
        stop_column = ceil_div(demand.behind, group.size)
        sequences.fill(self.pool, pages, stop_column)

  def _grow(self, entry, demand):
    """Adds pages for new tokens and the lookahead; returns the added pages."""
    is_new = not entry.grew
    new = []
    entry.grew = True
    for index, group in enumerate(self.groups):
      # In groups of states, the lookahead is in scratch pages.
      tokens = demand.tokens if group.holds_states else demand.slots
      stop_column = group.pages_for(tokens, demand.encoder)
      num_old = len(entry.sequence.pages[index])
      pages = group.grown(entry.sequence.pages[index], stop_column, is_new)
      sequences.fill(self.pool, pages, stop_column)
      entry.sequence.pages[index] = pages
      new.append(pages[num_old:])
    return tuple(new)

  def cache_pages(self, request: Request, num_computed_tokens: int) -> None:
    """Publishes the full pages of the computed tokens."""
    if request.request_id not in self.entries:
      raise KeyError(request.request_id)
    self._publish(request, num_computed_tokens)

  def _publish(self, request, tokens):
    # Unlike vLLM, the end of a prompt in larger pages gets no partial entry.
    if not self.caching:
      return
    entry = self.entries[request.request_id]
    sequence = entry.sequence
    sequence.root = _root(request)
    sequence.tokens = list(request.token_ids)
    sequence.prompt = request.num_prompt_tokens
    sequence.junction = request.shared_prefix_boundary
    for index, group in enumerate(self.groups):
      first_column = entry.considered[index] or 0
      stop_column = group.settled_pages(min(tokens, request.num_tokens))
      if first_column >= stop_column:
        continue
      columns = range(first_column, stop_column)
      old_keys = set(self.pool.keys)
      sequences.publish(self.pool, group, index, sequence, columns)
      if group.holds_states:
        new = self.pool.keys.keys() - old_keys
        self.written |= {self.pool.keys[page] for page in new}
      entry.considered[index] = stop_column

  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Releases pages that no token after these tokens attends to."""
    tables = self._entry(request_id).sequence.pages
    for group, pages in zip(self.groups, tables, strict=True):
      sequences.recycle(self.pool, group, pages, max(0, num_computed_tokens))

  def free(self, request: Request) -> None:
    """Releases all pages of a request."""
    sequences.release(self.pool, self._entry(request.request_id).sequence)
    self.entries.pop(request.request_id, None)

  def evict_pages(self, page_ids: list[int]) -> None:
    """Drops the keys of pages."""
    for page in page_ids:
      self.pool.forget(page)

  def reset_prefix_cache(self) -> bool:
    """Drops all keys if no page is held."""
    return self.pool.reset()

  def new_step_starts(self) -> None:
    """Begins a new step: pages published before are written now."""
    self.written.clear()

  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns the pages of a request by group, empty for an unknown one."""
    tables = self._entry(request_id).sequence.pages
    return tuple(list(pages) for pages in tables)

  def get_num_common_prefix_pages(self, request_id: str) -> list[int]:
    """Counts leading pages that all requests hold, for full attention only."""
    common = []
    for index, pages in enumerate(self.get_page_ids(request_id)):
      tables = [entry.sequence.pages[index] for entry in self.entries.values()]
      holders = sum(map(bool, tables))
      all_hold = [self.pool.refs[page] == holders for page in pages]
      is_full = self.groups[index].is_full
      common.append([*all_hold, False].index(False) if is_full else 0)
    return common

  def take_moves(self) -> Moves:
    """Returns the moves between the memories since the last call."""
    first_page = self.pool.num_pages + 1
    rows = [
      (page, *(Moves.NONE if n is None else n - first_page for n in offloaded))
      for page, *offloaded in self.pool.moves
    ]
    self.pool.moves = []
    columns: Any = np.array(rows, np.int32).reshape(-1, 3).T
    page, saved, restored = columns
    count: Any = np.int32(len(rows))
    return Moves(page=page, saved_to=saved, restored_from=restored, count=count)

  def free_queue(self) -> list[int]:
    """Returns the free pages in the order in which they will be popped."""
    return list(self.pool.free[0])

  def cached_page_ids(self) -> set[int]:
    """Returns the pages that a lookup can find."""
    return set(self.pool.keys)

  @property
  def num_free_pages(self) -> int:
    """The number of free pages."""
    return len(self.pool.free[0])

  @property
  def usage(self) -> float:
    """The fraction of pages that are held, without the null page."""
    return 1 - len(self.pool.free[0]) / (len(self.pool.refs) - 1)


def _root(request: Any) -> tuple:
  """Returns the start of a request's keys."""
  return request.cache_salt or None, request.lora_name or None
