"""The one place that calls Pallas-Triton, which jax deprecated in 0.11.

Until jax removes it, it is what serves pages and GPUs that Mosaic GPU does not,
and what a CPU interprets quickly.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Said when a kernel is lowered, wherever the user does that, about what is not
# theirs to change.
warnings.filterwarnings(
  "ignore",
  message="The Pallas Triton backend is deprecated",
  category=DeprecationWarning,
)


def call(
  kernel: Callable[..., None],
  inputs: Any,
  *,
  name: str,
  grid: tuple[int, ...],
  out_shape: tuple[jax.ShapeDtypeStruct, ...],
  num_warps: int,
  num_stages: int,
  interpret: Any,
) -> Any:
  """Runs a kernel on whole arrays.

  Args:
    kernel: (inputs, *outputs) -> None, references to arrays.
    inputs: a tree of arrays, handed to the kernel as it is.
    name: for profiles.
    grid: programs along each axis.
    out_shape: of the outputs.
    num_warps: of 32 threads each, a program.
    num_stages: of a loop's loads that are on their way.
    interpret: anything that is true runs it in Pallas's interpreter.

  Returns:
    The outputs.
  """
  return pl.pallas_call(
    kernel,
    grid=grid,
    out_shape=out_shape,
    compiler_params=plt.CompilerParams(
      num_warps=num_warps, num_stages=num_stages
    ),
    interpret=bool(interpret),
    name=name,
  )(inputs)
