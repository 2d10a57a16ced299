"""A context manager that hides the current mesh."""

import contextlib
import warnings
from collections.abc import Iterator

import jax
import numpy as np


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
  """Hides the mesh of the context from layers that look it up.

  Layers constrain the batch to be sharded over a mesh axis. A packed call has a
  batch of one row, which cannot be sharded. Without a mesh, a program is also
  compiled only once for all contexts in which it is called.
  """
  with contextlib.ExitStack() as stack:
    with warnings.catch_warnings():
      # `Mesh` as a context is deprecated, but sets the mesh that layers look
      # up.
      warnings.simplefilter("ignore", DeprecationWarning)
      stack.enter_context(jax.sharding.Mesh(np.empty((), object), ()))
    yield
