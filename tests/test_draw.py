"""Costly tests take turns: every one within the number of commits promised."""

import pytest

from tests import draw
from tests.cache.mutants import MUTANTS
from tests.cache.setups import SETUPS
from tests.commands.mutants import MUTANTS as COMMANDS
from tests.rollout.test_mutants import MUTANTS as ROLLOUTS


@pytest.mark.parametrize(
  ("names", "every"),
  [(MUTANTS, 32), (SETUPS, 12), (ROLLOUTS, 32), (COMMANDS, 8)],
)
def test_commits_in_a_row_run_everything_once(names, every):
  turns = [draw.drawn(names, every, turn) for turn in range(57, 57 + every)]
  assert sum(map(len, turns)) == len(names)
  assert set().union(*turns) == set(names)
  sizes = {len(turn) for turn in turns}
  assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0


def test_the_same_draw_is_the_same_turn():
  assert draw.turn_of("57") == 57
  assert draw.turn_of(None) == draw.turn_of(None)
  no_commit = "f" * 40
  assert draw.turn_of(no_commit) == draw.turn_of(no_commit)
  assert draw.turn_of(no_commit) != draw.turn_of("e" * 40)


def test_without_git(monkeypatch):
  monkeypatch.setattr(draw, "_git", lambda *_: None)
  assert draw.turn_of(None) == 0
