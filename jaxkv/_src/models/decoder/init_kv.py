"""Creates and checks the memory that a decoder's layers need."""

from typing import Any

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.kv_pages import init as init_pages
from jaxkv._src.kv.pools import Pool
from jaxkv._src.kv.recurrent_pages import init_states
from jaxkv._src.kv.view import AnyView
from jaxkv._src.models.decoder import expert_records
from jaxkv._src.models.decoder import groups
from jaxkv._src.models.decoder import recurrent_pages
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import check_decoder


def cache_groups(decoder: Decoder) -> tuple[GroupKind, ...]:
  """Returns `CacheConfig.groups` for a decoder.

  Layers with equal windows and equal sizes of cached data form a group. Groups
  are in the order of their first layers. Groups of equally many layers with
  equal sizes share a pool of pages, see `GroupKind.pool`.

  Examples:
    >>> from jaxkv import models
    >>> decoder = models.llama(
    ...   vocab_size=11, num_layers=6, embed_dim=8, num_heads=4,
    ...   num_kv_heads=2, head_dim=2, mlp_dim=16, windows=(8, 8, None)
    ... )
    >>> for kind in cache_groups(decoder):
    ...   print(kind)
    SlidingWindow(page_size=None, pool=0, window=8)
    FullAttention(page_size=None, pool=1)
  """
  check_decoder("decoder", decoder)
  return groups.groups_of(decoder).kinds


def init_kv(
  decoder: Decoder,
  config: CacheConfig,
  *,
  dtype: Any = None,
  record_experts: bool = False,
) -> Any:
  """Creates the memory of a decoder's layers, the `kv` of `forward`.

  Args:
    decoder: the decoder.
    config: sizes of the cache, from `cache_config` or with the decoder's
      `cache_groups`.
    dtype: format of keys and values, see `jaxkv.kv.init`; None for the
      decoder's dtype.
    record_experts: True to also record the experts of each token, in all layers
      with `Experts`. `jaxkv.kv.read_expert_ids(kv[-1], ...)` reads the records.

  Returns:
    The pool of all layers, such as `KVPages`; with several pools, a tuple of
    them. With `record_experts`, a tuple that ends with an `ExpertIdPages`.

  Raises:
    ValueError: `dtype` is not supported, the cache and the decoder differ in
      the groups or pools, or groups of the cache differ in the page size. With
      `record_experts`, also if no layer has experts, none has full attention,
      or layers differ in the experts per token.

  Examples:
    >>> import jaxkv
    >>> from jaxkv import models
    >>> decoder = models.llama(
    ...   vocab_size=11, num_layers=2, embed_dim=8, num_heads=4,
    ...   num_kv_heads=2, head_dim=4, mlp_dim=16
    ... )
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=3, page_size=4, num_slots=1, pages_per_slot=2,
    ...   groups=cache_groups(decoder),
    ... )
    >>> init_kv(decoder, config).k.shape  # two layers of three pages
    (6, 2, 4, 4)
  """
  check_decoder("decoder", decoder)
  check_config(config)
  layer_groups = groups.groups_of(decoder)
  layer_groups.check(config, "make the cache with models.cache_config(decoder)")
  if len(set(config.page_sizes)) > 1:
    raise ValueError(
      "`config` must have one page size for all groups, got "
      f"{config.page_sizes}; make the cache with groups=cache_groups(decoder)."
    )
  dtype = decoder.dtype if dtype is None else dtype
  pools: list[Pool] = []
  for group in layer_groups.by_pool:
    pools.append(_init_pool(decoder, config, group, dtype))
  # The expert ids come last, so that the indices of other pools do not depend
  # on `record_experts`.
  if record_experts:
    pools.append(expert_records.init_pool(decoder, config))
  return tuple(pools) if len(pools) > 1 else pools[0]


def _init_pool(
  decoder: Decoder, config: CacheConfig, group: int, dtype: Any
) -> Pool:
  """Creates the memory of a group's pool."""
  layer_groups = groups.groups_of(decoder)
  num_layers = layer_groups.num_layers[group]
  first_layer = layer_groups.locations.index((group, 0))
  name, layout = groups.shape_of(decoder.layers[first_layer])
  if name == "states":
    return init_states(
      config,
      num_layers=num_layers,
      shapes=recurrent_pages.state_shapes(layout),
      group=group,
    )
  head_sizes: dict[str, Any] = {
    "num_kv_heads": layout[0],
    "head_dim": layout[1],
  }
  if name == "latents":
    # A latent is stored once, and attention reads it as both key and value.
    head_sizes = {
      "num_kv_heads": 1,
      "head_dim": sum(layout),
      "value_dim": layout[0],
    }
  return init_pages(
    config, num_layers=num_layers, dtype=dtype, group=group, **head_sizes
  )


def check_pools(
  pools: tuple[Any, ...], views: tuple[AnyView, ...], config: Decoder
) -> None:
  """Raises ValueError unless pools and views fit a decoder."""
  layer_groups = groups.groups_of(config)
  num_groups = len(layer_groups.kinds)
  num_pools = len(layer_groups.by_pool)
  if len(views) != num_groups:
    raise ValueError(
      f"`batch.views` must have a view for each of the {num_groups} layer "
      f"groups of config, got {len(views)}; give a tuple in the order of "
      "cache_groups."
    )
  if len(pools) > num_pools and isinstance(pools[-1], ExpertIdPages):
    expert_records.check_pool(pools[-1], config)
    pools = pools[:-1]
  if len(pools) != num_pools:
    raise ValueError(
      f"`kv` must have {num_pools} pools for config, got {len(pools)}; make it "
      "with init_kv."
    )
  for pool, group in zip(pools, layer_groups.by_pool, strict=True):
    num_layers = layer_groups.num_layers[group]
    # A pool may have more memory layers than the decoder uses.
    if pool.num_layers < num_layers:
      raise ValueError(
        f"`kv` must have {num_layers} layers or more for config, got "
        f"{pool.num_layers}; make it with init_kv."
      )
