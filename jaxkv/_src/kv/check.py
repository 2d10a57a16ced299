"""Checks that K/V memory has the pages of a cache."""

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pools_of


def check(kv: Pools, config: CacheConfig) -> None:
  """Raises unless every pool fits the page count and page sizes of a cache.

  Compares static sizes only, so it costs nothing under `jit`. Memory from
  `init` with the same config always passes.

  Args:
    kv: the pages, of one pool or of a tuple of pools.
    config: the configuration of the cache, `state.config`.

  Raises:
    TypeError: `config` is not a CacheConfig, or `kv` is not made of pools.
    ValueError: `kv` has no pool, or a pool has a page count other than that of
      the cache, or a page size that no group has.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=1, num_kv_heads=2, head_dim=8)
    >>> jaxkv.kv.check(kv, config)
  """
  check_config(config)
  # Page sizes may differ between groups, and a pool may serve only one group.
  sizes = sorted(set(config.page_sizes))
  for number, pool in enumerate(pools_of(kv)):
    if pool.num_pages != config.num_pages or pool.page_size not in sizes:
      name = f"kv[{number}]" if isinstance(kv, tuple) else "kv"
      raise ValueError(
        f"`{name}` must have {config.num_pages} pages of"
        f" {' or '.join(map(str, sizes))} tokens, as the cache has, got"
        f" {pool.num_pages} of {pool.page_size}; make it from state.config."
      )
