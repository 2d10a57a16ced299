"""Writes new tokens into pages, in place.

Letters: a pool has N pages of S tokens, with K heads of D elements. A call has
T new tokens.
"""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src import check
from jaxkv_kernels._src.quantization import store


def append_pages(
  pages: jax.Array,
  new: jax.Array,
  page_ids: jax.Array,
  offsets: jax.Array,
  *,
  page_offset: jax.Array | int = 0,
  scale: jax.Array | None = None,
) -> jax.Array:
  """Writes new tokens into a pool of keys, values, latents or scales.

  Writes token t to page `page_ids[t] + page_offset` at offset `offsets[t]`.
  Writes are in place if the pool is donated or carried by a loop. On a CPU this
  does not hold for pools of dtype bfloat16 or float8 (see `quantization`). A
  token is dropped if its offset is out of range, or if its page id is out of
  range before or after `page_offset` is added. If two tokens have the same page
  and offset, it is undefined which of them is written.

  Floats are rounded to the pool's format. Without a scale, values of the pool's
  dtype are stored unchanged, and an int8 pool does not accept floats.

  Args:
    pages: [N, K, S, D], or [N, K, S] for scales.
    new: [T, K, D], or [T, K] for scales; floats or the pool's dtype.
    page_ids: int32[T]; an id out of range drops its token.
    offsets: int32[T], 0..S-1.
    page_offset: int32[], added to every page id.
    scale: float32[K], by which `new` is divided; `new` must then be floats.
      Pass the same scale to `AttentionOptions`.

  Returns:
    The pool.

  Examples:
    Writes an 8-bit key, and its scale for each head:

    >>> import jax.numpy as jnp
    >>> from jaxkv_kernels import quantize
    >>> pages = jnp.zeros((2, 1, 4, 2), jnp.int8)
    >>> k_scale = jnp.zeros((2, 1, 4))  # for `AttentionOptions`
    >>> where = jnp.asarray([1], jnp.int32), jnp.asarray([3], jnp.int32)
    >>> stored, factors = quantize(jnp.asarray([[[3.0, -6.0]]]), "int8")
    >>> pages = append_pages(pages, stored, *where)
    >>> k_scale = append_pages(k_scale, factors, *where)
    >>> pages[1, 0, 3].tolist(), round(float(k_scale[1, 0, 3]) * 127, 4)
    ([64, -127], 6.0)
  """
  check.pool("pages", pages, num_axes=(3, 4))
  check.vector("page_ids", page_ids, None)
  check.vector("offsets", offsets, page_ids.size)
  check.scalar("page_offset", page_offset, jnp.integer)
  _check_new(new, pages, page_ids.size)
  check.same_devices(
    "pages",
    pages,
    new=new,
    page_ids=page_ids,
    offsets=offsets,
    page_offset=page_offset,
    scale=scale,
  )
  targets = page_ids + jnp.asarray(page_offset, jnp.int32)
  # An id of -1 plus the offset would be a page of the previous layer, so ids
  # are checked before the addition. Targets are also checked, because
  # mode="drop" would wrap negative ones.
  fits = (page_ids >= 0) & (page_ids < pages.shape[0]) & (targets >= 0)
  fits &= (offsets >= 0) & (offsets < pages.shape[2])
  targets = jnp.where(fits, targets, pages.shape[0])
  return _put(pages, _to_storage(new, pages, scale), targets, offsets)


def _put(pages, new, targets, offsets) -> jax.Array:
  """Writes `new` [T, K, ...] to [N, K, S, ...]; drops tokens of pages >= N."""
  chex.assert_shape(new, (*targets.shape, pages.shape[1], *pages.shape[3:]))
  pages = jnp.asarray(pages)
  offsets = jnp.asarray(offsets)
  return lax.platform_dependent(
    pages, new, targets, offsets, tpu=_put_by_head, default=_put_all_heads
  )


def _put_all_heads(pages, new, targets, offsets) -> jax.Array:
  """Scatters all heads of a token with one index."""
  # The head axis has no index, so a pool sharded by heads needs no collective.
  return pages.at[targets, :, offsets].set(new, mode="drop")


def _put_by_head(pages, new, targets, offsets) -> jax.Array:
  """Scatters each head of a token with its own index, for a TPU."""
  # A scatter window over all heads would be strided in memory, so XLA for a TPU
  # would transpose the whole pool before and after a loop. But if heads are
  # sharded over only some mesh axes, XLA all-gathers the new tokens' heads.
  heads = jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
  index = targets[:, None], heads, offsets[:, None]
  return pages.at[index].set(new, mode="drop")


def _to_storage(
  new: jax.Array, pages: jax.Array, scale: jax.Array | None
) -> jax.Array:
  """Returns new tokens in the pool's dtype."""
  if scale is not None:
    # Only floats can be scaled.
    if not jnp.issubdtype(new.dtype, jnp.floating):
      hint = "pass values that are not quantized yet"
      check.refuse(TypeError, "new", "floats", new.dtype, hint)
    expected = f"float32[{pages.shape[1]}], one for each head"
    check.float32("scale", scale, expected)
    if scale.shape != pages.shape[1:2]:
      hint = "for a scale per token, `quantize` the tokens first"
      check.refuse(ValueError, "scale", expected, scale, hint)
    new = jnp.asarray(new, jnp.float32) / scale[None, :, None]
  elif new.dtype == pages.dtype:
    return jnp.asarray(new)
  elif pages.dtype == jnp.int8:
    # Without a scale, rounding to integers would turn small numbers into 0.
    hint = "`quantize` it first, which returns its scales, or pass `scale`"
    check.refuse(TypeError, "new", "int8 for an int8 pool", new.dtype, hint)
  return store(new, pages.dtype)


def _check_new(new: jax.Array, pages: jax.Array, num_tokens: int) -> None:
  """Raises unless `new` is [T, K, ...], in floats or the pool's dtype."""
  check.is_array("new", new)
  shape = (num_tokens, pages.shape[1], *pages.shape[3:])
  expected = f"floats or {pages.dtype}, {list(shape)}"
  is_float = jnp.issubdtype(new.dtype, jnp.floating)
  if not is_float and new.dtype != pages.dtype:
    check.refuse(TypeError, "new", expected, new)
  if new.shape != shape:
    check.refuse(ValueError, "new", expected, new)
