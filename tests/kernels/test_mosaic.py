"""Parts of the Mosaic backends, and cases beyond the table of shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import calls
from jaxkv_kernels._src.attention import head_epilogue
from jaxkv_kernels._src.attention.mosaic_gpu import backend as mosaic_gpu
from jaxkv_kernels._src.attention.mosaic_tpu import backend as mosaic_tpu
from jaxkv_kernels._src.attention.options import CallOptions
from tests.kernels import reference
from tests.kernels import shapes
from tests.kernels.backends import ON_HOPPER
from tests.kernels.backends import call_of
from tests.kernels.backends import check_float16_values

# On a Hopper `mosaic_gpu` is not interpreted.
INTERPRETED: dict[str, Any] = {
  "mosaic_tpu": pltpu.InterpretParams(detect_races=True),
  "mosaic_gpu": not ON_HOPPER and InterpretGPUParams(detect_races=True),
}
DTYPES = {"mosaic_tpu": np.float32, "mosaic_gpu": jnp.bfloat16}
quickly_interpreted = pytest.mark.skipif(
  jax.__version_info__ < (0, 11),
  reason="before jax 0.11 the interpreter of mosaic_gpu takes a minute",
)
over_backends = pytest.mark.parametrize(
  "backend",
  [
    *(() if ON_HOPPER else ("mosaic_tpu",)),
    pytest.param("mosaic_gpu", marks=quickly_interpreted),
  ],
)


def decode(backend, *arguments, **options):
  out = kernels.paged_decode(
    *shapes.put(*arguments),
    backend=backend,
    interpret=INTERPRETED[backend],
    **call_of(**options),
  )
  return [np.asarray(x) for x in out]


@pytest.mark.skipif(
  jax.default_backend() != "cpu" and not ON_HOPPER,
  reason="interpreted on a CPU, or run on a Hopper",
)
class TestKernels:
  @pytest.mark.slow
  @quickly_interpreted
  @pytest.mark.parametrize("factor", [1e3, 1e-12])
  def test_float16_keeps_values_of_any_size(self, factor):
    """A weight times a token's scale may be outside of float16's range."""
    interpret = INTERPRETED["mosaic_gpu"]
    check_float16_values(mosaic_gpu, interpret, factor)

  @pytest.mark.slow
  @quickly_interpreted
  @pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
  def test_scales_of_tokens_with_scales_of_heads(self, dtype):
    """With a tree that has an unseen node, whose scale and value are NaN."""
    rng = np.random.default_rng(0)
    pools = rng.standard_normal((2, 3, 1, 16, 128)).astype(dtype)
    q = rng.standard_normal((1, 3, 2, 128)).astype(jnp.bfloat16)
    pages = (np.array([[2, 0]], np.int32), *np.array([[17], [3]], np.int32))
    mask = np.ones((1, 3, 3), bool)
    mask[:, :, 1] = False
    options = {
      "k_scale": np.array([1.5], np.float32),
      "v_scale": rng.uniform(0.5, 2, (3, 1, 16)).astype(np.float32),
      "tree_mask": mask,
    }
    expected = reference.paged_attention_padded(q, *pools, *pages, **options)
    pools[:, 0, 0, 2] = options["v_scale"][0, 0, 2] = np.nan
    out, lse = kernels.paged_attention_padded(
      *shapes.put(q, *pools, *pages),
      **call_of(**jax.tree.map(jnp.asarray, options)),
      backend="mosaic_gpu",
      interpret=INTERPRETED["mosaic_gpu"],
    )
    shapes.assert_matches(out, lse, *expected, q.dtype, 2e-6)

  @over_backends
  def test_logits_that_rise_from_block_to_block(self, backend):
    """What earlier blocks have summed is scaled to the new maximum."""
    shape = shapes.Shape(
      heads=(4, 1), head_dim=128, page_size=32, lengths=(600,)
    )
    case = shapes.problem(shape)
    dtype = DTYPES[backend]
    pools = [pages.astype(dtype) for pages in case.pools[:2]]
    q = shapes.queries(case, shape, 1).astype(dtype)
    arguments = (q, *pools, case.page_table, case.lengths)
    expected = reference.paged_decode(*arguments)
    shapes.assert_matches(*decode(backend, *arguments), *expected, dtype, 2e-6)

  @pytest.mark.slow
  @over_backends
  def test_a_sink_of_minus_infinity(self, backend):
    """A row without keys stays zeros; others are as without a sink."""
    case = shapes.problem(shapes.SHAPES["everything_bfloat16_d128"])
    dtype = DTYPES[backend]
    pools = (pages.astype(dtype) for pages in case.pools[:2])
    lengths = case.lengths[:2]
    assert lengths.tolist() == [0, 1]
    q = np.ones((2, 8, 128), dtype)
    arguments = (q, *pools, case.page_table[:2], lengths)
    plain = decode(backend, *arguments)
    sinks = jnp.full(8, -jnp.inf)
    out, lse = decode(backend, *arguments, sinks=sinks)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(lse[0], -np.inf)
    np.testing.assert_array_equal(out, plain[0])
    np.testing.assert_array_equal(lse, plain[1])

  @pytest.mark.slow
  @over_backends
  @pytest.mark.parametrize("window", [None, 2])
  def test_nan_in_an_unseen_node_stays_out(self, backend, window):
    """Its NaN stays out, and so does that of a node after the last query."""
    dtype = DTYPES[backend]
    rng = np.random.default_rng(0)
    pools = rng.standard_normal((2, 2, 1, 8, 128)).astype(dtype)
    q = rng.standard_normal((1, 4, 1, 128)).astype(dtype)
    mask = np.ones((1, 4, 4), bool)
    mask[:, :, 1] = False
    mask[:, 2, 2] = False  # Allowed to queries before it, and to padding.
    num_seen = 1
    if window is not None:
      mask[:, :2, 0] = False  # The third query is too far from it.
      num_seen = 0
    results = []
    for bad in (0.0, np.nan):
      pools[:, 0, 0, 2 + num_seen : 5] = bad
      results.append(
        kernels.paged_attention_padded(
          *shapes.put(q, *pools, np.zeros((1, 1), np.int32)),
          jnp.array([2], jnp.int32),
          jnp.array([3], jnp.int32),
          options=kernels.AttentionOptions(
            tree_mask=jnp.asarray(mask), window=window
          ),
          backend=backend,
          interpret=INTERPRETED[backend],
        )
      )
    for a, b in zip(*results, strict=True):
      np.testing.assert_array_equal(a, b)


class TestHeadEpilogue:
  def test_sinks(self):
    """-inf and finite; for rows with keys, rows without, and padding."""
    out = jnp.asarray([[[1.0], [1.0]], [[0.0], [0.0]], [[0.0], [0.0]]])
    lse = jnp.asarray([[0.0, 0.0], [-jnp.inf, -jnp.inf], [-jnp.inf, -jnp.inf]])
    options = CallOptions(
      page_offset=jnp.int32(0),
      scale=1.0,
      sinks=jnp.asarray([-jnp.inf, 0.0]),
    )
    is_query = jnp.asarray([True, True, False])
    out, lse = head_epilogue.finish(out, lse, is_query, options)
    np.testing.assert_allclose(out[..., 0], [[1, 0.5], [0, 0], [0, 0]])
    log_2 = np.log(2)
    np.testing.assert_allclose(
      lse, [[0, log_2], [-np.inf, 0], [-np.inf, -np.inf]], rtol=1e-6
    )


def call(backend, **changes):
  """A decode that a backend serves, with changes that it may not serve."""
  dtype = changes.pop("dtype", jnp.bfloat16)
  dim, page_size = changes.pop("dim", 128), changes.pop("size", 16)
  heads, value_dim = changes.pop("heads", 4), changes.pop("value_dim", dim)
  q = changes.pop("q", jnp.ones((2, heads, dim), jnp.bfloat16))
  kernels.paged_decode(
    q,
    jnp.ones((3, 2, page_size, dim), dtype),
    jnp.ones((3, 2, page_size, value_dim), dtype),
    jnp.ones((2, 3), jnp.int32),
    jnp.ones(2, jnp.int32),
    backend=backend,
    **call_of(**changes),
  )


class TestUnsupported:
  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"dtype": jnp.float16}, "`k_pages` must be float32, .* got float16"),
      ({"dim": 64}, r"multiples of 128, got \(64, 64\)"),
      ({"value_dim": 64}, r"multiples of 128, got \(128, 64\)"),
      ({"size": 4}, "`k_pages` must have pages of a multiple of 8 .* got 4"),
      (
        {"size": 24},
        "pages of 8 or a multiple of 16 tokens .* got 24",
      ),
      ({"q": jnp.ones((2, 4, 128), jnp.float16)}, "`q` must .* got float16"),
      ({"size": 4096, "dim": 1024}, "bytes together, got"),
      ({"heads": 2**14}, "`q` must have few enough heads .* got 16384 heads"),
    ],
  )
  def test_tpu(self, changes, message):
    with pytest.raises(NotImplementedError, match=message):
      call("mosaic_tpu", **changes)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"dtype": jnp.float32}, "`k_pages` must be one of .* got float32"),
      ({"dtype": jnp.float16}, "`q` must be of the dtype of k_pages, float16"),
      (
        {"dtype": jnp.int8, "q": jnp.ones((2, 4, 128))},
        "`q` must be .* for 8-bit pages, got float32",
      ),
      ({"dtype": jnp.int8, "dim": 256}, "head size of 64 or 128 .* got 256"),
      ({"dim": 80}, r"`k_pages` and `v_pages` .* got \(80, 80\)"),
      ({"value_dim": 64}, r"must have equal head sizes .* got \(128, 64\)"),
      ({"size": 4}, "pages of 8, 16, 32 or a multiple of 64 tokens, got 4"),
      ({"size": 96}, "`k_pages` must have pages of .* got 96"),
      ({"heads": 256}, "at most 64 heads for each of the 2 K/V heads, got 256"),
    ],
  )
  def test_gpu(self, changes, message):
    with pytest.raises(NotImplementedError, match=message):
      call("mosaic_gpu", **changes)

  def test_scales_of_tokens_in_small_pages(self):
    scale = jnp.ones((3, 2, 8))
    with pytest.raises(
      NotImplementedError, match="if tokens have scales, got 8"
    ):
      call("mosaic_gpu", dtype=jnp.int8, size=8, k_scale=scale, v_scale=scale)

  @over_backends
  def test_other_platforms(self, backend):
    shape = jax.ShapeDtypeStruct((1, 1, 16, 128), jnp.bfloat16)
    module = {"mosaic_gpu": mosaic_gpu, "mosaic_tpu": mosaic_tpu}[backend]
    options = CallOptions(page_offset=jnp.int32(0), scale=1.0)
    zeros = jnp.zeros((1,), jnp.int32)
    call = calls.decode_call(shape, (shape, shape), zeros[None], zeros, options)
    reason = module.unsupported("cpu", call)
    assert reason.startswith("the platform must be")
