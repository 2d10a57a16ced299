"""Writes the keys and values of new tokens into their pages."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.kv_pages import check_layer
from jaxkv._src.kv.kv_pages import page_index
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

  Skips columns past `view.num_tokens`, and tokens whose entry in the page table
  is 0 (the null page), out of range or missing. Call `jaxkv.allocate` first. It
  reports the rows that get no pages. Not differentiable: for integer storage,
  `jax.grad` gives zeros and no error.

  Args:
    kv: the pages.
    view: the rows and their new tokens; for a `PackedView`, B is 1.
    layer: int32[], 0..L-1.
    k: [B, T, K, D], keys of T columns in B rows. Keys and values are converted
      to `kv.dtype`; 8-bit formats have a scale for each token and head.
    v: [B, T, K, D], values; None for latents, which contain their values.

  Returns:
    The pages.
  """
  new_tokens = {"k": k} if v is None else {"k": k, "v": v}
  if (v is None) != (kv.v is None):
    expected = "an array, unless the pages hold latents"
    if kv.v is None:
      expected = f"None for latents, whose values are k[..., :{kv.value_dim}]"
    arguments.refuse(TypeError, "v", expected, v)
  for name, array in new_tokens.items():
    arguments.check_array(name, array)
    heads = (kv.num_kv_heads, kv.head_dim)
    if array.ndim != 4 or array.shape[2:] != heads or array.shape != k.shape:
      expected = f"[B, T, {heads[0]}, {heads[1]}], the same for k and v"
      arguments.refuse(ValueError, name, expected, array)
    if kv.has_default_dtype and array.dtype == jnp.float32:
      hint = (
        "make the pages with dtype=float32, or with an explicit dtype=bfloat16"
      )
      expected = f"{kv.dtype}, the default dtype of the pages"
      arguments.refuse(TypeError, name, expected, array.dtype, hint)
  check_rows(view, "k", k)
  check_layer(kv, layer)
  return _write(kv, view, jnp.asarray(layer, jnp.int32), new_tokens)


# Inlined into a caller's `jit`, which decides whether to donate the pools.
# Without donation each call copies them.
@functools.partial(jax.jit, inline=True)
def _write(
  kv: KVPages, view: AnyView, layer: jax.Array, new_tokens: dict[str, jax.Array]
) -> KVPages:
  # The index of a page includes the layer, because a slice of one layer would
  # be a copy.
  places = token_places(kv, view, layer, new_tokens["k"].shape[1])
  arrays = {}
  for name, array in new_tokens.items():
    pages = getattr(kv, name)
    new = array.reshape(-1, *array.shape[2:])
    if kv.k_scale is not None:
      new, factors = kernels.quantize(new, pages.dtype)
      scales = getattr(kv, f"{name}_scale")
      arrays[f"{name}_scale"] = kernels.append_pages(scales, factors, *places)
    arrays[name] = kernels.append_pages(pages, new, *places)
  return dataclasses.replace(kv, **arrays)


def token_places(
  kv: Any, view: AnyView, layer: jax.Array, columns: int
) -> tuple[jax.Array, jax.Array]:
  """Returns each column's `page_index`, and offset in the page: int32[B * T].

  The index is out of range for padding and for tokens without a page.
  """
  if isinstance(view, PackedView):
    # `PackedView` puts the columns of `decode` before those of `prefill`.
    parts = [token_places(kv, view.decode, layer, 1)]
    if view.prefill is not None:
      row, position = packed_positions(
        view.prefill, columns - parts[0][0].shape[0]
      )
      parts.append(_locate(kv, view.prefill, layer, row, position))
    indices, offsets = zip(*parts, strict=True)
    return jnp.concatenate(indices), jnp.concatenate(offsets)
  rows = rows_of(view)
  row = jnp.arange(rows.starts.shape[0], dtype=jnp.int32)[:, None]
  indices, offsets = _locate(kv, rows, layer, row, positions(rows, columns))
  return indices.reshape(-1), offsets.reshape(-1)


def _locate(
  kv: Any, view: View, layer: jax.Array, row: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
  # Index -1 would read the last column, so padding reads past the table.
  column = jnp.where(
    position >= 0, position // kv.page_size, view.page_table.shape[1]
  )
  ids = view.page_table.at[row, column].get(mode="fill", fill_value=0)
  return page_index(kv, ids, layer), position % kv.page_size
