"""Pages of the K/V memory in host memory, and moves between host and device.

The pages in host memory are page-major: all layers of a page are contiguous, so
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
from jaxkv._src.cache.pool.host_pages import Moves
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.page_contents import arrays_of
from jaxkv._src.kv.page_contents import gathered
from jaxkv._src.kv.page_contents import page_shape
from jaxkv._src.kv.page_contents import scattered
from jaxkv._src.kv.pools import Memory
from jaxkv._src.kv.pools import Pools

HOST = "pinned_host"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
  """Pages in host memory; see `init_host`.

  Attributes:
    pages: one array for each array of the pools on the device. N2 is
      `CacheConfig.host_pages`, K is the size of the device array's second axis,
      such as heads, and a page has K * Y elements in all layers. If 128 does
      not divide Y, the last two axes are [1, Y].
      # storage dtype[N2, K, Y // 128, 128]
  """

  pages: tuple[Array, ...]


def init_host(kv: Pools, config: CacheConfig) -> HostMemory:
  """Makes pages of zeros in host memory, to which pages of `kv` can move.

  Args:
    kv: the pages on the device, of one pool or of a tuple of pools. If they are
      sharded by heads, the pages in host memory are sharded in the same way.
    config: the configuration of the cache, with `host_pages` above 0.

  Returns:
    `config.host_pages` pages in the memory `pinned_host`.

  Raises:
    ValueError: `config` has no host pages, or the platform has no memory
      `pinned_host`.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4, host_pages=32
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=2, num_kv_heads=2, head_dim=16)
    >>> host = init_host(kv, config)
    >>> host.pages[0].shape, host.pages[0].sharding.memory_kind
    ((32, 2, 1, 128), 'pinned_host')
  """
  check_config(config)
  if not config.host_pages:
    raise ValueError(
      "`config` must have pages in host memory, got host_pages=0; make it with "
      "CacheConfig(host_pages=...)."
    )
  arrays = arrays_of(kv)
  return HostMemory(
    pages=tuple(
      _zeros((config.host_pages, *page_shape(array, num_layers)), array)
      for array, num_layers in arrays
    )
  )


def _zeros(shape: tuple[int, ...], array: Array) -> Array:
  """Makes zeros in host memory, sharded like `array`."""
  if isinstance(array, Tracer):
    return jax.device_put(jnp.zeros(shape, array.dtype), jax.memory.Space.Host)
  place = array.sharding
  device = min(place.addressable_devices, key=lambda device: device.id)
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise ValueError(
      f"`kv` must be on a platform with the memory {HOST!r}, got "
      f"{device.platform} with {', '.join(kinds)}; use host_pages=0 there."
    )
  if isinstance(place, NamedSharding):
    split = (*place.spec, None, None)[1]
    where = NamedSharding(place.mesh, P(None, split), memory_kind=HOST)
  else:
    where = SingleDeviceSharding(device, memory_kind=HOST)
  # A jitted `zeros` would not have host memory in its type.
  return jax.device_put(np.zeros(shape, array.dtype), where)


def move(
  kv: Memory, host: HostMemory, moves: Moves
) -> tuple[Memory, HostMemory]:
  """Moves page contents between the device and host memory.

  Call it after each `admit`, `allocate`, `fork`, `truncate` and `pin`, in the
  order of these calls, and before `copy` and any write. These verbs give pages
  to sequences before the old contents of the pages are saved. Donate both
  memories, or carry them through a loop: a call without moves then costs one
  comparison. Without donation, each call copies both memories. Not supported
  under `vmap`.

  Args:
    kv: the pages on the device.
    host: the pages in host memory, from `init_host`.
    moves: `out.moves` of the verb.

  Returns:
    The pages on the device and the pages in host memory.

  Raises:
    ValueError: `host` was made for other pages, or is not in host memory.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4, host_pages=32
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=2, num_kv_heads=2, head_dim=16)
    >>> host = init_host(kv, config)
    >>> state, out = jaxkv.allocate(jaxkv.init(config), [5, 0])
    >>> kv, host = move(kv, host, out.moves)
    >>> int(out.moves.count)
    0
  """
  _checked(kv, host)
  if not isinstance(moves, Moves):
    expected = "`out.moves` of a verb of a cache with host_pages"
    arguments.refuse(TypeError, "moves", expected, moves)
  return _move(kv, host, moves)


def check_host(kv: Pools, host: HostMemory | None, config: CacheConfig) -> None:
  """Raises unless `host` has the pages that a cache and `kv` require.

  Raises:
    TypeError: `host` is not a HostMemory.
    ValueError: the number, shape, dtype or memory of the pages in `host` is
      wrong, or `host` is given for a cache without host pages.
  """
  if host is None and not config.host_pages:
    return
  if not config.host_pages:
    raise ValueError(
      "`host` must be None for a cache with host_pages=0; make the cache with "
      "CacheConfig(host_pages=...)."
    )
  host = _checked(kv, host)
  if host.pages[0].shape[0] != config.host_pages:
    raise ValueError(
      f"`host` must have {config.host_pages} pages, as the cache has, got "
      f"{host.pages[0].shape[0]}; make it with jaxkv.kv.init_host(kv, config)."
    )


def _checked(kv: Pools, host: Any) -> HostMemory:
  """Returns `host`; raises unless it has the pages that `kv` requires."""
  if not isinstance(host, HostMemory):
    arguments.refuse(TypeError, "host", "a HostMemory, from init_host", host)
  expected = [
    (page_shape(array, num_layers), array.dtype)
    for array, num_layers in arrays_of(kv)
  ]
  found = [(pages.shape[1:], pages.dtype) for pages in host.pages]
  if found != expected:
    raise ValueError(
      "`host` must have the pages of `kv` in the shapes and dtypes "
      f"{expected}, got {found}; make it with jaxkv.kv.init_host(kv, config)."
    )
  if any(
    jax.typeof(pages).memory_space != jax.memory.Space.Host
    for pages in host.pages
  ):
    raise ValueError(
      "`host` must have arrays whose type is in host memory, got "
      f"{', '.join(str(jax.typeof(pages)) for pages in host.pages)}; put numpy "
      "arrays there with jax.device_put, or make it with jaxkv.kv.init_host."
    )
  return host


@functools.partial(jax.jit, inline=True)
def _move(
  kv: Memory, host: HostMemory, moves: Moves
) -> tuple[Memory, HostMemory]:
  pools = arrays_of(kv)
  structure = jax.tree.structure(kv)

  # Each move reads a host page into `stage`, saves the device page, and writes
  # `stage` to the device page. So two pages can exchange their contents. A move
  # that restores nothing skips the read, and one that saves nothing the save.
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
      jnp.zeros((1, *pages.shape[1:]), pages.dtype) for pages in host.pages
    )
    loop = sharding.match_varying_axes((*loop, stage))
    return lax.fori_loop(0, moves.count, trip, loop)[:2]

  # A call without moves does not create `stage`.
  loop = tuple(array for array, _ in pools), host.pages
  device, far = loops.at_most_once(moves.count > 0, move_all, loop)
  return jax.tree.unflatten(structure, device), HostMemory(pages=far)


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
