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
      pages_per_slot=8,
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


@functools.cache
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


def _greedy(prompt: int, new: int = _NEW, seed: int = 0) -> list[int]:
  """The tokens that follow a prompt, by whole sequences without memory."""
  tokens, drawn = np.zeros(5 + 2 * _NEW, np.int32), [*_PROMPTS[prompt]]
  for _ in range(new):
    tokens[: len(drawn)] = drawn
    args = tokens, np.int32(len(drawn)), _INPUTS[prompt], _LENGTHS[prompt]
    drawn.append(int(_logits()(_params(seed), *map(jnp.asarray, args))))
  return drawn


def _found(state: rollout.RolloutState, row: int) -> list[int]:
  length = int(state.sequences.length[row])
  return np.asarray(state.sequences.tokens)[row, :length].tolist()


def _check_end(state: rollout.RolloutState) -> None:
  rollout.check(state)
  pool = state.cache.pool
  assert int(pool.queue.num_free) == state.cache.config.num_pages - 1


_GREEDY = rollout.Sampling(temperature=0.0)


class TestTokens:
  def test_the_inputs_matter(self):
    """Otherwise the tests below would show nothing."""
    state = _begun(rollout.RolloutConfig(max_new_tokens=_NEW), sampling=_GREEDY)
    other = _begun(
      rollout.RolloutConfig(max_new_tokens=_NEW),
      sampling=_GREEDY,
      inputs=_INPUTS[::-1],
    )
    ends = [_run()(_params(), some) for some in (state, other)]
    rows = [row for row in range(4) if _LENGTHS[row]]
    assert all(_found(ends[0], row) != _found(ends[1], row) for row in rows)
    for row in range(4):
      assert _found(ends[0], row) == _greedy(row)
    _check_end(ends[0])

  @pytest.mark.parametrize("way", ["inputs", "encoded"])
  def test_samples_fork(self, way):
    """Three of each prompt have its encoder's pages in common."""
    config = rollout.RolloutConfig(
      num_samples=3, max_new_tokens=_NEW, prefill_chunk=4, admissions=12
    )
    inputs, encode = _INPUTS, _encode
    if way == "encoded":
      encode, inputs = (
        _ENCODED,
        models.encode(
          _params(),
          jnp.asarray(_INPUTS),
          jnp.asarray(_LENGTHS),
          config=_DECODER,
        ),
      )
    state = _begun(config, num_slots=12, sampling=_GREEDY, inputs=inputs)
    end = _run(encode)(_params(), state)
    for row in range(12):
      assert _found(end, row) == _greedy(row // 3)
    assert int(end.counters.forked) == 8
    _check_end(end)

  @pytest.mark.parametrize("samples", [1, 2])
  def test_few_pages(self, samples):
    """Sequences are preempted, and forks refused, and all end alike."""
    config = rollout.RolloutConfig(
      num_samples=samples, max_new_tokens=_NEW, prefill_chunk=4
    )
    state = _begun(config, num_pages=25, num_slots=3, sampling=_GREEDY)
    run, steps = _run(), 0
    while not bool(rollout.is_done(state)):
      state = run(_params(), state, rollout.Until(steps=1))
      rollout.check(state)
      steps += 1
    for row in range(4 * samples):
      assert _found(state, row) == _greedy(row // samples)
    assert int(state.counters.preempted) > 0
    _check_end(state)

  def test_drafts(self):
    config = rollout.RolloutConfig(
      max_new_tokens=_NEW, draft_tokens=2, draft_match=1
    )
    end = _run()(_params(), _begun(config, sampling=_GREEDY))
    for row in range(4):
      assert _found(end, row) == _greedy(row)
    assert int(end.counters.drafted) > 0
    _check_end(end)


class TestVerbs:
  def test_a_turn_and_a_new_prompt(self):
    """What is taken out makes room for a prompt with another input."""
    config = rollout.RolloutConfig(max_new_tokens=3, max_length=12)
    state = _run()(_params(), _begun(config, sampling=_GREEDY))
    state, out = rollout.extend(state, [0], [[9]], [1])
    assert bool(out.ok.all())
    state, _ = rollout.harvest(state, ids=[1, 2])
    tokens = jnp.asarray([[*_PROMPTS[3]], [*_PROMPTS[3]]])
    state, out = rollout.submit(
      state,
      tokens,
      [2, 2],
      sampling=rollout.Sampling(temperature=jnp.zeros((2,))),
      encoder_inputs=_INPUTS[[0, 3]],
      encoder_lengths=[17, 5],
    )
    assert out.code.tolist() == [jaxkv.Status.BAD_LENGTH, jaxkv.Status.OK]
    end = _run()(_params(), state)
    row = int(np.flatnonzero(np.asarray(end.sequences.ids) == 4)[0])
    assert _found(end, row) == _greedy(3, 3)
    rows = [*_greedy(0, 3), 9]
    _PROMPTS.append(rows)
    assert _found(end, 0)[:9] == rows
    _PROMPTS.pop()
    _check_end(end)

  def test_new_weights_encode_again(self):
    config = rollout.RolloutConfig(max_new_tokens=_NEW)
    state = _begun(config, num_slots=4, sampling=_GREEDY)
    state = _run()(_params(), state, rollout.Until(steps=4))
    state = rollout.update_weights(state, "drop")
    end = _run()(_params(5), state)
    for row in range(4):
      assert _found(end, row) == _greedy(row, seed=5)
    _check_end(end)


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
      begin(_cache(9, 1), **(inputs | {"encoder_lengths": [17]}))
    with pytest.raises(ValueError, match=r"`encoder_inputs` must have the sha"):
      begin(_cache(9, 1), **(inputs | {"encoder_inputs": _INPUTS}))
    with pytest.raises(ValueError, match="num_pages` must be at least 21"):
      begin(_cache(9, 1), **(inputs | {"encoder_lengths": [16]}))
    with pytest.raises(
      ValueError, match=r"`encoder_inputs` and .* must be giv"
    ):
      rollout.submit(state, [[1]], [1])
