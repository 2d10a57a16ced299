"""Assignment of the prompts of a pool to its workers."""

import random
import threading

import pytest

from jaxkv import rollout
from jaxkv import workers
from jaxkv._src.workers.prompts import Prompt
from jaxkv._src.workers.prompts import split
from jaxkv._src.workers.routing import choose
from jaxkv._src.workers.worker_state import WorkerState
from tests.engine.by_hand import requests_of
from tests.workers import stub


def test_workers_leave_prompts_to_others_with_free_slots():
  all_have_prompts = threading.Barrier(4, timeout=20)

  class Waits(stub.StubWorker):
    def advance(self):
      if not self.num_steps:
        all_have_prompts.wait()
      return super().advance()

  with workers.Pool(
    lambda _: Waits(rows=100), 4, config=stub.CONFIG, max_failures=0
  ) as pool:
    # As many as there are slots.
    ids = pool.submit(requests_of(stub.random_prompts(16)))
    assert stub.results_of(pool) == stub.expected_of(ids)


@pytest.mark.parametrize("counts", [[1, 1, 1, 1, 1, 1], [4, 4], [3, 3, 3]])
def test_a_worker_takes_the_samples_that_it_needs(counts):
  config = rollout.RolloutConfig(num_samples=4)
  requests = rollout.Requests(
    [[1]] * len(counts), [1] * len(counts), num_samples=counts
  )
  waiting = [
    Prompt(prompt_id, part, ())
    for prompt_id, part in enumerate(split(requests, config))
  ]
  room = workers.Room(prompts=9, needed=8, slots=4)
  state, peer = WorkerState(0, print), WorkerState(1, print)
  chosen = choose(waiting, room, state, [peer])
  assert 4 <= sum(counts[prompt.id] for prompt in chosen) <= 6
  for prompt_id, part in enumerate(split(requests, config), 100):
    peer.add(Prompt(prompt_id, part, ()))
  assert choose(waiting, room, state, [peer]) == waiting
  assert choose(waiting, room, state, []) == waiting


def test_no_prompt_waits_for_a_place_without_a_worker():
  state = WorkerState(0, print)
  assert state.takes_prompts
  state.num_failures = 1
  assert not state.takes_prompts
  state.worker = stub.StubWorker()
  assert state.takes_prompts
  state.leaves = True
  assert not state.takes_prompts


@pytest.mark.slow
def test_families_of_prompts_stay_together():
  """40 families over 4 workers, beside one cache of their pages."""
  rng = random.Random(5)
  heads = [[rng.randrange(99) for _ in range(64)] for _ in range(40)]
  prompts = [
    rng.choice(heads) + [rng.randrange(99) for _ in range(20)]
    for _ in range(1200)
  ]
  # A worker's cache has 12 of the families, and not all 40.
  options = {"capacity": 12 * 4 + 16, "rows": 16}

  def hits_of(count, **options):
    make = stub.Maker(lambda _: stub.StubWorker(**options))
    with workers.Pool(make, count, config=stub.CONFIG) as pool:
      for start in range(0, 1200, 100):
        pool.submit(requests_of(prompts[start : start + 100]))
      assert len(stub.results_of(pool)) == 1200
    return sum(worker.hits for worker in make.made)

  in_pool = hits_of(4, **options)
  seq = hits_of(1, slots=16, rows=64, capacity=4 * options["capacity"])
  in_turn = 0
  for worker_index in range(4):
    worker = stub.StubWorker(**options)
    for start in range(worker_index, 1200, 32):
      part = prompts[start : start + 32 : 4]
      worker.submit(requests_of(part), ids=list(range(len(part))))
      while worker.room().prompts < 16:
        worker.step()
    in_turn += worker.hits
  assert in_pool >= 0.9 * seq > 1.3 * in_turn, (in_pool, seq, in_turn)
