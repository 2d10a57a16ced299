"""Packages that only some users have, imported when they are needed."""

import importlib
from typing import Any


def module(name: str, package: str) -> Any:
  """A module of an optional package.

  Args:
    name: of the module.
    package: what it is called where packages are installed from.

  Raises:
    ImportError: it is not installed.

  Examples:
    >>> module("json", "json").loads("[1]")
    [1]
  """
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name is None or not name.startswith(error.name.split(".")[0]):
      raise
    raise ImportError(
      f"`{name}` must be installed for this integration, got no module "
      f'{error.name!r}; do pip install "{package}".'
    ) from error
