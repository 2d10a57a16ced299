"""Workers of a pool that fail, hang, or are added and removed."""

import logging
import math
import random
import sys
import threading

import pytest

from jaxkv import workers
from tests.engine.by_hand import requests_of
from tests.workers.stub import CONFIG
from tests.workers.stub import FailingWorker
from tests.workers.stub import Maker
from tests.workers.stub import StubWorker
from tests.workers.stub import expected_of
from tests.workers.stub import random_prompts
from tests.workers.stub import results_of


class TestFailures:
  def test_prompts_run_again_elsewhere(self):
    rng = random.Random(3)
    make = Maker(lambda _: FailingWorker(rng.randint(3, 9)))
    with workers.Pool(
      make, 4, config=CONFIG, max_failures=100, retry_pause=0
    ) as pool:
      ids = pool.submit(requests_of(random_prompts(200)))
      assert results_of(pool) == expected_of(ids)
    assert len(make.made) > 10
    assert all(worker.is_closed for worker in make.made)

  def test_a_new_worker_of_a_place_gets_the_last_weights(self):
    make = Maker(lambda _: StubWorker() if make.made else FailingWorker(1))
    with workers.Pool(make, 1, config=CONFIG, retry_pause=0) as pool:
      pool.update_weights("weights 1")
      ids = pool.submit(requests_of(random_prompts(20)))
      assert results_of(pool) == expected_of(ids, version=1)
    assert [worker.version for worker in make.made] == [1, 1]

  def test_a_prompt_that_is_refused_is_an_error(self):
    class Strict(StubWorker):
      def submit(self, prompts, *, ids):
        raise ValueError("`requests` must be valid prompts")

    with workers.Pool(lambda _: Strict(), 2, config=CONFIG) as pool:
      pool.submit(requests_of(random_prompts(3)))
      with pytest.raises(RuntimeError, match="stopped: `requests` must be"):
        results_of(pool)

  def test_a_pool_without_a_place_is_an_error(self):
    made = []

    def make(place):
      made.append(place)
      raise OSError("no such machine")

    with workers.Pool(
      make, 2, config=CONFIG, max_failures=2, retry_pause=0
    ) as pool:
      pool.submit(requests_of(random_prompts(3)))
      with pytest.raises(
        RuntimeError,
        match=r"no place is left; place . failed 3 times .* ended: no such",
      ):
        results_of(pool)
      with pytest.raises(RuntimeError, match="no such machine"):
        pool.submit(requests_of(random_prompts(3)))
    assert sorted(made) == [0, 0, 0, 1, 1, 1]

  def test_other_places_go_on_when_one_is_given_up(self, caplog):
    tries, is_given_up = [], threading.Event()

    class Waits(StubWorker):
      def step(self, steps=None):
        assert is_given_up.wait(20)
        return super().step(steps)

    def make(place):
      if place:
        return Waits()
      tries.append(place)
      raise OSError("no such machine")

    class Handler(logging.Handler):
      def emit(self, record):
        if "goes on without a place" in record.getMessage():
          is_given_up.set()

    logger, handler = logging.getLogger("jaxkv"), Handler()
    logger.addHandler(handler)
    try:
      with workers.Pool(
        make, 2, config=CONFIG, max_failures=5, retry_pause=0
      ) as pool:
        ids = pool.submit(requests_of(random_prompts(60)))
        assert results_of(pool) == expected_of(ids)
        with pytest.raises(ValueError, match="must not be the last worker"):
          pool.remove(1)
        assert pool.add() == 2
        pool.remove(1)
        ids = pool.submit(requests_of(random_prompts(9)))
        assert results_of(pool) == expected_of(ids)
    finally:
      logger.removeHandler(handler)
    assert len(tries) == 6
    assert "place 0 failed 6 times before a prompt ended" in caplog.text

  def test_pauses_after_failures_double(self, monkeypatch):
    wait_for, tries, pauses = threading.Condition.wait_for, [], []

    def without_pauses(condition, predicate, timeout=None):
      if timeout is None:
        return wait_for(condition, predicate)
      pauses.append(timeout)
      return predicate()

    def make(place):
      tries.append(place)
      if len(tries) <= 9:
        raise OSError("no such machine")
      return FailingWorker(12 if len(tries) == 10 else 100)

    monkeypatch.setattr(threading.Condition, "wait_for", without_pauses)
    with workers.Pool(make, 1, config=CONFIG) as pool:
      ids = pool.submit(requests_of(random_prompts(60)))
      assert results_of(pool) == expected_of(ids)
    # Prompts have ended before the last failure.
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 1]

  def test_a_removed_place_does_not_wait(self, monkeypatch):
    """The pauses would last longer than the test may."""
    has_failed = threading.Event()

    def make(place):
      if place:
        # Otherwise this place could get all prompts before the other one.
        has_failed.wait(20)
        return StubWorker()
      has_failed.set()
      raise OSError("no such machine")

    with workers.Pool(
      make, 2, config=CONFIG, retry_pause=1e6, max_retry_pause=1e6
    ) as pool:
      ids = pool.submit(requests_of(random_prompts(40)))
      assert has_failed.wait(20)
      pool.remove(0)
      assert results_of(pool) == expected_of(ids)
      pool._states[0].thread.join(20)
      assert not pool._states[0].thread.is_alive()

  def test_calls_that_end_no_prompt_do_not_reset_the_count(self, caplog):
    with workers.Pool(
      lambda _: FailingWorker(1, steps=1),
      1,
      config=CONFIG,
      max_failures=2,
      retry_pause=0,
    ) as pool:
      pool.submit(requests_of(random_prompts(1)))
      with pytest.raises(RuntimeError, match="failed 3 times before a prompt"):
        results_of(pool)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["The worker of place 0 failed."] * 3
    assert "the machine was taken away" in caplog.text

  def test_samples_of_unknown_prompts_do_not_reset_the_count(self):
    class Wrong(StubWorker):
      def harvest(self):
        return [workers.PromptSamples(10**6, [])]

    with workers.Pool(
      lambda _: Wrong(), 1, config=CONFIG, max_failures=2, retry_pause=0
    ) as pool:
      pool.submit(requests_of(random_prompts(1)))
      with pytest.raises(RuntimeError, match="failed 3 times before a prompt"):
        results_of(pool)

  def test_a_place_that_was_removed_may_fail(self):
    has_prompts, has_failed = threading.Event(), threading.Event()

    class Waits(StubWorker):
      def step(self, steps=None):
        assert has_prompts.wait(20)
        return super().step(steps)

    class Fails(StubWorker):
      def step(self, steps=None):
        has_prompts.set()
        return 0

      def export(self):
        has_failed.set()
        raise OSError("the machine was taken away")

    def make(place):
      return Waits() if place else Fails()

    with workers.Pool(make, 2, config=CONFIG, max_failures=0) as pool:
      ids = pool.submit(requests_of(random_prompts(60)))
      results = {}
      for samples in pool.results():
        results[samples.id] = samples.results
        pool.remove(0)
      assert has_failed.is_set() and results == expected_of(ids)

  def test_a_worker_that_exits_is_replaced(self):
    class Exits(StubWorker):
      def step(self, steps=None):
        if len(make.made) == 1:
          sys.exit(3)
        return super().step(steps)

    make = Maker(lambda _: Exits())
    with workers.Pool(make, 1, config=CONFIG, retry_pause=0) as pool:
      ids = pool.submit(requests_of(random_prompts(3)))
      assert results_of(pool) == expected_of(ids)
    assert len(make.made) == 2 and make.made[0].is_closed

  def test_prompts_that_have_ended_come_before_the_error(self):
    has_stopped = threading.Event()

    class Last(FailingWorker):
      def close(self):
        has_stopped.set()

    with workers.Pool(
      lambda _: Last(6), 1, config=CONFIG, max_failures=0
    ) as pool:
      pool.submit(requests_of(random_prompts(20)))
      has_stopped.wait()
      results = {}
      with pytest.raises(RuntimeError, match="machine was taken away"):
        for samples in pool.results():
          results[samples.id] = samples.results
      assert len(results) >= 4 and results == expected_of(results)


