"""Sequences with different settings in one program."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import guides
from jaxkv import rollout
from tests.guides import small_vocabulary
from tests.tools.tiers import slow_except

pytestmark = pytest.mark.slow

_COUNT = 64


def _model(params, batch, kv):
  """Returns logits of the last token, with a small term of its position."""
  del kv
  token = batch.tokens[0].at[batch.columns].get(mode="clip")
  position = batch.positions[0].at[batch.columns].get(mode="clip")
  position = position.astype(jnp.float32)
  ramp = jnp.arange(params.shape[1], dtype=jnp.float32)[None]
  return params[token] + jnp.cos(ramp * position[:, None]), None


@functools.cache
def _program(process=None):
  run = functools.partial(rollout.generate, model=_model, process=process)
  return jax.jit(run)


def _begun(
  prompts: Any,
  config: rollout.RolloutConfig,
  sampling: rollout.Sampling,
  slots: int = 8,
  **settings: Any,
) -> rollout.RolloutState:
  prompts = np.asarray(prompts, np.int32)
  longest = config.max_length or prompts.shape[1] + config.max_new_tokens
  columns = -(-longest // 8)
  sizes = jaxkv.CacheConfig(
    num_pages=1 + 2 * slots * columns,
    page_size=8,
    num_slots=slots,
    pages_per_slot=columns,
  )
  lengths = np.full(len(prompts), prompts.shape[1])
  return rollout.init(
    jaxkv.init(sizes, jax.random.key(0)),
    jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
    rollout.Requests(prompts, lengths, sampling=sampling, **settings),
    jax.random.key(1),
    config,
  )


def _table(vocab_size: int) -> jax.Array:
  return 2 * jax.random.normal(jax.random.key(2), (vocab_size, vocab_size))


def _mixed(vocab_size: int) -> rollout.Sampling:
  """Returns different settings for 64 sequences; each has some features off."""
  rng = np.random.default_rng(0)

  def either(low: float, high: float, off: float) -> np.ndarray:
    values = rng.uniform(low, high, _COUNT)
    return np.where(rng.random(_COUNT) < 0.4, off, values).astype(np.float32)

  words = [
    [rng.integers(0, vocab_size, rng.integers(1, 4)).tolist() for _ in range(3)]
    for _ in range(_COUNT)
  ]
  biases = [
    {
      int(token): float(rng.normal() * 3)
      for token in rng.integers(0, vocab_size, 4)
    }
    for _ in range(_COUNT)
  ]
  letters = small_vocabulary.text().decode()
  strings = [
    [letters[offset : offset + 2] for offset in rng.integers(0, 5000, 2)]
    for _ in range(_COUNT)
  ]
  tokens = guides.token_bytes(small_vocabulary.tokens()[:vocab_size])
  return rollout.Sampling(
    temperature=either(0.3, 2.0, 0.0),
    top_k=np.where(rng.random(_COUNT) < 0.4, 0, rng.integers(1, 40, _COUNT)),
    top_p=either(0.3, 1.0, 1.0),
    min_p=either(0.0, 0.3, 0.0),
    presence_penalty=either(-1.0, 1.0, 0.0),
    frequency_penalty=either(-1.0, 1.0, 0.0),
    repetition_penalty=either(0.7, 1.5, 1.0),
    min_tokens=rng.integers(0, 6, _COUNT),
    max_tokens=rng.integers(6, 40, _COUNT),
    stop_tokens=rng.integers(0, vocab_size, (_COUNT, 3)),
    stop_strings=rollout.stop_strings(strings, tokens),
    logit_bias=biases,
    bad_words=words,
    seed=np.where(rng.random(_COUNT) < 0.5, -1, rng.integers(0, 99, _COUNT)),
  )


def _outcome(state: rollout.RolloutState, row: int) -> list[Any]:
  queue = state.queue
  length = int(queue.length[row])
  return [
    queue.tokens[row, :length].tolist(),
    queue.log_probs[row, :length].tolist(),
    int(queue.finish[row]),
    int(queue.stop[row]),
  ]


@pytest.mark.parametrize(
  ("drafts", "decode_steps"),
  [
    (3, 1),
    pytest.param(0, 1, marks=pytest.mark.deep),
    pytest.param(0, 3, marks=pytest.mark.deep),
    pytest.param(0, 8, marks=pytest.mark.deep),
    pytest.param(0, 16, marks=pytest.mark.deep),
  ],
)
def test_each_sequence_equals_a_separate_run(drafts, decode_steps):
  """Tokens and log-probs are bit-identical to those of a separate run."""
  vocab_size = 300
  config = rollout.RolloutConfig(
    max_new_tokens=40,
    stop_token=7,
    prefill_chunk=16,
    draft_tokens=drafts,
    draft_match=1,
    draft_columns=8,
    decode_steps=decode_steps,
  )
  prompts = np.random.default_rng(1).integers(0, vocab_size, (_COUNT, 12))
  state = _begun(prompts, config, _mixed(vocab_size))
  program = _program()
  params = _table(vocab_size)
  together = program(params, state)
  assert bool(rollout.is_done(together))
  reasons = set(together.queue.finish.tolist())
  assert reasons == {
    rollout.Finish.STOP_TOKEN,
    rollout.Finish.STOP_STRING,
    rollout.Finish.LENGTH,
  }
  if decode_steps > 1:
    config = dataclasses.replace(config, decode_steps=1)
    single = program(params, dataclasses.replace(state, config=config))
    for row in range(_COUNT):
      assert _outcome(single, row) == _outcome(together, row), row
  for row in range(0, _COUNT, 1 if drafts + decode_steps == 1 else 4):
    status = jnp.full((_COUNT,), rollout.SequenceStatus.DONE, jnp.int32)
    status = status.at[row].set(rollout.SequenceStatus.WAITING)
    queue = dataclasses.replace(state.queue, status=status)
    solo = program(params, dataclasses.replace(state, queue=queue))
    assert _outcome(solo, row) == _outcome(together, row), row


@pytest.mark.fast
@slow_except("decode_steps", [1, 3, 8, 16], 3)
@pytest.mark.parametrize(
  "decode_steps",
  [1, 3, *(pytest.param(k, marks=pytest.mark.deep) for k in (8, 16))],
)
def test_records_are_of_the_unfiltered_distribution(decode_steps):
  """Records ignore temperature, filters, penalties and biases."""
  vocab_size = 50
  config = rollout.RolloutConfig(
    num_samples=2,
    max_new_tokens=6,
    prefill_chunk=4,
    raw_log_probs=True,
    entropy=True,
    top_log_probs=3,
    decode_steps=decode_steps,
  )
  prompts = np.random.default_rng(1).integers(0, vocab_size, (4, 11))
  prompts[1:, :9] = prompts[0, :9]
  sampling = rollout.Sampling(
    temperature=0.7, top_k=9, frequency_penalty=0.8, logit_bias={3: 2.0}
  )
  state = _begun(prompts, config, sampling, slots=3, log_probs_from=[1] * 4)
  params = _table(vocab_size)
  state = _program()(params, state)
  assert int(state.counters.forked) > 0
  assert int(state.memory.cache.stats.hit_tokens) == 0
  out = jax.device_get(rollout.generated(state))
  column = np.arange(out.tokens.shape[1])
  ramp = np.arange(vocab_size, dtype=np.float32)
  logits = np.asarray(params)[out.tokens]
  logits = logits + np.cos(column[:, None] * ramp)[None]
  scores = np.asarray(jax.nn.log_softmax(logits[:, :-1], axis=-1))
  tokens = out.tokens[:, 1:, None]
  log_probs = np.take_along_axis(scores, tokens, axis=2)[..., 0]
  inside = column[1:] < out.lengths[:, None]
  np.testing.assert_allclose(
    out.records.raw_log_probs[:, 1:], np.where(inside, log_probs, 0), atol=2e-5
  )
  is_given = inside & ~out.mask[:, 1:]
  np.testing.assert_array_equal(
    out.log_probs[:, 1:][is_given], out.records.raw_log_probs[:, 1:][is_given]
  )
  entropy = -(np.exp(scores) * scores).sum(axis=-1)
  np.testing.assert_allclose(
    out.records.entropy[:, 1:], np.where(inside, entropy, 0), atol=2e-5
  )
  best = np.argsort(-scores, axis=-1, kind="stable")[..., :3]
  np.testing.assert_array_equal(
    out.records.top_tokens[:, 1:][inside], best[inside]
  )
  np.testing.assert_allclose(
    out.records.top_log_probs[:, 1:][inside],
    np.take_along_axis(scores, best, axis=-1)[inside],
    atol=2e-5,
  )
  assert np.all(out.log_probs[out.mask] != out.records.raw_log_probs[out.mask])
