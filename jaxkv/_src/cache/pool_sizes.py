"""Divides memory between the pools of a cache.

A pool gets pages for running sequences, and then pages for cached ones. All
pools can hold the same number of cached conversations, because a prefix hit
needs the pages of all groups.
"""

import functools
import operator
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int
from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.config import OffloadPolicy
from jaxkv._src.cache.config import by_pool
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import GroupSizes


class PoolNeeds(NamedTuple):
  """The pages of each pool that sequences need, [P].

  Attributes:
    running: pages of a running sequence that decodes.
    step: further pages of a sequence that computes a chunk of its prompt.
    cached: pages of a cached conversation.
  """

  running: tuple[int, ...]
  step: tuple[int, ...]
  cached: tuple[int, ...]

  def least(self, num_sequences: int) -> tuple[int, ...]:
    """Returns the fewest pages of each pool with which sequences can run."""
    # The first page of a pool is not usable. One sequence at a time computes a
    # chunk, because all sequences share the tokens of a step.
    return tuple(
      1 + step + num_sequences * running
      for step, running in zip(self.step, self.running, strict=True)
    )

  def fill(
    self, pool_sizes: Sequence[int], costs: Sequence[int], limit: int
  ) -> tuple[int, ...]:
    """Adds pages for as many cached conversations as a limit allows.

    Args:
      pool_sizes: pages of each pool, whose cost is at most `limit`.
      costs: the cost of a page of each pool, such as its bytes.
      limit: the maximum cost of all pages together.
    """
    num_parts = max(self.cached)

    def with_parts(parts: int) -> tuple[int, ...]:
      # A part of a conversation is one page of the pool that has most pages.
      return tuple(
        num_pages + parts * num_cached // num_parts
        for num_pages, num_cached in zip(pool_sizes, self.cached, strict=True)
      )

    # Rounded down, so a few more parts may fit.
    remaining_cost = limit - cost_of(pool_sizes, costs)
    num_fitting = remaining_cost * num_parts // cost_of(self.cached, costs)
    while cost_of(with_parts(num_fitting + 1), costs) <= limit:
      num_fitting += 1
    return with_parts(num_fitting)

  def divide(self, num_pages: int, num_sequences: int) -> tuple[int, ...]:
    """Divides a number of pages between the pools.

    Args:
      num_pages: the pages of all pools together.
      num_sequences: the maximum number of sequences at a time; fewer can run at
        a time if the pages do not suffice.

    Raises:
      ValueError: the pages do not suffice for one sequence.
    """
    num_pools = len(self.running)
    min_pages = sum(self.least(1))
    if num_pages < min_pages:
      expected = f"at least {min_pages}, for one sequence in {num_pools} pools"
      refuse(ValueError, "num_pages", expected, num_pages)
    most_sequences = 1 + (num_pages - min_pages) // sum(self.running)
    pool_sizes = self.least(min(num_sequences, most_sequences))
    return self.fill(pool_sizes, (1,) * num_pools, num_pages)


def cost_of(pool_sizes: Sequence[int], costs: Sequence[int]) -> int:
  """Returns the cost of the pages of all pools."""
  return sum(map(operator.mul, pool_sizes, costs))


def sized_config(
  groups: tuple[GroupKind, ...],
  page_bytes: int | tuple[int, ...] = 0,
  /,
  *,
  num_slots: int,
  max_length: int,
  page_size: int = 16,
  memory: int | None = None,
  num_pages: int | tuple[int, ...] | None = None,
  prefill_chunk: int = 256,
  decode_tokens: int = 1,
  **options: Any,
) -> CacheConfig:
  """Implements `jaxkv.models.cache_config` for layer groups.

  `page_bytes` has the bytes of a page of each pool, for `memory` and for an
  `OffloadPolicy`; 0 to read them from `options`.
  """
  num_slots = as_count("num_slots", num_slots, 1)
  max_length = as_count("max_length", max_length, 1)
  page_size = as_count("page_size", page_size, 1)
  prefill_chunk = as_count("prefill_chunk", prefill_chunk, 1)
  decode_tokens = as_count("decode_tokens", decode_tokens, 1)
  if isinstance(options.get("offload_policy"), OffloadPolicy):
    options = {"page_bytes": page_bytes, **options}
  make_config = functools.partial(
    CacheConfig,
    page_size=page_size,
    num_slots=num_slots,
    pages_per_slot=-(-max_length // page_size),
    groups=groups,
    **options,
  )
  page_sizes = (page_size,) * len(groups)
  group_sizes = GroupSizes(groups, page_sizes, max_length)
  needs = _needs(group_sizes, prefill_chunk, decode_tokens)
  if memory is not None and num_pages is not None:
    hint = "give one of the two"
    refuse(ValueError, "num_pages", "None with `memory`", num_pages, hint)
  if num_pages is not None:
    # A tuple has the pages of each pool, and one pool gets all pages.
    if not isinstance(num_pages, tuple) and len(needs.running) > 1:
      num_pages = as_count("num_pages", num_pages, 1)
      num_pages = needs.divide(num_pages, num_slots)
    return make_config(num_pages=num_pages)
  config = make_config(num_pages=needs.least(num_slots))
  if memory is None:
    return config
  memory = as_int("memory", memory)
  pool_sizes = config.numbers.sizes
  costs = by_pool(config.page_bytes or page_bytes)
  if not all(costs):
    requirement = "the bytes of a page of each pool with `memory`"
    refuse(ValueError, "page_bytes", requirement, page_bytes)
  min_memory = cost_of(pool_sizes, costs)
  if memory < min_memory:
    sequences = f"{num_slots} sequences of {max_length} tokens"
    requirement = f"at least {min_memory} bytes for {sequences}"
    hint = "lower num_slots or max_length"
    refuse(ValueError, "memory", requirement, memory, hint)
  return make_config(num_pages=needs.fill(pool_sizes, costs, memory))


def _needs(
  group_sizes: GroupSizes, prefill_chunk: int, decode_tokens: int
) -> PoolNeeds:
  """Returns the pages of each pool that sequences of a full slot need."""
  longest = group_sizes.slot_tokens
  decoding = group_sizes.max_pages(decode_tokens, longest)
  chunk = group_sizes.max_pages(prefill_chunk + decode_tokens - 1, longest)
  pools = [group_kind.pool for group_kind in group_sizes.groups]

  def sums(pages: Iterable[int]) -> tuple[int, ...]:
    counts = [0] * (1 + max(pools))
    for pool, count in zip(pools, pages, strict=True):
      counts[pool] += count
    return tuple(counts)

  return PoolNeeds(
    # Admission keeps a page of each group free for every running sequence.
    running=sums(count + 1 for count in decoding),
    step=sums(map(operator.sub, chunk, decoding)),
    cached=sums(group_sizes.max_pages(0, longest)),
  )
