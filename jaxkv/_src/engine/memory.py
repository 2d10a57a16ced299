"""The memory of a rollout: a cache, and the K/V pages that it manages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.state import without_moves
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.kv.check import check
from jaxkv._src.kv.check import check_offload
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.offload_memory import OffloadMemory
from jaxkv._src.kv.offload_memory import move
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pools_of
from jaxkv._src.kv.recurrent_pages import StatePages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """A cache and its K/V memory.

  `score` accepts a memory in place of a `RolloutState`, for example that of a
  reference model:

    Memory(cache=jaxkv.init(sizes), kv=jaxkv.models.init_kv(config, sizes))

  Attributes:
    cache: the cache; `cache.epoch` is the version of the weights.
    kv: the K/V memory: a pool or a tuple of pools.
    offload: offloaded pages, from `jaxkv.kv.init_offload`; None without
      `CacheConfig.offload_pages`.
  """

  cache: CacheState
  kv: Pools
  offload: OffloadMemory | None = None


def move_pages(memory: Memory) -> Memory:
  """Moves pages to and from offload memory, as the cache has planned."""
  pool, offload = memory.cache.pool, memory.offload
  if pool.offload is None or offload is None:
    return memory
  with jax.named_scope("rare/move"):
    kv, offload = move(memory.kv, offload, pool.offload.moves)
  return Memory(cache=without_moves(memory.cache), kv=kv, offload=offload)


def check_slots_unused(cache: CacheState) -> None:
  """Raises ValueError if a slot is in use; a traced cache is not checked."""
  num_pages = cache.num_pages
  # A rollout frees no slots but those of its own sequences.
  if not isinstance(num_pages, Tracer) and np.any(np.asarray(num_pages)):
    raise ValueError(
      "`cache` must have no slot in use, got some; call jaxkv.free first."
    )


def check_pools(
  memory: Memory, config: RolloutConfig, name: str = "cache"
) -> None:
  """Raises unless the cache and the pools are supported and fit together.

  `name` is the argument that has the cache.
  """
  cache, kv = memory.cache, memory.kv
  check_single(cache, name)
  sizes = cache.config
  if len(set(sizes.page_sizes)) > 1:
    raise ValueError(
      "`cache` must have one page size for all groups, got "
      f"{sizes.page_sizes}; a rollout supports one page size only."
    )
  if config.decode_steps > sizes.slot_tokens:
    raise ValueError(
      "`RolloutConfig.decode_steps` must be at most the tokens of a slot, "
      f"{sizes.slot_tokens}, got {config.decode_steps}."
    )
  check_offload(kv, memory.offload, sizes)
  check(kv, sizes, offload=memory.offload, state=cache)
  _check_kinds(sizes, kv, config)


def _check_kinds(sizes: CacheConfig, kv: Pools, config: RolloutConfig) -> None:
  """Raises ValueError unless each group is supported and has a pool."""
  pools = pools_of(kv)
  for kind in sizes.groups:
    pool_type = StatePages if kind.holds_states else KVPages
    if not any(isinstance(pool, pool_type) for pool in pools):
      function = "init_states" if kind.holds_states else "init"
      raise ValueError(
        f"`kv` must have {pool_type.__name__} for the layers of {kind}, got "
        f"{', '.join(type(pool).__name__ for pool in pools)}; make a tuple of "
        f"pools, one of them with jaxkv.kv.{function}."
      )
    if kind.holds_states and config.draft_tokens:
      raise ValueError(
        "`RolloutConfig.draft_tokens` must be 0 with a recurrent group, got "
        f"{config.draft_tokens}: the state before a draft that is rejected "
        "would be lost."
      )


def has_version(cache: CacheState, version: Array | int | None) -> Array:
  """Returns bool[], True if `version` is that of the cache's weights.

  Also True if `version` is None and the cache is traced or has no cached pages.
  Outside of a trace, another version, or None for a cache with cached pages,
  raises ValueError.
  """
  epoch, index = cache.epoch, cache.pool.index
  # NumPy, because in a trace jax would trace even concrete arrays.
  if version is None:
    if index is None or isinstance(index.buckets, Tracer):
      return jnp.ones((), bool)
    if not np.asarray(index.buckets).any():
      return jnp.ones((), bool)
    raise ValueError(
      "`version` must be given, because the cache holds pages of the weights "
      f"of version {int(epoch)}; give this version if the weights are the "
      "same. If they have changed, first call jaxkv.new_epoch or "
      "jaxkv.rollout.update_weights."
    )
  # `as_int32` refuses a traced uint32, which is the dtype of `epoch`.
  if getattr(version, "dtype", None) == jnp.uint32:
    version = jnp.asarray(version).astype(jnp.int32)
  number = as_int32("version", version, ())
  if isinstance(number, Tracer) or isinstance(epoch, Tracer):
    return jnp.asarray(number).astype(jnp.uint32) == epoch
  if int(number) != int(epoch):
    raise ValueError(
      f"`version` must be {int(epoch)}, the version of the cache's pages, got "
      f"{int(number)}; call jaxkv.new_epoch or jaxkv.rollout.update_weights "
      "once for each change of the weights."
    )
  return jnp.ones((), bool)
