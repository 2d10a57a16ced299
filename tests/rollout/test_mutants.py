"""Would the tests notice? Every mutant must fail its check."""

import pytest

from tests.rollout import mutants
from tests.rollout import score_mutants
from tests.rollout import verb_mutants

MUTANTS = mutants.MUTANTS | verb_mutants.MUTANTS | score_mutants.MUTANTS


def test_names():
  parts = mutants, verb_mutants, score_mutants
  assert len(MUTANTS) == sum(len(part.MUTANTS) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_dies(name, tmp_path):
  MUTANTS[name].dies(tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_can_be_made(name):
  with MUTANTS[name].made():
    pass
