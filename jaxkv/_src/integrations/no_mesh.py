"""A context in which no mesh is set."""

import contextlib
import warnings
from collections.abc import Iterator

import jax
import numpy as np


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
  """In it, layers that ask for the mesh of the context find none.

  A packed call has one row, which the mesh axis of a batch does not divide, so
  what a layer asks of the compiler for a batch cannot hold for it. And a
  program is compiled once, in whatever context it is called.
  """
  with contextlib.ExitStack() as stack:
    with warnings.catch_warnings():
      # Deprecated, but those layers look for what it sets.
      warnings.simplefilter("ignore", DeprecationWarning)
      stack.enter_context(jax.sharding.Mesh(np.empty((), object), ()))
    yield
