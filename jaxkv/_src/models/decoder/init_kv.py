"""Creates and checks the memory that a decoder's layers need."""

from typing import Any

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.kv_pages import init as init_pages
from jaxkv._src.kv.recurrent_pages import init_states
from jaxkv._src.kv.view import AnyView
from jaxkv._src.models.decoder import expert_records
from jaxkv._src.models.decoder import groups
from jaxkv._src.models.decoder import recurrent_pages
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import check_decoder


def cache_groups(decoder: Decoder) -> tuple[GroupKind, ...]:
  """Returns `CacheConfig.groups` for a decoder.

  Layer i is in group i % C, where C is the length of the shortest pattern that
  the windows and the cached data of the layers repeat.

  Examples:
    >>> from jaxkv import models
    >>> decoder = models.llama(
    ...   vocab_size=11, num_layers=6, embed_dim=8, num_heads=4,
    ...   num_kv_heads=2, head_dim=2, mlp_dim=16, windows=(8, 8, None)
    ... )
    >>> groups = cache_groups(decoder)
    >>> len(groups), groups[0]
    (3, SlidingWindow(page_size=None, window=8))
  """
  check_decoder("decoder", decoder)
  return groups.group_kinds(decoder)


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
    config: sizes of the cache, with `groups=cache_groups(decoder)`.
    dtype: format of keys and values, see `jaxkv.kv.init`; None for the
      decoder's dtype.
    record_experts: True to also record the experts of each token, in all layers
      with `Experts`. `jaxkv.kv.read_expert_ids(kv[-1], ...)` reads the records.

  Returns:
    The pool of all layers, such as `KVPages`; a tuple if layers need several
    pools. With `record_experts`, a tuple that ends with an `ExpertIdPages`.

  Raises:
    ValueError: `dtype` is not supported, the cache and the decoder differ in
      the number of groups, or groups of the cache differ in the page size. With
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
  num_groups = groups.period(decoder)
  if len(config.groups) != num_groups:
    raise ValueError(
      f"`config.groups` must be the {num_groups} groups of the decoder, got "
      f"{len(config.groups)}; make the cache with groups=cache_groups(decoder)."
    )
  # A pool has one page size, and can serve several groups.
  if len(set(config.page_sizes)) > 1:
    raise ValueError(
      "`config` must have one page size for all groups, got "
      f"{config.page_sizes}; make the cache with groups=cache_groups(decoder)."
    )
  layers = groups.num_memory_layers(decoder)
  dtype = decoder.dtype if dtype is None else dtype
  pools = []
  for name, layout in groups.pools(decoder):
    if name == "keys and values":
      heads, dim = layout
      pools.append(
        init_pages(
          config, num_layers=layers, num_kv_heads=heads, head_dim=dim,
          dtype=dtype,
        )
      )  # fmt: skip
    elif name == "latents":
      # A latent is stored once, and attention reads it as both key and value.
      pools.append(
        init_pages(
          config, num_layers=layers, num_kv_heads=1, head_dim=sum(layout),
          value_dim=layout[0], dtype=dtype,
        )
      )  # fmt: skip
    else:
      shapes = recurrent_pages.state_shapes(layout)
      pools.append(init_states(config, num_layers=layers, shapes=shapes))
  # The expert ids come last, so that the indices of other pools do not depend
  # on `record_experts`.
  if record_experts:
    pools.append(expert_records.init_pool(decoder, config))
  return tuple(pools) if len(pools) > 1 else pools[0]


def check_pools(
  pools: tuple[Any, ...], views: tuple[AnyView, ...], config: Decoder
) -> None:
  """Raises ValueError unless pools and views fit a decoder."""
  num_groups = groups.period(config)
  num_pools = len(groups.pools(config))
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
  num_layers = groups.num_memory_layers(config)
  for pool in pools:
    # A pool may have more memory layers than the decoder uses.
    if pool.num_layers < num_layers:
      raise ValueError(
        f"`kv` must have {num_layers} layers or more for config, got "
        f"{pool.num_layers}; make it with init_kv."
      )
