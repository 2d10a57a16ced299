"""Small K/V memories for the tests of `jaxkv.kv`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import kv as memory
from tests.kernels.backends import call_of

LAYERS, PAGES, SIZE, KV_HEADS, DIM = 3, 24, 4, 2, 32
HEADS = 8
DTYPES = ["float32", "bfloat16", "float16"]


def make(dtype="float32", **changes):
  """Makes a memory of small pages."""
  pages = {"num_pages": PAGES, "page_size": SIZE}
  pages |= {name: changes.pop(name) for name in pages if name in changes}
  config = jaxkv.CacheConfig(num_slots=1, pages_per_slot=1, **pages)
  fields = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
  return memory.init(config, dtype=dtype, **{**fields, **changes})


def poisoned(dtype="float32"):
  """Makes a memory that holds NaN everywhere."""
  kv = make(dtype)
  nan = np.full(kv.k.shape, np.nan, jnp.dtype(dtype)).view(kv.k.dtype)
  return dataclasses.replace(kv, k=jnp.asarray(nan), v=jnp.asarray(nan) + 0)


def view(table, starts, num_tokens):
  """Makes a view from lists."""
  return memory.View(
    page_table=jnp.asarray(table, jnp.int32),
    starts=jnp.asarray(starts, jnp.int32),
    num_tokens=jnp.asarray(num_tokens, jnp.int32),
  )


def draw(seed, *shape, dtype="float32"):
  """Draws normal numbers."""
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(values, dtype)


def dense(kv, layer, table):
  """Returns keys and values of one layer as float32[B, M * S, K, D].

  Zeros for page numbers that are not in the memory.
  """
  rows = np.asarray(table) - kv.first_page
  rows = np.where(rows >= 0, rows, kv.num_pages)

  def gathered(pages, scale):
    pages = kernels.load(pages).astype(jnp.float32)
    pages = pages if scale is None else pages * scale[..., None]
    pages = pages.reshape(kv.num_layers, kv.num_pages, *pages.shape[1:])[layer]
    pages = pages.at[rows].get(mode="fill", fill_value=0).swapaxes(2, 3)
    return np.asarray(pages.reshape(len(rows), -1, *pages.shape[3:]))

  keys = gathered(kv.k, kv.k_scale)
  if kv.v is None:
    return keys, keys[..., : kv.value_dim]
  return keys, gathered(kv.v, kv.v_scale)


write = jax.jit(memory.write)


def attend_by_name(kv, view, layer, q, **options):
  """Calls `attend_with_lse` with the options as keywords."""
  return memory.attend_with_lse(kv, view, layer, q, **call_of(**options))


attend = jax.jit(attend_by_name, static_argnames=("soft_cap", "window"))

TABLE = [[5, 9, 2, 24, 24], [7, 1, 24, 24, 24], [24] * 5]
