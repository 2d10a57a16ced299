"""Divides memory between the pools of a cache.

A pool gets pages for running sequences, and then pages for cached ones. All
pools can hold the same number of cached conversations, because a prefix hit
needs the pages of all groups.
"""

import functools
import operator
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int
from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.config import OffloadPolicy
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

    most_parts = 0
    step = 1 << limit.bit_length()
    while step:
      if cost_of(with_parts(most_parts + step), costs) <= limit:
        most_parts += step
      step //= 2
    return with_parts(most_parts)

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
  *,
  num_slots: int,
  max_length: int,
  page_size: int,
  prefill_chunk: int,
  decode_tokens: int,
  num_pages: int | tuple[int, ...] | None,
  options: Mapping[str, Any],
  memory: int | None = None,
  page_bytes: int | tuple[int, ...] = 0,
) -> CacheConfig:
  """Implements `jaxkv.models.cache_config` for layer groups.

  Args:
    groups: the kinds of the groups.
    num_slots: see `jaxkv.models.cache_config`; so are the other arguments.
    max_length: tokens of the longest sequence.
    page_size: tokens per page of all groups.
    prefill_chunk: the maximum number of prompt tokens in a step.
    decode_tokens: the maximum number of tokens that a sequence decodes in one.
    num_pages: pages of all pools, or a tuple with those of each pool.
    options: other fields of `CacheConfig`.
    memory: bytes of all pools.
    page_bytes: bytes of a page of each pool, for `memory` and for an
      `OffloadPolicy` in `options`; 0 for those in `options`.
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
  needs = pool_needs(
    groups,
    page_size=page_size,
    prefill_chunk=prefill_chunk,
    decode_tokens=decode_tokens,
    max_length=max_length,
  )
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
  costs = config.page_bytes or page_bytes
  costs = costs if isinstance(costs, tuple) else (costs,)
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


def pool_needs(
  groups: tuple[GroupKind, ...],
  *,
  page_size: int,
  prefill_chunk: int,
  decode_tokens: int,
  max_length: int,
) -> PoolNeeds:
  """Returns the pages of each pool that sequences of `max_length` tokens need.

  Args:
    groups: the kinds of the groups; all have pages of `page_size` tokens.
    page_size: tokens per page.
    prefill_chunk: the maximum number of prompt tokens in a step.
    decode_tokens: the maximum number of tokens that a sequence decodes in one.
    max_length: tokens of a sequence.
  """
  page_sizes = (page_size,) * len(groups)
  group_sizes = GroupSizes(groups, page_sizes, max_length)
  decoding = group_sizes.max_pages(decode_tokens, max_length)
  chunk = group_sizes.max_pages(prefill_chunk + decode_tokens - 1, max_length)
  pools = [group_kind.pool for group_kind in groups]

  def by_pool(pages: Iterable[int]) -> tuple[int, ...]:
    counts = [0] * (1 + max(pools))
    for pool, count in zip(pools, pages, strict=True):
      counts[pool] += count
    return tuple(counts)

  return PoolNeeds(
    # Admission keeps a page of each group free for every running sequence.
    running=by_pool(count + 1 for count in decoding),
    step=by_pool(np.subtract(chunk, decoding).tolist()),
    cached=by_pool(group_sizes.max_pages(0, max_length)),
  )
