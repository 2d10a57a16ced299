"""Tracing every Pallas backend, without its device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jaxkv_kernels as kernels

over_backends = pytest.mark.parametrize(
  "backend", ["triton", "mosaic_gpu", "mosaic_tpu"]
)


def arguments(batch=4, pages=8):
  shape = jax.ShapeDtypeStruct
  pool = shape((pages, 2, 16, 128), jnp.bfloat16)
  return (
    shape((batch, 4, 128), jnp.bfloat16),
    pool,
    pool,
    shape((batch, 3), jnp.int32),
    shape((batch,), jnp.int32),
  )


@over_backends
class TestTracing:
  @pytest.mark.parametrize("shared", [False, True])
  def test_under_shard_map(self, backend, shared):
    """Rows on two devices, with separate pages or the same pages."""
    if len(jax.devices()) < 2:
      pytest.skip("needs two devices")
    rows = PartitionSpec("data")
    pool = PartitionSpec() if shared else rows

    def decode(*arguments):
      out, lse = kernels.paged_decode(*arguments, backend=backend)
      assert jax.typeof(out).shape == (2, 4, 128)
      return out, lse

    out, lse = jax.eval_shape(
      jax.shard_map(
        decode,
        mesh=jax.make_mesh(
          (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
        ),
        in_specs=(rows, pool, pool, rows, rows),
        out_specs=rows,
      ),
      *arguments(),
    )
    assert (out.shape, out.dtype) == ((4, 4, 128), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, 4), jnp.float32)

  def test_with_64_bit_types(self, backend):
    def decode(*arguments):
      return kernels.paged_decode(
        *arguments,
        options=kernels.AttentionOptions(window=7, soft_cap=30.0),
        backend=backend,
      )

    with jax.enable_x64(True):
      out, lse = jax.eval_shape(decode, *arguments())
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
