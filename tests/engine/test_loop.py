"""The loop generates the same tokens as a dense cache in every situation."""

import dataclasses
import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import models
from jaxkv import rollout
from jaxkv_kernels._src.attention import shared_prefix
from tests.engine import by_hand
from tests.engine import uncached
from tests.models import small_model as texts
from tests.tools.tiers import slow_except

_PROMPT_WIDTH = 72
_END = rollout.Until(steps=jnp.int32(by_hand.NO_LIMIT))
_NEW = 24
# name: slots, pages, page size, samples, temperature
_RUNS = {
  "greedy": (4, 200, 8, 3, 0.0),
  "sampled": (4, 200, 8, 3, 1.0),
  "one slot": (1, 200, 8, 3, 1.0),
  "pages of one token": (16, 800, 1, 3, 1.0),
  "pages of 32 tokens": (3, 40, 32, 3, 1.0),
  "a pool that preempts": (6, 17, 8, 3, 1.0),
}


def _requests(model: models.Pretrained) -> rollout.Requests:
  """Returns six prompts: five with a common prefix, and one of one token."""
  encoded = [
    model.tokenizer.encode(texts.TEXT[:36] + texts.TEXT[start : start + count])
    for start, count in ((100, 3), (200, 9), (300, 30), (400, 14), (500, 4))
  ]
  encoded.append(model.tokenizer.encode("7"))
  requests = by_hand.requests_of(encoded, _PROMPT_WIDTH)
  return jax.tree.map(jnp.asarray, requests)


def _config(model, samples: int) -> rollout.RolloutConfig:
  return rollout.RolloutConfig(
    num_samples=samples,
    max_new_tokens=_NEW,
    stop_token=model.stop_tokens[0],
    prefill_chunk=16,
    admissions=4,
  )


