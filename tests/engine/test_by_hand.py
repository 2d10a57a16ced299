"""The loop against plain Python, and its counters against a count by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from tests.engine import by_hand
from tests.engine.by_hand import DONE
from tests.engine.by_hand import RUNS
from tests.engine.by_hand import WAITS
from tests.tools.pool_copies import pool_sized_rewrites

pytestmark = pytest.mark.slow

_CONFIG = rollout.RolloutConfig(
  num_samples=2,
  max_new_tokens=6,
  stop_token=8,
  prefill_chunk=3,
  admissions=3,
)


def test_tokens_equal_plain_python():
  program = by_hand.program()
  start_state = by_hand.begun(by_hand.sizes(60, 4), _CONFIG)
  for temperature in (0.0, 0.7):
    state = program(start_state, temperature, 200)
    by_hand.check_sequences(state, _CONFIG, temperature)
    assert set(state.queue.code.tolist()) == {jaxkv.Status.OK}
    num_drawn = jnp.sum(state.queue.length - state.queue.prompt_length)
    assert int(state.counters.generated) == int(num_drawn)
    assert int(state.counters.preempted) == 0
    assert set(state.slots.row.tolist()) == {8}
    assert int(state.memory.cache.pool.queue.num_free[0]) == 59
    jaxkv.check(state.memory.cache)


@pytest.mark.deep
def test_counters_equal_a_count_by_hand():
  """Two samples of five tokens, three tokens each, pages of two.

  The first sample computes 4 tokens into 2 pages, which the second one shares:
  two tokens in the places of the slots, which do not decode yet, and two in a
  chunk of three. In the second step each takes a page for the fifth token, in
  the fourth step another one for the seventh: 2 + 2 * 2 pages, of which 2 stand
  in both tables. Then come the two samples of one token, which have nothing to
  share.
  """
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=3, prefill_chunk=3
  )
  sizes = by_hand.sizes(20, 2)
  state = by_hand.ended(sizes, config, [[1, 2, 3, 4, 5], [6]], 1.0)
  counters = {
    name: np.asarray(x).tolist() for name, x in vars(state.counters).items()
  }
  assert counters == dict(
    steps=7,
    calls=[6, 1],
    rows=(2 + 3) + 3 * 2 + 3 * 2,
    generated=12,
    prefilled=4,
    recomputed=0,
    drafted=0,
    accepted=0,
    forked=1,
    preempted=0,
    peak_pages=6,
    peak_shared=2,
  )


@pytest.mark.fast
def test_younger_of_equal_sequences_is_preempted():
  """Two sequences of one token in four pages, four tokens long each.

  Each needs 2 pages for its first four tokens, so the fifth is for neither.
  The younger one gives its pages back at the end of that step and waits until
  the older one has ended. Then it resumes in three of the four pages. The last
  page is not given to the third one: it is left for the first two to grow.
  """
  # One program with `test_counts`.
  config = rollout.RolloutConfig(max_new_tokens=5, timeline=6)
  state = by_hand.begun(by_hand.sizes(5, 2), config, [[1], [2], [3]])
  program = by_hand.program()
  status = []
  for _ in range(7):
    state = program(state, 1.0, 1)
    status.append(state.queue.status.tolist())
  assert status[3] == [RUNS, RUNS, WAITS]
  assert status[4] == [RUNS, WAITS, WAITS]
  assert status[5] == [DONE, WAITS, WAITS]
  # The one that resumes lacks a single token.
  assert status[6] == [DONE, DONE, WAITS]
  assert int(state.counters.preempted) == 1


def test_penalties_count_tokens_of_every_slot():
  """A sequence is preempted twice, and samples in another slot in between."""
  prompts = [
    [9, 8, 4, 6, 3, 3],
    [5],
    [7],
    [1, 6, 5, 8],
    [7],
    [0, 4, 3, 2, 2, 10],
  ]
  config = rollout.RolloutConfig(max_new_tokens=14, prefill_chunk=4)
  sampling = rollout.Sampling(
    temperature=0.0,
    frequency_penalty=jnp.full((6,), 1.7),
    max_tokens=jnp.asarray([5, 11, 4, 10, 13, 8]),
  )
  small, ample = (
    by_hand.begun(
      dataclasses.replace(by_hand.sizes(pages, 4), pages_per_slot=10),
      config,
      prompts,
      sampling=sampling,
      priority=jnp.asarray([0, 0, 1, 0, 2, 0]),
    )
    for pages in (14, 100)
  )
  small, ample = (by_hand.program()(state, 0.0) for state in (small, ample))
  assert int(small.counters.preempted) == 3
  assert small.queue.tokens.tolist() == ample.queue.tokens.tolist()


@pytest.mark.deep
def test_newcomers_leave_a_page_for_each_running_sequence():
  """A sequence of six tokens and one of one token, in four pages.

  The long one takes three pages, and needs the fourth at its second step. The
  short one would fit into that page, but newcomers leave a page free for
  each sequence that runs, themselves included. So it waits.
  """
  config = rollout.RolloutConfig(max_new_tokens=2)
  sizes = by_hand.sizes(5, 2)
  state = by_hand.ended(sizes, config, [[1, 2, 3, 1, 2, 3], [1]], 1.0)
  assert (int(state.counters.steps), int(state.counters.preempted)) == (4, 0)


@pytest.mark.deep
def test_shorter_sequence_is_preempted():
  """A sequence of one token and one of four, in five pages.

  In the fourth step the second one needs a fourth page, and none is left: the
  first one holds two. It has fewer tokens, so it is preempted.
  """
  config = rollout.RolloutConfig(max_new_tokens=4, prefill_chunk=8)
  state = by_hand.begun(by_hand.sizes(6, 2), config, [[9], [1, 2, 3, 1]])
  program = by_hand.program()
  state = program(state, 0.0, 4)
  assert int(state.counters.preempted) == 1
  assert state.queue.status.tolist() == [WAITS, RUNS]
  state = program(state, 0.0, 50)
  assert bool(rollout.is_done(state)), "not done after 50 steps"
  # It had computed three tokens, and the page of two is still cached.
  assert int(state.counters.recomputed) == 1


@pytest.mark.deep
@pytest.mark.parametrize("page_size", [2, 4])
def test_common_prefix_is_computed_once(page_size):
  """Three prompts share eight tokens and differ in the last one.

  Each step computes four tokens. Nobody enters beside the first one before the
  last common page is cached, so only the first one computes those pages. Pages
  of four tokens are larger than the smallest that the cache could have.
  """
  config = rollout.RolloutConfig(max_new_tokens=1, prefill_chunk=1)
  common = [1, 2, 3, 4, 5, 6, 7, 8]
  groups = (jaxkv.FullAttention(page_size=page_size),)
  sizes = dataclasses.replace(by_hand.sizes(40, 3), groups=groups)
  prompts = [[*common, 5], [*common, 6], [*common, 7]]
  state = by_hand.ended(sizes, config, prompts, 0.0)
  assert int(state.counters.prefilled) == 8
  assert int(state.counters.steps) == 3
  assert int(state.memory.cache.stats.hit_tokens) == 16


@pytest.mark.deep
def test_cached_prefixes_are_admitted_first():
  """Prompts with a cached prefix overtake others `max_overtaken` times."""
  prompts = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]]
  for bound, expected_order in (
    (32, [0, 2, 3, 1]),
    (1, [0, 2, 1, 3]),
    (0, [0, 1, 2, 3]),
  ):
    config = rollout.RolloutConfig(max_new_tokens=1, max_overtaken=bound)
    state = by_hand.begun(by_hand.sizes(40, 1), config, prompts)
    program = by_hand.program()
    order = []
    for _ in range(30):
      state = program(state, 0.0, 1)
      for row in np.flatnonzero(state.queue.status == DONE):
        if row not in order:
          order.append(int(row))
    assert order == expected_order, bound


def test_priority_orders_admission_and_preemption():
  """Lower numbers enter first, and the highest is preempted first."""
  config = rollout.RolloutConfig(max_new_tokens=3)
  prompts = [[1], [2], [3], [4]]
  state = by_hand.begun(
    by_hand.sizes(40, 1), config, prompts, priority=[5, -2, 5, 0]
  )
  program = by_hand.program()
  order = []
  for _ in range(30):
    state = program(state, 0.0, 1)
    done = np.flatnonzero(state.queue.status == DONE)
    order += [row for row in done.tolist() if row not in order]
  assert order == [1, 3, 0, 2]
  assert not np.any(state.queue.overtaken)
  # The sequences of `test_younger_of_equal_sequences_is_preempted`.
  config = rollout.RolloutConfig(max_new_tokens=5)
  state = by_hand.begun(
    by_hand.sizes(5, 2), config, [[1], [2], [3]], priority=[1, 0, 2]
  )
  state = by_hand.program()(state, 1.0, 5)
  assert state.queue.status.tolist() == [WAITS, RUNS, WAITS]


def test_decoding_sequences_are_never_stalled():
  """A sequence with a sampled token samples one in each later step."""
  config = dataclasses.replace(_CONFIG, num_samples=1, max_new_tokens=8)
  prompts = [[1, 2], [3] * 8, [4] * 8, [5] * 8, [6, 7], [2] * 8]
  state = by_hand.begun(by_hand.sizes(90, 3), config, prompts)
  program = by_hand.program()
  while not bool(rollout.is_done(state)):
    queue = state.queue
    state = program(state, 0.7, 1)
    drawing = queue.status == RUNS
    drawing &= queue.length > queue.prompt_length
    grown = state.queue.length - queue.length
    assert np.all(np.asarray(grown)[np.asarray(drawing)] == 1)
  assert int(state.counters.preempted) == 0


def test_first_prompt_is_computed_first():
  """Two prompts of six tokens; a step computes three, of the first one first.

  After two steps it has drawn a token, and the other one has computed none.
  """
  config = rollout.RolloutConfig(max_new_tokens=2, prefill_chunk=1)
  state = by_hand.begun(
    by_hand.sizes(40, 2), config, [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]
  )
  state = by_hand.program()(state, 0.0, 2)
  assert state.queue.length.tolist() == [7, 6]
  assert state.memory.cache.length.tolist() == [6, 0]


@pytest.mark.parametrize(
  ("largest", "options"),
  [
    ("memory", {"decode_steps": 3}),
    ("queue", {}),
    pytest.param("queue", {"draft_tokens": 2}, marks=pytest.mark.slow),
    pytest.param("memory", {}, marks=pytest.mark.deep),
    pytest.param("queue", {"decode_steps": 3}, marks=pytest.mark.deep),
  ],
)
def test_pools_are_updated_in_place(largest, options):
  """A step rewrites neither the K/V memory nor the queue of sequences."""
  config = rollout.RolloutConfig(
    num_samples=2,
    max_new_tokens=6,
    prefill_chunk=3,
    window=4,
    **options,
  )
  prompts = [[1] * 10] * 2
  if largest == "queue":
    prompts = [[1] * 60] * 256
  sizes = dataclasses.replace(
    by_hand.sizes(9000 if largest == "memory" else 60, 4), pages_per_slot=33
  )
  state = by_hand.begun(sizes, config, prompts)
  array = state.memory.kv.k if largest == "memory" else state.queue.tokens
  program = jax.jit(by_hand.program(), donate_argnums=0)
  compiled = program.lower(state, jnp.float32(1)).compile()
  assert pool_sized_rewrites(compiled, array.shape) == []
