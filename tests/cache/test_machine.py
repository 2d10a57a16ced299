"""The jitted cache against the oracle, move by move.

The default run takes a hybrid, and `--all` takes setups in which each kind of
group and each option occurs: 800 moves that hypothesis chooses and can shrink,
and 2,000 at random, in each. `--deep` takes every setup, and makes 12,000 and
10,000 of them.
"""

import dataclasses

import chex
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.stateful import precondition
from hypothesis.stateful import rule
from hypothesis.stateful import run_state_machine_as_test

import jaxkv
from jaxkv._src.arrays import loops
from jaxkv._src.cache.prefix import prefix_index
from tests.cache.moves import WEIGHTS
from tests.cache.moves import Moves
from tests.cache.pair import Pair
from tests.cache.pair import wander
from tests.cache.setups import CLASSIC
from tests.cache.setups import MERGE
from tests.cache.setups import SETUPS
from tests.cache.setups import WIDE
from tests.cache.setups import Setup
from tests.model_of_the_cache.slots import groups_of
from tests.tools.tiers import slow_except

WEIGHTED = [verb for verb, weight in WEIGHTS.items() for _ in range(weight)]


@dataclasses.dataclass(frozen=True)
class Chosen:
  """Draws from hypothesis."""

  data: st.DataObject | None

  def integer(self, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return self.data.draw(st.integers(low, high))


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """A kept state, and copies of its leaves and of the oracle."""

  state: jaxkv.CacheState
  leaves: list[np.ndarray]
  oracle: object


class Machine(RuleBasedStateMachine):
  """Every move is made by the cache and by the oracle, and compared.

  The moves themselves, a rule or more for each verb, are added below.
  """

  def __init__(self, setup: Setup):
    super().__init__()
    self.pair = Pair(setup)
    self.snapshots: list[Snapshot] = []

  def moves(self, data=None) -> Moves:
    """Legal moves from where the oracle is."""
    return Moves(Chosen(data), self.pair.oracle, self.pair.setup)

  @rule(verb=st.sampled_from(WEIGHTED), data=st.data())
  def misuse(self, verb, data):
    """A move with a bad argument."""
    arguments = self.moves(data).make(verb)
    if arguments is not None:
      self.pair.move(verb, self.moves(data).spoiled(verb, arguments))

  @precondition(lambda self: self.pair.oracle.error)
  @rule()
  def forgive(self):
    """Lets the next failure be the first one."""
    self.pair.forgive()

  @rule()
  def keep(self):
    """Keeps a state, as a user does who may want to go back."""
    state = self.pair.state
    oracle = self.pair.oracle.copy()
    self.snapshots.append(Snapshot(state, _leaves(state), oracle))

  @precondition(lambda self: self.snapshots)
  @rule(data=st.data())
  def roll_back(self, data):
    """Goes on from a kept state, which no move since has changed."""
    index = data.draw(st.sampled_from(range(len(self.snapshots))))
    snapshot = self.snapshots[index]
    state = snapshot.state
    chex.assert_trees_all_equal(_leaves(state), snapshot.leaves, strict=True)
    self.pair.state = state
    self.pair.oracle = snapshot.oracle.copy()


def _rule_for(verb):
  @precondition(lambda self: self.moves().possible(verb))
  @rule(data=st.data())
  def move(self, data):
    arguments = self.moves(data).make(verb)
    if arguments is not None:
      self.pair.move(verb, arguments)

  return move


for _verb, _weight in WEIGHTS.items():
  for _copy in range(-(-_weight // 3)):
    setattr(Machine, f"{_verb}_{_copy}", _rule_for(_verb))


def _leaves(state):
  return [np.array(leaf) for leaf in jax.tree.leaves(state)]


# Each kind and each option of these is in another setup, too.
_LIKE_OTHERS = {
  *("a_chunk_alone", "chunks", "classic", "classic_groups"),
  *("classic_no_caching", "draft", "draft_chunks", "draft_sliding"),
  *("draft_windows", "groups", "offload", "host_classic", "latest_kept"),
  *("merge_pages", "odd_chunks", "one_alone", "one_token_pages", "plain"),
  *("published", "full_and_states", "sliding", "some_kept", "two_windows"),
  *("wide_window", "windows", "window_of_one"),
  *("pools", "pools_of_groups", "retained"),
}


@slow_except("name", SETUPS, "hybrid")
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.deep) if name in _LIKE_OTHERS else name
    for name in SETUPS
  ],
)
def test_machine(name, request):
  """Both walks in one test, because compiling is most of either."""
  deep = request.config.getoption("--deep")
  setup = SETUPS[name]
  settings = hypothesis.settings(
    max_examples=60 if deep else 20,
    stateful_step_count=200 if deep else 40,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  with setup.patched():
    run_state_machine_as_test(lambda: Machine(setup), settings=settings)
    codes = walk(setup, 100 if deep else 20)
  # The moves say nothing about a failure that they never meet.
  codes_of_rollouts = {s for s in jaxkv.Status if s > jaxkv.Status.RECYCLED}
  missing = set(jaxkv.Status) - codes_of_rollouts - codes
  assert missing == never_met(setup.config)


def never_met(config: jaxkv.CacheConfig) -> set[jaxkv.Status]:
  """Codes that this config never returns."""
  slot = config.slot_tokens
  leaves = any(group.skipped_pages(slot) for group in groups_of(config))
  return set() if leaves else {jaxkv.Status.RECYCLED}


# Commits beyond the room there is, and pins given back twice, are rare.
FAILING = WEIGHTS | {"commit": 8, "unpin": 5}


def walk(setup: Setup, walks: int) -> set[int]:
  """Random moves, 100 a walk, and the codes that they were answered with."""
  codes = set()
  for seed in range(walks):
    pair = Pair(setup)
    wander(pair, seed, 100, FAILING)
    codes |= pair.codes
  return codes


_deep = pytest.mark.deep


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "three_kinds",
    pytest.param("offload", marks=_deep),
    pytest.param("full_and_states", marks=_deep),
  ],
)
def test_programs_for_a_gpu(name):
  """A GPU's programs have other loops, and run on a CPU, too."""
  setup = SETUPS[name]
  config = dataclasses.replace(setup.config, number=400 + setup.config.number)
  setup = dataclasses.replace(setup, config=config, for_gpu=True)
  with setup.patched():
    walk(setup, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
  "options",
  [MERGE, pytest.param({}, marks=_deep), pytest.param(CLASSIC, marks=_deep)],
)
def test_more_rows_than_a_window(options):
  """Walks with the window sizes of real caches."""
  config = dataclasses.replace(WIDE.config, **options)
  setup = dataclasses.replace(WIDE, config=config)
  pair = Pair(setup)
  wander(pair, seed=0, steps=60)
  assert pair.oracle.hits > 0
  assert pair.oracle.pool.evicted + pair.oracle.pool.merged > 0
  wide = max(loops.WINDOW, prefix_index.INSERT_WINDOW)
  assert min(setup.rows, config.num_slots) > wide
