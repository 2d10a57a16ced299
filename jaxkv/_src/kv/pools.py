"""Operations on pages of any kind, and on several memories at once."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.kv_pages import in_memory
from jaxkv._src.kv.recurrent_pages import StatePages

Pool = KVPages | StatePages | ExpertIdPages
Pools = Pool | tuple[Pool, ...]
"""The memory of a cache: one memory, or a tuple of memories. Each one has the
pages of one pool of the cache, and a pool can have several memories. Attention
groups use `KVPages`, and recurrent groups use `StatePages`."""

Memory = TypeVar("Memory", bound=Pools)


def pools_of(kv: Pools) -> tuple[Pool, ...]:
  """Returns the pools of a memory as a tuple, or raises if it has none."""
  pools = kv if isinstance(kv, tuple) else (kv,)
  for pool in pools:
    expected = "KVPages, StatePages, ExpertIdPages or a tuple of them"
    hint = "make them with jaxkv.kv.init, init_states and init_expert_ids"
    arguments.check_type("kv", pool, Pool, expected, hint)
  if not pools:
    arguments.refuse(ValueError, "kv", "one pool or more", kv)
  return pools


def pool_index(kv: Pools) -> dict[int, int]:
  """Maps the first page of each pool of a memory to the index of the pool."""
  first_pages = sorted({pool.first_page for pool in pools_of(kv)})
  return {page: index for index, page in enumerate(first_pages)}


def page_bytes(kv: Pools) -> int | tuple[int, ...]:
  """Returns the bytes of a page in all layers of all memories of its pool.

  Args:
    kv: the pages, of one memory or of a tuple of memories, or their shapes from
      `jax.eval_shape`.

  Returns:
    A number, or with several pools a tuple with a number for each pool, as
    `CacheConfig.page_bytes` expects it.

  Examples:
    >>> import functools
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jax.eval_shape(functools.partial(
    ...   jaxkv.kv.init, config, num_layers=3, num_kv_heads=2, head_dim=16))
    >>> page_bytes(kv)  # keys and values in bfloat16
    1536
  """
  index = pool_index(kv)
  num_bytes = [0 for _ in index]
  for pool in pools_of(kv):
    leaves = jax.tree.leaves(pool)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    num_bytes[index[pool.first_page]] += size // pool.num_pages
  return tuple(num_bytes) if len(num_bytes) > 1 else num_bytes[0]


def copy(kv: Memory, src: jax.Array, dst: jax.Array) -> Memory:
  """Copies page `src[r]` over page `dst[r]`, in every layer of its pool.

  Reads all sources before it writes any destination. Skips pairs with an id out
  of range, pairs of pages of two pools, and pairs whose destination is the null
  page. A call that skips all pairs costs nothing, except under `vmap` beside
  calls that copy pages.

  Args:
    kv: the pages, of one memory or of a tuple of memories.
    src: int32[R], ids 0..N-1.
    dst: int32[R]; pairs that are not skipped have different destinations.

  Returns:
    The pages.
  """
  pools_of(kv)
  arguments.check_int32("src", src, ("R",))
  arguments.check_int32("dst", dst, ("R",))
  return _copy(kv, src, dst)


@functools.partial(jax.jit, inline=True)
def _copy(kv: Memory, src: jax.Array, dst: jax.Array) -> Memory:
  def copy_in(pool: Pool) -> Pool:
    return _copy_in_pool(pool, src, dst)

  # Pools are the leaves, because L can differ between pools.
  return jax.tree.map(copy_in, kv, is_leaf=lambda kv: isinstance(kv, Pool))


def _copy_in_pool(pool: Pool, src: jax.Array, dst: jax.Array) -> Pool:
  src = in_memory(pool, src)
  dst = in_memory(pool, dst)
  # The null page becomes a row out of range, which `copy_pages` drops.
  dst = jnp.where(dst == 0, pool.num_pages, dst)

  def copy_in(array: jax.Array) -> jax.Array:
    # A TPU tiles the last two axes, so reshaping them would copy the pool.
    tile = (1, 1, *array.shape[1:])[-2:]
    pages = array.reshape(array.shape[0], -1, *tile)
    pages = kernels.copy_pages(pages, src, dst, num_layers=pool.num_layers)
    return pages.reshape(array.shape)

  return jax.tree.map(copy_in, pool)
