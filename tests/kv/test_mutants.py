"""Would the tests of the K/V memory notice? Each mistake must fail its test."""

import jax
import pytest

from tests.kv.mutants import MUTANTS


@pytest.mark.skipif(
  jax.default_backend() != "cpu", reason="mistakes are in what a CPU runs"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_is_noticed(name):
  assert MUTANTS[name].is_noticed(), MUTANTS[name].test
