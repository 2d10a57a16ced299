"""Would the tests notice? Every mutant must do something wrong somewhere."""

import pytest

from tests.mutants import MUTANTS
from tests.mutation import CURRENT
from tests.mutation import DUPLICATES
from tests.pair import VERBS
from tests.pair import Mismatch
from tests.pair import Pair
from tests.pair import wander

WALKS, STEPS = 30, 60


def walk(setup, verbs):
  """The same random walks for every mutant."""
  for seed in range(WALKS):
    wander(Pair(setup, verbs), seed, STEPS)


@pytest.mark.parametrize("setup", [CURRENT, DUPLICATES])
def test_the_real_cache_lives(setup):
  with setup.patched():
    walk(setup, VERBS)


@pytest.mark.parametrize("name", MUTANTS)
def test_dies(name):
  mutant = MUTANTS[name]
  with mutant.setup.patched(), pytest.raises(Mismatch):
    walk(mutant.setup, mutant.verbs_with_it())


def test_there_are_enough():
  assert len(MUTANTS) >= 50
