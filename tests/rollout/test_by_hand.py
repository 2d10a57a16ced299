"""The loop against plain Python, and its counters against a count by hand."""

import dataclasses
import functools

import jax
import numpy as np

import jaxkv
from jaxkv import rollout
from tests.rollout import by_hand

_CONFIG = rollout.RolloutConfig(
  num_samples=2,
  max_new_tokens=6,
  stop_token=8,
  prefill_chunk=3,
  admissions=3,
)


def _sizes(pages: int, slots: int) -> jaxkv.CacheConfig:
  return jaxkv.CacheConfig(
    num_pages=pages, page_size=2, num_slots=slots, pages_per_slot=8
  )


@functools.cache
def _expected(temperature: float) -> list[by_hand.Expected]:
  prompts = [prompt for prompt in by_hand.PROMPTS for _ in range(2)]
  return [
    by_hand.expected(number, prompt, jax.random.key(5), temperature, _CONFIG)
    for number, prompt in enumerate(prompts)
  ]


def check_sequences(
  pages: int, slots: int, temperatures=(0.7,)
) -> rollout.RolloutState:
  """All of finished rollouts in a pool of so many pages; returns the last."""
  program = by_hand.program()
  state = by_hand.begun(jax.random.key(5), _sizes(pages, slots), _CONFIG)
  ends = [program(state, temperature, 200) for temperature in temperatures]
  for end, temperature in zip(ends, temperatures, strict=True):
    assert bool(rollout.is_done(end)), "not done after 200 steps"
    for number, wanted in enumerate(_expected(temperature)):
      _check_sequence(end.sequences, number, wanted)
    assert set(end.sequences.status.tolist()) == {rollout.DONE}
    assert set(end.sequences.code.tolist()) == {jaxkv.Status.OK}
    lengths = [len(wanted.log_probs) for wanted in _expected(temperature)]
    assert int(end.counters.generated) == sum(lengths)
    assert set(end.running.tolist()) == {len(lengths)}
    assert int(end.cache.pool.queue.num_free) == pages - 1
    jaxkv.check(end.cache)
  return ends[-1]


def _check_sequence(sequences, number: int, wanted: by_hand.Expected) -> None:
  length = int(sequences.length[number])
  assert sequences.tokens[number, :length].tolist() == wanted.tokens
  assert not np.any(sequences.tokens[number, length:])
  count = length - int(sequences.prompt_length[number])
  scores = np.asarray(sequences.log_probs[number])
  # float32, summed in another order.
  np.testing.assert_allclose(scores[:count], wanted.log_probs, atol=1e-5)
  assert not np.any(scores[count:])


def test_sequences():
  end = check_sequences(60, 4, temperatures=(0.0, 0.7))
  assert int(end.counters.preempted) == 0


def check_scarce_pages() -> None:
  """As before, where sequences are preempted and pages evicted."""
  end = check_sequences(12, 4)
  assert int(end.counters.preempted) > 0
  assert int(end.cache.stats.evicted_pages) > 0


def test_scarce_pages():
  check_scarce_pages()


def check_counters() -> None:
  """Two samples of five tokens, three tokens each, pages of two.

  The first sample computes 4 tokens into 2 pages, which the second one shares.
  At the first step each takes a page for the fifth token, at the third step
  another one for the seventh: 2 + 2 * 2 pages, of which 2 stand in both tables.
  Then come the two samples of one token, which have nothing to share.
  """
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=3, prefill_chunk=3
  )
  state = by_hand.begun(
    jax.random.key(5), _sizes(20, 2), config, [[1, 2, 3, 4, 5], [6]]
  )
  end = by_hand.program()(state, 1.0, 0)
  assert jax.tree.map(int, end.counters) == rollout.Counters(
    steps=6,
    generated=12,
    prefilled=4,
    forked=1,
    preempted=0,
    peak_pages=6,
    peak_shared=2,
  )


def test_counters():
  check_counters()


def check_preemption() -> None:
  """Two sequences of one token in four pages, four tokens long each.

  Each needs 2 pages for its first four tokens, so the fifth is for neither.
  The younger one gives its pages back at the end of that step and waits until
  the older one has ended. Meanwhile nobody is admitted: the third one waits.
  """
  config = rollout.RolloutConfig(max_new_tokens=5)
  state = by_hand.begun(
    jax.random.key(5), _sizes(5, 2), config, [[1], [2], [3]]
  )
  program, status = by_hand.program(), []
  for _ in range(7):
    state = program(state, 1.0, 1)
    status.append(state.sequences.status.tolist())
  waits, runs, done = rollout.WAITING, rollout.RUNNING, rollout.DONE
  assert status[3] == [runs, runs, waits]
  assert status[4] == [runs, waits, waits]
  assert status[5] == [done, waits, waits]
  # The one that resumes lacks a single token.
  assert status[6] == [done, done, runs]
  assert int(state.counters.preempted) == 1


def test_preemption():
  check_preemption()


def check_pause() -> None:
  """A sequence of six tokens and one of one token, in four pages.

  At the second step the long one needs its fourth page, so the short one gives
  its only page back. It would fit into that page again at once, and neither
  would ever get further; so it waits until the long one has ended.
  """
  config = rollout.RolloutConfig(max_new_tokens=2)
  state = by_hand.begun(
    jax.random.key(5), _sizes(5, 2), config, [[1, 2, 3, 1, 2, 3], [1]]
  )
  end = by_hand.program()(state, 1.0, 50)
  assert bool(rollout.is_done(end)), "not done after 50 steps"
  assert (int(end.counters.steps), int(end.counters.preempted)) == (4, 1)


def test_pause():
  check_pause()


def check_hopeless() -> None:
  """Of 7 pages others hold 5; the 2 that are left have room for 4 tokens.

  Seven tokens are never admitted. Two tokens are, and draw three more from
  the four that fit; then no page is left, though the sequence is alone.
  """
  config = rollout.RolloutConfig(max_new_tokens=5)
  state = by_hand.begun(
    jax.random.key(5), _sizes(8, 1), config, [[1, 2, 3, 1, 2, 3, 1], [1, 2]]
  )
  cache, _ = jaxkv.allocate(state.cache, [10])
  cache, _ = jaxkv.touch(cache, cache.page_table[:, 0])
  cache, _ = jaxkv.free(cache, mask=[True])
  end = by_hand.program()(dataclasses.replace(state, cache=cache), 0.0, 50)
  assert bool(rollout.is_done(end)), "not done after 50 steps"
  assert end.sequences.status.tolist() == [rollout.FAILED, rollout.FAILED]
  assert set(end.sequences.code.tolist()) == {jaxkv.Status.OUT_OF_PAGES}
  lengths = end.sequences.length - end.sequences.prompt_length
  assert lengths.tolist() == [0, 3]
  # One to refuse the first, three tokens, and one to find no page.
  assert int(end.counters.steps) == 5
  assert int(end.counters.preempted) == 0
  assert int(end.cache.pool.queue.num_free) == 2


def test_hopeless():
  check_hopeless()
