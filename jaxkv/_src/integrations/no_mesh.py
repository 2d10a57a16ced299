"""A context manager that hides the current mesh."""

import contextlib
import warnings
from collections.abc import Iterator

import jax
import numpy as np


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
  """Hides the mesh of the context from layers that look it up.

  A packed call has one row, which a mesh axis of the batch does not divide, so
  the layers' sharding constraints cannot be met. Without a mesh, a program is
  also compiled only once for all contexts in which it is called.
  """
  with contextlib.ExitStack() as stack:
    with warnings.catch_warnings():
      # Entering a `Mesh` is deprecated, but sets the mesh that layers look up.
      warnings.simplefilter("ignore", DeprecationWarning)
      stack.enter_context(jax.sharding.Mesh(np.empty((), object), ()))
    yield
