"""Writing new tokens into their pages."""

import jax
import jax.numpy as jnp

from jaxkv_kernels import check
from jaxkv_kernels.storage import store


def append_kv(
  k_pages: jax.Array,
  v_pages: jax.Array,
  k_new: jax.Array,
  v_new: jax.Array,
  page_ids: jax.Array,
  offsets: jax.Array,
  *,
  page_offset: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
  """Writes token t to slot `offsets[t]` of page `page_ids[t]`.

  In place when the pools are donated or carried by a loop (bfloat16 on a CPU:
  only as uint16 bits, see `storage`). A token is dropped if its page id, with
  or without `page_offset`, or its offset is out of range. Two tokens for one
  place: either may win.

  Args:
    k_pages: [P, K, S, D].
    v_pages: [P, K, S, Dv].
    k_new: [T, K, D], rounded to the pool's format.
    v_new: [T, K, Dv].
    page_ids: int32[T]; an id out of range drops the token.
    offsets: int32[T], 0..S-1.
    page_offset: int32[], added to every page id.

  Returns:
    (k_pages, v_pages).

  Raises:
    ValueError: an argument has a shape or dtype that is not supported.

  Examples:
    >>> import jax.numpy as jnp
    >>> zeros = jnp.zeros((3, 1, 4, 2))
    >>> k_pages, _ = append_kv(
    ...   zeros,
    ...   zeros,
    ...   jnp.ones((2, 1, 2)),
    ...   jnp.ones((2, 1, 2)),
    ...   jnp.asarray([1, 3], jnp.int32),  # page 3 does not exist
    ...   jnp.asarray([2, 0], jnp.int32),
    ... )
    >>> k_pages[1, 0, 2], float(k_pages.sum())
    (Array([1., 1.], dtype=float32), 2.0)
  """
  check.pool("k_pages", k_pages)
  check.pool("v_pages", v_pages)
  tokens = page_ids.size
  check.vector("page_ids", page_ids, tokens)
  check.vector("offsets", offsets, tokens)
  check.scalar("page_offset", page_offset, jnp.integer)
  _check_new("k_new", k_new, k_pages, tokens)
  _check_new("v_new", v_new, v_pages, tokens)
  pages, page_size = k_pages.shape[0], k_pages.shape[2]
  where = page_ids + jnp.asarray(page_offset, jnp.int32)
  fits = (page_ids >= 0) & (page_ids < pages) & (where >= 0)
  fits &= (offsets >= 0) & (offsets < page_size)
  where = jnp.where(fits, where, pages)
  return (
    k_pages.at[where, :, offsets].set(store(k_new, k_pages.dtype), mode="drop"),
    v_pages.at[where, :, offsets].set(store(v_new, v_pages.dtype), mode="drop"),
  )


def _check_new(
  name: str, new: jax.Array, pages: jax.Array, tokens: int
) -> None:
  wanted = (tokens, pages.shape[1], pages.shape[3])
  if new.shape != wanted or not jnp.issubdtype(new.dtype, jnp.floating):
    raise ValueError(
      f"{name} is {new.dtype}{list(new.shape)}; it must be"
      f" float{list(wanted)} for a pool of shape {pages.shape}"
    )
