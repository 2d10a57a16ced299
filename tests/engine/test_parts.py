"""Parts of the loop by hand: limits, drafts, stop rules and rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import guides
from jaxkv import rollout
from jaxkv._src.engine import generate
from jaxkv._src.engine.counters import Count
from jaxkv._src.engine.hooks import rows_of
from jaxkv._src.engine.sampling import ngrams
from jaxkv._src.engine.sampling import speculate
from jaxkv._src.engine.sampling.stop_rules import endings
from tests.engine import by_hand
from tests.engine.by_hand import DONE
from tests.engine.by_hand import EMPTY
from tests.engine.by_hand import FAILED
from tests.engine.by_hand import RUNS

pytestmark = pytest.mark.slow

_CONFIG = rollout.RolloutConfig(num_samples=2, max_new_tokens=6)


def _begun(config=_CONFIG, prompts=((1, 2), (3, 4, 5), (6,)), **options):
  prompts = [list(prompt) for prompt in prompts]
  return by_hand.begun(by_hand.sizes(40, 3), config, prompts, **options)


@pytest.mark.fast
def test_limits_of_a_call():
  """One group has ended, one half, and one has no sample."""
  state = _begun()
  status = [DONE, FAILED, RUNS, DONE, EMPTY, EMPTY]
  state = by_hand.with_queue(state, status=jnp.asarray(status, jnp.int32))
  steps = state.counters.steps + jnp.int32(5)
  counters = dataclasses.replace(state.counters, steps=steps)
  state = dataclasses.replace(state, counters=counters)
  for limits, goes_on in (
    ({}, True),
    ({"steps": 2}, True),
    ({"steps": 1}, False),
    ({"prompts": 1}, False),
    ({"prompts": 2}, True),
    ({"sequences": 3}, False),
    ({"sequences": 4}, True),
    ({"steps": 9, "prompts": 1, "sequences": 9}, False),
  ):
    limits = generate.as_until(rollout.Until(**limits))
    start_steps = Count.zeros() + jnp.int32(4)
    assert bool(generate.goes_on(limits, state, start_steps)) == goes_on, limits


@pytest.mark.fast
def test_stop_tokens_and_stop_strings():
  """A stop string counts after enough tokens, and a stop token before it."""
  texts = guides.token_bytes([b"a", b"b", b"c", b"ab", b"!"])
  strings = rollout.stop_strings([["xx", "ab"]] * 3, texts)
  config = rollout.RolloutConfig(max_new_tokens=3, max_length=8, stop_token=4)
  sampling = rollout.Sampling(
    stop_strings=strings,
    min_tokens=jnp.asarray([0, 2, 0], jnp.int32),
    stop_tokens=jnp.asarray([[2], [2], [3]], jnp.int32),
  )
  state = _begun(config, [[0]] * 3, sampling=sampling)
  indices = jnp.arange(3, dtype=jnp.int32)
  # What an earlier turn has left of a string does not count.
  left, _ = strings.advance(strings.init(3), jnp.zeros((3,), jnp.int32))
  queue = dataclasses.replace(state.queue, stop_states=left)
  rows = rows_of(state.queue, indices)
  cases = [
    ([1, 0, 0], [0, 0, 0], [-1, -1, -1]),
    # The last two have the string; the last one may end with it.
    ([0, 1, 1], [0, 0, 2], [-1, -1, 1]),
    ([2, 3, 3], [1, 2, 1], [2, 1, 3]),
    ([4, 0, 0], [1, 3, 3], [4, -1, -1]),
  ]
  for count, (tokens, *expected) in enumerate(cases):
    lengths = jnp.full((3,), 1 + min(count, 2), jnp.int32)
    lengths = jnp.where(count == 2, 2, lengths).astype(jnp.int32)
    at = rows._replace(counts=jnp.full((3,), count, jnp.int32), lengths=lengths)
    tokens = jnp.asarray(tokens, jnp.int32)
    finish, stop, states = endings(queue, at, tokens, queue.sampling, config)
    assert finish.tolist() == expected[0], count
    assert stop.tolist() == expected[1], count
    queue = dataclasses.replace(queue, stop_states=states)


_GUESSES = rollout.RolloutConfig(
  num_samples=2,
  max_new_tokens=6,
  draft_tokens=3,
  draft_match=2,
  draft_columns=4,
)


def _drafts_of(state):
  """Proposes drafts for sequences 0, 1 and 2, which decode in slots 0, 1, 2.

  Slot 3 is empty, as sequence 4 does not exist.
  """
  rows = jnp.asarray([0, 1, 2, 4], jnp.int32)
  slots = dataclasses.replace(state.slots, row=rows)
  # The last token of each sequence is missing.
  missing = state.queue.length.at[rows].get(mode="fill", fill_value=1) - 1
  cache = dataclasses.replace(state.memory.cache, length=missing)
  memory = dataclasses.replace(state.memory, cache=cache)
  state = dataclasses.replace(state, slots=slots, memory=memory)
  return speculate.propose_drafts(None, state, None)


def test_drafts_continue_repeated_ngrams():
  """Drafts are the tokens that followed the same two tokens before."""
  prompts = [[1, 2, 3, 4, 5, 1, 2], [1, 2, 3, 4, 5, 6, 7]]
  state = by_hand.begun(by_hand.sizes(40, 4), _GUESSES, prompts)
  rates = state.queue.draft_rates
  rows = jnp.asarray([0, 1, 2, 4], jnp.int32)
  drafts = _drafts_of(state)
  assert drafts.found.tolist() == [True, True, False, False]
  assert drafts.counts.tolist() == [3, 3, 0, 0]
  assert drafts.tokens[:2].tolist() == [[3, 4, 5]] * 2
  # None may stand behind the last token that it may draw.
  limit = jnp.asarray([9, 8, 13, 13], jnp.int32)
  limited = _drafts_of(by_hand.with_queue(state, limit=limit))
  assert limited.counts.tolist() == [1, 0, 0, 0]
  # Both were found, so both are tried again, and the first one was wrong.
  zeros = jnp.zeros_like(limited.counts)
  for _ in range(6):
    rates = ngrams.learn(rates, rows, drafts.found, limited.counts, zeros)
  state = by_hand.with_queue(state, draft_rates=rates)
  assert _drafts_of(state).counts.tolist() == [0, 3, 0, 0]
  for _ in range(40):
    rates = ngrams.learn(rates, rows, drafts.found, zeros, zeros)
  state = by_hand.with_queue(state, draft_rates=rates)
  assert _drafts_of(state).counts.tolist() == [1, 3, 0, 0]


def _model(params, batch, kv):
  """Returns logits that select the token in the row's `extra`."""
  del params, kv
  logits = jax.nn.one_hot(batch.rows.extra["token"], by_hand.VOCABULARY)
  return logits[batch.columns], None


