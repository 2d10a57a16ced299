"""The pages that hold keys and values, and operations on whole pages."""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.cache.config import CacheConfig

# Formats, and the integer dtype in which a CPU stores their bits.
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
  (If a scan over layers had the pools as inputs, each step would copy them.)
  Page 0 of each layer is the null page: never written, never attended to.

  With `value_dim` the pages hold latent vectors (MLA): the leading elements of
  a key are its value, and nothing is stored twice.

  Attributes:
    k: keys, in the storage dtype.
    v: values, in the storage dtype, in a separate buffer; None for latents.
    num_layers: L.
    dtype: the number format of keys and values, such as "bfloat16"; on a CPU
      bfloat16 is stored as its bits in uint16, float8_e4m3fn in uint8.
    k_scale: for 8-bit formats, a factor for each token and head; None for
      others.
    v_scale: the same for values.
    value_dim: for latents Dv, the leading elements of a key that are its value;
      None for others.
  """

  k: jax.Array  # storage dtype[L * N, K, S, D]
  v: jax.Array | None  # storage dtype[L * N, K, S, D]
  num_layers: int = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(metadata={"static": True})
  k_scale: jax.Array | None = None  # float32[L * N, K, S]
  v_scale: jax.Array | None = None  # float32[L * N, K, S]
  value_dim: int | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

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
  config: CacheConfig,
  *,
  num_layers: int,
  num_kv_heads: int,
  head_dim: int,
  value_dim: int | None = None,
  dtype=jnp.bfloat16,
  group: int = 0,
  storage_dtype=None,
) -> KVPages:
  """Pages of zeros for a cache.

  Takes 2 * L * N * K * S * D elements, half of that for latents, and for 8-bit
  formats one float32 for every D elements. Groups of one cache never have a
  page in common, so layers of different groups may share one layer of memory:
  L is then the number of layers of the largest group.

  Args:
    config: of the cache. It gives N, the pages of a layer including the null
      page, and S, the tokens of a page.
    num_layers: L.
    num_kv_heads: K, 1 for latents.
    head_dim: D.
    value_dim: for the latents of MLA, how many of the D elements of a vector
      are its value: 512 of 576 for DeepSeek. None: values have pages of their
      own.
    dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8. With
      the last three each token and head has a scale, set when it is written.
    group: the layer group whose page size to use, if groups have their own.
    storage_dtype: dtype of the buffers. None: `dtype`, except on a CPU uint16
      for bfloat16 and uint8 for float8_e4m3fn. XLA for a CPU rewrites a whole
      buffer of those formats, and of float8_e5m2, at each write.

  Returns:
    The pages.

  Raises:
    TypeError: `config` is not a CacheConfig, or a size is not an integer.
    ValueError: a size below 1, no such group, or dtypes that do not go
      together.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=5, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = init(
    ...   config, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"
    ... )
    >>> kv.k.shape, kv.num_pages
    ((10, 2, 4, 8), 5)

    Latents of 6 elements with 2 rotated ones behind them.

    >>> latents = init(
    ...   config, num_layers=2, num_kv_heads=1, head_dim=8, value_dim=6
    ... )
    >>> latents.k.shape, latents.v
    ((10, 1, 4, 8), None)
  """
  check_config(config)
  sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
  check_sizes(config, group, num_layers=num_layers, **sizes)
  _check_latents(num_kv_heads, head_dim, value_dim)
  dtype = np.dtype(dtype)
  if dtype.name not in _BITS:
    wanted = f"one of {', '.join(_BITS)}"
    arguments.refuse(ValueError, "dtype", wanted, dtype)
  bits = _BITS[dtype.name]
  if storage_dtype is None:
    storage_dtype = storage_of(dtype)
  if kernels.logical_dtype(storage_dtype) != dtype:
    wanted = dtype.name if bits is None else f"{dtype.name} or {bits}, its bits"
    arguments.refuse(
      ValueError, "storage_dtype", wanted, np.dtype(storage_dtype)
    )
  pages = num_layers * config.num_pages
  shape = (pages, num_kv_heads, config.page_sizes[group], head_dim)
  scaled, latent = dtype.itemsize == 1, value_dim is not None
  return KVPages(
    k=jnp.zeros(shape, storage_dtype),
    v=None if latent else jnp.zeros(shape, storage_dtype),
    num_layers=int(num_layers),
    dtype=dtype.name,
    k_scale=jnp.ones(shape[:3], jnp.float32) if scaled else None,
    v_scale=jnp.ones(shape[:3], jnp.float32) if scaled and not latent else None,
    value_dim=None if value_dim is None else int(value_dim),
  )


def copy_kv(kv: KVPages, src: jax.Array, dst: jax.Array) -> KVPages:
  """As `jaxkv.kv.copy`; `dst` has no null page."""

  def copied(pages: jax.Array | None) -> jax.Array | None:
    if pages is None:
      return None
    every = pages.reshape(*pages.shape[:3], -1)  # A scale is one number.
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
    (keys, values), each [B, M * S, K, D] in the format `kv.dtype`, or for 8-bit
    formats in float32 with scales applied. Tokens past a sequence's length are
    whatever the pages hold. Of latents the values are [B, M * S, 1, Dv].

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument has a shape or value that is not supported.
  """
  check_layer(kv, layer)
  arguments.check_int32("page_table", page_table, ("B", "M"))
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

  keys = dense(kv.k, kv.k_scale)
  if kv.v is None:
    return keys, keys[..., : kv.value_dim]
  return keys, dense(kv.v, kv.v_scale)


