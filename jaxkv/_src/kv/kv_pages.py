"""The pages that hold keys and values, and operations on whole pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays import arguments
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.kv import storage_dtypes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
  """Keys and values of all layers, in pages.

  The first axis holds the N pages of each of L layers: page p of layer l is at
  index l * N + p - `first_page`. A page holds S tokens with K heads of D
  elements. The first page of each layer is the null page, which is never
  written and never attended to.

  With `value_dim` the pages hold one latent vector for each token (MLA). The
  vector is the key, and its leading elements are the value, so `v` is None.

  Attributes:
    k: keys, in the storage dtype (see `dtype`).
    v: values, in the same dtype; None for latents.
    num_layers: L.
    first_page: the number of the first page of the memory's pool, see
      `jaxkv.CacheConfig.num_pages`. Pages of other pools are ignored.
    dtype: the number format of keys and values, such as "bfloat16". The storage
      dtype is the same, or the integer dtype of the bits: uint16 for bfloat16
      and uint8 for float8_e4m3fn.
    k_scale: for 8-bit formats, the dequantization factor of the key of each
      token and head; None for other formats.
    v_scale: the same for values; also None for latents.
    value_dim: Dv, the number of leading elements of a latent vector that are
      the value; None for separate keys and values.
    has_default_dtype: True if the caller of `init` did not pass `dtype`.
  """

  # Layers have no separate axis, because a scan over such an axis would copy
  # the pages of each layer.
  k: jax.Array  # storage dtype[L * N, K, S, D]
  v: jax.Array | None  # storage dtype[L * N, K, S, D]
  num_layers: int = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(metadata={"static": True})
  first_page: int = dataclasses.field(default=0, metadata={"static": True})
  k_scale: jax.Array | None = None  # float32[L * N, K, S]
  v_scale: jax.Array | None = None  # float32[L * N, K, S]
  value_dim: int | None = dataclasses.field(
    default=None, metadata={"static": True}
  )
  has_default_dtype: bool = dataclasses.field(
    default=False, metadata={"static": True}
  )

  @property
  def num_pages(self) -> int:
    """N, the pages of one layer."""
    return self.k.shape[0] // self.num_layers

  @property
  def num_kv_heads(self) -> int:
    """K, the number of key-value heads."""
    return self.k.shape[1]

  @property
  def page_size(self) -> int:
    """S, tokens per page."""
    return self.k.shape[2]

  @property
  def head_dim(self) -> int:
    """D, elements of a key."""
    return self.k.shape[3]


def init(
  config: CacheConfig,
  *,
  num_layers: int,
  num_kv_heads: int,
  head_dim: int,
  value_dim: int | None = None,
  dtype=None,
  group: int = 0,
  storage_dtype=None,
) -> KVPages:
  """Makes pages of zeros for a cache.

  The pages have 2 * L * N * K * S * D elements, or half of that for latents.
  8-bit formats add one float32 for every D elements. A page belongs to at most
  one layer group, so layers of groups that share a pool can use the same layer
  of memory. L is then the number of layers of the largest of these groups.

  Args:
    config: the configuration of the cache. It gives N, the pages of the group's
      pool including the null page, and S, the tokens of a page.
    num_layers: L. L * N must fit int32.
    num_kv_heads: K, the number of key-value heads; 1 for latents.
    head_dim: D, elements of a key, and of a value unless pages hold latents.
    value_dim: Dv for the latents of MLA: the number of leading elements that
      are the value, at most D, such as 512 of 576 for DeepSeek. None for keys
      and values.
    dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8. With
      the last three `write` computes a scale for each token and head. None for
      bfloat16; `write` then refuses float32 keys and values, which would be
      rounded silently.
    group: a layer group whose keys and values the pages hold. It gives the pool
      and the page size.
    storage_dtype: dtype of the buffers. None for `dtype`, except that a CPU
      uses uint16 for bfloat16 and uint8 for float8_e4m3fn. On a CPU each write
      into a pool of float8_e5m2 rewrites the whole buffer, which is slow.

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

    Latent vectors of 8 elements, the first 6 of which are the value:

    >>> latents = init(
    ...   config, num_layers=2, num_kv_heads=1, head_dim=8, value_dim=6
    ... )
    >>> latents.k.shape, latents.v
    ((10, 1, 4, 8), None)
  """
  check_config(config)
  head_sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
  pages = num_rows(config, group, num_layers=num_layers, **head_sizes)
  _check_latents(num_kv_heads, head_dim, value_dim)
  is_default = dtype is None
  dtype = dtype or jnp.bfloat16
  dtype = storage_dtypes.as_dtype("dtype", dtype, storage_dtypes.FORMATS)
  storage_dtype = storage_dtypes.resolve(dtype, storage_dtype)
  shape = (pages, num_kv_heads, config.page_sizes[group], head_dim)
  has_scales = dtype.itemsize == 1
  is_latent = value_dim is not None
  # Each field gets its own buffer, because a buffer cannot be donated twice.
  return KVPages(
    k=jnp.zeros(shape, storage_dtype),
    v=None if is_latent else jnp.zeros(shape, storage_dtype),
    num_layers=int(num_layers),
    first_page=first_page_of(config, group),
    dtype=dtype.name,
    k_scale=jnp.ones(shape[:3], jnp.float32) if has_scales else None,
    v_scale=(
      jnp.ones(shape[:3], jnp.float32) if has_scales and not is_latent else None
    ),
    value_dim=None if value_dim is None else int(value_dim),
    has_default_dtype=is_default,
  )


def check_config(config: CacheConfig) -> None:
  """Raises `TypeError` unless `config` is a CacheConfig."""
  hint = "for a CacheState, pass state.config"
  arguments.check_type("config", config, CacheConfig, "a CacheConfig", hint)


def check_group(config: CacheConfig, group: int) -> None:
  """Raises unless `group` is the index of a layer group of a cache."""
  if not isinstance(group, int) or isinstance(group, bool):
    arguments.refuse(TypeError, "group", "a Python int", group)
  if not 0 <= group < config.num_groups:
    expected = f"from 0 to {config.num_groups - 1}"
    arguments.refuse(ValueError, "group", expected, group)


def num_rows(
  config: CacheConfig, group: int, *, num_layers: int, **sizes: int
) -> int:
  """Returns L * N for a group's pool; raises unless all sizes are valid."""
  for name, count in {"num_layers": num_layers, **sizes}.items():
    arguments.as_count(name, count, 1)
  check_group(config, group)
  num_pages = config.numbers.sizes[config.groups[group].pool]
  # The index of a page over all layers must fit int32.
  if num_layers * num_pages > np.iinfo(np.int32).max:
    raise ValueError(
      "`num_layers` must be such that num_layers * num_pages fits int32, got"
      f" {num_layers} * {num_pages}."
    )
  return num_layers * num_pages


