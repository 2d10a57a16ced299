"""Would the tests notice? Every mutant must do something wrong somewhere."""

import pytest

from tests.cache.moves import WEIGHTS
from tests.cache.mutants import MUTANTS
from tests.cache.mutation import AGED
from tests.cache.mutation import CHUNKED
from tests.cache.mutation import CURRENT
from tests.cache.mutation import DRAFTED
from tests.cache.mutation import DUPLICATES
from tests.cache.mutation import ENCODER
from tests.cache.mutation import HYBRID
from tests.cache.mutation import KEPT
from tests.cache.mutation import LOGGED
from tests.cache.mutation import NARROW
from tests.cache.mutation import ONE_WINDOW
from tests.cache.mutation import PUBLISHED
from tests.cache.mutation import SCARCE
from tests.cache.mutation import SCRATCH
from tests.cache.mutation import SLIDING
from tests.cache.mutation import WINDOWS
from tests.cache.pair import VERBS
from tests.cache.pair import Mismatch
from tests.cache.pair import Pair
from tests.cache.pair import wander

WALKS, STEPS = 30, 60
REAL = [CURRENT, DUPLICATES, ONE_WINDOW, SCARCE]
REAL += [SLIDING, NARROW, HYBRID, PUBLISHED, DRAFTED, WINDOWS, CHUNKED, KEPT]
REAL += [ENCODER, AGED, SCRATCH, LOGGED]


def walk(setup, verbs, favoured=(), others=()):
  """Random walks, the favoured verbs more often than usual."""
  weights = WEIGHTS | {verb: 4 * WEIGHTS[verb] for verb in favoured}
  weights |= dict(others)
  for seed in range(WALKS):
    wander(Pair(setup, verbs), seed, STEPS, weights)


@pytest.mark.deep
@pytest.mark.parametrize("setup", REAL)
def test_the_real_cache_lives(setup):
  with setup.patched():
    walk(setup, VERBS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_dies(name):
  mutant = MUTANTS[name]
  with mutant.setup.patched(), pytest.raises(Mismatch):
    verbs = mutant.verbs_with_it()
    walk(mutant.setup, verbs, mutant.verbs, mutant.others)


@pytest.mark.parametrize("name", MUTANTS)
def test_can_be_made(name):
  """The text that it changes is there."""
  MUTANTS[name].verbs_with_it()


def test_there_are_enough():
  assert len(MUTANTS) >= 85
