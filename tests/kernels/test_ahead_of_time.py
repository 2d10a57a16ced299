"""Programs compiled for other machines, without running them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton

import jaxkv
import jaxkv_kernels as kernels
from jaxkv._src.arrays import loops
from jaxkv._src.cache.pool import free_queue
from jaxkv_kernels._src.attention.mosaic_gpu import compat
from tests.cache.setups import NumberedConfig
from tests.tools.ahead_of_time import TARGETS
from tests.tools.ahead_of_time import compile_for
from tests.tools.ahead_of_time import for_target
from tests.tools.ahead_of_time import needs
from tests.tools.compiled_loops import work_in_loops
from tests.tools.pool_copies import pool_sized_rewrites

LAYERS, PAGES, KV_HEADS, SIZE, DIM = 4, 512, 8, 16, 128
SLOTS, HEADS, COLUMNS = 8, 32, 16
BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def over(targets):
  """A test for each target; skipped for targets without a compiler here."""
  cases = [pytest.param(name, marks=needs(name)) for name in targets]
  return pytest.mark.parametrize("target", cases)


# The backends that can be named on each target.
BACKENDS = [
  pytest.param(target, name, marks=needs(target), id=f"{target}-{name}")
  for target in TARGETS
  for name in for_target(target)
]
over_backends = pytest.mark.parametrize(("target", "backend"), BACKENDS)


def by_its_sums(columns):
  """A Mosaic GPU kernel that holds a whole matrix in registers; its shape."""

  def kernel(x_ref, out_ref):
    x = compat.load(x_ref, compat.MATRIX, interpreted=False)
    out_ref[...] = x * lax.broadcast_in_dim(jnp.sum(x, axis=1), x.shape, [0])

  shape = jax.ShapeDtypeStruct((64, columns), jnp.float32)
  scale = plgpu.kernel(kernel, out_type=shape, grid=(1,), grid_names=("block",))
  return scale, shape


class TestHarness:
  @pytest.mark.slow
  @over(["h200"])
  def test_spilled_registers_are_an_error(self, target):
    def kernel(x_ref, y_ref, out_ref):
      out_ref[...] = jnp.dot(
        x_ref[...], y_ref[...], preferred_element_type=jnp.float32
      )

    def product(x, y):
      return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((128, 256), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=1),
      )(x, y)

    x = jax.ShapeDtypeStruct((128, 32), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((32, 256), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="spill"):
      compile_for(target, jax.jit(product), x, y)
    compile_for(target, jax.jit(product), x, y, may_spill=True)

  @over(["h200"])
  def test_spilled_registers_of_mosaic_are_an_error(self, target):
    """Also if Mosaic has compiled the kernel before, and so reports nothing."""
    scale, shape = by_its_sums(1024)  # All at once: 512 registers.
    for _ in range(2):
      with pytest.raises(jax.errors.JaxRuntimeError, match="spilled"):
        compile_for(target, jax.jit(scale), shape)
    program = compile_for(target, jax.jit(scale), shape, may_spill=True)
    assert [kernel.spilled > 0 for kernel in program.mosaic_kernels] == [True]

  @over(TARGETS)
  def test_devices_here_stay_what_they_are(self, target):
    devices = jax.devices()
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    program = compile_for(target, jax.jit(lambda x: x + 1, donate_argnums=0), x)
    assert program.aliased == x.size * 4
    assert jax.devices() == devices
    assert jnp.ones(3).devices() <= set(devices)

  def test_an_unknown_target_is_refused(self):
    with pytest.raises(ValueError, match="one of"):
      compile_for("v4", jax.jit(jnp.sin), jnp.ones(3))


def append_and_attend(pools, tokens, layer, backend):
  """A layer's part of a step on pools of all layers."""
  k_pages, v_pages = (
    kernels.append_pages(
      pages,
      tokens["new"],
      tokens["pages"],
      tokens["offsets"],
      page_offset=layer * PAGES,
    )
    for pages in pools
  )
  out, _ = kernels.paged_decode(
    tokens["q"],
    k_pages,
    v_pages,
    tokens["table"],
    tokens["lengths"],
    page_offset=layer * PAGES,
    backend=backend,
  )
  return (k_pages, v_pages), jnp.sum(out.astype(jnp.float32))


def in_jit(pools, tokens, *, backend):
  return append_and_attend(pools, tokens, jnp.int32(1), backend)


def in_layers(pools, tokens, *, backend):
  """A loop over layers, which share the pools."""

  def body(pools, layer):
    return append_and_attend(pools, tokens, layer, backend)

  return jax.lax.scan(body, pools, jnp.arange(LAYERS, dtype=jnp.int32))


def in_scan(pools, tokens, *, backend):
  """Steps of a decode loop, each over all layers."""

  def body(pools, _):
    return in_layers(pools, tokens, backend=backend)

  return jax.lax.scan(body, pools, None, length=3)


