"""Weights that reach a Ray actor damaged, with a stand-in for Ray."""

import functools
import pickle
import sys
import types

import numpy as np
import pytest

from jaxkv import workers
from jaxkv.integrations.ray import RayWorkers
from tests.engine.by_hand import requests_of
from tests.workers import stub

_WEIGHTS = {"layer": np.arange(8, dtype=np.float32)}


class _Worker(stub.StubWorker):
  def update_weights(self, params, *, version, max_age):
    np.testing.assert_array_equal(params["layer"], _WEIGHTS["layer"])
    return super().update_weights(
      f"weights {version}", version=version, max_age=max_age
    )


class _Ray(types.ModuleType):
  """Calls actors directly; damages the first `num_damaged` stored objects."""

  def __init__(self, num_damaged):
    super().__init__("ray")
    self.num_stored, self._num_damaged = 0, num_damaged

  def is_initialized(self):
    return True

  def remote(self, cls):
    def start(*arguments):
      actor = cls(*arguments)
      methods = {
        name: types.SimpleNamespace(
          remote=functools.partial(functools.partial, getattr(actor, name))
        )
        for name in ("call", "update_weights")
      }
      return types.SimpleNamespace(**methods)

    maker = types.SimpleNamespace(remote=start)
    return types.SimpleNamespace(options=lambda **_: maker)

  def put(self, value):
    self.num_stored += 1
    params, checksum = pickle.loads(pickle.dumps(value))
    if self.num_stored <= self._num_damaged:
      params["layer"][3] += 1
    return [params, checksum]

  def get(self, call, timeout):
    return call()

  def kill(self, actor):
    pass


def _results(ray, monkeypatch, **options):
  """Runs prompts after an update of the weights."""
  monkeypatch.setitem(sys.modules, "ray", ray)
  make = RayWorkers(lambda _: _Worker())
  with workers.Pool(
    make, 2, config=stub.CONFIG, retry_pause=0, **options
  ) as pool:
    pool.update_weights(_WEIGHTS)
    ids = pool.submit(requests_of(stub.random_prompts(40)))
    assert stub.results_of(pool) == stub.expected_of(ids, version=1)


@pytest.mark.parametrize("num_damaged", [0, 1, 3])
def test_damaged_weights_are_sent_again(num_damaged, monkeypatch, caplog):
  ray = _Ray(num_damaged)
  _results(ray, monkeypatch, max_failures=0)
  # Both actors read one copy.
  assert ray.num_stored == num_damaged + 1
  assert ("got damaged weights of version 1" in caplog.text) == (
    num_damaged > 0
  )


def test_an_actor_that_always_gets_damaged_weights_is_replaced(
  monkeypatch, caplog
):
  _results(_Ray(20), monkeypatch)
  assert "damaged weights of version 1 4 times" in caplog.text
