"""Writes the K/V of new tokens into pages.

| function | pools |
|---|---|
| `append_kv` | keys and values; optionally with one fixed scale for each head |
| `append_quantized` | 8-bit keys and values, with a scale per token and head |
| `append_pages` | one pool, such as that of latent vectors |

Each function writes token t to page `page_ids[t] + page_offset` at offset
`offsets[t]`. Writes are in place if the pools are donated or carried by a loop.
On a CPU this does not hold for pools of dtype bfloat16 or float8 (see
`quantization`). A token is dropped if its offset is out of range, or if its
page id is out of range before or after `page_offset` is added. If two tokens
have the same page and offset, it is undefined which of them is written.

`append_kv` and `append_pages` round floats to the pool's format. Without a
scale, they store values of the pool's dtype unchanged, and do not accept floats
for an int8 pool.

Letters: a pool has N pages of S tokens, with K heads of D or Dv elements. A
call has T new tokens.
"""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src import check
from jaxkv_kernels._src.quantization import quantize
from jaxkv_kernels._src.quantization import scaled_dtype
from jaxkv_kernels._src.quantization import store


def append_kv(
  k_pages: jax.Array,
  v_pages: jax.Array,
  k_new: jax.Array,
  v_new: jax.Array,
  page_ids: jax.Array,
  offsets: jax.Array,
  *,
  page_offset: jax.Array | int = 0,
  k_scale: jax.Array | None = None,
  v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Writes the keys and values of new tokens.

  Args:
    k_pages: [N, K, S, D].
    v_pages: [N, K, S, Dv].
    k_new: [T, K, D], floats or the pool's dtype.
    v_new: [T, K, Dv], floats or the pool's dtype.
    page_ids: int32[T]; an id out of range drops its token.
    offsets: int32[T], 0..S-1.
    page_offset: int32[], added to every page id.
    k_scale: float32[K], by which `k_new` is divided; `k_new` must then be
      floats. Pass the same scale to `AttentionOptions`.
    v_scale: float32[K], the same for `v_new`.

  Returns:
    (k_pages, v_pages).

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
  targets = _targets_of_pair(
    pools=(k_pages, v_pages),
    new=(k_new, v_new),
    scales=(k_scale, v_scale),
    page_ids=page_ids,
    offsets=offsets,
    page_offset=page_offset,
  )
  k_stored = _to_storage("k_", k_new, k_pages, k_scale)
  v_stored = _to_storage("v_", v_new, v_pages, v_scale)
  return (
    _put(k_pages, k_stored, targets, offsets),
    _put(v_pages, v_stored, targets, offsets),
  )


def append_quantized(
  k_pages: jax.Array,
  v_pages: jax.Array,
  k_scale: jax.Array,
  v_scale: jax.Array,
  k_new: jax.Array,
  v_new: jax.Array,
  page_ids: jax.Array,
  offsets: jax.Array,
  *,
  page_offset: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Writes new tokens into 8-bit pools, and their scales into pools of scales.

  The vector of each token and head gets a scale, as `quantize` computes it.

  Args:
    k_pages: [N, K, S, D], 8-bit.
    v_pages: [N, K, S, Dv], 8-bit.
    k_scale: float32[N, K, S].
    v_scale: float32[N, K, S].
    k_new: float[T, K, D].
    v_new: float[T, K, Dv].
    page_ids: int32[T]; an id out of range drops its token.
    offsets: int32[T], 0..S-1.
    page_offset: int32[], added to every page id.

  Returns:
    (k_pages, v_pages, k_scale, v_scale).

  Examples:
    >>> import jax.numpy as jnp
    >>> pages = jnp.zeros((2, 1, 4, 2), jnp.int8)
    >>> scale = jnp.zeros((2, 1, 4))
    >>> new = jnp.asarray([[[3.0, -6.0]]])
    >>> page, offset = jnp.asarray([1], jnp.int32), jnp.asarray([0], jnp.int32)
    >>> pages, _, scale, _ = append_quantized(
    ...   pages, pages, scale, scale, new, new, page, offset
    ... )
    >>> pages[1, 0, 0].tolist(), round(float(scale[1, 0, 0]) * 127, 4)
    ([64, -127], 6.0)
  """
  targets = _targets_of_pair(
    pools=(k_pages, v_pages),
    new=(k_new, v_new),
    scales=(k_scale, v_scale),
    page_ids=page_ids,
    offsets=offsets,
    page_offset=page_offset,
  )
  scaled_dtype("k_pages", k_pages.dtype)
  for side, new, scale in (("k", k_new, k_scale), ("v", v_new, v_scale)):
    _check_floats(f"{side}_new", new)
    _check_scale(f"{side}_scale", scale, k_pages.shape[:3])
  k_stored, k_factor = quantize(k_new, k_pages.dtype)
  v_stored, v_factor = quantize(v_new, v_pages.dtype)
  return (
    _put(k_pages, k_stored, targets, offsets),
    _put(v_pages, v_stored, targets, offsets),
    _put(k_scale, k_factor, targets, offsets),
    _put(v_scale, v_factor, targets, offsets),
  )


def append_pages(
  pages: jax.Array,
  new: jax.Array,
  page_ids: jax.Array,
  offsets: jax.Array,
  *,
  page_offset: jax.Array | int = 0,
) -> jax.Array:
  """Writes new tokens into one pool.

  Args:
    pages: [N, K, S, D].
    new: [T, K, D], floats or the pool's dtype.
    page_ids: int32[T]; an id out of range drops its token.
    offsets: int32[T], 0..S-1.
    page_offset: int32[], added to every page id.

  Returns:
    The pool.

  Examples:
    Writes an 8-bit latent vector, and its scale as a vector of size 1:

    >>> import jax.numpy as jnp
    >>> pages = jnp.zeros((2, 1, 4, 2), jnp.int8)
    >>> k_scale = jnp.zeros((2, 1, 4))  # for the options of mla_decode
    >>> where = jnp.asarray([1], jnp.int32), jnp.asarray([3], jnp.int32)
    >>> stored, scale = quantize(jnp.asarray([[[3.0, -6.0]]]), "int8")
    >>> pages = append_pages(pages, stored, *where)
    >>> k_scale = append_pages(
    ...   k_scale[..., None], scale[..., None], *where
    ... )[..., 0]
    >>> pages[1, 0, 3].tolist(), round(float(k_scale[1, 0, 3]) * 127, 4)
    ([64, -127], 6.0)
  """
  check.pool("pages", pages)
  check.vector("page_ids", page_ids, None)
  check.same_devices(
    "pages",
    pages,
    new=new,
    page_ids=page_ids,
    offsets=offsets,
    page_offset=page_offset,
  )
  _check_new("new", new, pages, page_ids.size)
  targets = _target_pages(pages, page_ids, offsets, page_offset)
  return _put(pages, _to_storage("", new, pages), targets, offsets)


def _target_pages(
  pages: jax.Array, page_ids: jax.Array, offsets: jax.Array, page_offset
) -> jax.Array:
  """Returns int32[T], the page of each token, at least N for one to drop."""
  check.vector("offsets", offsets, page_ids.size)
  check.scalar("page_offset", page_offset, jnp.integer)
  chex.assert_equal_shape([page_ids, offsets])
  targets = page_ids + jnp.asarray(page_offset, jnp.int32)
  # An id of -1 plus the offset would be a page of the previous layer, so ids
  # are checked before the addition. Targets are also checked, because
  # mode="drop" would wrap negative ones.
  fits = (page_ids >= 0) & (page_ids < pages.shape[0]) & (targets >= 0)
  fits &= (offsets >= 0) & (offsets < pages.shape[2])
  return jnp.where(fits, targets, pages.shape[0])


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
  prefix: str, new: jax.Array, pages: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
  """Returns `new` in the pool's dtype; errors name `{prefix}new`."""
  if scale is not None:
    _check_floats(f"{prefix}new", new)
    hint = "for one scale per token use append_quantized"
    _check_scale(f"{prefix}scale", scale, pages.shape[1:2], hint)
    new = jnp.asarray(new, jnp.float32) / scale[None, :, None]
  elif new.dtype == pages.dtype:
    return jnp.asarray(new)
  elif pages.dtype == jnp.int8:
    hint = (
      "`quantize` it first, which returns its scales; for keys and values use"
      " append_quantized, or append_kv with k_scale and v_scale"
    )
    # Without a scale, rounding to integers would turn small numbers into 0.
    expected = "int8 for an int8 pool"
    check.refuse(TypeError, f"{prefix}new", expected, new.dtype, hint)
  return store(new, pages.dtype)


def _check_scale(
  name: str, scale: jax.Array, shape: tuple[int, ...], hint: str = ""
) -> None:
  """Raises unless a scale is float32 of the given shape."""
  expected = f"float32{list(shape)}"
  check.float32(name, scale, expected)
  if scale.shape != shape:
    check.refuse(ValueError, name, expected, scale, hint)


def _check_floats(name: str, new: jax.Array) -> None:
  """Raises `TypeError` unless new tokens are floats."""
  # `_check_new` accepts floats and the pool's dtype. Only floats can be scaled.
  if not jnp.issubdtype(new.dtype, jnp.floating):
    hint = "pass values that are not quantized yet"
    check.refuse(TypeError, name, "floats", new.dtype, hint)


def _targets_of_pair(
  *,
  pools: tuple[jax.Array, jax.Array],
  new: tuple[jax.Array, jax.Array],
  scales: tuple[jax.Array | None, jax.Array | None],
  page_ids: jax.Array,
  offsets: jax.Array,
  page_offset: jax.Array | int,
) -> jax.Array:
  """Checks keys and values, and returns `_target_pages` for both pools."""
  check.pool_pair(*pools)
  check.vector("page_ids", page_ids, None)
  check.same_devices(
    "k_pages",
    pools[0],
    v_pages=pools[1],
    k_new=new[0],
    v_new=new[1],
    page_ids=page_ids,
    offsets=offsets,
    page_offset=page_offset,
    k_scale=scales[0],
    v_scale=scales[1],
  )
  for name, tokens, pages in zip(("k_new", "v_new"), new, pools, strict=True):
    _check_new(name, tokens, pages, page_ids.size)
  return _target_pages(pools[0], page_ids, offsets, page_offset)


def _check_new(
  name: str, new: jax.Array, pages: jax.Array, tokens: int
) -> None:
  """Raises unless `new` is [T, K, D], in floats or the pool's dtype."""
  check.is_array(name, new)
  shape = (tokens, pages.shape[1], pages.shape[3])
  expected = f"floats or {pages.dtype}, {list(shape)}"
  is_float = jnp.issubdtype(new.dtype, jnp.floating)
  if not is_float and new.dtype != pages.dtype:
    check.refuse(TypeError, name, expected, new)
  if new.shape != shape:
    check.refuse(ValueError, name, expected, new)
