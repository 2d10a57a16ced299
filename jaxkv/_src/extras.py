"""Imports packages that only some users need."""

import importlib
from typing import Any


def extra_package(name: str, *, install: str, task: str) -> Any:
  """Imports an optional package, or one of its modules.

  `install` is the argument for `pip install`, and `task` begins the message of
  the ImportError if the package, or a dependency of it, is not installed.

  Examples:
    >>> extra_package("no_such", install="jaxkv[hf]", task="To read nothing")
    Traceback (most recent call last):
    ImportError: To read nothing, the package `no_such` must be installed; do
    pip install "jaxkv[hf]".
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    package = name.partition(".")[0]
    # If a dependency is missing, the original error already names it.
    if (error.name or "").partition(".")[0] != package:
      raise
    raise ImportError(
      f"{task}, the package `{package}` must be installed; do "
      f'pip install "{install}".'
    ) from None
