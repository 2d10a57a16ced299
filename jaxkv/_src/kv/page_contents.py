"""Contents of whole pages, in the layout for moves between memories.

The contents are page-major: all layers of a page are contiguous, so that one
transfer moves a page. In a pool, the layers of a page are apart.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.kv.pools import Memory
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pools_of

# The size of the last axis of a TPU's tiles, in offload memory too.
_LANES = 128
# Bounds the temporary arrays of `write_pages`.
_PAGES_AT_ONCE = 16


def arrays_of(kv: Pools) -> list[tuple[Array, int]]:
  """Returns the arrays of all pools, each with its number of layers."""
  return [
    (array, pool.num_layers)
    for pool in pools_of(kv)
    for array in jax.tree.leaves(pool)
  ]


def page_shape(array: Array, num_layers: int) -> tuple[int, ...]:
  """Returns the shape of a page's contents in an array of `OffloadMemory`."""
  rows = array.shape[1] if array.ndim > 1 else 1
  num_elements = num_layers * math.prod(array.shape[1:]) // rows
  lanes = _LANES if num_elements % _LANES == 0 else num_elements
  return rows, num_elements // lanes, lanes


def gathered(array: Array, num_layers: int, pages: Array) -> Array:
  """Returns the contents of `pages`, int32[X], as [X, *page_shape(...)]."""
  contents = array[_rows(array, num_layers, pages)]
  rows, *_ = page_shape(array, num_layers)
  contents = contents.reshape(num_layers, pages.shape[0], rows, -1)
  contents = jnp.moveaxis(contents, 0, 2)
  return contents.reshape(pages.shape[0], *page_shape(array, num_layers))


def scattered(
  array: Array, num_layers: int, pages: Array, contents: Array
) -> Array:
  """Writes `contents` into `pages`, int32[X]; skips pages that are NOWHERE."""
  count, rows = contents.shape[:2]
  contents = jnp.moveaxis(contents.reshape(count, rows, num_layers, -1), 2, 0)
  contents = contents.reshape(num_layers, count, *array.shape[1:])
  index = _rows(array, num_layers, pages)
  index = jnp.where(pages < NOWHERE, index, NOWHERE)
  return array.at[index].set(contents, mode="drop", unique_indices=True)


def read_pages(kv: Pools, pages: Array) -> tuple[Array, ...]:
  """Returns `gathered` of `pages`, int32[X], for each array of all pools."""
  return tuple(
    gathered(array, num_layers, pages) for array, num_layers in arrays_of(kv)
  )


def write_pages(
  kv: Memory, contents: tuple[Array, ...], sources: Array, pages: Array
) -> Memory:
  """Writes row `sources[e]` of `contents` into page `pages[e]`.

  Args:
    kv: the memory.
    contents: from `read_pages` of a memory with pages of the same shapes.
    sources: int32[E], rows of `contents`, for E entries.
    pages: int32[E], distinct; 0 for an entry to skip.
  """
  pools = arrays_of(kv)
  structure = jax.tree.structure(kv)
  is_page = pages > 0
  # The entries to write come first, so the loop visits only them.
  order = jnp.argsort(~is_page, stable=True).astype(jnp.int32)
  num_trips = -(-jnp.sum(is_page, dtype=jnp.int32) // _PAGES_AT_ONCE)
  targets = indexing.where_valid(is_page, pages)
  lanes = jnp.arange(_PAGES_AT_ONCE, dtype=jnp.int32)

  def trip(index: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    entry = indexing.take(order, index * _PAGES_AT_ONCE + lanes, fill=NOWHERE)
    target = indexing.take(targets, entry, fill=NOWHERE)
    source = indexing.take(sources, entry)
    return tuple(
      scattered(array, num_layers, target, indexing.take(content, source))
      for array, (_, num_layers), content in zip(
        arrays, pools, contents, strict=True
      )
    )

  arrays = tuple(array for array, _ in pools)
  num_trips, arrays = sharding.match_varying_axes((num_trips, arrays))
  arrays = lax.fori_loop(0, num_trips, trip, arrays)
  return jax.tree.unflatten(structure, arrays)


def _rows(array: Array, num_layers: int, pages: Array) -> Array:
  """Returns int32[L, X]: the index in `array` of each page in each layer."""
  layers = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
  return layers * (array.shape[0] // num_layers) + pages[None]
