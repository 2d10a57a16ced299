"""Would the tests of the automata notice? Each mistake must fail its test."""

import pytest

from tests.rollout.automata.mutants import MUTANTS


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_is_noticed(name):
  assert MUTANTS[name].is_noticed(), MUTANTS[name].test


@pytest.mark.parametrize("name", MUTANTS)
def test_can_be_made(name):
  with MUTANTS[name].made():
    pass
