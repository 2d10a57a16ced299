"""Calls Pallas-Triton kernels.

jax deprecated Pallas-Triton in 0.11, but it supports page sizes and GPUs that
Mosaic GPU does not, and its interpreter is fast on a CPU.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Users can do nothing about this warning, which appears for each kernel.
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
    kernel: (inputs, *outputs) -> None, on references to arrays.
    inputs: a tree of whole arrays; the kernel gets references to them.
    name: the kernel's name in profiles.
    grid: the number of programs along each axis.
    out_shape: shapes and dtypes of the outputs.
    num_warps: warps of 32 threads in a program.
    num_stages: the number of loop steps whose loads are in flight.
    interpret: runs the kernel in Pallas's interpreter if true.
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
