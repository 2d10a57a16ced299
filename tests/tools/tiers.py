"""Marks tests slow for all but a few of their parameters.

The default run takes these few, always the same; `--all` takes all.
"""

from collections.abc import Iterable

import pytest


def slow_except(
  parameter: str, values: Iterable[object], *fast: object
) -> pytest.MarkDecorator:
  """Marks a parametrized test slow, except for the `fast` ones of its `values`.

  Values are distinguished by their `str`.

  Raises:
    ValueError: one of `fast` is not in `values`, as after a renaming.
  """
  texts = {str(value) for value in values}
  missing = {str(value) for value in fast} - texts
  if missing:
    raise ValueError(f"`fast` must be in {sorted(texts)}, got {missing}.")
  return pytest.mark.slow(parameter, fast=frozenset(map(str, fast)))
