"""A context manager that hides the current mesh."""

import contextlib
import warnings
from collections.abc import Iterator

import jax
import numpy as np


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
  """Hides the current mesh from the layers of a model.

  Layers that find a mesh shard the batch over a mesh axis. A packed call has a
  batch of one row, which cannot be sharded. Hiding the mesh also lets calls in
  the contexts of different meshes share one compiled program.
  """
  with contextlib.ExitStack() as stack:
    with warnings.catch_warnings():
      # Entering a `Mesh` is deprecated, but sets the mesh that layers see.
      warnings.simplefilter("ignore", DeprecationWarning)
      stack.enter_context(jax.sharding.Mesh(np.empty((), object), ()))
    yield
