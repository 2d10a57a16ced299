"""Rollouts whose evicted prefixes move to offload memory and back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from tests.engine import by_hand
from tests.models import exact_families as families
from tests.models import tiny_decoders as tiny

_SAMPLES, _NEW, _PROMPT, _PAGE = 2, 12, 20, 4
_COLUMNS = -(-(_PROMPT + _NEW) // _PAGE)
_ROUNDS = 3


def _sizes(config, *, num_pages, offload_pages=0):
  return tiny.cache_config(
    config,
    num_pages=num_pages,
    page_size=_PAGE,
    num_slots=4,
    pages_per_slot=_COLUMNS,
    offload_pages=offload_pages,
  )


@functools.cache
def _compiled(config):
  """Compiles once for all tests of a decoder and its sizes."""
  model = functools.partial(models.forward, config=config)
  return jax.jit(functools.partial(rollout.generate, model=model))


def _rounds(config, params, sizes, decode_steps=1):
  """Generates for the same prompts repeatedly; returns results and counters."""
  return _rounds_and_memory(config, params, sizes, decode_steps)[:2]


def _rounds_and_memory(config, params, sizes, decode_steps=1):
  """Returns the results of `_rounds`, and the memory after the last round."""
  rng = np.random.default_rng(1)
  prompts = jnp.asarray(
    rng.integers(0, families.VOCABULARY, (6, _PROMPT)), jnp.int32
  )
  lengths = jnp.asarray([20, 13, 7, 20, 18, 20], jnp.int32)
  options = rollout.RolloutConfig(
    num_samples=_SAMPLES,
    max_new_tokens=_NEW,
    prefill_chunk=16,
    decode_steps=decode_steps,
  )
  generate = _compiled(config)
  sampling = rollout.Sampling(temperature=0.8)
  cache = jaxkv.init(sizes)
  kv = models.init_kv(config, sizes)
  offload = jaxkv.kv.init_offload(kv, sizes) if sizes.offload_pages else None
  ends = []
  for round_index in range(_ROUNDS):
    state = rollout.init(
      cache,
      kv,
      rollout.Requests(prompts, lengths, sampling=sampling),
      jax.random.key(round_index),
      options,
      version=0,
      offload=offload,
    )
    state = generate(params, state)
    rollout.check(state)
    ends.append((rollout.generated(state), state.counters))
    cache = state.memory.cache
    kv = state.memory.kv
    offload = state.memory.offload
  memory = rollout.Memory(cache=cache, kv=kv, offload=offload)
  return ends, jaxkv.stats(cache), memory


@pytest.mark.parametrize(
  ("name", "decode_steps"),
  [
    pytest.param("llama", 1, marks=pytest.mark.slow),
    pytest.param("llama", 3, marks=pytest.mark.deep),
    pytest.param("gemma", 1, marks=pytest.mark.deep),
    pytest.param("delta_net", 3, marks=pytest.mark.deep),
    pytest.param("latents", 1, marks=pytest.mark.deep),
  ],
)
def test_offload_pages_change_no_bit(name, decode_steps):
  """A small pool with offload pages has the bits of a large pool."""
  config, params = families.decoder(name)
  num_pages = 1 + _COLUMNS * 5 // 2
  large = _sizes(config, num_pages=201)
  small = _sizes(config, num_pages=num_pages, offload_pages=150)
  expected, _ = _rounds(config, params, large)
  actual, stats = _rounds(config, params, small, decode_steps)
  for (expected_results, _), (results, _) in zip(expected, actual, strict=True):
    for field in ("tokens", "log_probs", "lengths", "finish"):
      np.testing.assert_array_equal(
        getattr(expected_results, field), getattr(results, field), err_msg=field
      )
  assert int(stats.saved_pages) > num_pages
  assert int(stats.restored_pages) > 10


@pytest.mark.deep
def test_moves_of_pin_are_not_repeated():
  """`init` does not repeat moves of `pin` that the caller has made."""
  config, params = families.decoder("llama")
  sizes = _sizes(config, num_pages=25, offload_pages=100)
  ends, _, memory = _rounds_and_memory(config, params, sizes)
  results = ends[-1][0]
  cache, out = jaxkv.pin(memory.cache, results.tokens[:1], results.lengths[:1])
  assert int(out.moves.count) > 0
  kv, offload = jaxkv.kv.move(memory.kv, memory.offload, out.moves)
  pages = out.pages[out.pages < sizes.no_page]
  restored_keys = np.asarray(kv.k[pages])
  requests = rollout.Requests(jnp.ones((1, 3), jnp.int32), jnp.asarray([3]))
  options = rollout.RolloutConfig(max_new_tokens=1)
  state = rollout.init(
    cache,
    kv,
    requests,
    jax.random.key(0),
    options,
    version=0,
    offload=offload,
  )
  model = functools.partial(models.forward, config=config)
  state = jax.jit(functools.partial(rollout.generate, model=model))(
    params, state
  )
  np.testing.assert_array_equal(state.memory.kv.k[pages], restored_keys)


@pytest.mark.deep
def test_score_restores_prompts():
  """The prompts of a second call return from the host, with the same bits."""
  config, params = families.decoder("llama")
  rng = np.random.default_rng(2)
  prompts = jnp.asarray(rng.integers(0, families.VOCABULARY, (5, _PROMPT)))
  answers = jnp.asarray(rng.integers(0, families.VOCABULARY, (5, 2, _NEW)))
  groups = (
    prompts.astype(jnp.int32),
    jnp.full((5,), _PROMPT, jnp.int32),
    answers.astype(jnp.int32),
    jnp.full((5, 2), _NEW, jnp.int32),
  )
  model = functools.partial(models.forward, config=config)
  score = jax.jit(functools.partial(rollout.score, model=model, chunk=16))
  runs = []
  for sizes in (
    _sizes(config, num_pages=200),
    _sizes(config, num_pages=25, offload_pages=100),
  ):
    kv = models.init_kv(config, sizes)
    offload = jaxkv.kv.init_offload(kv, sizes) if sizes.offload_pages else None
    memory = rollout.Memory(cache=jaxkv.init(sizes), kv=kv, offload=offload)
    memory, _ = score(params, memory, *groups)
    memory, scored = score(params, memory, *groups)
    assert scored.ok.all()
    runs.append(scored)
  np.testing.assert_array_equal(runs[0].log_probs, runs[1].log_probs)
  assert int(runs[0].computed_tokens) == int(runs[1].computed_tokens)
  assert int(jaxkv.stats(memory.cache).restored_pages) > 0


@pytest.mark.deep
def test_preempted_sequences_restore_their_full_pages():
  """Only partial pages are computed again, in 8 pages of two tokens."""
  config = rollout.RolloutConfig(max_new_tokens=6, num_samples=2)
  program = by_hand.program()
  ends = []
  for offload_pages in (0, 60):
    sizes = dataclasses.replace(
      by_hand.sizes(9, 4), offload_pages=offload_pages
    )
    state = program(by_hand.begun(sizes, config), 0.7)
    by_hand.check_sequences(state, config, 0.7)
    ends.append(state.counters)
  without_host, with_host = ends
  assert int(with_host.preempted) > 0
  # A partial page has one token.
  assert int(with_host.recomputed) <= int(with_host.preempted)
  assert int(without_host.recomputed) > int(without_host.preempted)


def test_another_offload_pool_is_refused():
  config, _ = families.decoder("llama")
  sizes = _sizes(config, num_pages=25, offload_pages=10)
  kv = models.init_kv(config, sizes)
  cache = jaxkv.init(sizes)
  requests = rollout.Requests(jnp.ones((1, 3), jnp.int32), jnp.asarray([3]))
  options = rollout.RolloutConfig(max_new_tokens=4)
  make = functools.partial(
    rollout.init, cache, kv, requests, jax.random.key(0), options
  )
  with pytest.raises(TypeError, match="`offload` must be an OffloadMemory"):
    make()
  other_config = _sizes(config, num_pages=25, offload_pages=11)
  with pytest.raises(ValueError, match="`offload` must have 10 pages"):
    make(offload=jaxkv.kv.init_offload(kv, other_config))
