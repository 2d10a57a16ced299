"""Pages with the ids of the experts that computed each token in each layer.

The ids are stored like keys and values, so a sequence that reuses a cached
prefix also finds the expert ids of the prefix.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.kv import storage_dtypes
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.kv_pages import check_layer
from jaxkv._src.kv.kv_pages import first_page_of
from jaxkv._src.kv.kv_pages import num_rows
from jaxkv._src.kv.kv_pages import page_index
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import check_rows
from jaxkv._src.kv.write import token_places

_FORMATS = ("uint8", "uint16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertIdPages:
  """Expert ids of all tokens and layers, in the pages of one layer group.

  The first axis is that of `KVPages`, but L counts only the layers with
  experts, so it may be smaller than the L of `KVPages`.

  Attributes:
    values: X expert ids of each token.  # uint8 or uint16[L * N, S, X]
    num_layers: L.
    group: the layer group whose pages hold the ids.
    first_page: see `KVPages`.
  """

  values: jax.Array
  num_layers: int = dataclasses.field(metadata={"static": True})
  group: int = dataclasses.field(metadata={"static": True})
  first_page: int = dataclasses.field(default=0, metadata={"static": True})

  @property
  def num_pages(self) -> int:
    """N, the pages of one layer."""
    return self.values.shape[0] // self.num_layers

  @property
  def page_size(self) -> int:
    """S, tokens per page."""
    return self.values.shape[1]

  @property
  def width(self) -> int:
    """X, expert ids of a token in one layer."""
    return self.values.shape[2]

  @property
  def read_dtype(self) -> np.dtype:
    """The signed dtype that `read_expert_ids` returns: int16 or int32."""
    return np.promote_types(self.values.dtype, np.int8)


def init_expert_ids(
  config: CacheConfig,
  *,
  num_layers: int,
  width: int,
  dtype=jnp.uint8,
  group: int = 0,
) -> ExpertIdPages:
  """Returns pages of zeros for the expert ids of a cache's tokens.

  Allocates L * N * S * X integers. A freed page loses its ids, so choose a
  group that keeps its pages while a sequence runs, such as `FullAttention`.

  Args:
    config: the configuration of the cache. It gives N, the pages of the group's
      pool including the null page, and S, the tokens of a page.
    num_layers: L. L * N must fit int32.
    width: X, expert ids of a token in one layer.
    dtype: uint8 or uint16.
    group: the layer group whose pages hold the ids.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=5, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> pages = init_expert_ids(config, num_layers=3, width=2)
    >>> pages.values.shape, pages.num_pages
    ((15, 4, 2), 5)
  """
  check_config(config)
  rows = num_rows(config, group, num_layers=num_layers, width=width)
  dtype = storage_dtypes.as_dtype("dtype", dtype, _FORMATS)
  shape = (rows, config.page_sizes[group], width)
  return ExpertIdPages(
    values=jnp.zeros(shape, dtype),
    num_layers=int(num_layers),
    group=group,
    first_page=first_page_of(config, group),
  )


def write_expert_ids(
  pages: ExpertIdPages, view: AnyView, layer: jax.Array | int, values: jax.Array
) -> ExpertIdPages:
  """Writes the expert ids of new tokens in one layer.

  The ids of a token get the page and offset that `jaxkv.kv.write` gives to the
  token's key. Tokens that `jaxkv.kv.write` skips are skipped here too.

  Args:
    pages: the expert ids.
    view: a view of group `pages.group`, with the new tokens of each row. For a
      `PackedView`, B is 1.
    layer: int32[], 0..L-1.
    values: integers[B, T, X], cast to the dtype of the pages; no range check.

  Returns:
    The pages.

  Examples:
    >>> import jax.numpy as jnp
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=5, page_size=4, num_slots=1, pages_per_slot=2
    ... )
    >>> pages = init_expert_ids(config, num_layers=1, width=2)
    >>> cache, _ = jaxkv.allocate(jaxkv.init(config), [3])
    >>> new = jnp.asarray([[[1, 6], [0, 3], [5, 4]]])
    >>> view = jaxkv.view(cache, num_tokens=[3])
    >>> pages = write_expert_ids(pages, view, 0, new)
    >>> cache, _ = jaxkv.commit(cache, [[7, 8, 9]], [3])
    >>> table = cache.page_table[:, pages.group]
    >>> read_expert_ids(pages, table, cache.length)[0, :4, 0].tolist()
    [[1, 6], [0, 3], [5, 4], [-1, -1]]
  """
  arguments.check_integers("values", values)
  if values.ndim != 3 or values.shape[2] != pages.width:
    arguments.refuse(ValueError, "values", f"[B, T, {pages.width}]", values)
  check_rows(view, "values", values)
  check_layer(pages, layer)
  return _write(pages, view, jnp.asarray(layer, jnp.int32), values)


@functools.partial(jax.jit, inline=True)
def _write(
  pages: ExpertIdPages, view: AnyView, layer: jax.Array, values: jax.Array
) -> ExpertIdPages:
  places = token_places(pages, view, layer, values.shape[1])
  # `append_pages` expects an axis of heads: [L * N, 1, S, X]. It accepts
  # integers only if they have the pool's dtype.
  new = values.astype(pages.values.dtype).reshape(-1, 1, pages.width)
  pool = kernels.append_pages(pages.values[:, None], new, *places)
  return dataclasses.replace(pages, values=pool[:, 0])


def read_expert_ids(
  pages: ExpertIdPages, page_table: jax.Array, lengths: jax.Array
) -> jax.Array:
  """Reads the expert ids of sequences, in all layers.

  Args:
    pages: the expert ids.
    page_table: int32[R, M], page ids of R sequences in group `pages.group`.
    lengths: int32[R], tokens of each sequence.

  Returns:
    [R, M * S, L, X], int16 for pages of uint8, int32 for pages of uint16. -1
    past a sequence's length and in missing pages.
  """
  arguments.check_int32("page_table", page_table, ("B", "M"))
  arguments.check_int32("lengths", lengths, (page_table.shape[0],))
  return _read(pages, jnp.asarray(page_table), jnp.asarray(lengths))


@functools.partial(jax.jit, inline=True)
def _read(
  pages: ExpertIdPages, page_table: jax.Array, lengths: jax.Array
) -> jax.Array:
  layer = jnp.arange(pages.num_layers, dtype=jnp.int32)
  index = page_index(pages, page_table[:, :, None], layer[None, None])
  has_page = index[:, :, 0] < pages.values.shape[0]
  values = pages.values.at[index].get(mode="fill", fill_value=0)
  rows, columns = page_table.shape
  shape = (columns * pages.page_size, pages.num_layers, pages.width)
  # Widened first, because the pages' unsigned dtype cannot hold -1.
  values = values.swapaxes(2, 3).reshape(rows, *shape).astype(pages.read_dtype)
  token = jnp.arange(shape[0], dtype=jnp.int32)[None]
  is_token = jnp.repeat(has_page, pages.page_size, axis=1)
  # Past the length, a page may hold values of an earlier sequence.
  is_token &= token < lengths[:, None]
  return jnp.where(
    is_token[:, :, None, None], values, jnp.full_like(values, -1)
  )
