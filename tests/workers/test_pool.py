"""Pools of workers without a model: streams of prompts, and weights."""

import queue
import threading

import numpy as np
import pytest

from jaxkv import guides
from jaxkv import rollout
from jaxkv import workers
from tests.engine.by_hand import requests_of
from tests.workers.stub import CONFIG
from tests.workers.stub import Maker
from tests.workers.stub import StubWorker
from tests.workers.stub import expected_of
from tests.workers.stub import random_prompts
from tests.workers.stub import results_of
from tests.workers.stub import tokens_of

_TOKENS = guides.token_bytes([b"a", b"b"])


def _ending_at(string):
  strings = rollout.stop_strings([string], _TOKENS)
  return rollout.Sampling(stop_strings=strings)


class TestStream:
  def test_every_prompt_is_returned_once(self):
    with workers.Pool(lambda _: StubWorker(), 3, config=CONFIG) as pool:
      ids = pool.submit(requests_of(random_prompts(100)))
      assert ids == list(range(100))
      assert results_of(pool) == expected_of(ids)
      # The pool goes on.
      new_ids = pool.submit(
        requests_of(random_prompts(20)), ids=range(500, 520)
      )
      assert results_of(pool) == expected_of(new_ids)
      assert pool.submit(requests_of(random_prompts(1))) == [520]

  def test_slots_are_busy_while_there_are_prompts(self):
    pools = []

    def has_prompts():
      return any(pool.num_waiting for pool in pools)

    make = Maker(lambda _: StubWorker(steps=1, has_prompts=has_prompts))
    with workers.Pool(make, 4, config=CONFIG) as pool:
      pools.append(pool)
      pool.submit(requests_of(random_prompts(600)))
      assert len(results_of(pool)) == 600
    assert [worker.idle_steps for worker in make.made] == [0] * 4
    assert sum(worker.num_steps for worker in make.made) > 600

  @pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
      ([0], ValueError, r"`ids` must have the shape .*got"),
      ([0, 1, 2], ValueError, r"`ids` must have the shape .*got"),
      ([-1, 5], ValueError, "from 0 to 2147483646 and"),
      ([0, 2**31 - 1], ValueError, "from 0 to 2147483646 and"),
      ([0, 2**31], ValueError, "`ids` must fit int32"),
      ([0.5, 1.0], TypeError, "`ids` must hold integers"),
    ],
  )
  def test_ids_of_another_shape_or_range_are_refused(self, ids, error, message):
    with workers.Pool(lambda _: StubWorker(), 1, config=CONFIG) as pool:
      with pytest.raises(error, match=message):
        pool.submit(requests_of(random_prompts(2)), ids=ids)
      assert results_of(pool) == {}

  def test_ids_in_use_are_refused(self):
    with workers.Pool(lambda _: StubWorker(), 1, config=CONFIG) as pool:
      with pytest.raises(ValueError, match=r"not in use, got \[7, 7"):
        pool.submit(requests_of(random_prompts(2)), ids=[7, 7])
      pool.submit(requests_of(random_prompts(1)), ids=[7])
      results_of(pool)
      pool.submit(requests_of(random_prompts(1)), ids=[7])

  @pytest.mark.parametrize(
    ("first", "second", "message"),
    [
      ({}, {"priority": [1]}, r"\.priority` must be None, .* got a value"),
      ({"priority": [1]}, {}, r"\.priority` must have a value, .* got None"),
      (
        {},
        {"extra": {"a": np.zeros(1)}},
        r"\.extra\['a'\]` must be None, .* got a value",
      ),
      (
        {"extra": np.zeros(1)},
        {"extra": np.zeros((1, 2))},
        r"\.extra` must have the tree, .* in the first prompt of the pool",
      ),
      (
        {"sampling": rollout.Sampling(top_k=5)},
        {"sampling": rollout.Sampling(top_k=5, seed=1)},
        r"\.sampling\.seed` must be None, .* got a value",
      ),
      (
        {"sampling": _ending_at("a")},
        {"sampling": _ending_at("b")},
        r"\.sampling\.stop_strings` must have the automata .* first prompt",
      ),
    ],
  )
  def test_other_optional_fields_are_refused(self, first, second, message):
    first, second = (
      rollout.Requests([[1]], [1], **fields) for fields in (first, second)
    )
    with workers.Pool(lambda _: StubWorker(), 1, config=CONFIG) as pool:
      ids = pool.submit(first)
      with pytest.raises(ValueError, match=f"`requests{message}"):
        pool.submit(second)
      ids += pool.submit(first)
      assert results_of(pool) == expected_of(ids)

  def test_lengths_beyond_the_tokens_are_refused(self):
    requests = rollout.Requests([[7, 7]], [3])
    with workers.Pool(lambda _: StubWorker(), 1, config=CONFIG) as pool:
      with pytest.raises(ValueError, match=r"lengths\[0\]` must be 1 .. 2"):
        pool.submit(requests)
      assert results_of(pool) == {}

  def test_a_closed_pool_is_an_error(self):
    with workers.Pool(lambda _: StubWorker(), 1, config=CONFIG) as pool:
      pool.submit(requests_of(random_prompts(1)))
    with pytest.raises(RuntimeError, match="pool is closed"):
      pool.submit(requests_of(random_prompts(1)))
    with pytest.raises(RuntimeError, match="pool is closed"):
      pool.add()
    with pytest.raises(RuntimeError, match="pool is closed"):
      pool.update_weights("weights 1")
    with pytest.raises(RuntimeError, match="pool is closed"):
      results_of(pool)

  @pytest.mark.parametrize(("timeout", "is_closed"), [(0, True), (60, False)])
  def test_a_call_is_interrupted_after_the_timeout(self, timeout, is_closed):
    has_begun = threading.Event()
    was_closed = threading.Event()
    answers = queue.SimpleQueue()

    class Waits(StubWorker):
      def step(self, steps=None):
        has_begun.set()
        # Only `close` sets it while the call runs.
        answers.put(was_closed.wait(0.5))
        return super().step(steps)

      def close(self):
        was_closed.set()

    pool = workers.Pool(lambda _: Waits(), 1, config=CONFIG)
    pool.submit(requests_of(random_prompts(1)))
    has_begun.wait()
    pool.close(timeout=timeout)
    assert answers.get(timeout=10) == is_closed and was_closed.wait(10)

  def test_too_many_prompts_wait_outside(self):
    is_open = threading.Event()

    class Slow(StubWorker):
      def step(self, steps=None):
        is_open.wait()
        return super().step(steps)

    with workers.Pool(
      lambda _: Slow(rows=4), 1, config=CONFIG, max_waiting=10
    ) as pool:
      thread = threading.Thread(
        target=pool.submit, args=(requests_of(random_prompts(40)),)
      )
      thread.start()
      thread.join(0.5)
      # 4 on the worker, 10 in the pool.
      assert thread.is_alive() and pool.num_waiting == 10
      is_open.set()
      thread.join()
      assert len(results_of(pool)) == 40

  def test_an_interrupt_leaves_no_id_behind(self, monkeypatch):
    wait_for, caller = threading.Condition.wait_for, threading.current_thread()

    def interrupted(condition, predicate):
      if threading.current_thread() is caller and not predicate():
        raise KeyboardInterrupt
      return wait_for(condition, predicate)

    with workers.Pool(
      lambda _: StubWorker(), 1, config=CONFIG, max_waiting=10
    ) as pool:
      with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
          pool.submit(requests_of(random_prompts(40)))
      # No worker took one of the 10 prompts before the interrupt.
      ids = pool.submit(requests_of(random_prompts(5)), ids=range(10, 15))
      assert results_of(pool) == expected_of([*range(10), *ids])


