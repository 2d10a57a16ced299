"""Checks that the memory of pages fits a cache."""

import jax
import numpy as np
from jax.core import Tracer

from jaxkv._src.arrays.arguments import check_not_donated
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.invariants import CacheError
from jaxkv._src.cache.pool.offload_pages import num_planned
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import check_single
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.offload_memory import OffloadMemory
from jaxkv._src.kv.offload_memory import checked
from jaxkv._src.kv.offload_memory import misuse_of
from jaxkv._src.kv.offload_memory import offload_counts
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pools_of


def check(
  kv: Pools,
  config: CacheConfig,
  *,
  offload: OffloadMemory | None = None,
  state: CacheState | None = None,
) -> None:
  """Raises unless the memory fits a cache, and all moves were made.

  Compares sizes, and if `offload` is given, its counts of moves. Counts that
  are traced are not compared, so the call costs nothing under `jit`. Memory
  from `init` with the same config always passes.

  Args:
    kv: the pages, of one memory or of a tuple of memories.
    config: the configuration of the cache, `state.config`.
    offload: the offloaded pages; None to check only `kv`.
    state: the cache, to compare the moves that it planned with those that
      `offload` made; None to check only the order in which they were made.

  Raises:
    CacheError: moves were forgotten or repeated, see `jaxkv.kv.move`.
    TypeError: an argument has a wrong type.
    ValueError: the pages do not fit the cache, or were donated.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=1, num_kv_heads=2, head_dim=8)
    >>> jaxkv.kv.check(kv, config)
  """
  check_config(config)
  # Page sizes may differ between groups, and a memory may serve only one group.
  numbers = config.numbers
  shapes = {
    (numbers.first_pages[kind.pool], numbers.sizes[kind.pool], page_size)
    for kind, page_size in zip(config.groups, config.page_sizes, strict=True)
  }
  first_pages = set()
  for index, pool in enumerate(pools_of(kv)):
    check_not_donated("kv", jax.tree.leaves(pool)[0])
    shape = pool.first_page, pool.num_pages, pool.page_size
    first_pages.add(pool.first_page)
    if shape not in shapes:
      name = f"kv[{index}]" if isinstance(kv, tuple) else "kv"
      expected = " or ".join(map(_described, sorted(shapes)))
      raise ValueError(
        f"`{name}` must have {expected}, as the cache has, got"
        f" {_described(shape)}; make it from state.config."
      )
  missing = set(numbers.first_pages) - first_pages
  if missing:
    pool = numbers.first_pages.index(min(missing))
    raise ValueError(
      f"`kv` must have pages for each pool, got none for pool {pool} of groups "
      f"{config.groups_of_pools[pool]}; make a tuple of memories, one with "
      f"group={config.groups_of_pools[pool][0]}."
    )
  if state is not None:
    check_single(state)
  if offload is not None:
    check_offload(kv, offload, config)
    _check_moves(offload, state)


def _described(shape: tuple[int, int, int]) -> str:
  first_page, num_pages, page_size = shape
  text = f"{num_pages} pages of {page_size} tokens"
  return f"{text} from page {first_page} on" if first_page else text


def check_offload(
  kv: Pools, offload: OffloadMemory | None, config: CacheConfig
) -> None:
  """Raises unless `offload` has the pages that a cache and `kv` require."""
  if offload is None and not config.offload_pages:
    return
  if not config.offload_pages:
    raise ValueError(
      "`offload` must be None for a cache with offload_pages=0; make the "
      "cache with CacheConfig(offload_pages=...)."
    )
  offload = checked(kv, offload)
  counts = offload_counts(kv, config)
  actual_counts = tuple(pages.shape[0] for pages in offload.pages)
  if actual_counts != counts:
    raise ValueError(
      f"`offload` must have {config.offload_pages} pages, as the cache has, "
      f"in arrays of {counts}, got {actual_counts}; make it with "
      "jaxkv.kv.init_offload(kv, config)."
    )


def _check_moves(offload: OffloadMemory, state: CacheState | None) -> None:
  """Raises CacheError if moves were forgotten or repeated."""
  if isinstance(offload.num_moves, Tracer):
    return
  remedy = (
    "See jaxkv.Status. Call `jaxkv.kv.move` once with `out.moves` of each "
    "verb, in the order of the calls and before any write."
  )
  # The memories of several shards have an error each.
  error = Status(int(np.max(np.asarray(offload.error))))
  if error != Status.OK:
    raise CacheError(
      "A call of `jaxkv.kv.move` did not have the next moves, and "
      f"`offload.error` recorded {error.name}. {remedy}"
    )
  if state is None or state.pool.offload is None:
    return
  planned = num_planned(state.pool.offload)
  if isinstance(planned, Tracer):
    return
  error = Status(int(misuse_of(planned, offload.num_moves)))
  if error != Status.OK:
    raise CacheError(
      f"`state` has planned {int(planned)} moves, and `offload` has made "
      f"{int(offload.num_moves)}: {error.name}. {remedy}"
    )
