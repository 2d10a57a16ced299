"""Every Pallas kernel compiles for its machines, over shapes and formats.

A compiler error, one spilled register of a CUDA kernel, or a temporary that
grows with the pool fails here. Backends must serve the calls that they claim to
serve, and refuse all others with a reason.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention.mosaic_gpu import backend as mosaic_gpu
from tests.kernels.compiled_calls import BATCH
from tests.kernels.compiled_calls import COLUMNS
from tests.kernels.compiled_calls import DIM
from tests.kernels.compiled_calls import EVERYTHING
from tests.kernels.compiled_calls import HEADS
from tests.kernels.compiled_calls import KV_HEADS
from tests.kernels.compiled_calls import PAGES
from tests.kernels.compiled_calls import PER_TOKEN
from tests.kernels.compiled_calls import SIZE
from tests.kernels.compiled_calls import assert_small
from tests.kernels.compiled_calls import compile_call
from tests.kernels.compiled_calls import compile_decode
from tests.kernels.compiled_calls import compile_padded
from tests.kernels.compiled_calls import query_dtype
from tests.kernels.compiled_calls import shape
from tests.kernels.compiled_calls import vector
from tests.tools.ahead_of_time import OLDER_GPUS
from tests.tools.ahead_of_time import TARGETS
from tests.tools.ahead_of_time import compile_for
from tests.tools.ahead_of_time import for_target
from tests.tools.ahead_of_time import needs
from tests.tools.tiers import slow_except

# The formats of pools that a backend must serve.
FORMATS = {
  "triton": ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8"),
  "mosaic_gpu": ("bfloat16", "float16", "float8_e4m3fn", "int8"),
  "mosaic_tpu": ("bfloat16", "float32", "float8_e4m3fn"),
}
# With another head size a TPU copies the whole pool to a new layout.
DIMS = {
  "triton": (64, 128, 256),
  "mosaic_gpu": (64, 128, 256),
  "mosaic_tpu": (128, 256),
}
SIZES = (8, 16, 64)
WIDE = ("bfloat16", "float16", "float32")


def matrix():
  """Head sizes, page sizes and formats of every backend on every target.

  8-bit pools have one page size: a kernel uses it only to index its table.
  """
  for target in TARGETS:
    for backend in for_target(target):
      # The XLA backend is compiled in loops, in test_ahead_of_time.py.
      for dtype in FORMATS.get(backend, ()):
        for page_size in SIZES if dtype in WIDE else SIZES[1:2]:
          for dim in DIMS[backend]:
            if backend == "mosaic_gpu" and dtype not in WIDE and dim > 128:
              continue
            yield pytest.param(
              target,
              backend,
              dtype,
              page_size,
              dim,
              marks=needs(target),
              id=f"{target}-{backend}-{dtype}-{page_size}-{dim}",
            )


def compile_latent(target, dtype, heads):
  """As in DeepSeek-V2 and V3: 512 + 64 elements, in 1.2 GB or more."""
  pages = shape((8 * PAGES, 1, SIZE, 576), dtype)
  decode = functools.partial(
    kernels.paged_decode,
    value_dim=512,
    options=kernels.AttentionOptions(scale=192**-0.5),
    backend="triton",
  )
  program = compile_for(
    target,
    jax.jit(lambda q, pages, *where: decode(q, pages, None, *where)),
    shape((BATCH, heads, 576), query_dtype(dtype)),
    pages,
    shape((BATCH, COLUMNS), jnp.int32),
    vector(),
  )
  # Parts for 264 programs in float32.
  assert_small(program, pages)


class TestDecode:
  # float16 is bfloat16 with another conversion.
  @slow_except("dtype", FORMATS["triton"], *FORMATS["mosaic_tpu"], "int8")
  @slow_except("dim", sorted({*sum(DIMS.values(), ())}), 128)
  @slow_except("page_size", SIZES, 16)
  @slow_except("target", TARGETS, "h200", "v6e")
  @pytest.mark.parametrize(
    ("target", "backend", "dtype", "page_size", "dim"), list(matrix())
  )
  def test_compiles(self, target, backend, dtype, page_size, dim):
    program = compile_decode(
      target, backend, dtype=dtype, size=page_size, dim=dim
    )
    for kernel in program.mosaic_kernels:
      # All warpgroups together have 65,536 registers.
      threads = 2 * 128 * mosaic_gpu.streams(dim)
      assert kernel.registers * threads <= 65_536


class Test64Bits:
  """With integers of 64 bits by default."""

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ("target", "backend"),
    [
      pytest.param(target, backend, marks=needs(target))
      for target, backend in (
        ("h200", "triton"),
        ("h200", "mosaic_gpu"),
        ("v5e", "mosaic_tpu"),
      )
    ],
  )
  def test_compiles(self, target, backend):
    mask = shape((BATCH, 9, 9), jnp.bool_)
    with jax.enable_x64(True):
      compile_decode(target, backend)
      compile_padded(target, backend, tree_mask=mask, **EVERYTHING)


class TestTriton:
  """All features of the reference, for any group and head size."""

  @needs("h200")
  @slow_except("heads", [8, 32, 64, 256], 32)
  @pytest.mark.parametrize("heads", [8, 32, 64, 256])
  @pytest.mark.parametrize("dims", [(80, 80), (96, 160), (192, 128)])
  def test_groups_and_head_sizes(self, heads, dims):
    sizes = {"dim": dims[0], "value_dim": dims[1]}
    compile_decode("h200", "triton", heads=(heads, KV_HEADS), **sizes)

  @needs("h200")
  def test_a_long_prompt_and_a_long_table(self):
    """The output is not copied for every part that a table may be cut into."""
    q = shape((1, 4096, HEADS, DIM), jnp.bfloat16)
    pool = shape((PAGES, KV_HEADS, SIZE, DIM), jnp.bfloat16)
    table, lengths = shape((1, 8192), jnp.int32), shape((1,), jnp.int32)
    attention = functools.partial(
      kernels.paged_attention_padded, backend="triton"
    )
    program = compile_for(
      "h200", jax.jit(attention), q, pool, pool, table, lengths, lengths
    )
    # One output in float32 and its log-sum-exps.
    assert program.temporary < q.size * 4 * 1.1

  @pytest.mark.slow
  @needs("h200")
  # The most shared memory, and the most options.
  @pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
  def test_all_options(self, dtype):
    options = {"dtype": dtype, **EVERYTHING}
    if dtype == "int8":
      options |= PER_TOKEN
    mask = shape((BATCH, 8, 8), jnp.bool_)
    compile_decode("h200", "triton", **options)
    compile_padded("h200", "triton", columns=8, tree_mask=mask, **options)
    packed = kernels.paged_attention, (64,), vector(), vector(BATCH + 1)
    compile_call("h200", "triton", *packed, **options)

  @pytest.mark.slow
  @needs("h200")
  # The others differ in the conversion alone; see `TestOlderGpus`.
  @pytest.mark.parametrize("heads", [16, 128])
  @pytest.mark.parametrize("dtype", FORMATS["triton"])
  def test_latent_attention(self, dtype, heads):
    compile_latent("h200", dtype, heads)


on_older_gpus = pytest.mark.parametrize(
  "target", [pytest.param(t, marks=needs(t)) for t in OLDER_GPUS]
)


class TestOlderGpus:
  """Triton also serves GPUs before Hopper, which have less shared memory."""

  @slow_except("dim", DIMS["triton"], 128)
  @pytest.mark.parametrize("dim", DIMS["triton"])
  @on_older_gpus
  def test_decode(self, target, dim):
    compile_decode(target, "triton", dim=dim)

  @on_older_gpus
  def test_prefill_of_int8(self, target):
    compile_padded(target, "triton", columns=64, dtype="int8")

  @on_older_gpus
  def test_latent_attention(self, target):
    compile_latent(target, "bfloat16", 128)
