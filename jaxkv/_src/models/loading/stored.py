"""Tensors of a checkpoint that have not been read yet."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file.

  Attributes:
    shape: of the array.
    dtype: of the array that `read` gives.
    read: reads it; the array may be a window on the file.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]


Stored = dict[str, StoredTensor]
"""The tensors of a checkpoint, by name."""


def changed(
  tensor: StoredTensor,
  change: Callable[[np.ndarray], np.ndarray],
  *,
  shape: tuple[int, ...] | None = None,
) -> StoredTensor:
  """A tensor whose array is changed once it is read."""
  shape = tensor.shape if shape is None else shape
  return StoredTensor(shape, tensor.dtype, lambda: change(tensor.read()))
