"""Runs attention functions with each backend.

To add a backend, add a line to `RUNNERS`. If a backend does not support a call,
the test is skipped with the backend's reason, except for shapes in `serves`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

import jaxkv_kernels as kernels
from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import calls
from jaxkv_kernels._src.attention.options import CallOptions
from tests.kernels import reference
from tests.kernels.shapes import SHAPES
from tests.kernels.shapes import put

_STATIC = (
  "scale",
  "soft_cap",
  "window",
  "backend",
  "value_dim",
  "max_query_len",
  "query_tile",
  "interpret",
)
# With JAXKV_TEST_PLATFORM=cuda; see conftest.py.
_ON_CUDA = jax.default_backend() == "gpu"
ON_HOPPER = check.architectures() == {90}
_NEW_JAX = jax.__version_info__ >= (0, 11)
# Shapes that every backend serves.
COMMON = ("page16_gqa4_d128", "bits_gqa4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
  """A backend, and the way in which tests on this platform run it.

  Attributes:
    backend: the name of the backend.
    interpret: an argument of the attention functions.
    shapes: the names of the shapes to try; fewer for a slow interpreter.
    serves: the names of the shapes that must not be skipped.
    float32_l2: the relative L2 error allowed for float32.
    dtype: the dtype of tests in which the format does not matter.
    required: True if an unsupported call is a failure, not a skip.
  """

  backend: str
  interpret: Any = False
  shapes: tuple[str, ...] = tuple(SHAPES)
  serves: tuple[str, ...] = COMMON
  float32_l2: float = 2e-6
  dtype: Any = np.float32
  required: bool = False

  def __call__(self, name: str, *arguments, **options):
    """Calls a jitted attention function; returns output and log-sum-exp.

    Skips the test if the backend does not support the call.
    """
    options = {
      key: jnp.asarray(value) if isinstance(value, np.ndarray) else value
      for key, value in options.items()
    }
    if self.interpret:
      options["interpret"] = self.interpret
    try:
      out = _jitted(name)(
        *jax.tree.map(jnp.asarray, arguments),
        backend=self.backend,
        **options,
      )
    except NotImplementedError as error:
      if self.required:
        raise
      pytest.skip(str(error))
    return [np.asarray(x) for x in out]


def call_of(**keywords) -> dict[str, Any]:
  """Moves the fields of `AttentionOptions` among the keywords to one object."""
  names = {field.name for field in dataclasses.fields(kernels.AttentionOptions)}
  options = {name: keywords.pop(name) for name in names & keywords.keys()}
  if options:
    keywords["options"] = kernels.AttentionOptions(**options)
  return keywords


@functools.cache
def _jitted(name: str):
  """Jits a function that takes the options as keywords."""

  def function(*arguments, **keywords):
    return getattr(kernels, name)(*arguments, **call_of(**keywords))

  return jax.jit(function, static_argnames=_STATIC)


# Shapes that Mosaic serves, as many as its interpreters have time for.
_MOSAIC_TPU = (
  "page16_gqa4_d128",
  "page32_gqa2_d256",
  "bfloat16_page128_d256",
  "int8_scale_per_head",
  "e4m3_scale_per_head_d128",
  "everything_bfloat16_d128",
  "everything_int8_d128",
)
_MOSAIC_GPU = (
  "bfloat16_mqa",
  "bfloat16_page64_d192",
  "bfloat16_page128_d256",
  "float16_gqa8",
  "int8_scale_per_token",
  "e4m3_scale_per_token",
  "e4m3_scale_per_head_d128",
  "e5m2_without_scale",
  "everything_bfloat16_d128",
  "everything_int8_d128",
)

# Every feature of Triton at least once; the other shapes run on a GPU.
_TRITON = (
  "page1_mha_d32",
  "page16_gqa4_d128",
  "page24_not_dividing_a_block",
  "head_dim_96_values_of_160",
  "page32_gqa2_d256",
  "bits_gqa4",
  "bfloat16_mqa",
  "float16_gqa8",
  "int8_scale_per_token",
  "e4m3_bits_scale_per_head",
  "e5m2_without_scale",
  "window20",
  "window_without_short_rows",
  "soft_cap1",
  "alibi",
  "everything",
  "everything_int8",
  "everything_bits",
)

RUNNERS = {
  "xla": Runner(backend="xla", serves=tuple(SHAPES), float32_l2=1e-6),
  "triton": Runner(
    backend="triton",
    interpret=not _ON_CUDA,
    shapes=tuple(SHAPES) if _ON_CUDA else _TRITON,
    serves=tuple(SHAPES),
  ),
}
if not _ON_CUDA:
  RUNNERS["mosaic_tpu"] = Runner(
    backend="mosaic_tpu",
    interpret=pltpu.InterpretParams(detect_races=True),
    # With the newest jax, all of them.
    shapes=_MOSAIC_TPU if _NEW_JAX else _MOSAIC_TPU[::3],
    serves=_MOSAIC_TPU,
  )
if ON_HOPPER:
  RUNNERS["mosaic_gpu"] = Runner(
    backend="mosaic_gpu", serves=_MOSAIC_GPU, dtype=jnp.bfloat16
  )
elif not _ON_CUDA and _NEW_JAX:
  # In older jax its interpreter takes minutes; test_mosaic.py has a case.
  RUNNERS["mosaic_gpu"] = Runner(
    backend="mosaic_gpu",
    interpret=InterpretGPUParams(detect_races=True),
    shapes=_MOSAIC_GPU,
    serves=_MOSAIC_GPU,
    dtype=jnp.bfloat16,
  )


def cases(*names: str):
  """Returns parameters (runner, shape name) of all backends."""
  return [
    pytest.param(
      dataclasses.replace(runner, required=name in runner.serves),
      name,
      id=f"{key}-{name}",
    )
    for key, runner in RUNNERS.items()
    for name in (names or SHAPES)
    if name in runner.shapes
  ]


def backends():
  """Returns parameters (runner) of all backends."""
  return [pytest.param(runner, id=key) for key, runner in RUNNERS.items()]


def check_float16_values(
  module: Any, interpret: Any, factor: float, per_head: bool = False
) -> None:
  """Values of the size of `factor`, in int8 and with scales, are exact."""
  rng = np.random.default_rng(0)
  pools = rng.integers(-127, 128, (2, 8, 1, 16, 64)).astype(np.int8)
  q = rng.standard_normal((1, 2, 64)).astype(np.float16)
  table = np.arange(8, dtype=np.int32)[None]
  lengths = np.array([120], np.int32)
  shape = (1,) if per_head else (8, 1, 16)
  scales = {
    "k_scale": np.full(shape, 0.01, np.float32),
    "v_scale": (rng.uniform(0.5, 2, shape) * factor).astype(np.float32),
  }
  expected, _ = reference.paged_decode(q, *pools, table, lengths, **scales)
  options = CallOptions(
    page_offset=jnp.int32(0),
    scale=64**-0.5,
    interpret=interpret,
    **{name: jnp.asarray(value) for name, value in scales.items()},
  )
  q, *pools, table, lengths = put(q, *pools, table, lengths)
  call = calls.decode_call(q, tuple(pools), table, lengths, options)
  out, _ = calls.decode_with(module, call)
  error = np.linalg.norm(np.asarray(out, np.float64) - expected)
  assert error < 1e-3 * np.linalg.norm(expected)
