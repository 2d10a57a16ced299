"""Would the tests notice? Each mistake must fail the test that it names."""

import jax
import pytest

from tests.commands import mutants as commands
from tests.engine import mutants as engine
from tests.guides import mutants as guides
from tests.kernels import mutants as kernels
from tests.kv import mutants as kv
from tests.sampling import mutants as sampling
from tests.transfer import mutants as transfer

_TABLES = (commands, engine, guides, kernels, kv, sampling, transfer)
MUTANTS = {
  name: mutant for table in _TABLES for name, mutant in table.MUTANTS.items()
}


def test_names():
  assert len(MUTANTS) == sum(len(table.MUTANTS) for table in _TABLES)


@pytest.mark.slow
@pytest.mark.skipif(
  jax.default_backend() != "cpu", reason="mistakes are in what a CPU runs"
)
@pytest.mark.parametrize("name", MUTANTS)
def test_is_noticed(name):
  assert MUTANTS[name].is_noticed(), MUTANTS[name].test


@pytest.mark.parametrize("name", MUTANTS)
def test_can_be_made(name):
  """The function is there, with the parameters that are changed."""
  with MUTANTS[name].made():
    pass