def _initial(
  model, slots, pages, page_size, samples, temperature=1.0
) -> rollout.RolloutState:
  cache = jaxkv.init(
    jaxkv.CacheConfig(
      num_pages=pages,
      page_size=page_size,
      num_slots=slots,
      pages_per_slot=-(-(_PROMPT_WIDTH + _NEW) // page_size),
    )
  )
  kv = models.init_kv(model.config, cache.config)
  # Whatever an unused page holds must not reach a logit.
  kv = dataclasses.replace(kv, k=kv.k * jnp.nan, v=kv.v * jnp.nan)
  state = rollout.init(
    cache, kv, _requests(model), jax.random.key(3), _config(model, samples)
  )
  return by_hand.begun_at(state, temperature)


def _program(model) -> Any:
  forward = functools.partial(models.forward, config=model.config)
  return jax.jit(functools.partial(rollout.generate, model=forward))


@functools.cache
def _uncached_run(samples: int, temperature: float, get_model) -> Any:
  model = get_model()
  state = _initial(model, 4, 200, 8, samples)
  run = functools.partial(
    uncached.generate, decoder=model.config, config=state.config
  )
  return jax.jit(run)(model.params, state.queue, jnp.float32(temperature))


@pytest.fixture(scope="module")
def uncached_run(small_model):
  def get_model():
    return small_model

  return lambda samples, temperature: _uncached_run(
    samples, temperature, get_model
  )


@pytest.fixture(scope="module")
def program(small_model):
  """Returns a compiled rollout, shared by tests."""
  return _program(small_model)


_DEEP = ("greedy", "one slot", "pages of 32 tokens")


class TestTokens:
  @slow_except("name", _RUNS, "a pool that preempts")
  @pytest.mark.parametrize(
    "name",
    [
      pytest.param(name, marks=pytest.mark.deep) if name in _DEEP else name
      for name in _RUNS
    ],
  )
  def test_equal_forward_passes(self, name, small_model, uncached_run):
    _, pages, _, samples, temperature = _RUNS[name]
    state = _initial(small_model, *_RUNS[name])
    state = _program(small_model)(small_model.params, state, _END)
    expected = uncached_run(samples, temperature)
    np.testing.assert_array_equal(state.queue.tokens, expected.tokens)
    np.testing.assert_array_equal(state.queue.length, expected.length)
    # float32, summed in another order.
    np.testing.assert_allclose(
      state.queue.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5
    )
    assert bool(rollout.is_done(state))
    jaxkv.check(state.memory.cache)
    assert int(state.memory.cache.pool.queue.num_free[0]) == pages - 1
    self._check_counters(name, state)

  @pytest.mark.slow
  def test_pages_read_once_give_the_same_tokens(
    self, monkeypatch, small_model, uncached_run
  ):
    """Sharing is forced, because it would not pay for a small model."""
    savings = dict.fromkeys(shared_prefix._LEAST_SAVING, -(2**20))
    monkeypatch.setattr(shared_prefix, "_LEAST_SAVING", savings)
    *_, samples, temperature = _RUNS["sampled"]
    state = _initial(small_model, *_RUNS["sampled"])
    with monkeypatch.context() as patch:
      calls = []
      decode = kernels.cascade_decode
      patch.setattr(
        kernels,
        "cascade_decode",
        lambda *a, **k: calls.append(1) or decode(*a, **k),
      )
      # Another function than in other tests, so that it is traced again.
      program = jax.jit(
        functools.partial(
          rollout.generate, model=lambda *args: small_model.forward(*args)
        )
      )
      state = program(small_model.params, state, _END)
    assert calls
    expected = uncached_run(samples, temperature)
    np.testing.assert_array_equal(state.queue.tokens, expected.tokens)

  def _check_counters(self, name: str, state: rollout.RolloutState) -> None:
    counters = state.counters
    stats = jaxkv.stats(state.memory.cache)
    if name == "a pool that preempts":
      assert int(counters.preempted) > 0
      assert int(stats.evicted_pages) > 0
    if name == "sampled":
      assert int(counters.forked) > 0
      prompt_tokens = int(jnp.sum(state.queue.prompt_length))
      assert int(counters.prefilled) < prompt_tokens // 2


class TestSpans:
  @pytest.mark.slow
  def test_interrupted_calls_give_the_same_state(self, small_model, program):
    """States are bit-identical, also through numpy arrays."""
    run = functools.partial(program, small_model.params)
    state = _initial(small_model, 3, 40, 8, 1)
    whole = run(state, _END)
    while not bool(rollout.is_done(state)):
      until = rollout.Until(steps=jnp.int32(7))
      state = _through_offload_memory(run(state, until))
    chex.assert_trees_all_equal(_numbers(state), _numbers(whole))

  @pytest.mark.slow
  def test_arguments_on_the_device_cause_no_transfer(
    self, small_model, program
  ):
    state = _initial(small_model, 3, 40, 8, 1)
    program(small_model.params, state, _END)
    with jax.transfer_guard("disallow"):
      state = program(small_model.params, state, _END)
    assert bool(rollout.is_done(state))

  @pytest.mark.slow
  def test_program_has_no_host_callback(self, small_model, program):
    state = _initial(small_model, 3, 40, 8, 1)
    compiled = program.lower(small_model.params, state, _END).compile()
    text = compiled.as_text()
    assert re.search(r"\b(infeed|outfeed|send|recv)\(", text) is None
    assert "callback" not in text


class TestArguments:
  def _begun(self, model, state, **changes):
    """Begins another rollout in the memory of a state, with some changes."""
    arguments = {**vars(state.memory), "requests": _requests(model), **changes}
    config = _config(model, 1)
    return rollout.init(**arguments, key=jax.random.key(0), config=config)

  def test_memory_of_another_page_size_is_refused(self, small_model):
    state = _initial(small_model, 2, 40, 8, 1)
    other_state = _initial(small_model, 2, 40, 16, 1)
    with pytest.raises(
      ValueError, match=r"`kv` must have .* got 40 pages of 16"
    ):
      self._begun(small_model, state, kv=other_state.memory.kv)

  def test_cache_in_use_is_refused(self, small_model):
    state = _initial(small_model, 2, 40, 8, 1)
    cache, _ = jaxkv.allocate(state.memory.cache, [1, 0])
    with pytest.raises(ValueError, match="must have no slot in use"):
      self._begun(small_model, state, cache=cache)

  def test_sequences_beyond_the_pool_or_slot_are_refused(self, small_model):
    with pytest.raises(ValueError, match=r"num_pages` must be at least 13 for"):
      _initial(small_model, 2, 8, 8, 1)
    state = _initial(small_model, 2, 40, 8, 1)
    requests = rollout.Requests([[0] * 100], [1])
    with pytest.raises(ValueError, match=r"must fit a slot of 96 tokens"):
      self._begun(small_model, state, requests=requests)


def test_init_inside_jit(small_model):
  """Prompts that a program closes over are checked while it is traced."""
  state = _initial(small_model, 2, 40, 8, 1)
  requests = _requests(small_model)
  key = jax.random.key(0)
  config = _config(small_model, 1)

  def begin(cache, kv, requests=requests):
    return rollout.init(cache, kv, requests, key, config)

  expected = begin(state.memory.cache, state.memory.kv)
  shapes = jax.eval_shape(begin, state.memory.cache, state.memory.kv)
  chex.assert_trees_all_equal_shapes_and_dtypes(shapes, expected)
  compiled_state = jax.jit(begin)(state.memory.cache, state.memory.kv)
  chex.assert_trees_all_equal(_numbers(compiled_state), _numbers(expected))
  empty = dataclasses.replace(requests, lengths=requests.lengths * 0)
  message = r"`requests\.lengths\[0\]` must be 1 .. 72"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(
      lambda cache: begin(cache, state.memory.kv, empty), state.memory.cache
    )


def _numbers(state: rollout.RolloutState) -> rollout.RolloutState:
  """Replaces keys by their bits, and clears `is_new`."""
  state = dataclasses.replace(state, key=jax.random.key_data(state.key))
  state = by_hand.with_queue(state, is_new=jnp.zeros_like(state.queue.is_new))
  return by_hand.with_queue(state, keys=jax.random.key_data(state.queue.keys))


def _through_offload_memory(
  state: rollout.RolloutState,
) -> rollout.RolloutState:
  """Converts the state to numpy arrays, and back."""
  arrays = jax.tree.map(np.array, _numbers(state))
  state = jax.tree.map(jnp.asarray, arrays)
  keys = jax.random.wrap_key_data(state.queue.keys)
  state = dataclasses.replace(state, key=jax.random.wrap_key_data(state.key))
  return by_hand.with_queue(state, keys=keys)
