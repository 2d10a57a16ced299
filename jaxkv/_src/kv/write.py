"""Writing the keys and values of new tokens."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.memory import Layered
from jaxkv._src.kv.memory import check_layer
from jaxkv._src.kv.memory import in_layer
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_rows
from jaxkv._src.kv.view import packed_positions
from jaxkv._src.kv.view import positions
from jaxkv._src.kv.view import rows_of


def write(
  kv: KVPages,
  view: AnyView,
  layer: jax.Array | int,
  k: jax.Array,
  v: jax.Array | None = None,
) -> KVPages:
  """Writes the new tokens' keys and values in one layer.

  Columns past `view.counts` are dropped, and so are positions whose table entry
  is the null page, out of range, or past the table's end. A dropped token never
  lands in another page or layer. Allocate before writing: `allocate` reports
  what it could not grant. Not differentiable: pages stored as bits have a
  gradient of zeros, without an error.

  Args:
    kv: the pages.
    view: where the rows live and which columns are tokens; of a `PackedView`,
      B is 1.
    layer: int32[], 0..L-1.
    k: [B, T, K, D], rounded to the format `kv.dtype`; 8-bit formats get a scale
      for each token and head.
    v: [B, T, K, D]; None for latents, whose values are part of their keys.

  Returns:
    The pages.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument has a shape or value that is not supported.
  """
  given = {"k": k, "v": v}
  if kv.v is None:
    _refuse_values(kv, given.pop("v"))
  for name, new in given.items():
    arguments.check_array(name, new)
    sizes = (kv.num_kv_heads, kv.head_dim)
    if new.ndim != 4 or new.shape[2:] != sizes or new.shape != k.shape:
      wanted = f"[B, T, {sizes[0]}, {sizes[1]}], k and v alike"
      arguments.refuse(ValueError, name, wanted, new)
  check_rows(view, "k", k)
  check_layer(kv, layer)
  return _write(kv, view, jnp.asarray(layer, jnp.int32), k, v)


def _refuse_values(kv: KVPages, v: jax.Array | None) -> None:
  """Raises unless no values are given for latents."""
  if v is not None:
    wanted = f"None for latents, whose values are k[..., :{kv.value_dim}]"
    arguments.refuse(TypeError, "v", wanted, v)


@functools.partial(jax.jit, inline=True)
def _write(
  kv: KVPages,
  view: AnyView,
  layer: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
) -> KVPages:
  where = places(kv, view, k.shape[1])
  if kv.v is None or v is None:
    return _write_latents(kv, layer, k, where)
  new = (k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]))
  offset = layer * kv.num_pages
  if kv.k_scale is None or kv.v_scale is None:
    k_pages, v_pages = kernels.append_kv(
      kv.k, kv.v, *new, *where, page_offset=offset
    )
    return dataclasses.replace(kv, k=k_pages, v=v_pages)
  k_pages, v_pages, k_scale, v_scale = kernels.append_quantized(
    kv.k, kv.v, kv.k_scale, kv.v_scale, *new, *where, page_offset=offset
  )
  return dataclasses.replace(
    kv, k=k_pages, v=v_pages, k_scale=k_scale, v_scale=v_scale
  )


def _write_latents(
  kv: KVPages,
  layer: jax.Array,
  k: jax.Array,
  where: tuple[jax.Array, jax.Array],
) -> KVPages:
  """Writes latents [B, T, 1, D]; `where` is that of `places`."""
  new, offset = k.reshape(-1, *k.shape[2:]), layer * kv.num_pages
  if kv.k_scale is None:
    pages = kernels.append_pages(kv.k, new, *where, page_offset=offset)
    return dataclasses.replace(kv, k=pages)
  stored, scale = kernels.quantize(new, kv.k.dtype)
  pages = kernels.append_pages(kv.k, stored, *where, page_offset=offset)
  scales = kernels.append_pages(
    kv.k_scale[..., None], scale[..., None], *where, page_offset=offset
  )
  return dataclasses.replace(kv, k=pages, k_scale=scales[..., 0])


def places(
  kv: Layered, view: AnyView, columns: int
) -> tuple[jax.Array, jax.Array]:
  """Page and offset of each token of a call, as `locate`, int32[B * T]."""
  if isinstance(view, PackedView):
    parts = [places(kv, view.decode, 1)]
    if view.prefill is not None:
      row, position = packed_positions(
        view.prefill, columns - parts[0][0].shape[0]
      )
      parts.append(_locate(kv, view.prefill, row, position))
    ids, offsets = zip(*parts, strict=True)
    return jnp.concatenate(ids), jnp.concatenate(offsets)
  rows = rows_of(view)
  ids, offsets = locate(kv, rows, positions(rows, columns))
  return ids.reshape(-1), offsets.reshape(-1)


def locate(
  kv: Layered, view: View, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Page and offset of positions.

  Args:
    kv: the pages.
    view: the rows.
    position: int32[B, T], -1 for none.

  Returns:
    (int32[B, T] page ids, out of range where there is no page; int32[B, T]
    offsets).
  """
  chex.assert_equal_shape_prefix([position, view.page_table], 1)
  row = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None]
  return _locate(kv, view, row, position)


def _locate(
  kv: Layered, view: View, row: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """As `locate`, of positions in rows int32[X]."""
  column = jnp.where(
    position >= 0, position // kv.page_size, view.page_table.shape[1]
  )
  ids = view.page_table.at[row, column].get(mode="fill", fill_value=0)
  ids = jnp.where(ids == 0, kv.num_pages, ids)
  return in_layer(kv, ids), position % kv.page_size
