"""Would the tests notice? Every mutant must do something wrong somewhere."""

import pytest

from tests.cache import pair
from tests.cache.moves import WEIGHTS
from tests.cache.mutants import MUTANTS

WALKS = 30
STEPS = 60
REAL = list(dict.fromkeys(mutant.setup for mutant in MUTANTS.values()))


def walk(setup, verbs, favoured=(), other_weights=()):
  """Random walks, the favoured verbs more often than usual."""
  weights = WEIGHTS | {verb: 4 * WEIGHTS[verb] for verb in favoured}
  weights |= dict(other_weights)
  for seed in range(WALKS):
    pair.wander(pair.Pair(setup, verbs), seed, STEPS, weights)


@pytest.mark.deep
@pytest.mark.parametrize("setup", REAL)
def test_right_caches_equal_the_oracle(setup):
  with setup.patched():
    walk(setup, pair.VERBS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name):
  mutant = MUTANTS[name]
  with mutant.setup.patched(), pytest.raises(pair.Mismatch):
    verbs = mutant.verbs_with_it()
    walk(mutant.setup, verbs, mutant.verbs, mutant.others)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_replace_existing_functions(name):
  """The function is there, with the parameters that are changed."""
  MUTANTS[name].verbs_with_it()