def _count_tokens(logits, rows, extra):
  """Counts the tokens of each sequence, and records its id."""
  return logits, extra | {"count": extra["count"] + 1, "id": rows.ids}


@pytest.mark.parametrize("decode_steps", [1, 2])
def test_model_sees_the_row_of_each_sequence(decode_steps):
  """Each sequence has its row of `extra` and its id in every call."""
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=3, prefill_chunk=2, decode_steps=decode_steps
  )
  prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3], [9], [8, 8, 8, 8, 8]]
  tokens_of_rows = np.asarray([4, 9, 2, 3, 7, 1, 6, 5], np.int32)
  zeros = np.zeros(8, np.int32)
  extra = {"token": tokens_of_rows, "count": zeros, "id": zeros}
  state = _begun(config, prompts, extra=extra, first_sequence=20)
  state = by_hand.begun_at(state, 0.0)
  state = jax.jit(
    lambda state: rollout.generate(
      None, state, rollout.Until(steps=60), model=_model, process=_count_tokens
    )
  )(state)
  assert bool(rollout.is_done(state)), "not done after 60 steps"
  assert state.queue.extra["count"].tolist() == [3] * 8
  assert state.queue.extra["id"].tolist() == [*range(20, 28)]
  for row, token in enumerate(tokens_of_rows.tolist()):
    prompt_length = len(prompts[row // 2])
    samples = state.queue.tokens[row, prompt_length : prompt_length + 3]
    assert samples.tolist() == [token] * 3


@pytest.mark.deep
def test_drafts_leave_the_last_pages():
  """Two prompts of two pages in six pages; one ends after two tokens.

  Until then both need the last two pages, though there is a guess for which one
  of them could take both.
  """
  config = dataclasses.replace(_GUESSES, num_samples=1)
  prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
  sampling = rollout.Sampling(max_tokens=jnp.asarray([2, 6], jnp.int32))
  state = by_hand.begun(by_hand.sizes(7, 2), config, prompts, sampling=sampling)

  def draft(params, rows, tokens):
    del params, rows
    return tokens[:, :3], jnp.full((2,), 3, jnp.int32)

  model = by_hand.all_logits(by_hand.model)
  until = rollout.Until(steps=60)
  state = jax.jit(
    lambda state: rollout.generate(None, state, until, model=model, draft=draft)
  )(state)
  assert bool(rollout.is_done(state)), "not done after 60 steps"
  assert int(state.counters.drafted) > 0
  assert int(state.counters.preempted) == 0
