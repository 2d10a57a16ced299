"""Marks tests slow for all but a few of their parameters.

The default run takes these few, always the same; `--all` takes all.
"""

from collections.abc import Iterable

import pytest


def slow_except(
  parameter: str, values: Iterable[object], *fast: object
) -> pytest.MarkDecorator:
  """Marks a parametrized test slow, except for a few of its parameters.

  Args:
    parameter: the name of the parameter.
    values: all values of the parameter, distinguished by their `str`.
    *fast: the values of the default run.

  Raises:
    ValueError: one of `fast` is not in `values`, for example after a renaming.
  """
  texts = {str(value) for value in values}
  missing = {str(value) for value in fast} - texts
  if missing:
    raise ValueError(f"`fast` must be in {sorted(texts)}, got {missing}.")
  return pytest.mark.slow(parameter, fast=frozenset(map(str, fast)))