def in_while(pools, tokens, *, backend):
  def body(carry):
    step, pools, total = carry
    pools, outs = in_layers(pools, tokens, backend=backend)
    return step + 1, pools, total + jnp.sum(outs)

  start = (jnp.int32(0), pools, jnp.float32(0))
  return jax.lax.while_loop(lambda carry: carry[0] < 3, body, start)


LOOPS = (in_jit, in_layers, in_scan, in_while)
FORMATS = ("float32", "float8_e4m3fn", "int8")


def step_arguments(dtype):
  pool = jax.ShapeDtypeStruct((LAYERS * PAGES, KV_HEADS, SIZE, DIM), dtype)
  shape = jax.ShapeDtypeStruct
  # int8 pools take quantized tokens.
  new = dtype if dtype == "int8" else "bfloat16"
  tokens = {
    "new": shape((SLOTS, KV_HEADS, DIM), jnp.dtype(new)),
    "q": shape((SLOTS, HEADS, DIM), jnp.bfloat16),
    "pages": shape((SLOTS,), jnp.int32),
    "offsets": shape((SLOTS,), jnp.int32),
    "table": shape((SLOTS, COLUMNS), jnp.int32),
    "lengths": shape((SLOTS,), jnp.int32),
  }
  return (pool, pool), tokens


def assert_in_place(compiled, pools):
  """Pools are aliased, none is made anew, and temporaries are under 5 %."""
  bytes_of_all = sum(p.size * np.dtype(p.dtype).itemsize for p in pools)
  memory = compiled.memory_analysis()
  assert pool_sized_rewrites(compiled, pools[0].shape) == []
  assert memory.alias_size_in_bytes >= bytes_of_all
  assert memory.temp_size_in_bytes < bytes_of_all * 0.05


def jitted(loop):
  return jax.jit(loop, donate_argnums=0, static_argnames="backend")


class TestInPlace:
  """A step writes its tokens into the donated pools and copies no pool."""

  # A scan over steps has the loop over layers inside.
  @pytest.mark.slow
  @over_backends
  @pytest.mark.parametrize("loop", LOOPS)
  def test_elsewhere(self, target, backend, loop):
    pools, tokens = step_arguments("bfloat16")
    program = compile_for(target, jitted(loop), pools, tokens, backend=backend)
    assert_in_place(program.compiled, pools)

  # Of 8 bits, the one that a target may lack.
  @pytest.mark.slow
  @over(TARGETS)
  @pytest.mark.parametrize("dtype", FORMATS)
  def test_formats(self, target, dtype):
    pools, tokens = step_arguments(dtype)
    program = compile_for(
      target, jitted(in_layers), pools, tokens, backend="xla"
    )
    assert_in_place(program.compiled, pools)


def decode_loop(target, number):
  """A state, and the program of eight steps without a model."""
  config = NumberedConfig(
    # More than the pairs of items that a GPU compares inside a kernel.
    num_pages=4 * loops.GPU_WINDOW**2,
    page_size=16,
    num_slots=64,
    pages_per_slot=256,
    number=number,
  )
  state = jax.eval_shape(lambda: jaxkv.init(config, jaxkv.salt("")))

  def step(state, tokens):
    ones = jnp.ones((config.num_slots,), jnp.int32)
    state, _ = jaxkv.allocate(state, ones)
    state, _ = jaxkv.commit(state, tokens[:, None], ones)
    state, _ = jaxkv.free(state, mask=tokens == 7)
    return state, None

  def loop(state, tokens):
    return jax.lax.scan(step, state, tokens)[0]

  tokens = jax.ShapeDtypeStruct((8, config.num_slots), jnp.int32)
  jitted = jax.jit(loop, donate_argnums=0)
  return state, compile_for(target, jitted, state, tokens)


class TestTransitions:
  @over(["h200"])
  @pytest.mark.parametrize(
    "quick", [True, pytest.param(False, marks=pytest.mark.slow)]
  )
  def test_kernels_and_waits(self, target, quick, monkeypatch):
    """A step needs no more than `benchmarks/launches.py` has as bounds."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from launches import counted

    bounded = [row for row in counted(target, quick) if row.bound is not None]
    assert len(bounded) >= 2
    assert all(row.met for row in bounded), bounded

  @over(["h200"])
  def test_a_decode_loop_of_the_cache_is_in_place(self, target, monkeypatch):
    """As on a CPU. Leaves out the rare sweep of the free queue."""
    monkeypatch.setattr(free_queue, "reserve", lambda queue, count: queue)
    state, program = decode_loop(target, number=5)
    leaves = jax.tree.leaves(state)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert program.aliased >= num_bytes
    assert program.temporary < num_bytes * 0.05
    assert work_in_loops(program.text, state.config.num_pages // 2) == {}
