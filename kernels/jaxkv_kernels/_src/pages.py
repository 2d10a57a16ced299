"""Copies whole pages within a pool.

Letters: a pool has L layers of N pages of S tokens, with K heads of D elements.
A copy has R pairs of pages.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src import check


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
