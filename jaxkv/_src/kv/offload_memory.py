"""Pages of the K/V memory in offload memory, and moves between host and device.

The offloaded pages are page-major: all layers of a page are contiguous, so
that one transfer moves a page. On the device, the layers of a page are apart.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from jaxkv._src.arrays import arguments
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool.offload_pages import Moves
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.page_contents import arrays_of
from jaxkv._src.kv.page_contents import gathered
from jaxkv._src.kv.page_contents import page_shape
from jaxkv._src.kv.page_contents import scattered
from jaxkv._src.kv.pools import Memory
from jaxkv._src.kv.pools import Pools

PINNED_HOST = "pinned_host"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadMemory:
  """Offloaded pages; see `init_offload`.

  Attributes:
    pages: one array for each array of the pools on the device. N2 is
      `CacheConfig.offload_pages`, K is the size of the device array's second
      axis, such as heads, and a page has K * Y elements in all layers. If 128
      does not divide Y, the last two axes are [1, Y].
      # storage dtype[N2, K, Y // 128, 128]
  """

  pages: tuple[Array, ...]


def init_offload(kv: Pools, config: CacheConfig) -> OffloadMemory:
  """Makes pages of zeros in offload memory, to which pages of `kv` can move.

  Args:
    kv: the pages on the device, of one pool or of a tuple of pools. If they are
      sharded by heads, the offloaded pages are sharded in the same way.
    config: the configuration of the cache, with `offload_pages` above 0.

  Returns:
    `config.offload_pages` pages in the memory `pinned_host`.

  Raises:
    ValueError: `config` has no offload pages, or the platform has no memory
      `pinned_host`.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4,
    offload_pages=32
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=2, num_kv_heads=2, head_dim=16)
    >>> offload = init_offload(kv, config)
    >>> host.pages[0].shape, host.pages[0].sharding.memory_kind
    ((32, 2, 1, 128), 'pinned_host')
  """
  check_config(config)
  if not config.offload_pages:
    raise ValueError(
      "`config` must have offloaded pages, got offload_pages=0; make it with "
      "CacheConfig(offload_pages=...)."
    )
  arrays = arrays_of(kv)
  return OffloadMemory(
    pages=tuple(
      _zeros((config.offload_pages, *page_shape(array, num_layers)), array)
      for array, num_layers in arrays
    )
  )


def _zeros(shape: tuple[int, ...], array: Array) -> Array:
  """Makes zeros in offload memory, sharded like `array`."""
  if isinstance(array, Tracer):
    return jax.device_put(jnp.zeros(shape, array.dtype), jax.memory.Space.Host)
  place = array.sharding
  device = min(place.addressable_devices, key=lambda device: device.id)
  kinds = [memory.kind for memory in device.addressable_memories()]
  if PINNED_HOST not in kinds:
    raise ValueError(
      f"`kv` must be on a platform with the memory {PINNED_HOST!r}, got "
      f"{device.platform} with {', '.join(kinds)}; use offload_pages=0 there."
    )
  if isinstance(place, NamedSharding):
    split = (*place.spec, None, None)[1]
    where = NamedSharding(place.mesh, P(None, split), memory_kind=PINNED_HOST)
  else:
    where = SingleDeviceSharding(device, memory_kind=PINNED_HOST)
  # A jitted `zeros` would not have offload memory in its type.
  return jax.device_put(np.zeros(shape, array.dtype), where)


def move(
  kv: Memory, offload: OffloadMemory, moves: Moves
) -> tuple[Memory, OffloadMemory]:
  """Moves page contents between the device and offload memory.

  Call it after each `admit`, `allocate`, `fork`, `truncate` and `pin`, in the
  order of these calls, and before `copy` and any write. These verbs give pages
  to sequences before the old contents of the pages are saved. Donate both
  memories, or carry them through a loop: a call without moves then costs one
  comparison. Without donation, each call copies both memories. Not supported
  under `vmap`.

  Args:
    kv: the pages on the device.
    offload: the offloaded pages, from `init_offload`.
    moves: `out.moves` of the verb.

  Returns:
    The pages on the device and the offloaded pages.

  Raises:
    ValueError: `offload` was made for other pages, or is not in offload memory.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4,
    offload_pages=32
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=2, num_kv_heads=2, head_dim=16)
    >>> offload = init_offload(kv, config)
    >>> state, out = jaxkv.allocate(jaxkv.init(config), [5, 0])
    >>> kv, offload = move(kv, offload, out.moves)
    >>> int(out.moves.count)
    0
  """
  _checked(kv, offload)
  if not isinstance(moves, Moves):
    expected = "`out.moves` of a verb of a cache with offload_pages"
    arguments.refuse(TypeError, "moves", expected, moves)
  return _move(kv, offload, moves)


def check_offload(
  kv: Pools, offload: OffloadMemory | None, config: CacheConfig
) -> None:
  """Raises unless `offload` has the pages that a cache and `kv` require.

  Raises:
    TypeError: `offload` is not an OffloadMemory.
    ValueError: the number, shape, dtype or memory of the pages in `offload` is
      wrong, or `offload` is given for a cache without offload pages.
  """
  if offload is None and not config.offload_pages:
    return
  if not config.offload_pages:
    raise ValueError(
      "`offload` must be None for a cache with offload_pages=0; make the "
      "cache with CacheConfig(offload_pages=...)."
    )
  offload = _checked(kv, offload)
  if offload.pages[0].shape[0] != config.offload_pages:
    raise ValueError(
      f"`offload` must have {config.offload_pages} pages, as the cache has, "
      f"got {offload.pages[0].shape[0]}; make it with "
      "jaxkv.kv.init_offload(kv, config)."
    )


def _checked(kv: Pools, offload: Any) -> OffloadMemory:
  """Returns `offload`; raises unless it has the pages that `kv` requires."""
  if not isinstance(offload, OffloadMemory):
    arguments.refuse(
      TypeError, "offload", "an OffloadMemory, from init_offload", offload
    )
  expected = [
    (page_shape(array, num_layers), array.dtype)
    for array, num_layers in arrays_of(kv)
  ]
  found = [(pages.shape[1:], pages.dtype) for pages in offload.pages]
  if found != expected:
    raise ValueError(
      "`offload` must have the pages of `kv` in the shapes and dtypes "
      f"{expected}, got {found}; make it with "
      "jaxkv.kv.init_offload(kv, config)."
    )
  if any(
    jax.typeof(pages).memory_space != jax.memory.Space.Host
    for pages in offload.pages
  ):
    raise ValueError(
      "`offload` must have arrays whose type is in host memory, got "
      f"{', '.join(str(jax.typeof(pages)) for pages in offload.pages)}; put "
      "numpy arrays there with jax.device_put, or make it with "
      "jaxkv.kv.init_offload."
    )
  return offload


@functools.partial(jax.jit, inline=True)
def _move(
  kv: Memory, offload: OffloadMemory, moves: Moves
) -> tuple[Memory, OffloadMemory]:
  pools = arrays_of(kv)
  structure = jax.tree.structure(kv)

  # Each move reads an offload page into `stage`, saves the device page, and
  # writes `stage` to the device page. So two pages can exchange their contents.
  # A move that restores nothing skips the read, and one that saves nothing the
  # save.
  def trip(index: Array, loop):
    device, far, stage = loop
    page = moves.page[index]
    source, target = moves.restored_from[index], moves.saved_to[index]
    restores, saves = source < Moves.NONE, target < Moves.NONE

    def read(stage):
      return tuple(
        jax.device_put(_slice(pages, source), jax.memory.Space.Device)
        for pages in far
      )

    def save(loop):
      _, far = loop
      contents = [
        gathered(array, num_layers, page[None])
        for array, (_, num_layers) in zip(device, pools, strict=True)
      ]
      far = tuple(
        lax.dynamic_update_slice(
          pages,
          jax.device_put(content, jax.memory.Space.Host),
          (target_after_read, 0, 0, 0),
        )
        for pages, content in zip(far, contents, strict=True)
      )
      return _read_of(contents), far

    stage = loops.at_most_once(restores, read, stage)
    target_after_read = loops.read_before(_read_of(stage), target)
    zero = jnp.zeros((), jnp.int32)
    saved, far = loops.at_most_once(saves, save, (zero, far))
    place = loops.read_before(saved, jnp.where(restores, page, NOWHERE))
    device = tuple(
      scattered(array, num_layers, place[None], content)
      for array, content, (_, num_layers) in zip(
        device, stage, pools, strict=True
      )
    )
    return device, far, stage

  def move_all(loop):
    stage = tuple(
      jnp.zeros((1, *pages.shape[1:]), pages.dtype) for pages in offload.pages
    )
    loop = sharding.match_varying_axes((*loop, stage))
    return lax.fori_loop(0, moves.count, trip, loop)[:2]

  # A call without moves does not create `stage`.
  loop = tuple(array for array, _ in pools), offload.pages
  device, far = loops.at_most_once(moves.count > 0, move_all, loop)
  return jax.tree.unflatten(structure, device), OffloadMemory(pages=far)


def _slice(pages: Array, index: Array) -> Array:
  return lax.dynamic_slice(pages, (index, 0, 0, 0), (1, *pages.shape[1:]))


def _read_of(contents: Any) -> Array:
  """Returns the argument `read` of `read_before`, for a page's contents."""
  total = jnp.zeros((), jnp.uint32)
  for content in contents:
    bits = np.dtype(f"uint{8 * content.dtype.itemsize}")
    first = lax.bitcast_convert_type(content.reshape(-1)[0], bits)
    total += first.astype(jnp.uint32)
  return (total >> 1).astype(jnp.int32)
