"""Copies whole pages within a pool, and gathers pages out of it.

Letters: a pool has L layers of N pages of S tokens, with K heads of D elements.
A table has B rows of M pages. A copy has R pairs of pages.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src import check
from jaxkv_kernels._src.quantization import load


def copy_pages(
  pages: jax.Array, src: jax.Array, dst: jax.Array, *, num_layers: int = 1
) -> jax.Array:
  """Copies page `src[r]` over page `dst[r]`, in every layer.

  Reads all sources before it writes any destination. Works in place if the pool
  is donated or carried by a loop; on a CPU not for bfloat16 or float8. Skips
  pairs with an id out of range. A call that skips all pairs costs nothing,
  except under `vmap` beside calls that copy pages. With equal destinations, it
  is undefined which pair is copied.

  Args:
    pages: [L * N, K, S, D].
    src: int32[R], ids 0..N-1.
    dst: int32[R], ids 0..N-1.
    num_layers: L.

  Returns:
    The pool.

  Examples:
    >>> import jax.numpy as jnp
    >>> pool = jnp.arange(4.0).reshape(4, 1, 1, 1)
    >>> copied = copy_pages(
    ...   pool, jnp.asarray([3, 1], jnp.int32), jnp.asarray([1, 9], jnp.int32)
    ... )
    >>> copied.ravel()
    Array([0., 3., 2., 3.], dtype=float32)
  """
  check.pool("pages", pages)
  num_pages = pages.shape[0]
  check.count("num_layers", num_layers)
  if num_pages % num_layers != 0:
    expected = f"a divisor of the pool's {num_pages} pages"
    check.refuse(ValueError, "num_layers", expected, num_layers)
  check.vector("src", src, None)
  check.vector("dst", dst, src.size)
  check.same_devices("pages", pages, src=src, dst=dst)
  per_layer = num_pages // num_layers
  fits = (src >= 0) & (src < per_layer) & (dst >= 0) & (dst < per_layer)

  def copy_layer(layer: jax.Array, pool: jax.Array) -> jax.Array:
    first_page = layer * per_layer
    # Ids out of range may read any page, because the scatter drops their pairs.
    content = pool.at[src + first_page].get(mode="clip")
    return pool.at[jnp.where(fits, dst + first_page, num_pages)].set(
      content, mode="drop"
    )

  # A loop of zero steps skips the copies. A `cond` would copy the pool.
  steps = jnp.where(jnp.any(fits), num_layers, 0).astype(jnp.int32)
  return lax.fori_loop(0, steps, copy_layer, jnp.asarray(pages))


def gather_pages(
  pages: jax.Array, page_table: jax.Array, *, page_offset: jax.Array | int = 0
) -> jax.Array:
  """Gathers the pages of each sequence into one dense array.

  Args:
    pages: [L * N, K, S, D].
    page_table: int32[B, M]; an id outside 0..L * N - 1 reads as zeros.
    page_offset: int32[], added to every page id; sums have the same range.

  Returns:
    [B, M * S, K, D] in the pool's `logical_dtype`. Elements past the end of a
    sequence are arbitrary.
  """
  check.pool("pages", pages)
  check.table(page_table, None)
  check.scalar("page_offset", page_offset, jnp.integer)
  check.same_devices(
    "pages", pages, page_table=page_table, page_offset=page_offset
  )
  pages = jnp.asarray(pages)
  num_pages, kv_heads, _, dim = pages.shape
  ids = page_table + jnp.asarray(page_offset, jnp.int32)
  # Ids are checked before the offset is added, because the offset would turn -1
  # into a page of the previous layer. An index of `num_pages` reads as zeros.
  fits = (page_table >= 0) & (page_table < num_pages) & (ids >= 0)
  tiles = load(
    pages.at[jnp.where(fits, ids, num_pages)].get(mode="fill", fill_value=0)
  )
  return tiles.swapaxes(2, 3).reshape(page_table.shape[0], -1, kv_heads, dim)