def check_config(config: CacheConfig) -> None:
  """Raises `TypeError` unless `config` is a CacheConfig."""
  if not isinstance(config, CacheConfig):
    raise TypeError(
      f"`config` must be a CacheConfig, got {type(config).__name__}; for a"
      " CacheState, pass state.config."
    )


def check_group(config: CacheConfig, group: int) -> None:
  """Raises unless `group` is a layer group of a cache."""
  if not isinstance(group, int) or isinstance(group, bool):
    arguments.refuse(TypeError, "group", "a Python int", group)
  if not 0 <= group < config.num_groups:
    wanted = f"from 0 to {config.num_groups - 1}"
    arguments.refuse(ValueError, "group", wanted, group)


def check_sizes(
  config: CacheConfig, group: int, *, num_layers: int, **sizes: int
) -> None:
  """Raises unless a memory of these sizes can be made for a group.

  Args:
    config: of the cache, checked.
    group: must be a layer group of the cache.
    num_layers: at least 1; the pages of all layers must have int32 numbers.
    **sizes: further numbers by name, each at least 1.
  """
  for name, size in {"num_layers": num_layers, **sizes}.items():
    check_size(name, size)
  check_group(config, group)
  if num_layers * config.num_pages > np.iinfo(np.int32).max:
    raise ValueError(
      "`num_layers` must be such that num_layers * num_pages fits int32, got"
      f" {num_layers} * {config.num_pages}."
    )


def _check_latents(
  num_kv_heads: int, head_dim: int, value_dim: int | None
) -> None:
  """Raises unless `value_dim` goes with the other sizes, or is None."""
  if value_dim is None:
    return
  check_size("value_dim", value_dim)
  if value_dim > head_dim:
    wanted = f"at most head_dim, {head_dim}"
    arguments.refuse(ValueError, "value_dim", wanted, value_dim)
  if num_kv_heads != 1:
    wanted = "1 with value_dim: all query heads read the same latents"
    arguments.refuse(ValueError, "num_kv_heads", wanted, num_kv_heads)


def storage_of(dtype: np.dtype) -> np.dtype:
  """The dtype of the buffer for a format, if nobody names one."""
  bits = _BITS[dtype.name]
  as_bits = bits is not None and jax.default_backend() == "cpu"
  return np.dtype(bits if as_bits else dtype)


def check_size(name: str, size: int) -> None:
  """Raises unless `size` is an integer of at least 1."""
  if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
    arguments.refuse(TypeError, name, "an integer of at least 1", size)
  if size < 1:
    arguments.refuse(ValueError, name, "an integer of at least 1", size)


class Layered(Protocol):
  """Memory of several layers, in pages."""

  @property
  def num_layers(self) -> int:
    """L."""
    ...

  @property
  def num_pages(self) -> int:
    """N, the pages of one layer."""
    ...

  @property
  def page_size(self) -> int:
    """S, tokens per page."""
    ...


def check_layer(kv: Layered, layer: jax.Array | int) -> None:
  """Raises unless `layer` is an integer, and in range if its value is known.

  The value of a JAX array is not checked: if there is no such layer, nothing is
  written, and reads are meaningless.
  """
  arguments.check_integer("layer", layer)
  if not isinstance(layer, jax.Array) and not 0 <= layer < kv.num_layers:
    wanted = f"from 0 to {kv.num_layers - 1}"
    arguments.refuse(ValueError, "layer", wanted, int(layer))


def in_layer(kv: Layered, page_ids: jax.Array) -> jax.Array:
  """Page ids, with those out of a layer's range replaced by L * N.

  An id between N and L * N would be a page of another layer.
  """
  fits = (page_ids >= 0) & (page_ids < kv.num_pages)
  return jnp.where(fits, page_ids, kv.num_layers * kv.num_pages)
