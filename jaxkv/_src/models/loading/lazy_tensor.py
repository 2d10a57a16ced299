"""Tensors of a checkpoint that are read on demand."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class LazyTensor:
  """A tensor that is read from a file on demand.

  Attributes:
    shape: shape of the array.
    dtype: dtype of the array that `read` returns.
    read: reads the array, which may be a memory map of the file.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]


Tensors = dict[str, LazyTensor]
"""The tensors of a checkpoint, by name."""


def transformed(
  tensor: LazyTensor, transform: Callable[[np.ndarray], np.ndarray]
) -> LazyTensor:
  """Returns a tensor whose array is transformed when it is read."""
  return LazyTensor(
    tensor.shape, tensor.dtype, lambda: transform(tensor.read())
  )
