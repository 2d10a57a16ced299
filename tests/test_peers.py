"""The logic of `benchmarks/peers.py` that no figure shows."""

import pathlib
import sys
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import peers


class Peer:
  """Counts what it is asked for; finds the prompts that it has seen."""

  def __init__(self, num_pages, page_size, windows, max_tokens):
    self.windows, self.running, self.seen = windows, [], set()
    self.extended = self.ended = 0

  def new(self, tokens):
    return types.SimpleNamespace(tokens=tokens, num_tokens=len(tokens))

  def start(self, request):
    self.running.append(request)
    found = tuple(request.tokens) in self.seen
    self.seen.add(tuple(request.tokens))
    return (request.num_tokens - 1) // 16 * 16 if found else 0

  def extend(self, request, tokens):
    assert any(request is other for other in self.running)
    request.num_tokens += len(tokens)
    self.extended += len(tokens)

  def free(self, request):
    self.running = [other for other in self.running if other is not request]
    self.ended += 1


@pytest.mark.parametrize("number", range(8))
def test_a_round_gives_everything_back(number):
  case = peers.CASES[number]
  side = peers.PeerSide(Peer, case, steps=3)
  for record in (False, True):
    side.round(record=record)
    assert side._manager.running == []
  assert side._manager.windows[0] is None
  assert side._manager.windows[1:] == [1024] * 5 * (case.mode == "hybrid")
  assert len(side.samples) == 1
  assert side.times()["us_median"] == side.samples[0]


def test_a_decode_step_extends_every_sequence():
  case = peers.Case("decode_step", "full", 64)
  side = peers.PeerSide(Peer, case, steps=200)
  manager = side._manager
  run = side._decode()
  before = manager.extended, manager.ended
  run()
  began = len(manager.running) - 64 + manager.ended - before[1]
  assert manager.extended - before[0] + began == 200 * 64
  # Sequences of 128 tokens, at most one token later in 200 steps.
  assert 64 < manager.ended - before[1] <= 2 * 64
  assert max(request.num_tokens for request in manager.running) < 128


def test_a_peer_that_is_not_here_is_skipped(monkeypatch, capsys):
  monkeypatch.setattr(peers, "PEERS", {"none": "no_such_module"})
  monkeypatch.setattr(peers, "QUICK_CASES", peers.CASES[:1])
  monkeypatch.setattr(peers.ops, "full_cache", lambda *_: None)
  ours = types.SimpleNamespace(
    op=types.SimpleNamespace(steps=1),
    round=lambda record: None,
    times=lambda: {"us_median": 2.0, "us_min": 1.0},
  )
  monkeypatch.setattr(peers, "jaxkv_side", lambda *_: ours)
  report = peers.measured(quick=True, rounds=1)
  assert "no_such_module" in report["peers"]["none"]
  assert report["rows"] == [
    {
      "op": "decode_step",
      "mode": "full",
      "slots": 64,
      "pages": 65536,
      "page_size": 16,
      "side": "jaxkv",
      "us_median": 2.0,
      "us_min": 1.0,
    }
  ]
  assert "skipped" in capsys.readouterr().out
