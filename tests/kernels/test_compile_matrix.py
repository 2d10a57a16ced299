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
from tests.kernels.backends import call_of
from tests.tools.ahead_of_time import OLDER_GPUS
from tests.tools.ahead_of_time import TARGETS
from tests.tools.ahead_of_time import compile_for
from tests.tools.ahead_of_time import for_target
from tests.tools.ahead_of_time import needs
from tests.tools.tiers import slow_except

BATCH, HEADS, KV_HEADS, TOKENS, PAGE_TOKENS = 8, 32, 8, 4096, 2**18
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


def pools_and_table(dtype, page_size, dim):
  shape = jax.ShapeDtypeStruct
  pool = shape((PAGE_TOKENS // page_size, KV_HEADS, page_size, dim), dtype)
  return pool, pool, shape((BATCH, TOKENS // page_size), jnp.int32)


def query_dtype(dtype):
  return jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype


def assert_small(program, *pools):
  """Temporaries under 5 % of the pools."""
  num_bytes = sum(pool.size * jnp.dtype(pool.dtype).itemsize for pool in pools)
  assert program.temporary < num_bytes * 0.05


def compile_latent(target, dtype, heads):
  """As in DeepSeek-V2 and V3: 512 + 64 elements, in 1.2 GB or more."""
  shape = jax.ShapeDtypeStruct
  pages = shape((8 * PAGE_TOKENS // 16, 1, 16, 576), dtype)
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
    shape((BATCH, TOKENS // 16), jnp.int32),
    shape((BATCH,), jnp.int32),
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
    decode = jax.jit(functools.partial(kernels.paged_decode, backend=backend))
    pools = pools_and_table(dtype, page_size, dim)
    program = compile_for(
      target,
      decode,
      jax.ShapeDtypeStruct((BATCH, HEADS, dim), query_dtype(dtype)),
      *pools,
      jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    )
    assert_small(program, *pools[:2])
    assert len(program.mosaic_kernels) == (backend == "mosaic_gpu")
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
    shape = jax.ShapeDtypeStruct
    vector = shape((BATCH,), jnp.int32)
    pools = pools_and_table("bfloat16", 16, 128)
    options = {
      "window": shape((), jnp.int32),
      "tree_mask": shape((BATCH, 9, 9), jnp.bool_),
      "sinks": shape((HEADS,), jnp.float32),
      "alibi_slopes": shape((HEADS,), jnp.float32),
    }

    def both(q, rectangle, options, *arguments):
      decode = kernels.paged_decode(q, *arguments[:-1], backend=backend)
      return decode, kernels.paged_attention_padded(
        rectangle, *arguments, backend=backend, **call_of(**options)
      )

    with jax.enable_x64(True):
      compile_for(
        target,
        jax.jit(both),
        shape((BATCH, HEADS, 128), jnp.bfloat16),
        shape((BATCH, 9, HEADS, 128), jnp.bfloat16),
        options,
        *pools,
        vector,
        vector,
      )


class TestTriton:
  """All features of the reference, for any group and head size."""

  def compile(self, function, heads, dims, dtype, *rest, **options):
    dim, value_dim = dims
    shape = jax.ShapeDtypeStruct
    k_pages = shape((PAGE_TOKENS // 16, KV_HEADS, 16, dim), dtype)
    v_pages = shape((PAGE_TOKENS // 16, KV_HEADS, 16, value_dim), dtype)
    table = shape((BATCH, TOKENS // 16), jnp.int32)
    leading = rest[0]
    q = shape((*leading, heads, dim), query_dtype(dtype))
    arrays = {
      name: value
      for name, value in options.items()
      if isinstance(value, jax.ShapeDtypeStruct)
    }
    names = tuple(arrays)
    static = {k: v for k, v in options.items() if k not in arrays}

    def call(*arguments):
      positional = arguments[: len(arguments) - len(names)]
      traced = dict(zip(names, arguments[len(positional) :], strict=True))
      return function(
        *positional, backend="triton", **call_of(**static, **traced)
      )

    program = compile_for(
      "h200",
      jax.jit(call),
      q,
      k_pages,
      v_pages,
      table,
      *rest[1:],
      *arrays.values(),
    )
    assert_small(program, k_pages, v_pages)

  @needs("h200")
  @slow_except("heads", [8, 32, 64, 256], 32)
  @pytest.mark.parametrize("heads", [8, 32, 64, 256])
  @pytest.mark.parametrize("dims", [(80, 80), (96, 160), (192, 128)])
  def test_groups_and_head_sizes(self, heads, dims):
    lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    self.compile(
      kernels.paged_decode, heads, dims, "bfloat16", (BATCH,), lengths
    )

  @needs("h200")
  def test_a_long_prompt_and_a_long_table(self):
    """The output is not copied for every part that a table may be cut into."""
    shape = jax.ShapeDtypeStruct
    q = shape((1, 4096, HEADS, 128), jnp.bfloat16)
    pool = shape((PAGE_TOKENS // 16, KV_HEADS, 16, 128), jnp.bfloat16)
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
    shape = jax.ShapeDtypeStruct
    vector = shape((BATCH,), jnp.int32)
    options = {
      "scale": 0.1,
      "soft_cap": 30.0,
      "window": shape((), jnp.int32),
      "page_offset": shape((), jnp.int32),
      "sinks": shape((HEADS,), jnp.float32),
      "alibi_slopes": shape((HEADS,), jnp.float32),
    }
    if dtype == "int8":
      scales = shape((PAGE_TOKENS // 16, KV_HEADS, 16), jnp.float32)
      options |= {"k_scale": scales, "v_scale": scales}
    heads = (HEADS, (128, 128), dtype)
    self.compile(kernels.paged_decode, *heads, (BATCH,), vector, **options)
    self.compile(
      kernels.paged_attention_padded,
      *heads,
      (BATCH, 8),
      vector,
      vector,
      tree_mask=shape((BATCH, 8, 8), jnp.bool_),
      **options,
    )
    self.compile(
      kernels.paged_attention,
      *heads,
      (64,),
      vector,
      shape((BATCH + 1,), jnp.int32),
      **options,
    )

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
    pools = pools_and_table("bfloat16", 16, dim)
    compile_for(
      target,
      jax.jit(functools.partial(kernels.paged_decode, backend="triton")),
      jax.ShapeDtypeStruct((BATCH, HEADS, dim), jnp.bfloat16),
      *pools,
      jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    )

  @on_older_gpus
  def test_prefill_of_int8(self, target):
    shape = jax.ShapeDtypeStruct
    pools = pools_and_table("int8", 16, 128)
    compile_for(
      target,
      jax.jit(
        functools.partial(kernels.paged_attention_padded, backend="triton")
      ),
      shape((BATCH, 64, HEADS, 128), jnp.bfloat16),
      *pools,
      shape((BATCH,), jnp.int32),
      shape((BATCH,), jnp.int32),
    )

  @on_older_gpus
  def test_latent_attention(self, target):
    compile_latent(target, "bfloat16", 128)
