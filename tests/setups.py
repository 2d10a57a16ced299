"""Small caches for random tests, and what is made worse about them."""

import contextlib
import dataclasses

import jax.numpy as jnp
import pytest

from jaxkv import CacheConfig
from jaxkv.cache import committing
from jaxkv.cache import free_queue
from jaxkv.cache import prefix_index
from jaxkv.cache import ragged


@dataclasses.dataclass(frozen=True)
class Setup:
  """A cache and the shapes of all calls, so that each verb compiles once.

  Attributes:
    config: the cache's sizes. Its seed is its own, so that no compiled verb is
      shared with a cache that is patched otherwise.
    rows: R.
    columns: T, one more than fit into a slot.
    window: items handled at once, where it is not as many as usual; everything
      that is done in several windows is never done in these small caches.
    crowded: all pages begin at one bucket of the prefix index, so that it
      overflows.
    tight: the free queue's ring has half its size, so that it is swept often.
  """

  config: CacheConfig
  rows: int
  columns: int
  window: int | None = None
  crowded: bool = False
  tight: bool = False

  @contextlib.contextmanager
  def patched(self):
    """The library as this cache wants it, while its verbs are traced."""
    with pytest.MonkeyPatch.context() as patch:
      if self.window is not None:
        patch.setattr(ragged, "WINDOW", self.window)
        patch.setattr(prefix_index, "INSERT_WINDOW", self.window)
        patch.setattr(committing, "_SLOT_WINDOW", self.window)
      if self.crowded:
        patch.setattr(
          prefix_index,
          "_first_bucket",
          lambda index, keys: jnp.zeros(keys.shape[:1], jnp.int32),
        )
      if self.tight:
        patch.setattr(free_queue, "init", _half_a_ring)
      yield


def _half_a_ring(num_pages: int, init=free_queue.init) -> free_queue.FreeQueue:
  """A queue that still has room for all pages, but for few stale entries."""
  queue = init(num_pages)
  return dataclasses.replace(queue, ring=queue.ring[: queue.ring.size // 2])


def small(
  seed: int,
  size: int,
  groups: int = 1,
  window: int | None = None,
  *,
  worse: str = "",
  num_pages: int | None = None,
  **options: bool,
) -> Setup:
  """Four slots of four pages, and pages for little more than two of them.

  Args:
    seed: of the config.
    size: tokens a page.
    groups: of layers.
    window: see `Setup`.
    worse: names of flags of `Setup`.
    num_pages: N, where it is another one.
    **options: of the config.
  """
  config = CacheConfig(
    num_pages=num_pages or 10 * groups + 2,
    page_size=size,
    num_slots=4,
    pages_per_slot=4,
    num_groups=groups,
    seed=seed,
    **options,
  )
  flags = dict.fromkeys(worse.split(), True)
  return Setup(config, 3, config.slot_tokens + 1, window, **flags)


MERGE = {"merge_duplicates": True}
CLASSIC = {"unhashed_first": False}
NO_CACHING = {"prefix_caching": False}

SETUPS = {
  # Seen in every run: both policies, merging, groups, no caching.
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
}

DEFAULT = ("plain", "merge", "groups", "no_caching")
"""The setups of the default run; `--deep` takes them all."""

# More rows than any window of the library is wide.
WIDE = Setup(
  CacheConfig(
    num_pages=900,
    page_size=2,
    num_slots=160,
    pages_per_slot=4,
    num_groups=2,
    seed=301,
  ),
  rows=150,
  columns=9,
)