def _check_latents(
  num_kv_heads: int, head_dim: int, value_dim: int | None
) -> None:
  """Raises unless `value_dim` is None, or at most `head_dim` with one head."""
  if value_dim is None:
    return
  arguments.as_count("value_dim", value_dim, 1)
  if value_dim > head_dim:
    expected = f"at most head_dim, {head_dim}"
    arguments.refuse(ValueError, "value_dim", expected, value_dim)
  if num_kv_heads != 1:
    expected = "1 with value_dim: all query heads read the same latents"
    arguments.refuse(ValueError, "num_kv_heads", expected, num_kv_heads)


def check_layer(kv: Any, layer: jax.Array | int) -> None:
  """Raises unless `layer` is a layer of a pool of any kind.

  Only the value of a jax array can be out of range. Writes are then dropped,
  and reads are meaningless.
  """
  arguments.check_integer("layer", layer)
  if not isinstance(layer, jax.Array) and not 0 <= layer < kv.num_layers:
    expected = f"from 0 to {kv.num_layers - 1}"
    arguments.refuse(ValueError, "layer", expected, int(layer))


def first_page_of(config: CacheConfig, group: int) -> int:
  """Returns the number of the first page of a group's pool."""
  return config.numbers.first_pages[config.groups[group].pool]


def in_memory(kv: Any, page_ids: jax.Array) -> jax.Array:
  """Converts page numbers to rows of one layer of a memory of any kind.

  The null page becomes row 0. Pages of other pools become N, which is out of
  range.
  """
  if kv.first_page == 0:
    return page_ids
  row = page_ids - kv.first_page
  is_page = (row > 0) & (row < kv.num_pages)
  return jnp.where(is_page, row, jnp.where(page_ids == 0, 0, kv.num_pages))


def page_index(kv: Any, page_ids: jax.Array, layer: jax.Array) -> jax.Array:
  """Returns the index of each page of a layer in the arrays of any memory.

  L * N, which is out of range, for the null page, for pages of other pools, and
  for a layer out of range.
  """
  rows = in_memory(kv, page_ids)
  # Without these checks, a number out of range could be a page of another
  # layer.
  is_page = (rows > 0) & (rows < kv.num_pages)
  is_page &= (layer >= 0) & (layer < kv.num_layers)
  no_index = jnp.int32(kv.num_layers * kv.num_pages)
  return jnp.where(is_page, rows + layer * kv.num_pages, no_index)
