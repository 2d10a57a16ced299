"""Rollouts of an encoder-decoder: its tokens' pages come and go with them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from tests.tools.pool_copies import pool_sized_rewrites

_VOCAB, _NEW = 13, 6
_HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
_PROMPTS = [[1, 2, 3, 4, 5], [1], [1, 2, 3], [1, 7]]
_LENGTHS = np.array([7, 3, 0, 5], np.int32)
_INPUTS = np.random.default_rng(3).integers(0, _VOCAB, (4, 7)).astype(np.int32)


def _decoder() -> models.Decoder:
  def layer(window: int | None, cross: bool) -> models.Layer:
    return models.Layer(
      attention=models.Attention(**_HEADS, window=window),
      cross=models.Attention(**_HEADS, rope=None) if cross else None,
      mlp=models.Mlp(inner_dim=24),
    )

  return models.Decoder(
    vocab_size=_VOCAB,
    embed_dim=16,
    layers=(layer(3, True), layer(None, True)),
    encoder=models.Encoder(
      vocab_size=_VOCAB, embed_dim=12, layers=(layer(None, False),)
    ),
  )


_DECODER = _decoder()
_MODEL = functools.partial(models.forward, config=_DECODER)
_ENCODED = functools.partial(models.write_encoded, config=_DECODER)


def _encode(params, tokens, lengths, kv, views):
  """Both, inside of the loop."""
  encoded = models.encode(params, tokens, lengths, config=_DECODER)
  return _ENCODED(params, encoded, lengths, kv, views)


@functools.cache
def _params(seed: int = 0) -> Any:
  params = models.init_params(jax.random.key(seed), _DECODER)
  # Logits far apart, which the encoder's tokens decide.
  return jax.tree.map(lambda leaf: leaf * 2, params)


def _cache(num_pages: int, num_slots: int) -> jaxkv.CacheState:
  return jaxkv.init(
    jaxkv.CacheConfig(
      num_pages=num_pages,
      page_size=2,
      num_slots=num_slots,
      pages_per_slot=10,
      groups=models.cache_groups(_DECODER),
      prefix_caching=False,
    )
  )


def _begun(config, num_pages=200, num_slots=2, inputs=_INPUTS, **options):
  cache = _cache(num_pages, num_slots)
  kv = models.init_kv(_DECODER, cache.config)
  kv = jax.tree.map(lambda leaf: leaf * jnp.nan, kv)
  rows = [[*prompt, *[0] * (5 - len(prompt))] for prompt in _PROMPTS]
  return rollout.init(
    cache,
    kv,
    rows,
    [len(prompt) for prompt in _PROMPTS],
    jax.random.key(1),
    config,
    encoder_inputs=jnp.asarray(inputs),
    encoder_lengths=_LENGTHS,
    **options,
  )


def _run(encode=_encode):
  return jax.jit(
    functools.partial(rollout.generate, model=_MODEL, encode=encode)
  )


@functools.cache
def _logits():
  def last(params, tokens, length, inputs, input_length):
    encoded = models.encode(
      params, inputs[None], input_length[None], config=_DECODER
    )
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    logits = models.forward_uncached(
      params,
      tokens[None],
      positions,
      encoded,
      input_length[None],
      config=_DECODER,
    )
    return jnp.argmax(logits[0, length - 1])

  return jax.jit(last)


def _greedy(
  prompt: int, *, seed: int = 0, prompt_tokens: list[int] | None = None
) -> list[int]:
  """A prompt and what follows, by whole sequences without memory."""
  tokens = np.zeros(6 + 2 * _NEW, np.int32)
  drawn = [*(prompt_tokens or _PROMPTS[prompt])]
  for _ in range(_NEW):
    tokens[: len(drawn)] = drawn
    args = tokens, np.int32(len(drawn)), _INPUTS[prompt], _LENGTHS[prompt]
    drawn.append(int(_logits()(_params(seed), *map(jnp.asarray, args))))
  return drawn


def _found(state: rollout.RolloutState, row: int) -> list[int]:
  length = int(state.sequences.length[row])
  return np.asarray(state.sequences.tokens)[row, :length].tolist()


_GREEDY = rollout.Sampling(temperature=0.0)


def _holds(state: rollout.RolloutState) -> None:
  laws = rollout.check_invariants(state)
  assert all(map(bool, laws.values())), laws


def _is_greedy(state: rollout.RolloutState, seed: int = 0) -> None:
  """Every sequence has what it would draw alone, and no page is left."""
  samples = state.config.num_samples
  for row in range(4 * samples):
    assert _found(state, row) == _greedy(row // samples, seed=seed)
  _holds(state)
  pool = state.cache.pool
  assert int(pool.queue.num_free) == state.cache.config.num_pages - 1


def check_few_pages():
  """Samples fork, sequences are preempted, forks refused: all end alike."""
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=_NEW, prefill_chunk=4
  )
  begun = functools.partial(
    _begun, config, num_pages=20, num_slots=3, sampling=_GREEDY
  )
  state, run = begun(), _run()
  for _ in range(60):
    state = run(_params(), state, rollout.Until(steps=jnp.int32(1)))
    _holds(state)
  _is_greedy(state)
  assert int(state.counters.steps) < 60  # It ended before.
  assert int(state.counters.preempted) > 0
  assert int(state.counters.forked) > 0
  # Without that the test would show nothing.
  other = begun(inputs=_INPUTS[::-1])
  other = run(_params(), other, rollout.Until(steps=jnp.int32(100)))
  for row in np.flatnonzero(np.repeat(_LENGTHS > 0, 2)):
    assert _found(other, row) != _found(state, row)


def check_samples():
  """All samples share pages, also those of a prompt of a single token.

  The encoder has run before.
  """
  config = rollout.RolloutConfig(
    num_samples=3, max_new_tokens=_NEW, prefill_chunk=4, admissions=12
  )
  encoded = models.encode(
    _params(), jnp.asarray(_INPUTS), jnp.asarray(_LENGTHS), config=_DECODER
  )
  state = _begun(
    config, num_pages=50_000, num_slots=12, sampling=_GREEDY, inputs=encoded
  )
  run = functools.partial(rollout.generate, model=_MODEL, encode=_ENCODED)
  run = jax.jit(run, donate_argnums=1)
  run = run.lower(_params(), state, rollout.Until(steps=jnp.int32(3))).compile()
  # Neither the pages nor what the encoder has made are copied in the loop.
  assert pool_sized_rewrites(run, state.kv.k.shape) == []
  state = run(_params(), state, rollout.Until(steps=jnp.int32(3)))
  assert int(state.counters.forked) == 8
  groups = state.cache.config.groups
  for group, kind in enumerate(groups):
    if kind.holds_encoder:
      assert np.max(state.cache.pool.ref_count) == 3
      rows = np.asarray(state.cache.page_table)[:3, group, :4]
      np.testing.assert_array_equal(rows, rows[:1].repeat(3, axis=0))
  _is_greedy(run(_params(), state, rollout.Until(steps=jnp.int32(100))))


def check_refused():
  """A fork without a page leaves its slot, and its encoder's pages.

  Two forks of a single token need two pages each, and three are free.
  """
  config = rollout.RolloutConfig(
    num_samples=3, max_new_tokens=_NEW, prefill_chunk=4
  )
  begun = _begun(config, num_pages=20, num_slots=4, sampling=_GREEDY)
  some = [row not in (3, 4, 5) for row in range(12)]  # But those of [1].
  sequences = begun.sequences
  status = jnp.where(
    jnp.asarray(some), jnp.int32(rollout.EMPTY), sequences.status
  )
  state = dataclasses.replace(
    begun, sequences=dataclasses.replace(sequences, status=status)
  )
  run = _run()
  state = run(_params(), state, rollout.Until(steps=jnp.int32(1)))
  assert int(jnp.sum(state.leader < 4)) == 2
  free = int(state.cache.pool.queue.num_free)
  # Somebody else takes the others, in the slot that is left.
  taken = jnp.asarray([0, 0, 0, 2 * ((free - 3) // 2)], jnp.int32)
  cache, out = jaxkv.allocate(state.cache, taken)
  assert bool(out.ok.all())
  assert int(cache.pool.queue.num_free) == 3
  state = dataclasses.replace(state, cache=cache)
  state = run(_params(), state, rollout.Until(steps=jnp.int32(1)))
  assert int(state.counters.forked) == 1
  cache, _ = jaxkv.free(state.cache, mask=jnp.arange(4) == 3)
  state = dataclasses.replace(state, cache=cache)
  _holds(state)
  state = run(_params(), state, rollout.Until(steps=jnp.int32(100)))
  for row in (3, 4, 5):
    assert _found(state, row) == _greedy(1)
  _holds(state)


def check_drafts():
  """The second sample of a prompt guesses what the first one drew."""
  config = rollout.RolloutConfig(
    num_samples=2,
    max_new_tokens=_NEW,
    prefill_chunk=4,
    draft_tokens=2,
    draft_match=1,
    draft_columns=2,
  )
  end = _run()(_params(), _begun(config, num_slots=1, sampling=_GREEDY))
  _is_greedy(end)
  assert int(end.counters.accepted) > 0


def check_verbs():
  """What is taken out makes room for a prompt with another input."""
  config = rollout.RolloutConfig(
    max_new_tokens=_NEW, max_length=18, prefill_chunk=4
  )
  state, run = _begun(config, num_slots=4, sampling=_GREEDY), _run()
  state = run(_params(), state, rollout.Until(steps=jnp.int32(4)))
  state = rollout.update_weights(state, "drop")
  state = run(_params(5), state, rollout.Until(steps=jnp.int32(100)))
  _is_greedy(state, seed=5)
  before = _found(state, 0)
  state, out = rollout.extend(state, [0], [[9]], [1])
  assert bool(out.ok.all())
  state, _ = rollout.harvest(state, ids=[1, 2])
  state, out = rollout.submit(
    state,
    jnp.asarray([_PROMPTS[3], _PROMPTS[3]]),
    [2, 2],
    sampling=rollout.Sampling(temperature=jnp.zeros((2,))),
    encoder_inputs=_INPUTS[[0, 3]],
    encoder_lengths=[37, 5],
  )
  assert out.code.tolist() == [jaxkv.Status.BAD_LENGTH, jaxkv.Status.OK]
  end = run(_params(5), state, rollout.Until(steps=jnp.int32(100)))
  row = int(np.flatnonzero(np.asarray(end.sequences.ids) == 4)[0])
  assert _found(end, row) == _greedy(3, seed=5)
  turn = [*before, 9]
  assert _found(end, 0) == _greedy(0, seed=5, prompt_tokens=turn)
  _holds(end)


_CHECKS = {
  "few pages": check_few_pages,
  "samples share pages": check_samples,
  "a fork without a page": check_refused,
  "drafts": check_drafts,
  "turns, prompts and weights": check_verbs,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _CHECKS)
def test_rollouts(name):
  _CHECKS[name]()


class TestErrors:
  def test_what_is_missing_or_in_vain(self):
    config = rollout.RolloutConfig(max_new_tokens=2)
    state = _begun(config)
    with pytest.raises(ValueError, match="`encode` must be given"):
      rollout.generate(_params(), state, model=_MODEL)
    plain = dataclasses.replace(state, encoder=None)
    with pytest.raises(ValueError, match="`encode` must be None"):
      rollout.generate(_params(), plain, model=_MODEL, encode=_encode)

    def begin(cache, **options):
      kv = models.init_kv(_DECODER, _cache(9, 1).config)
      rollout.init(cache, kv, [[1]], [1], jax.random.key(0), config, **options)

    inputs = {"encoder_inputs": _INPUTS[:1], "encoder_lengths": [3]}
    with pytest.raises(
      ValueError, match=r"`encoder_inputs` and .* must be giv"
    ):
      begin(_cache(9, 1))
    sizes = jaxkv.CacheConfig(
      num_pages=9, page_size=2, num_slots=1, pages_per_slot=8
    )
    with pytest.raises(
      ValueError, match=r"`encoder_inputs` and .* must be Non"
    ):
      begin(jaxkv.init(sizes), **inputs)
    with pytest.raises(ValueError, match=r"`encoder_lengths\[0\]` must be 0"):
      begin(_cache(9, 1), **(inputs | {"encoder_lengths": [21]}))
    with pytest.raises(ValueError, match=r"`encoder_inputs` must have the sha"):
      begin(_cache(9, 1), **(inputs | {"encoder_inputs": _INPUTS}))
    with pytest.raises(
      ValueError, match=r"at least 22 for the longest seq.* 16"
    ):
      begin(_cache(9, 1), **(inputs | {"encoder_lengths": [16]}))
    with pytest.raises(
      ValueError, match=r"`encoder_inputs` and .* must be giv"
    ):
      rollout.submit(state, [[1]], [1])
