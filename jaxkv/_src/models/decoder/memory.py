"""The memory that a decoder needs."""

import dataclasses
from typing import Any

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.memory import init as init_pages
from jaxkv._src.kv.recurrent_pages import init_states
from jaxkv._src.kv.view import AnyView
from jaxkv._src.models.decoder import layout
from jaxkv._src.models.decoder import routing
from jaxkv._src.models.decoder import states
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet

_DELTA_NET = [field.name for field in dataclasses.fields(DeltaNet)]


def cache_groups(decoder: Decoder) -> tuple[GroupKind, ...]:
  """For `CacheConfig.groups`: what a cache must keep for a decoder's layers.

  Layer i is in group i % C, where C is the period of the layers' windows.

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
  return layout.groups(decoder)


def init_kv(
  decoder: Decoder,
  config: CacheConfig,
  *,
  dtype: Any = None,
  experts: bool = False,
) -> Any:
  """Memory of a decoder for a cache, for `forward`.

  Args:
    decoder: whose layers it serves.
    config: of the cache, with `groups=cache_groups(decoder)`.
    dtype: of keys and values, see `jaxkv.kv.init`; None for the decoder's.
    experts: whether pages also keep which experts each token used, in all
      layers with `Experts`. `jaxkv.kv.read_tokens(kv[-1], ...)` reads them.

  Returns:
    `KVPages`, or a tuple if the layers need several kinds of memory. With
    `experts` a tuple whose last pool is `ExpertIdPages`.

  Raises:
    ValueError: the groups of the cache are not those of the decoder; or of
      `experts`, there are none, layers choose different numbers of them, or no
      layer keeps all tokens.

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
  wanted = layout.groups(decoder)
  if len(config.groups) != len(wanted):
    raise ValueError(
      f"`config.groups` must be the {len(wanted)} of the decoder, got "
      f"{len(config.groups)}; make the cache with groups=cache_groups(decoder)."
    )
  layers = layout.num_memory_layers(decoder)
  dtype = decoder.dtype if dtype is None else dtype
  pools = []
  for name, sizes in layout.pools(decoder):
    if name == "keys and values":
      heads, dim = sizes
      pools.append(
        init_pages(
          config, num_layers=layers, num_kv_heads=heads, head_dim=dim,
          dtype=dtype,
        )
      )  # fmt: skip
    elif name == "latents":
      pools.append(
        init_pages(
          config, num_layers=layers, num_kv_heads=1, head_dim=sum(sizes),
          value_dim=sizes[0], dtype=dtype,
        )
      )  # fmt: skip
    else:
      shapes = states.state_shapes(
        DeltaNet(**dict(zip(_DELTA_NET, sizes, strict=True)))
      )
      pools.append(init_states(config, num_layers=layers, shapes=shapes))
  if experts:
    pools.append(routing.init_pool(decoder, config))
  return tuple(pools) if len(pools) > 1 else pools[0]


def check_memory(
  pools: tuple[Any, ...], views: tuple[AnyView, ...], config: Decoder
) -> None:
  """Raises ValueError unless a memory and views are those of a decoder."""
  groups, wanted = layout.groups(config), len(layout.pools(config))
  if len(views) != len(groups):
    raise ValueError(
      f"`view` must have a view for each of the {len(groups)} layer groups of "
      f"config, got {len(views)}; give a tuple in the order of cache_groups."
    )
  if len(pools) > wanted and isinstance(pools[-1], ExpertIdPages):
    routing.check_pool(pools[-1], config)
    pools = pools[:-1]
  if len(pools) != wanted:
    raise ValueError(
      f"`kv` must have {wanted} pools for config, got {len(pools)}; make it "
      "with init_kv."
    )
  least = layout.num_memory_layers(config)
  for pool in pools:
    if pool.num_layers < least:
      raise ValueError(
        f"`kv` must have {least} layers for config, got {pool.num_layers}; "
        "make it with init_kv."
      )
