"""Contents of whole pages, in the layout for moves between memories.

The contents are page-major: all layers of a page are contiguous, so that one
transfer moves a page. In a memory, the layers of a page are apart. Pages of
several pools are listed pool by pool, because they differ in size.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.kv.pools import Memory
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pool_index
from jaxkv._src.kv.pools import pools_of

# The size of the last axis of a TPU's tiles, in offload memory too.
_LANES = 128
# Bound the temporary arrays of `write_pages`.
_PAGES_AT_ONCE = 16
_BYTES_AT_ONCE = 64 * 2**20


class PageArray(NamedTuple):
  """An array of a memory.

  Attributes:
    values: the array.  # [L * N, ...]
    num_layers: L.
    pool: the index of the pool of its pages.
    first_page: the number of its first page.
  """

  values: Array
  num_layers: int
  pool: int
  first_page: int

  @property
  def num_pages(self) -> int:
    """N, the pages of one layer."""
    return self.values.shape[0] // self.num_layers

  def page_shape(self) -> tuple[int, int, int]:
    """Returns the shape of a page's contents in an array of `OffloadMemory`."""
    shape = self.values.shape
    rows = shape[1] if len(shape) > 1 else 1
    num_elements = self.num_layers * math.prod(shape[1:]) // rows
    lanes = _LANES if num_elements % _LANES == 0 else num_elements
    return rows, num_elements // lanes, lanes

  def has(self, pages: Array) -> Array:
    """Returns bool[...]: True for pages in this array, except its first one."""
    row = pages - self.first_page
    return (row > 0) & (row < self.num_pages)


def arrays_of(kv: Pools) -> list[PageArray]:
  """Returns the arrays of all memories, in the order of the leaves of `kv`."""
  index = pool_index(kv)
  return [
    PageArray(values, pool.num_layers, index[pool.first_page], pool.first_page)
    for pool in pools_of(kv)
    for values in jax.tree.leaves(pool)
  ]


def gathered(array: PageArray, pages: Array) -> Array:
  """Returns the contents of `pages`, int32[X], as [X, *page_shape]."""
  contents = array.values[_rows(array, pages)]
  rows, *_ = array.page_shape()
  contents = contents.reshape(array.num_layers, pages.shape[0], rows, -1)
  contents = jnp.moveaxis(contents, 0, 2)
  return contents.reshape(pages.shape[0], *array.page_shape())


def scattered(array: PageArray, pages: Array, contents: Array) -> Array:
  """Writes `contents` into `pages`, int32[X]; skips pages that are NOWHERE."""
  count, rows = contents.shape[:2]
  contents = contents.reshape(count, rows, array.num_layers, -1)
  contents = jnp.moveaxis(contents, 2, 0)
  contents = contents.reshape(array.num_layers, count, *array.values.shape[1:])
  index = _rows(array, pages)
  index = jnp.where(pages < NOWHERE, index, NOWHERE)
  return array.values.at[index].set(contents, mode="drop", unique_indices=True)


def read_pages(kv: Pools, pages_of_pools: Sequence[Array]) -> tuple[Array, ...]:
  """Returns the contents of some pages of each pool, int32[X], by array."""
  return tuple(
    gathered(array, pages_of_pools[array.pool]) for array in arrays_of(kv)
  )


def write_pages(
  kv: Memory, contents: tuple[Array, ...], sources: Array, pages: Array
) -> Memory:
  """Writes row `sources[e]` of a pool's `contents` into its page `pages[e]`.

  `contents` are from `read_pages` of a memory with pages of the same shapes.
  The pages, int32[E], are distinct; 0 for an entry to skip.
  """
  arrays = arrays_of(kv)
  structure = jax.tree.structure(kv)
  new_values = [array.values for array in arrays]
  for pool in sorted({array.pool for array in arrays}):
    places = [i for i, array in enumerate(arrays) if array.pool == pool]
    written = _write_in_pool(
      [arrays[i] for i in places],
      [contents[i] for i in places],
      sources,
      pages,
    )
    for place, values in zip(places, written, strict=True):
      new_values[place] = values
  return jax.tree.unflatten(structure, new_values)


def _write_in_pool(
  arrays: list[PageArray],
  contents: list[Array],
  sources: Array,
  pages: Array,
) -> tuple[Array, ...]:
  """Writes the pages of one pool; returns the new values of its arrays."""
  # All arrays of a pool have the same pages.
  is_page = arrays[0].has(pages)
  num_bytes = sum(array.values.nbytes // array.num_pages for array in arrays)
  count = max(1, min(_PAGES_AT_ONCE, _BYTES_AT_ONCE // num_bytes))
  # The entries to write come first, so the loop visits only them.
  order = jnp.argsort(~is_page, stable=True).astype(jnp.int32)
  num_trips = -(-jnp.sum(is_page, dtype=jnp.int32) // count)
  targets = indexing.where_valid(is_page, pages)
  lanes = jnp.arange(count, dtype=jnp.int32)

  def trip(index: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
    entry = indexing.take(order, index * count + lanes, fill=NOWHERE)
    target = indexing.take(targets, entry, fill=NOWHERE)
    source = indexing.take(sources, entry)
    return tuple(
      scattered(
        array._replace(values=value), target, indexing.take(content, source)
      )
      for value, array, content in zip(values, arrays, contents, strict=True)
    )

  values = tuple(array.values for array in arrays)
  num_trips, values = sharding.match_varying_axes((num_trips, values))
  return lax.fori_loop(0, num_trips, trip, values)


def _rows(array: PageArray, pages: Array) -> Array:
  """Returns int32[L, X]: the index in an array of each page in each layer."""
  layers = jnp.arange(array.num_layers, dtype=jnp.int32)[:, None]
  return layers * array.num_pages + pages[None] - array.first_page
