"""Small caches for random tests, with options that make failures likely."""

import contextlib
import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxkv import CacheConfig
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import GroupKind
from jaxkv import OffloadPolicy
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv import StateRetention
from jaxkv._src.arrays import loops
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.steps import publish as publishing
from tests.tools.platforms import programs_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberedConfig(CacheConfig):
  """A config with a number.

  Configs of different numbers are different static arguments, so jit never
  reuses a verb that was compiled while the library was patched in another way.
  """

  number: int = 1


@dataclasses.dataclass(frozen=True)
class Setup:
  """A cache and the shapes of all calls, so that each verb compiles once.

  Attributes:
    config: the cache's config, with a distinct number.
    rows: R.
    columns: T, one more than fit into a slot.
    window: the number of items handled at once, instead of the library's, which
      these small caches never exceed.
    crowded: True to start all pages in one bucket of the prefix index, so that
      it overflows.
    tight: True to halve the free queues' rings, so that they are swept often.
    for_gpu: True to run the programs that are compiled for a GPU.
  """

  config: CacheConfig
  rows: int
  columns: int
  window: int | None = None
  crowded: bool = False
  tight: bool = False
  for_gpu: bool = False

  @contextlib.contextmanager
  def patched(self):
    """Patches the library for this cache while its verbs are traced."""
    with pytest.MonkeyPatch.context() as patch:
      if self.window is not None:
        patch.setattr(loops, "WINDOW", self.window)
        patch.setattr(loops, "GPU_WINDOW", self.window)
        patch.setattr(prefix_index, "INSERT_WINDOW", self.window)
        patch.setattr(publishing, "ROWS_AT_ONCE", self.window)
      if self.crowded:
        patch.setattr(
          prefix_index,
          "_first_bucket",
          lambda index, keys: jnp.zeros(keys.shape[:1], jnp.int32),
        )
      if self.tight:
        whole = free_queue.capacity
        patch.setattr(free_queue, "capacity", lambda pages: whole(pages) // 2)
      with programs_for("cuda" if self.for_gpu else "cpu"):
        yield


def small(
  config_number: int,
  page_size: int,
  groups: int | tuple[GroupKind, ...] = 1,
  window: int | None = None,
  *,
  worse: str = "",
  num_pages: int | tuple[int, ...] | None = None,
  pages_per_slot: int = 4,
  **options: Any,
) -> Setup:
  """Makes a setup of four slots, with pages for little more than two of them.

  Args:
    config_number: the number of the config.
    page_size: tokens of a page.
    groups: the kinds, or the number of groups of full attention.
    window: see `Setup`.
    worse: the names of `Setup`'s flags to set.
    num_pages: N; None for the default.
    pages_per_slot: M.
    **options: other fields of the config.
  """
  kinds = groups
  if isinstance(kinds, int):
    kinds = (FullAttention(),) * kinds
  slot_tokens = pages_per_slot * page_size
  a_slot = sum(slot_tokens // (k.page_size or page_size) for k in kinds)
  config = NumberedConfig(
    num_pages=num_pages or 5 * a_slot // 2 + 2,
    page_size=page_size,
    num_slots=4,
    pages_per_slot=pages_per_slot,
    groups=kinds,
    number=config_number,
    **options,
  )
  flags = dict.fromkeys(worse.split(), True)
  return Setup(config, 3, config.slot_tokens + 1, window, **flags)


MERGE = {"merge_duplicates": True}
CLASSIC = {"free_policy": "lru"}
NO_CACHING = {"prefix_caching": False}
DRAFT = {"use_eagle": True}
CLASSIC_PREFIXES = {"prefix_rules": "classic"}
LONG = {"pages_per_slot": 8}

Full = FullAttention
Window = SlidingWindow
Chunk = ChunkedLocal
State = Recurrent

SETUPS = {
  # Both policies, merging, groups, no caching.
  "plain": small(1, 2, worse="tight", num_pages=16),
  "merge": small(2, 1, window=2, **MERGE, **CLASSIC),
  "groups": small(3, 2, groups=2, worse="crowded", **MERGE),
  "no_caching": small(4, 4, window=3, worse="tight", **NO_CACHING),
  # The rest of the ways to combine them.
  "classic": small(5, 4, worse="crowded tight", **CLASSIC),
  "classic_groups": small(6, 1, groups=2, **CLASSIC),
  "merge_pages": small(7, 4, window=1, worse="tight", **MERGE),
  "windows": small(8, 2, groups=2, window=3, worse="crowded tight"),
  "classic_no_caching": small(9, 2, groups=2, **NO_CACHING, **CLASSIC),
  "one_token_pages": small(10, 1, window=1),
  # Pages that are left behind, and pages of different sizes.
  "sliding": small(11, 2, (Window(4),), window=3, **LONG, **MERGE),
  "hybrid": small(
    12, 1, (Full(page_size=2), Window(4, page_size=3)), pages_per_slot=12
  ),
  "draft": small(
    13, 2, (Window(3), Full(page_size=4)), worse="tight", **LONG, **DRAFT
  ),
  # And the rest.
  "three_kinds": small(
    14,
    1,
    (Window(5), Chunk(4, page_size=2), Full(page_size=2)),
    window=2,
    worse="crowded",
    **LONG,
    **MERGE,
  ),
  "chunks": small(15, 2, (Full(), Chunk(4)), **LONG, **CLASSIC),
  "odd_chunks": small(16, 2, (Chunk(3), Full(page_size=4)), **LONG, **MERGE),
  "draft_chunks": small(17, 2, (Chunk(6), Full()), window=1, **LONG, **DRAFT),
  "a_chunk_alone": small(18, 2, (Chunk(6),), worse="tight", **LONG),
  "two_windows": small(
    19, 2, (Window(2), Window(7, page_size=4)), **LONG, **CLASSIC
  ),
  "draft_windows": small(
    20,
    2,
    (Window(3), Window(6, page_size=4), Full(), Window(3)),
    worse="crowded",
    **LONG,
    **DRAFT,
    **MERGE,
  ),
  "draft_sliding": small(21, 2, (Window(4),), **LONG, **DRAFT, **CLASSIC),
  "published": small(
    22, 2, (Full(page_size=4), Window(1)), window=2, **LONG, **CLASSIC_PREFIXES
  ),
  "draft_published": small(
    23,
    1,
    (Window(3), Full(page_size=2)),
    worse="tight",
    num_pages=50,
    pages_per_slot=12,
    **DRAFT,
    **CLASSIC_PREFIXES,
  ),
  "window_of_one": small(24, 1, (Full(), Window(1)), **LONG, **MERGE),
  "one_alone": small(25, 2, (Window(1),), worse="tight", **LONG),
  "wide_window": small(26, 2, (Window(100),), **LONG, **MERGE, **CLASSIC),
  "sliding_no_caching": small(
    27, 2, (Window(3), Full(page_size=4)), **LONG, **NO_CACHING, **CLASSIC
  ),
  "latest_kept": small(
    29,
    2,
    (Window(3), Full(page_size=4)),
    worse="tight",
    prefix_retention_interval=0,
    **LONG,
  ),
  "some_kept": small(
    30,
    1,
    (Window(3), Full(page_size=2), Window(5)),
    num_pages=80,
    pages_per_slot=12,
    prefix_retention_interval=4,
    **DRAFT,
    **MERGE,
  ),
  "states": small(32, 2, (State(),), window=2, num_pages=16, **LONG),
  "full_and_states": small(
    33,
    2,
    (Full(page_size=4), State()),
    worse="tight",
    num_pages=30,
    **LONG,
    **MERGE,
  ),
  "kept_states": small(
    34,
    1,
    (State(), Window(3, page_size=2)),
    num_pages=24,
    pages_per_slot=10,
    prefix_retention_interval=4,
    **DRAFT,
    **CLASSIC,
  ),
  # With offloaded pages.
  "offload": small(35, 2, worse="tight", num_pages=12, offload_pages=6),
  "host_hybrid": small(
    36,
    1,
    (Full(page_size=2), Window(4, page_size=2), Full(page_size=2)),
    window=3,
    worse="crowded tight",
    num_pages=24,
    offload_pages=12,
    # One of a column's two pages may return, not both.
    offload_policy=OffloadPolicy(10, 10),
    page_bytes=1,
    **LONG,
    **MERGE,
  ),
  "host_classic": small(
    37,
    2,
    (State(), Full(page_size=4)),
    window=2,
    num_pages=16,
    offload_pages=5,
    **LONG,
    **CLASSIC,
  ),
  # With several pools.
  "pools": small(
    41,
    2,
    (Full(), Window(4, pool=1)),
    worse="tight",
    num_pages=(20, 8),
    **LONG,
    **MERGE,
  ),
  "pools_of_states": small(
    42, 2, (Full(), State(pool=1)), window=4, num_pages=(22, 7), **LONG, **DRAFT
  ),
  "three_pools": small(
    43,
    1,
    (State(page_size=4, pool=2), Full(page_size=2), Window(4, pool=1)),
    window=3,
    worse="crowded tight",
    num_pages=(20, 18, 6),
    pages_per_slot=12,
    **MERGE,
  ),
  "pools_of_groups": small(
    44,
    2,
    (
      Full(),
      Window(3, page_size=4, pool=1),
      Full(),
      Chunk(6, page_size=4, pool=1),
    ),
    num_pages=(44, 12),
    prefix_retention_interval=4,
    **LONG,
  ),
  "pools_offload": small(
    45,
    2,
    (Full(), State(pool=1)),
    worse="tight",
    num_pages=(14, 6),
    offload_pages=(6, 3),
    **LONG,
  ),
  "three_pools_offload": small(
    46,
    1,
    (
      Window(4, page_size=2, pool=1),
      Full(page_size=4),
      State(page_size=2, pool=2),
    ),
    window=6,
    worse="crowded",
    num_pages=(10, 14, 6),
    offload_pages=(4, 3, 2),
    # A page of states costs more than those of K/V.
    offload_policy=OffloadPolicy(10, 10),
    page_bytes=(1, 1, 2),
    **LONG,
    **MERGE,
    **CLASSIC,
  ),
  # With states that are kept by a rule.
  "retained": small(
    47,
    2,
    (Full(), State(pool=1)),
    window=5,
    num_pages=(22, 9),
    prefix_retention_interval=StateRetention(8),
    **LONG,
    **MERGE,
  ),
  "retained_offload": small(
    48,
    1,
    (State(page_size=2, pool=1), Window(4, pool=2), Full(page_size=2)),
    worse="tight crowded",
    num_pages=(18, 8, 20),
    offload_pages=(5, 3, 6),
    prefix_retention_interval=StateRetention(),
    **LONG,
  ),
  "mixed_sizes": small(
    28, 1, (Full(page_size=4), Full(page_size=2)), window=2, **LONG, **MERGE
  ),
}

# More rows than any window of the library is wide.
WIDE = Setup(
  NumberedConfig(
    num_pages=900,
    page_size=2,
    num_slots=160,
    pages_per_slot=4,
    groups=(FullAttention(),) * 2,
    number=301,
  ),
  rows=150,
  columns=9,
)
