"""The reference systems' cache manager: slow, obvious, from SEMANTICS 4.

Where the text names a defect of theirs (section 9), the right thing is done
instead and a comment says so.
"""

import math
from typing import Any

from tests.model_of_the_cache.reference_kinds import Rules
from tests.model_of_the_cache.reference_kinds import name
from tests.model_of_the_cache.reference_lookup import longest_hit
from tests.model_of_the_cache.reference_pool import ReferencePool
from tests.model_of_the_cache.reference_request import CachePages
from tests.model_of_the_cache.reference_request import Request
from tests.model_of_the_cache.reference_request import page_keys
from tests.model_of_the_cache.reference_tables import CrossTables
from tests.model_of_the_cache.reference_tables import Demand
from tests.model_of_the_cache.reference_tables import RecurrentTables
from tests.model_of_the_cache.reference_tables import Tables


class ReferenceManager:
  """Which pages requests hold and which can be found.

  Args:
    num_pages: pages, the null page 0 counted.
    groups: kinds, each with its page size.
    max_model_len: tokens of the longest sequence.
    enable_caching: whether pages are published and found.
    use_eagle: whether a draft model needs the last page computed again.
    policy: "current" or "classic".
    retention: what is kept of windows and states. None: every place where a
      hit can end; 0: the latest; k: every k tokens and the latest.
    watermark: part of the pages kept free of newcomers.
    max_in_flight: tokens that steps in flight may write; None for
      `max_model_len`.
    max_encoder_tokens: of the longest encoder input; nothing depends on it.

  Raises:
    ValueError: the options do not go together.
  """

  def __init__(
    self,
    num_pages: int,
    groups: list[Any],
    max_model_len: int,
    enable_caching: bool = True,
    use_eagle: bool = False,
    *,
    policy: str = "current",
    retention: int | None = None,
    watermark: float = 0.0,
    max_in_flight: int | None = None,
    max_encoder_tokens: int | None = None,
  ):
    sizes = [group.page_size for group in groups]
    self.rules = Rules(
      classic=policy == "classic",
      caching=enable_caching,
      eagle=use_eagle,
      hybrid=len(groups) > 1,
      hash_size=math.gcd(*sizes),
      align=math.lcm(*sizes),
      max_model_len=max_model_len,
      max_in_flight=max_model_len if max_in_flight is None else max_in_flight,
      retention=retention,
    )
    _check_options(self.rules, groups, policy)
    self.groups = list(groups)
    self.watermark = watermark
    self.pool = ReferencePool(num_pages, enable_caching, policy == "current")
    kinds = {"Recurrent": RecurrentTables, "CrossAttention": CrossTables}
    self.tables: list[Tables] = [
      kinds.get(name(group), Tables)(index, group, self.pool, self.rules)
      for index, group in enumerate(groups)
    ]

  # --- lookup ----------------------------------------------------------------

  def get_computed_pages(self, request: Request) -> tuple[CachePages, int]:
    """The longest cached prefix that leaves a token to compute."""
    request.shared_prefix_boundary = 0
    if not self.rules.caching or request.prompt_logprobs:
      return CachePages(tuple([] for _ in self.groups)), 0
    keys = page_keys(request, self.rules.hash_size)
    limit = request.num_tokens - 1
    hit = longest_hit(self.groups, keys, limit, self.pool, self.rules)
    request.shared_prefix_boundary = hit.junction
    return CachePages(hit.pages), hit.tokens

  # --- allocation ------------------------------------------------------------

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
    """Pages for new tokens; None, and no page taken, if there are too few."""
    external, longest = num_external_computed_tokens, self.rules.max_model_len
    if num_new_tokens + external + num_new_computed_tokens == 0:
      raise ValueError("nothing to allocate for")
    behind = request.num_computed_tokens + num_new_computed_tokens + external
    total = min(behind, longest)
    tokens = total + num_new_tokens
    slots = min(tokens + num_lookahead_tokens, longest)
    hits = new_computed_pages and new_computed_pages.get_page_ids()
    hits = hits or [[] for _ in self.groups]
    encoder = num_encoder_tokens
    demands = self._demands(
      request, hits, behind, external, tokens, slots, encoder
    )
    room = len(self.pool.free)
    if has_scheduled_requests and request.status in ("waiting", "preempted"):
      room -= int(self.watermark * len(self.pool.refs))
    if full_sequence_must_fit:
      whole = min(request.num_tokens, longest)
      full = self._demands(
        request, hits, behind, external, whole, whole, encoder
      )
      if self._need(full, capped=True) > room:
        return None
    before = len(self.pool.free)
    settled = max(0, total - request.num_in_flight_tokens)
    self.remove_skipped_pages(request.request_id, settled)
    room += len(self.pool.free) - before
    if self._need(demands) > room - reserved_pages:
      return None
    self._attach(demands)
    new = tuple(
      table.grow(demand)
      for table, demand in zip(self.tables, demands, strict=True)
    )
    if not delay_cache_pages:
      self._publish(request, min(tokens, request.num_tokens))
    return CachePages(new)

  def _demands(self, request, hits, behind, external, tokens, slots, encoder):
    return [
      Demand(
        request_id=request.request_id,
        hit=list(hit),
        behind=behind,
        external=external,
        tokens=tokens,
        slots=slots,
        encoder=encoder,
      )
      for hit in hits
    ]

  def _need(self, demands, capped=False):
    pairs = zip(self.tables, demands, strict=True)
    return sum(table.need(demand, capped) for table, demand in pairs)

  def _attach(self, demands):
    """The hit and the pages of external tokens, once for each request."""
    if not any(demand.hit or demand.external for demand in demands):
      return
    pairs = list(zip(self.tables, demands, strict=True))
    if any(demand.request_id in table.num_cached for table, demand in pairs):
      return
    # Classic goes group by group, and may pop what a later group would touch.
    for table, demand in pairs:
      table.attach(demand)
    for table, demand in pairs:
      table.attach_external(demand)

  # --- publication -----------------------------------------------------------

  def cache_pages(self, request: Request, num_computed_tokens: int) -> None:
    """Publishes the full pages of so many tokens."""
    if request.request_id not in self.tables[0].tables:
      raise KeyError(request.request_id)
    self._publish(request, num_computed_tokens)

  def _publish(self, request, tokens):
    if not self.rules.caching:
      return
    keys = page_keys(request, self.rules.hash_size)
    for table in self.tables:
      table.publish(request, keys, tokens)

  # --- release ---------------------------------------------------------------

  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Gives back what nothing behind so many tokens looks at."""
    for table in self.tables:
      if request_id in table.tables:
        table.recycle(request_id, max(0, num_computed_tokens))

  def free(self, request: Request) -> None:
    """Gives everything of a request back."""
    for table in self.tables:
      table.free(request.request_id)

  def evict_pages(self, page_ids: list[int]) -> None:
    """Drops the keys of pages."""
    for page in page_ids:
      self.pool.forget(page)

  def reset_prefix_cache(self) -> bool:
    """Drops all keys if no page is held."""
    return self.pool.reset()

  def new_step_starts(self) -> None:
    """A new step begins."""
    for table in self.tables:
      table.new_step()

  # --- what there is ---------------------------------------------------------

  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Pages of a request by group; of an unknown one, none."""
    return tuple(list(t.tables.get(request_id, [])) for t in self.tables)

  def get_num_common_prefix_pages(self, request_id: str) -> list[int]:
    """By group; only full attention has any."""
    return [
      table.num_common(request_id)
      if name(table.group) == "FullAttention"
      else 0
      for table in self.tables
    ]

  def free_queue(self) -> list[int]:
    """Free pages in the order in which they will be popped."""
    return list(self.pool.free)

  def cached_page_ids(self) -> set[int]:
    """Pages that can be found."""
    return set(self.pool.key)

  @property
  def num_free_pages(self) -> int:
    """How many pages are free."""
    return len(self.pool.free)

  @property
  def usage(self) -> float:
    """Part of the pages that is held."""
    return self.pool.usage


def _check_options(rules, groups, policy):
  if policy not in ("current", "classic"):
    raise ValueError(f"policy must be current or classic, got {policy!r}")
  kinds = [name(group) for group in groups]
  for group, kind in zip(groups, kinds, strict=True):
    mixed = rules.eagle or group.page_size != rules.align
    if kind == "CrossAttention" and rules.caching:
      raise ValueError("encoder-decoders have no prefix cache")
    if kind == "ChunkedLocal" and rules.caching and mixed:
      raise ValueError("chunked groups: no EAGLE, one page size")
    if kind == "Recurrent" and group.page_size != rules.hash_size:
      raise ValueError("recurrent groups have the smallest page size")
  if rules.retention is not None:
    _check_retention(rules, kinds)


def _check_retention(rules, kinds):
  retention = rules.retention
  if rules.classic:
    raise ValueError("the classic policy has no retention")
  if retention < 0 or retention % rules.align:
    raise ValueError(f"retention must be a multiple of {rules.align}")
  if retention and not {"SlidingWindow", "Recurrent"} & set(kinds):
    raise ValueError("retention needs a window or a state")
