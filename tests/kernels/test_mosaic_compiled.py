"""The Mosaic backends compile with every option, beyond the plain matrix."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import jaxkv_kernels as kernels
from tests.kernels.compiled_calls import BATCH
from tests.kernels.compiled_calls import COLUMNS
from tests.kernels.compiled_calls import DIM
from tests.kernels.compiled_calls import EVERYTHING
from tests.kernels.compiled_calls import HEADS
from tests.kernels.compiled_calls import KV_HEADS
from tests.kernels.compiled_calls import PAGES
from tests.kernels.compiled_calls import PER_TOKEN
from tests.kernels.compiled_calls import SIZE
from tests.kernels.compiled_calls import compile_call
from tests.kernels.compiled_calls import compile_decode
from tests.kernels.compiled_calls import compile_padded
from tests.kernels.compiled_calls import shape
from tests.kernels.compiled_calls import vector
from tests.tools.ahead_of_time import compile_for
from tests.tools.ahead_of_time import needs
from tests.tools.tiers import slow_except

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
# The oldest and the newest TPU; the matrix has the third.
BACKENDS = {"h200": "mosaic_gpu", "v5e": "mosaic_tpu", "v7x": "mosaic_tpu"}
TPUS = [pytest.param(name, marks=needs(name)) for name in ("v5e", "v7x")]
over_targets = pytest.mark.parametrize(
  "target", [pytest.param("h200", marks=needs("h200")), *TPUS]
)
over_tpus = pytest.mark.parametrize("target", TPUS)


PER_HEAD = dict.fromkeys(
  ("k_scale", "v_scale"), shape((KV_HEADS,), jnp.float32)
)
TREE = {"tree_mask": shape((BATCH, 9, 9), jnp.bool_)}
BYTES = ("int8", "float8_e4m3fn", "float8_e5m2")


# Of the TPUs a v7x has the least memory for blocks.
@slow_except("target", BACKENDS, "h200", "v7x")
@over_targets
class TestAllTargets:
  @pytest.mark.parametrize(
    "dim", [128, pytest.param(256, marks=pytest.mark.slow)]
  )
  def test_decode(self, target, dim):
    compile_decode(target, BACKENDS[target], dim=dim, **EVERYTHING)

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ("dim", "options"),
    [
      (128, {**EVERYTHING, **PER_HEAD, **TREE}),
      (256, {**EVERYTHING, **PER_HEAD}),
      (256, TREE),
    ],
    ids=["all128", "all256", "tree256"],
  )
  def test_rectangle(self, target, dim, options):
    compile_padded(target, BACKENDS[target], dim=dim, **options)

  @pytest.mark.slow
  def test_packed(self, target):
    function = kernels.paged_attention
    vectors = vector(), vector(BATCH + 1)
    compile_call(
      target, BACKENDS[target], function, (200,), *vectors, **EVERYTHING
    )

  @slow_except("heads", [(8, 1), (64, 1), (32, 32), (24, 3)], (24, 3))
  @pytest.mark.parametrize("heads", [(8, 1), (64, 1), (32, 32), (24, 3)])
  def test_groups(self, target, heads):
    compile_decode(target, BACKENDS[target], heads=heads)

  @pytest.mark.slow
  @pytest.mark.parametrize("page_size", [8, 128])
  def test_page_sizes(self, target, page_size):
    compile_decode(target, BACKENDS[target], size=page_size)


class TestHopper:
  @pytest.mark.slow
  @needs("h200")
  @pytest.mark.parametrize("dtype", BYTES)
  @pytest.mark.parametrize("dim", [64, 128])
  @pytest.mark.parametrize("page_size", [8, 16, 64])
  def test_8_bits(self, dtype, dim, page_size):
    tokens = PAGES * SIZE // page_size, KV_HEADS, page_size
    of = (KV_HEADS,) if page_size == 8 else tokens
    scales = shape(of, jnp.float32)
    layout = {"dtype": dtype, "dim": dim, "size": page_size}
    layout |= {"k_scale": scales, "v_scale": scales}
    compile_padded("h200", "mosaic_gpu", **layout, **EVERYTHING, **TREE)

  @pytest.mark.slow
  @needs("h200")
  @pytest.mark.parametrize("dtype", BYTES[:2])
  @pytest.mark.parametrize(
    "scales", [PER_HEAD, PER_TOKEN], ids=["head", "token"]
  )
  def test_8_bits_for_float16(self, dtype, scales):
    query = shape((BATCH, HEADS, DIM), jnp.float16)

    def decode(_, *arguments, **options):
      return kernels.paged_decode(
        jnp.zeros(query.shape, query.dtype), *arguments, **options
      )

    compile_decode("h200", "mosaic_gpu", decode, dtype=dtype, **scales)

  @pytest.mark.slow
  @needs("h200")
  def test_head_size_192(self):
    compile_decode("h200", "mosaic_gpu", dim=192)

  @pytest.mark.slow
  @needs("h200")
  def test_a_layer_is_few_kernels(self, monkeypatch):
    """Attention, a merge, and a few of XLA's own; see `triton.merge`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from launches import in_largest_loop

    def layers(q, k_pages, v_pages, table, lengths):
      def layer(index, q):
        out, _ = kernels.paged_decode(
          q,
          k_pages,
          v_pages,
          table,
          lengths,
          page_offset=index * (PAGES // 4),
          backend="mosaic_gpu",
        )
        return q + out

      return jax.lax.fori_loop(0, 4, layer, q)

    pool = shape((PAGES, KV_HEADS, SIZE, DIM), jnp.bfloat16)
    q = shape((BATCH, HEADS, DIM), jnp.bfloat16)
    table = shape((BATCH, COLUMNS), jnp.int32)
    program = compile_for(
      "h200", jax.jit(layers), q, pool, pool, table, vector()
    )
    launches = in_largest_loop(program.text)
    assert 3 < launches.kernels <= 13
    assert launches.waits == 0


@slow_except("target", BACKENDS, "v7x")
@over_tpus
class TestTpu:
  @pytest.mark.slow
  @pytest.mark.parametrize("dtype", BYTES)
  @pytest.mark.parametrize(
    "scales", [PER_HEAD, PER_TOKEN], ids=["head", "token"]
  )
  def test_8_bits(self, target, dtype, scales):
    compile_decode(target, BACKENDS[target], dtype=dtype, **scales)

  @pytest.mark.parametrize("size", [8, 40])
  def test_8_bits_in_small_pages(self, target, size):
    compile_decode(target, BACKENDS[target], size=size, dtype="int8")

  def test_trees_with_scales_of_tokens(self, target):
    compile_padded(
      target, BACKENDS[target], dtype="int8", **EVERYTHING, **PER_TOKEN, **TREE
    )

  @pytest.mark.slow
  @pytest.mark.parametrize("heads", [40, 64])
  def test_prompts_with_many_kv_heads(self, target, heads):
    """Tiles and blocks must shrink to fit into the chip's memory."""
    compile_padded(target, BACKENDS[target], columns=128, heads=(heads, heads))

  @pytest.mark.parametrize("dtype", ["float32", "int8"])
  def test_pages_of_24_tokens(self, target, dtype):
    compile_padded(target, BACKENDS[target], size=24, dtype=dtype, **TREE)

  def test_float32(self, target):
    compile_decode(target, BACKENDS[target], dtype="float32")