class TestWeights:
  @pytest.mark.parametrize("max_age", [0, 1, None])
  def test_no_sequence_mixes_more_versions_than_allowed(self, max_age):
    with workers.Pool(
      lambda _: StubWorker(steps=1), 3, config=CONFIG, max_age=max_age
    ) as pool:
      ids = pool.submit(requests_of(random_prompts(200)))
      results = {}
      for samples in pool.results():
        results[samples.id] = samples.results
        if len(results) % 20 == 0 and len(results) < 200:
          version = pool.update_weights(f"weights {len(results) // 20}")
          assert version == len(results) // 20
        if len(results) == 59:
          pool.remove(0)
        if len(results) == 100:
          pool.add()
    assert sorted(results) == ids
    ages = []
    for prompt_id, tokens in results.items():
      assert [token for token, _ in tokens] == [
        token for token, _ in tokens_of(prompt_id, 0)
      ]
      versions = [version for _, version in tokens]
      ages.append(versions[-1] - versions[0])
    assert max(ages) <= (9 if max_age is None else max_age)

  def test_a_trainer_may_change_its_tree_after_an_update(self):
    trees = []

    class Records(StubWorker):
      def update_weights(self, params, *, version, max_age):
        trees.append(params)
        return []

    params = {}
    with workers.Pool(lambda _: Records(), 1, config=CONFIG) as pool:
      for prompt_id in (1, 2):
        params["layer"] = prompt_id
        pool.update_weights(params)
        pool.submit(requests_of(random_prompts(1)))
        results_of(pool)
    assert trees == [{"layer": 1}, {"layer": 2}]
