"""Whether K/V memory has the pages that a cache hands out."""

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.kv.memory import KVPages


def check(kv: KVPages, config: CacheConfig) -> None:
  """Raises unless the memory has the pages of a cache, or of one group of it.

  Only sizes are compared, so it costs nothing under `jit`. What pages hold is
  not looked at.

  Args:
    kv: the pages.
    config: of the cache, `state.config`.

  Raises:
    TypeError: `config` is no CacheConfig.
    ValueError: there are more pages or fewer, or no group has such pages.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jaxkv.kv.init(
    ...   num_layers=1, num_pages=8, page_size=4, num_kv_heads=2, head_dim=8
    ... )
    >>> jaxkv.kv.check(kv, config)
  """
  if not isinstance(config, CacheConfig):
    raise TypeError(
      f"config must be a CacheConfig, got {type(config).__name__}; that of a "
      "state is state.config."
    )
  sizes = sorted(set(config.page_sizes))
  if kv.num_pages != config.num_pages or kv.page_size not in sizes:
    raise ValueError(
      f"kv has {kv.num_pages} pages of {kv.page_size} tokens and the cache "
      f"{config.num_pages} of {' or '.join(map(str, sizes))}; they must be "
      "equal."
    )
