"""Packages that only some users need."""

import importlib
from typing import Any


def extra_package(name: str, *, install: str, task: str) -> Any:
  """A package, or one of its modules, that is imported when it is needed.

  Args:
    name: what to import.
    install: what to install for it, as pip is told.
    task: what it is needed for, as in "To read a .gguf file".

  Returns:
    The module.

  Raises:
    ImportError: it is not installed; the message says what to do.

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
    if (error.name or "").partition(".")[0] != package:
      raise
    raise ImportError(
      f"{task}, the package `{package}` must be installed; do "
      f'pip install "{install}".'
    ) from None
