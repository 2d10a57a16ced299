"""Would the tests notice? Every mutant must fail its check."""

import pytest

from tests.commands.mutants import MUTANTS


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_dies(name, tmp_path):
  MUTANTS[name].dies(tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_can_be_made(name):
  with MUTANTS[name].made():
    pass
