"""Random calls of all verbs: every code, every token, every invariant."""

import pytest

import jaxkv
from jaxkv import rollout
from tests.engine.random_calls import Calls
from tests.tools.tiers import slow_except

_RARE = "BAD_SEQUENCE", "BAD_LENGTH", "ENDED", "UNFINISHED", "QUEUE_FULL"


class MovingCalls(Calls):
  """A rollout whose sequences also leave it and return."""

  names = (*Calls.names, "move", "move")

  def _move(self) -> None:
    """Exports sequences and imports them again, some of them twice."""
    ids = self._ids(3)
    mask = self._mask(3)
    codes = [
      jaxkv.Status.OK if code is None else code
      for code in self._codes_of(ids, mask)
    ]
    max_pages = None if self._rng.random() < 0.8 else 5
    self.state, exported = rollout.export(
      self.state, ids, mask=mask, max_pages=max_pages
    )
    self._codes("export", exported.code, codes)
    for code in (jaxkv.Status.OK, jaxkv.Status.BAD_SEQUENCE):
      self.state, out = rollout.import_sequences(self.state, exported)
      expected = [
        code if done == jaxkv.Status.OK else jaxkv.Status.SKIPPED
        for done in codes
      ]
      self._codes("import", out.code, expected)


@slow_except("drafts", [0, 3], 0)
@pytest.mark.parametrize(
  ("drafts", "decode_steps"),
  [
    (0, 1),
    (3, 1),
    pytest.param(0, 3, marks=pytest.mark.deep),
  ],
)
def test_random_calls_equal_plain_python(drafts, decode_steps):
  options = {"draft_match": 1, "draft_columns": 4, "decode_steps": decode_steps}
  # Moves take seconds to compile.
  calls_class = MovingCalls if drafts else Calls
  calls = calls_class(1, draft_tokens=drafts, **options)
  for _ in range(400):
    calls.step()
  counters = calls.state.counters
  if drafts:
    assert 0 < int(counters.accepted) < int(counters.drafted)
    assert calls.done["import OK"] > 20
  assert int(calls.state.memory.cache.stats.hit_tokens) > 0
  assert int(calls.state.counters.forked) > 0
  for name in ("submit", "abort", "requeue", "extend", "harvest"):
    assert calls.done[f"{name} {jaxkv.Status.OK.name}"] > 3
  for code in _RARE:
    assert any(key.endswith(code) for key in calls.done), code


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10, 20))
def test_many_calls(seed):
  calls = MovingCalls(seed, decode_steps=1 + seed % 4)
  for _ in range(20_000):
    calls.step()
  assert int(calls.state.counters.preempted) > 0
