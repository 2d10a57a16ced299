"""Storing the keys and values of new tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.memory import check_layer
from jaxkv._src.kv.memory import in_layer
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_rows
from jaxkv._src.kv.view import positions
from jaxkv_kernels._src import check


def write(
  kv: KVPages,
  view: View,
  layer: jax.Array | int,
  k: jax.Array,
  v: jax.Array,
) -> KVPages:
  """Stores the new tokens' keys and values in one layer.

  Dropped, and never landing in another page or layer: columns past
  `view.counts`, and positions whose table entry is the null page, out of
  range, or past the table's end. Allocate before writing; the allocator
  reports what it could not give. Not differentiable: what is stored as bits
  has a gradient of zeros, and no error says so.

  Args:
    kv: the pages.
    view: where the rows live and which columns are tokens.
    layer: int32[], 0..L-1.
    k: [B, T, K, D], rounded to the format `kv.dtype`, 8-bit ones with a scale
      for each token and head.
    v: [B, T, K, D].

  Returns:
    The pages.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
  """
  for name, new in (("k", k), ("v", v)):
    check.is_array(name, new)
    wanted = (kv.num_kv_heads, kv.head_dim)
    if new.ndim != 4 or new.shape[2:] != wanted or new.shape != k.shape:
      raise ValueError(
        f"{name} has shape {new.shape}; it must be"
        f" [B, T, {wanted[0]}, {wanted[1]}], k and v alike"
      )
  check_rows(view, "k", k)
  check_layer(kv, layer)
  return _write(kv, view, jnp.asarray(layer, jnp.int32), k, v)


@functools.partial(jax.jit, inline=True)
def _write(
  kv: KVPages, view: View, layer: jax.Array, k: jax.Array, v: jax.Array
) -> KVPages:
  ids, offsets = locate(kv, view, positions(view, k.shape[1]))
  new = (k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]))
  where = (ids.reshape(-1), offsets.reshape(-1))
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


def locate(
  kv: KVPages, view: View, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Page id (out of range for nowhere) and offset of int32[B, T] positions."""
  column = jnp.where(
    position >= 0, position // kv.page_size, view.page_table.shape[1]
  )
  row = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None]
  ids = view.page_table.at[row, column].get(mode="fill", fill_value=0)
  ids = jnp.where(ids == 0, kv.num_pages, ids)
  return in_layer(kv, ids), position % kv.page_size