class TestAddAndRemove:
  def test_sequences_of_a_removed_worker_are_continued(self):
    make = Maker(lambda _: StubWorker(steps=1))
    with workers.Pool(make, 3, config=CONFIG) as pool:
      ids = pool.submit(requests_of(random_prompts(120)))
      # Added first: a worker is made only if prompts wait.
      assert pool.add() == 3
      results = results_of(pool, {20: lambda: pool.remove(1)})
      assert results == expected_of(ids)
    # A sequence that began again would take more steps.
    tokens = sum(map(len, results.values()))
    assert sum(worker.num_steps for worker in make.made) * 4 >= tokens
    assert make.made[1].is_closed and len(make.made) == 4

  def test_sequences_are_distributed_over_several_workers(self):
    """None has room for all of them."""

    def make(place):
      return StubWorker(steps=1, rows=40 if place == 0 else 8)

    def remove_twice():
      pool.remove(0)
      pool.remove(0)

    with workers.Pool(make, 4, config=CONFIG) as pool:
      ids = pool.submit(requests_of(random_prompts(150)))
      assert results_of(pool, {10: remove_twice}) == expected_of(ids)

  def test_sequences_that_cannot_be_imported_begin_again(self):
    """Each failure uses up an export, so they cannot fail for ever."""
    has_begun, may_go_on, failures = threading.Event(), threading.Event(), []

    class Refuses(StubWorker):
      def step(self, steps=None):
        has_begun.set()
        may_go_on.wait()
        return super().step(steps)

      def import_sequences(self, exported, ids):
        failures.append(ids)
        raise OSError("out of memory")

    with workers.Pool(
      lambda _: Refuses(steps=1),
      1,
      config=CONFIG,
      max_failures=8,
      retry_pause=0,
    ) as pool:
      ids = pool.submit(requests_of(random_prompts(30)))
      has_begun.wait()
      pool.add()
      pool.remove(0)
      may_go_on.set()
      assert results_of(pool) == expected_of(ids)
    assert failures

  def test_removing_an_unused_place_makes_no_worker(self):
    made = []

    def make(place):
      made.append(place)
      return StubWorker()

    with workers.Pool(make, 3, config=CONFIG) as pool:
      pool.remove(1)
      ids = pool.submit(requests_of(random_prompts(20)))
      assert results_of(pool) == expected_of(ids)
    assert 1 not in made

  @pytest.mark.parametrize(
    "call", ["room", "match", "submit", "step", "export", "update_weights"]
  )
  def test_a_hung_worker_is_left_behind(self, call, caplog):
    has_prompts, is_hung = threading.Event(), threading.Event()
    may_return, made = threading.Event(), {}

    class Hangs(StubWorker):
      def step(self, steps=None):
        has_prompts.set()
        return super().step(steps) if may_return.is_set() else 0

    def hang(worker, *arguments, **options):
      is_hung.set()
      may_return.wait()
      return getattr(super(Hangs, worker), call)(*arguments, **options)

    setattr(Hangs, call, hang)

    def make(place):
      # The first worker takes prompts before another one exists.
      assert place == 0 or is_hung.wait(20)
      made[place] = StubWorker() if place else Hangs(rows=20)
      return made[place]

    with workers.Pool(make, 2, config=CONFIG) as pool:
      ids = pool.submit(requests_of(random_prompts(60)))
      if call in ("export", "update_weights"):
        assert has_prompts.wait(20)
      version = int(call == "update_weights")
      if version:
        pool.update_weights("weights 1")
      if call == "export":
        pool.remove(0, timeout=None)
      assert is_hung.wait(20)
      pool.remove(0, timeout=0)
      assert results_of(pool) == expected_of(ids, version)
      may_return.set()
      pool._states[0].thread.join(20)
      assert not pool._states[0].thread.is_alive()
      # What the calls of the hung worker returned late is ignored.
      ids = pool.submit(requests_of(random_prompts(5)))
      assert results_of(pool) == expected_of(ids, version)
    assert made[0].is_closed and len(made) == 2
    assert "The worker of place 0 failed" not in caplog.text

  @pytest.mark.parametrize(
    ("options", "error", "message"),
    [
      ({"make": []}, TypeError, r"`make` must be a function .*, got \[\]"),
      ({"retry_pause": "1"}, TypeError, "`retry_pause` must be a number of"),
      ({"retry_pause": -1}, ValueError, "`retry_pause` must be .*, got -1"),
      ({"max_retry_pause": math.nan}, ValueError, "at least 0 .*, got nan"),
      ({"max_retry_pause": math.inf}, ValueError, "at most .*, got inf"),
    ],
  )
  def test_options_are_checked_by_the_caller(self, options, error, message):
    options = {"make": lambda _: StubWorker()} | options
    with pytest.raises(error, match=message):
      workers.Pool(options.pop("make"), 1, config=CONFIG, **options)

  def test_timeouts_are_checked(self):
    with workers.Pool(lambda _: StubWorker(), 2, config=CONFIG) as pool:
      with pytest.raises(ValueError, match=r"`timeout` must be .*, got -1"):
        pool.remove(0, timeout=-1)
      with pytest.raises(TypeError, match=r"`timeout` must be .*, got 'soon'"):
        pool.remove(0, timeout="soon")
      assert not pool._states[0].leaves

  def test_the_last_worker_cannot_be_removed(self):
    with workers.Pool(lambda _: StubWorker(), 1, config=CONFIG) as pool:
      with pytest.raises(ValueError, match="must not be the last worker"):
        pool.remove(0)
      pool.remove(pool.add())
      with pytest.raises(ValueError, match="must not be the last worker"):
        pool.remove(0)
      pool.remove(1)
      with pytest.raises(ValueError, match=r"`place` must be one of \[0\]"):
        pool.remove(5)
