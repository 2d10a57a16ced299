"""Pages of the K/V memory in offload memory, and moves to and from the device.

`page_contents` has the layout of offloaded pages.
"""

import dataclasses
import functools
from collections.abc import Sequence
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
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import sticky
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.page_contents import PageArray
from jaxkv._src.kv.page_contents import arrays_of
from jaxkv._src.kv.page_contents import gathered
from jaxkv._src.kv.page_contents import scattered
from jaxkv._src.kv.pools import Memory
from jaxkv._src.kv.pools import Pools

PINNED_HOST = "pinned_host"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadMemory:
  """Offloaded pages; see `init_offload`.

  Attributes:
    pages: one array for each array of the memory on the device. N2 is the
      number of offloaded pages of its pool, K is the size of the device array's
      second axis, such as heads, and a page has K * Y elements in all layers.
      If 128 does not divide Y, the last two axes are [1, Y].
      # storage dtype[N2, K, Y // 128, 128]
    num_moves: the number of moves made since `init_offload`, modulo 2**32.
      # uint32[]
    error: MOVES_FORGOTTEN or MOVES_REPEATED after the first call of `move` that
      was not the next one, see `jaxkv.Status`; else OK.  # int32[]
  """

  pages: tuple[Array, ...]
  num_moves: Array
  error: Array


def init_offload(kv: Pools, config: CacheConfig) -> OffloadMemory:
  """Makes pages of zeros in offload memory, to which pages of `kv` can move.

  Args:
    kv: the pages on the device, of one memory or of a tuple of memories. If
      they are sharded by heads, the offloaded pages are sharded in the same
      way.
    config: the configuration of the cache, with `offload_pages` above 0.

  Returns:
    `config.offload_pages` pages of each pool, in the memory `pinned_host`.

  Raises:
    ValueError: `config` has no offload pages, or the platform has no memory
      `pinned_host`.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4,
    ...   offload_pages=32
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=2, num_kv_heads=2, head_dim=16)
    >>> offload = init_offload(kv, config)
    >>> offload.pages[0].shape, offload.pages[0].sharding.memory_kind
    ((32, 2, 1, 128), 'pinned_host')
  """
  check_config(config)
  if not config.offload_pages:
    raise ValueError(
      "`config` must have offloaded pages, got offload_pages=0; make it with "
      "CacheConfig(offload_pages=...)."
    )
  arrays = arrays_of(kv)
  counts = offload_counts(kv, config)
  return OffloadMemory(
    pages=tuple(
      _zeros((count, *array.page_shape()), array.values)
      for count, array in zip(counts, arrays, strict=True)
    ),
    num_moves=_scalar(jnp.uint32, arrays[0].values),
    error=_scalar(jnp.int32, arrays[0].values),
  )


def offload_counts(kv: Pools, config: CacheConfig) -> tuple[int, ...]:
  """Returns the number of offloaded pages of each array of a memory."""
  sizes = config.offload_numbers.sizes
  return tuple(sizes[array.pool] - 1 for array in arrays_of(kv))


