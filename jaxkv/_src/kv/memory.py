"""The pages that hold keys and values, and operations on whole pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv_kernels as kernels
from jaxkv_kernels._src import check

# Formats, and the dtype of their bits where a CPU stores those.
_BITS = {
  "float32": None,
  "bfloat16": "uint16",
  "float16": None,
  "float8_e4m3fn": "uint8",
  "float8_e5m2": None,
  "int8": None,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
  """Keys and values of all layers, in pages.

  Layers are flattened into the page axis: page p of layer l is row l * N + p.
  (As leaves of a scan over layers the pools would be copied at each step.)
  Page 0 of each layer is the null page: never written, never attended to.

  Attributes:
    k: keys, in the storage dtype. [L * N, K, S, D]
    v: values, likewise, in a buffer of their own. [L * N, K, S, D]
    num_layers: L.
    dtype: the number format of keys and values, such as "bfloat16"; on a CPU
      bfloat16 is stored as its bits in uint16, float8_e4m3fn in uint8.
    k_scale: for 8-bit formats, what the numbers of each token and head are to
      be multiplied by; None for others. float32[L * N, K, S]
    v_scale: likewise.
  """

  k: jax.Array  # storage dtype[L * N, K, S, D]
  v: jax.Array  # storage dtype[L * N, K, S, D]
  num_layers: int = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(metadata={"static": True})
  k_scale: jax.Array | None = None  # float32[L * N, K, S]
  v_scale: jax.Array | None = None  # float32[L * N, K, S]

  @property
  def num_pages(self) -> int:
    """N, the pages of one layer."""
    return self.k.shape[0] // self.num_layers

  @property
  def num_kv_heads(self) -> int:
    """K."""
    return self.k.shape[1]

  @property
  def page_size(self) -> int:
    """S, tokens per page."""
    return self.k.shape[2]

  @property
  def head_dim(self) -> int:
    """D."""
    return self.k.shape[3]


def init(
  *,
  num_layers: int,
  num_pages: int,
  page_size: int,
  num_kv_heads: int,
  head_dim: int,
  dtype=jnp.bfloat16,
  storage_dtype=None,
) -> KVPages:
  """Pages of zeros.

  Takes 2 * L * N * K * S * D elements, and for 8-bit formats one float32 more
  for every D of them. Groups of one cache never have a page in common, so
  layers of different groups may share one layer of memory: L is then the
  number of layers of the largest group.

  Args:
    num_layers: L.
    num_pages: N per layer, `CacheConfig.num_pages`: the null page counts.
    page_size: S, tokens per page, `CacheConfig.page_size` or that of the group.
    num_kv_heads: K.
    head_dim: D.
    dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8. With
      the last three each token and head has a scale, set when it is written.
    storage_dtype: dtype of the buffers. None: uint16 for bfloat16 and uint8
      for float8_e4m3fn if the default backend is a CPU, where a buffer of
      those formats would be rewritten whole at each write (as one of
      float8_e5m2 is); `dtype` otherwise.

  Returns:
    The pages.

  Raises:
    ValueError: a size below 1, or dtypes that do not go together.

  Examples:
    >>> kv = init(
    ...   num_layers=2, num_pages=5, page_size=4, num_kv_heads=2, head_dim=8,
    ...   dtype="float32",
    ... )
    >>> kv.k.shape, kv.num_pages
    ((10, 2, 4, 8), 5)
  """
  sizes = {
    "num_layers": num_layers,
    "num_pages": num_pages,
    "page_size": page_size,
    "num_kv_heads": num_kv_heads,
    "head_dim": head_dim,
  }
  for name, size in sizes.items():
    if not isinstance(size, (int, np.integer)) or size < 1:
      raise ValueError(f"{name}={size!r}; it must be an integer of at least 1")
  if num_layers * num_pages > np.iinfo(np.int32).max:
    raise ValueError(
      f"num_layers={num_layers} times num_pages={num_pages} does not fit int32"
    )
  dtype = np.dtype(dtype)
  if dtype.name not in _BITS:
    raise ValueError(f"dtype={dtype.name}; supported are {', '.join(_BITS)}")
  bits = _BITS[dtype.name]
  if storage_dtype is None:
    as_bits = bits is not None and jax.default_backend() == "cpu"
    storage_dtype = bits if as_bits else dtype
  if kernels.logical_dtype(storage_dtype) != dtype:
    also = "" if bits is None else f", or {bits}, which holds its bits"
    raise ValueError(
      f"storage_dtype={np.dtype(storage_dtype).name} does not hold"
      f" {dtype.name}; use {dtype.name}{also}"
    )
  shape = (num_layers * num_pages, num_kv_heads, page_size, head_dim)
  return KVPages(
    k=jnp.zeros(shape, storage_dtype),
    v=jnp.zeros(shape, storage_dtype),
    num_layers=int(num_layers),
    dtype=dtype.name,
    k_scale=jnp.ones(shape[:3], jnp.float32) if dtype.itemsize == 1 else None,
    v_scale=jnp.ones(shape[:3], jnp.float32) if dtype.itemsize == 1 else None,
  )


def copy(kv: KVPages, src: jax.Array, dst: jax.Array) -> KVPages:
  """Copies page `src[r]` over page `dst[r]`, in every layer.

  All sources are read before any destination is written. Skipped: pairs with
  an id out of range, and those whose destination is the null page. Costs
  nothing when all pairs are skipped (but under `vmap` always its full cost).

  Args:
    kv: the pages.
    src: int32[R], ids 0..N-1.
    dst: int32[R], without duplicates.

  Returns:
    The pages.

  Raises:
    ValueError: an argument has a shape or dtype that is not supported.
  """
  check.integers("src", src)
  check.integers("dst", dst)
  return _copy(kv, src, dst)


@functools.partial(jax.jit, inline=True)
def _copy(kv: KVPages, src: jax.Array, dst: jax.Array) -> KVPages:
  dst = jnp.where(dst == 0, kv.num_pages, dst)

  def copied(pages: jax.Array | None) -> jax.Array | None:
    if pages is None:
      return None
    every = pages.reshape(*pages.shape[:3], -1)  # a scale is a token's only one
    every = kernels.copy_pages(every, src, dst, num_layers=kv.num_layers)
    return every.reshape(pages.shape)

  return dataclasses.replace(
    kv,
    k=copied(kv.k),
    v=copied(kv.v),
    k_scale=copied(kv.k_scale),
    v_scale=copied(kv.v_scale),
  )


def gather(
  kv: KVPages, layer: jax.Array | int, page_table: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """One layer's keys and values of some sequences, as dense arrays.

  Args:
    kv: the pages.
    layer: int32[], 0..L-1.
    page_table: int32[B, M]; an id out of range reads as a page of zeros.

  Returns:
    Two arrays [B, M * S, K, D] in the format `kv.dtype`, or for 8-bit formats
    float32, scales applied. Slots past a sequence's length are whatever they
    hold.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
  """
  check_layer(kv, layer)
  check.table(page_table, None)
  return _gather(kv, jnp.asarray(layer, jnp.int32), page_table)


@functools.partial(jax.jit, inline=True)
def _gather(
  kv: KVPages, layer: jax.Array, page_table: jax.Array
) -> tuple[jax.Array, jax.Array]:
  ids = in_layer(kv, page_table)
  offset = layer * kv.num_pages

  def dense(pages: jax.Array, scale: jax.Array | None) -> jax.Array:
    tokens = kernels.gather_pages(pages, ids, page_offset=offset)
    if scale is None:
      return tokens
    factors = kernels.gather_pages(scale[..., None], ids, page_offset=offset)
    return tokens.astype(jnp.float32) * factors

  return dense(kv.k, kv.k_scale), dense(kv.v, kv.v_scale)


def check_layer(kv: KVPages, layer: jax.Array | int) -> None:
  """Raises `ValueError` for what is no integer, or known to be no layer.

  Of a JAX array the value is not looked at: if there is no such layer, nothing
  is written, and what is read means nothing.
  """
  check.scalar("layer", layer, np.integer)
  if not isinstance(layer, jax.Array) and not 0 <= layer < kv.num_layers:
    raise ValueError(f"layer={layer}; there are {kv.num_layers} layers")


def in_layer(kv: KVPages, page_ids: jax.Array) -> jax.Array:
  """Page ids with those that are none of a layer's N replaced by L * N.

  An id between N and L * N would name another layer's page.
  """
  fits = (page_ids >= 0) & (page_ids < kv.num_pages)
  return jnp.where(fits, page_ids, kv.k.shape[0])
