"""A test's parameters, of which the default run takes a few; `--all` has all.

Every run of a tree takes the same ones.
"""

from collections.abc import Iterable

import pytest


def slow_except(
  parameter: str, values: Iterable[object], *fast: object
) -> pytest.MarkDecorator:
  """Marks a parametrized test slow, except for a few of its parameters.

  Args:
    parameter: the name of the parameter.
    values: all its values; they are told apart by their text.
    *fast: those that the default run takes.

  Raises:
    ValueError: if one of `fast` is not in `values`, as after a renaming.
  """
  texts = {str(value) for value in values}
  missing = {str(value) for value in fast} - texts
  if missing:
    raise ValueError(f"`fast` must be in {sorted(texts)}, got {missing}.")
  return pytest.mark.slow(parameter, fast=frozenset(map(str, fast)))