def _scalar(dtype: Any, array: Array) -> Array:
  """Makes a zero on the devices of `array`."""
  zero = jnp.zeros((), dtype)
  if isinstance(array, Tracer) or not array.committed:
    return zero
  where = array.sharding
  if isinstance(where, NamedSharding):
    where = NamedSharding(where.mesh, P())
  return jax.device_put(zero, where)


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

  If the moves are not the next ones, nothing moves, and `offload.error` records
  MOVES_FORGOTTEN or MOVES_REPEATED, which `check` reports. Moves that are made
  after a write to their pages are not noticed: pages have no time of their last
  write, because each layer would have to update it.

  Args:
    kv: the pages on the device.
    offload: the offloaded pages, from `init_offload`.
    moves: `out.moves` of the verb.

  Returns:
    The pages on the device and the offloaded pages.

  Raises:
    ValueError: `offload` was made for other pages, or is not in host memory.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4,
    ...   offload_pages=32
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=2, num_kv_heads=2, head_dim=16)
    >>> offload = init_offload(kv, config)
    >>> state, out = jaxkv.allocate(jaxkv.init(config), [5, 0])
    >>> kv, offload = move(kv, offload, out.moves)
    >>> int(out.moves.count)
    0
  """
  checked(kv, offload)
  if not isinstance(moves, Moves):
    expected = "`out.moves` of a verb of a cache with offload_pages"
    arguments.refuse(TypeError, "moves", expected, moves)
  return _move(kv, offload, moves)


def checked(kv: Pools, offload: Any) -> OffloadMemory:
  """Returns `offload`; raises unless it has the pages that `kv` requires."""
  if not isinstance(offload, OffloadMemory):
    arguments.refuse(
      TypeError, "offload", "an OffloadMemory, from init_offload", offload
    )
  expected = [
    (array.page_shape(), array.values.dtype) for array in arrays_of(kv)
  ]
  page_types = [(pages.shape[1:], pages.dtype) for pages in offload.pages]
  if page_types != expected:
    raise ValueError(
      "`offload` must have the pages of `kv` in the shapes and dtypes "
      f"{expected}, got {page_types}; make it with "
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
  arrays = arrays_of(kv)
  structure = jax.tree.structure(kv)
  # Handmade moves have no start, and are always the next ones.
  start = offload.num_moves if moves.start is None else moves.start
  first_offload_pages = _first_offload_pages(arrays, offload)

  # Each move reads an offload page into `stage`, saves the device page, and
  # writes `stage` to the device page. So two pages can exchange their contents.
  # A move that restores nothing skips the read, and one that saves nothing the
  # save.
  def trip(index: Array, loop):
    for pool in first_offload_pages:
      loop = move_in_pool(pool, index, loop)
    return loop

  def move_in_pool(pool: int, index: Array, loop):
    """Makes a move if its page is in the pool."""
    places = [i for i, array in enumerate(arrays) if array.pool == pool]
    all_device, all_offload, all_stage = loop
    device = [arrays[i]._replace(values=all_device[i]) for i in places]
    offload_pages = tuple(all_offload[i] for i in places)
    stage = tuple(all_stage[i] for i in places)
    page = moves.page[index]
    first_page = first_offload_pages[pool]
    source = moves.restored_from[index] - first_page
    target = moves.saved_to[index] - first_page
    restores = moves.restored_from[index] < Moves.NONE
    saves = moves.saved_to[index] < Moves.NONE
    if len(first_offload_pages) > 1:
      restores &= device[0].has(page)
      saves &= device[0].has(page)

    def read(stage):
      return tuple(
        jax.device_put(
          lax.dynamic_slice_in_dim(pages, source, 1), jax.memory.Space.Device
        )
        for pages in offload_pages
      )

    def save(loop):
      _, offload_pages = loop
      contents = [gathered(array, page[None]) for array in device]
      offload_pages = tuple(
        lax.dynamic_update_slice(
          pages,
          jax.device_put(content, jax.memory.Space.Host),
          (target_after_read, 0, 0, 0),
        )
        for pages, content in zip(offload_pages, contents, strict=True)
      )
      return _read_of(contents), offload_pages

    stage = loops.at_most_once(restores, read, stage)
    target_after_read = loops.read_before(_read_of(stage), target)
    zero = jnp.zeros((), jnp.int32)
    saved, offload_pages = loops.at_most_once(
      saves, save, (zero, offload_pages)
    )
    target_page = loops.read_before(saved, jnp.where(restores, page, NOWHERE))
    values = [
      scattered(array, target_page[None], content)
      for array, content in zip(device, stage, strict=True)
    ]
    return tuple(
      _replaced(all_parts, places, parts)
      for all_parts, parts in (
        (all_device, values),
        (all_offload, offload_pages),
        (all_stage, stage),
      )
    )

  def move_all(loop):
    stage = tuple(
      jnp.zeros((1, *pages.shape[1:]), pages.dtype) for pages in offload.pages
    )
    device, offload_pages, num_moves, error = loop
    misuse = misuse_of(start, num_moves)
    error = sticky(error, misuse)
    count = jnp.where(misuse == Status.OK, moves.count, 0)
    loop = sharding.match_varying_axes((device, offload_pages, stage))
    device, offload_pages, _ = lax.fori_loop(0, count, trip, loop)
    return device, offload_pages, num_moves + count.astype(jnp.uint32), error

  # A call without moves does not create `stage`.
  device = tuple(array.values for array in arrays)
  loop = device, offload.pages, offload.num_moves, offload.error
  is_needed = (moves.count > 0) | (start != offload.num_moves)
  device, offload_pages, num_moves, error = loops.at_most_once(
    is_needed, move_all, loop
  )
  offload = OffloadMemory(pages=offload_pages, num_moves=num_moves, error=error)
  return jax.tree.unflatten(structure, device), offload


def _first_offload_pages(
  arrays: list[PageArray], offload: OffloadMemory
) -> dict[int, int]:
  """Maps each pool to the number in `Moves` of its first offloaded page."""
  counts = {
    array.pool: pages.shape[0]
    for array, pages in zip(arrays, offload.pages, strict=True)
  }
  first_pages = {}
  first_page = 0
  for pool in sorted(counts):
    first_pages[pool] = first_page
    # One number between the pages of two pools is not used.
    first_page += counts[pool] + 1
  return first_pages


def _replaced(values: tuple, places: list[int], parts: Sequence) -> tuple:
  """Returns a tuple with `parts` at `places`."""
  new_values = list(values)
  for place, part in zip(places, parts, strict=True):
    new_values[place] = part
  return tuple(new_values)


def misuse_of(num_planned: Array, num_moves: Array) -> Array:
  """Compares planned moves with those that were made; returns a `Status`."""
  # Both counts can have wrapped around.
  difference = (num_planned - num_moves).astype(jnp.int32)
  return first_code(
    (difference > 0, Status.MOVES_FORGOTTEN),
    (difference < 0, Status.MOVES_REPEATED),
  )


def _read_of(contents: Any) -> Array:
  """Returns the argument `read` of `read_before`, for a page's contents."""
  total = jnp.zeros((), jnp.uint32)
  for content in contents:
    bits = np.dtype(f"uint{8 * content.dtype.itemsize}")
    first = lax.bitcast_convert_type(content.reshape(-1)[0], bits)
    total += first.astype(jnp.uint32)
  return (total >> 1).astype(jnp.int32)
