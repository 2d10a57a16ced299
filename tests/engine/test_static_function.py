"""`StaticFunction`: functions for which `generate` compiles once."""

import functools

import numpy as np
import pytest

from jaxkv._src.engine.hooks import StaticFunction


def _model(*arguments, **keywords):
  del arguments, keywords


def _equal(one, other):
  one, other = StaticFunction(one), StaticFunction(other)
  assert one != other or hash(one) == hash(other)
  return one == other


@pytest.mark.parametrize("value", [1, 1.0, True, "x", None, (1, 2)])
def test_partials_with_equal_arguments_are_equal(value):
  partial = functools.partial
  assert _equal(partial(_model, value), partial(_model, value))
  assert _equal(partial(_model, a=1, b=value), partial(_model, b=value, a=1))
  assert not _equal(partial(_model, value), _model)
  assert not _equal(partial(_model, value), partial(_model, a=value))


@pytest.mark.parametrize(
  ("value", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (2.0, 2)]
)
def test_equal_numbers_of_other_types_are_different(value, other):
  """A program would compute in another dtype, or divide by another zero."""
  partial = functools.partial
  assert not _equal(partial(_model, value), partial(_model, other))
  assert not _equal(partial(_model, a=value), partial(_model, a=other))


def test_arrays_are_compared_by_identity():
  one, other = (functools.partial(_model, np.ones(2)) for _ in range(2))
  assert _equal(one, one) and not _equal(one, other)
  assert _equal(_model, _model) and not _equal(_model, lambda: None)
