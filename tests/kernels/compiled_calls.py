"""Compiles calls of attention over large pools for absent devices."""

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from tests.kernels.backends import call_of
from tests.tools import ahead_of_time

BATCH, HEADS, KV_HEADS, SIZE, DIM = 8, 32, 8, 16, 128
PAGES, COLUMNS = 16_384, 256
shape = jax.ShapeDtypeStruct

EVERYTHING = {
  "scale": shape((), jnp.float32),
  "soft_cap": 30.0,
  "window": shape((), jnp.int32),
  "page_offset": shape((), jnp.int32),
  "sinks": shape((HEADS,), jnp.float32),
  "alibi_slopes": shape((HEADS,), jnp.float32),
}
PER_TOKEN = dict.fromkeys(
  ("k_scale", "v_scale"), shape((PAGES, KV_HEADS, SIZE), jnp.float32)
)


def vector(length=BATCH):
  return shape((length,), jnp.int32)


def query_dtype(dtype):
  return jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype


def assert_small(program, *pools):
  """Temporaries under 5 % of the pools."""
  num_bytes = sum(pool.size * jnp.dtype(pool.dtype).itemsize for pool in pools)
  assert program.temporary < num_bytes * 0.05


def compile_call(
  target,
  backend,
  function,
  leading,
  *vectors,
  heads=(HEADS, KV_HEADS),
  size=SIZE,
  dim=DIM,
  value_dim=None,
  dtype="bfloat16",
  **options,
):
  """Compiles a call without spills or large temporaries.

  Args:
    target: the device.
    backend: the name of the backend.
    function: an attention function.
    leading: the shape of the queries, without heads.
    *vectors: arguments behind the page table.
    heads: H and K.
    size: tokens of a page; all pools have equally many elements of keys.
    dim: D.
    value_dim: Dv, D if None.
    dtype: the format of the pools.
    **options: options of the call; shapes are traced.

  Returns:
    The program.
  """
  pages = PAGES * SIZE * KV_HEADS // (size * heads[1])
  pools = [
    shape((pages, heads[1], size, columns), jnp.dtype(dtype))
    for columns in (dim, value_dim or dim)
  ]
  arrays = {k: v for k, v in options.items() if isinstance(v, shape)}
  static = {k: v for k, v in options.items() if k not in arrays}

  def call(arrays, *arguments):
    return function(*arguments, **call_of(**arrays, **static), backend=backend)

  program = ahead_of_time.compile_for(
    target,
    jax.jit(call),
    arrays,
    shape((*leading, heads[0], dim), query_dtype(dtype)),
    *pools,
    shape((BATCH, COLUMNS * SIZE // size), jnp.int32),
    *vectors,
  )
  assert_small(program, *pools)
  assert len(program.mosaic_kernels) == (backend == "mosaic_gpu")
  return program


def compile_decode(target, backend, function=kernels.paged_decode, **options):
  """Compiles a call with one query a row; see `compile_call`."""
  call = target, backend, function
  return compile_call(*call, (BATCH,), vector(), **options)


def compile_padded(target, backend, columns=9, **options):
  """Compiles a call with several queries a row; see `compile_call`."""
  call = target, backend, kernels.paged_attention_padded
  return compile_call(*call, (BATCH, columns), vector(), vector(), **options)
