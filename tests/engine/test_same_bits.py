"""Exact numerics: a rollout's log-probs are those of a score and a trainer."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rl
from jaxkv import rollout
from jaxkv import sharding
from jaxkv._src.exact import log_probs
from tests import as_users
from tests.engine.by_forward import arguments_of
from tests.models import exact_families as families
from tests.models import tiny_decoders as tiny

_SAMPLES, _NEW, _PROMPT = 2, 12, 20
_TEMPERATURE = 0.8
_deep, _slow = pytest.mark.deep, pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class _Setting:
  """Settings of a rollout that must change no bit."""

  slots: int = 8
  chunk: int = 16
  page_size: int = 16
  pages: int = 0
  admissions: int = 16
  drafts: int = 0
  decode_steps: int = 1
  reverse: bool = False
  cached: bool = False


def _prompts(reverse=False):
  """Returns prompts, some of them with a common prefix, and their lengths."""
  rng = np.random.default_rng(1)
  prompts = rng.integers(0, families.VOCABULARY, (5, _PROMPT))
  prompts[3:, :17] = prompts[:2, :17]
  lengths = np.asarray([20, 13, 7, 20, 18])
  order = slice(None, None, -1) if reverse else slice(None)
  return (
    jnp.asarray(prompts[order], jnp.int32),
    jnp.asarray(lengths[order], jnp.int32),
  )


def _state(config, setting, params) -> Any:
  """Returns a rollout before its first step, with cached prompts if asked."""
  columns = -(-(_PROMPT + _NEW) // setting.page_size)
  sizes = tiny.cache_config(
    config,
    num_pages=setting.pages or 1 + 10 * columns * 4,
    page_size=setting.page_size,
    num_slots=setting.slots,
    pages_per_slot=columns,
  )
  options = rollout.RolloutConfig(
    num_samples=_SAMPLES,
    max_new_tokens=_NEW,
    prefill_chunk=setting.chunk,
    admissions=setting.admissions,
    draft_tokens=setting.drafts,
    decode_steps=setting.decode_steps,
    draft_match=1,
    raw_log_probs=True,
  )
  cache = jaxkv.init(sizes)
  kv = models.init_kv(config, sizes)
  prompts, lengths = _prompts(setting.reverse)
  seeds = np.repeat(np.arange(5), _SAMPLES) * 10 + np.arange(10) % _SAMPLES
  if setting.reverse:
    seeds = np.repeat(np.arange(5)[::-1], _SAMPLES) * 10
    seeds = seeds + np.arange(10) % _SAMPLES
  sampling = rollout.Sampling(temperature=_TEMPERATURE, seed=seeds)
  requests = rollout.Requests(prompts, lengths, sampling=sampling)
  make = functools.partial(
    rollout.init, requests=requests, key=jax.random.key(0), config=options
  )
  state = make(cache, kv)
  if setting.cached:
    state = _generate(config)(params, state)
    state = make(state.memory.cache, state.memory.kv, version=0)
  return state


@functools.cache
def _generate(config) -> Any:
  forward = functools.partial(models.forward, config=config)
  return as_users.jit(functools.partial(rollout.generate, model=forward))


def _samples(config, params, setting) -> rollout.Generated:
  state = _generate(config)(params, _state(config, setting, params))
  rollout.check(state)
  results = rollout.generated(state)
  if not setting.reverse:
    return results
  # Back in the order of the others.
  rows = np.arange(10).reshape(5, _SAMPLES)[::-1].ravel()
  return jax.tree.map(lambda x: x[rows], results)


def _groups(results) -> rollout.Grouped:
  return rollout.grouped(
    results,
    num_samples=_SAMPLES,
    prompt_columns=_PROMPT,
    completion_columns=_NEW,
  )


def _by_score(config, params, groups, page_size=4) -> np.ndarray:
  sizes = tiny.cache_config(
    config,
    num_pages=200,
    page_size=page_size,
    num_slots=3,
    pages_per_slot=-(-(_PROMPT + _NEW) // page_size),
  )
  state = rollout.Memory(
    cache=jaxkv.init(sizes), kv=models.init_kv(config, sizes)
  )
  model = functools.partial(models.forward, config=config)
  score = as_users.jit(
    functools.partial(
      rollout.score, model=model, temperature=_TEMPERATURE, chunk=24
    )
  )
  _, scored = score(params, state, *arguments_of(groups))
  assert scored.ok.all()
  return np.asarray(scored.log_probs)


def _by_trainer(config, params, groups, temperature=_TEMPERATURE, remat=False):
  """Returns log-probs of a trainer's forward pass, alone and in a gradient."""

  def log_probs(params):
    return models.grouped_log_probs(
      params,
      *arguments_of(groups),
      config=config,
      temperature=temperature,
      remat=remat,
    )

  def loss(params):
    new = log_probs(params)
    good = rl.group_normalized(
      jnp.arange(10, dtype=jnp.float32), num_samples=_SAMPLES
    ).reshape(new.shape[:2])
    value, _ = rl.grpo_loss(new, groups.log_probs, good, groups.mask)
    return value, new

  gradient = as_users.jit(jax.value_and_grad(loss, has_aux=True))
  (_, inside), _ = gradient(params)
  return np.asarray(as_users.jit(log_probs)(params)), np.asarray(inside)


@functools.lru_cache(maxsize=1)
def _grouped_samples(name, dtype):
  """Returns a decoder, its parameters and the groups of a rollout."""
  config, params = families.decoder(name, dtype)
  groups = _groups(_samples(config, params, _Setting(slots=3)))
  mask = np.asarray(groups.mask)
  assert mask.sum() == 5 * _SAMPLES * _NEW
  assert len(np.unique(groups.log_probs[mask])) > mask.sum() // 2
  return config, params, groups


def _compare(left, right):
  for name in ("tokens", "log_probs", "lengths"):
    np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
  np.testing.assert_array_equal(
    left.records.raw_log_probs, right.records.raw_log_probs
  )


def _families(marks):
  """Parametrizes by name and dtype, deep unless `marks` has another mark."""
  pairs = itertools.product(families.NAMES, (jnp.float32, jnp.bfloat16))
  return pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*pair, marks=marks.get(pair, _deep)) for pair in pairs],
  )


@_families({("llama", jnp.float32): ()})
def test_rollout_and_trainer_have_the_same_bits(name, dtype):
  config, params, groups = _grouped_samples(name, dtype)
  mask = np.asarray(groups.mask)
  for trained in _by_trainer(config, params, groups):
    np.testing.assert_array_equal(groups.log_probs[mask], trained[mask])


@_families({("llama", jnp.float32): _slow})
def test_rollout_and_score_have_the_same_bits(name, dtype):
  config, params, groups = _grouped_samples(name, dtype)
  mask = np.asarray(groups.mask)
  scored = _by_score(config, params, groups)
  np.testing.assert_array_equal(groups.log_probs[mask], scored[mask])


@_families({})
def test_pages_and_chunks_change_no_bit(name, dtype):
  config, params = families.decoder(name, dtype)
  expected = _samples(config, params, _Setting(slots=3))
  _compare(expected, _samples(config, params, _Setting(page_size=4, chunk=5)))


@_families({})
def test_several_calls_of_a_step_change_no_bit(name, dtype):
  """Bits are equal, also where a state at a page's end ends the calls."""
  config, params = families.decoder(name, dtype)
  expected = _samples(config, params, _Setting(slots=3, page_size=4))
  setting = _Setting(slots=3, page_size=4, decode_steps=5)
  _compare(expected, _samples(config, params, setting))


@_deep
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "experts"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_settings_of_a_run_change_no_bit(name, dtype):
  config, params = families.decoder(name, dtype)
  expected = _samples(config, params, _Setting())
  for setting in (
    _Setting(slots=3),
    _Setting(slots=64, chunk=64),
    _Setting(page_size=4, chunk=5),
    _Setting(drafts=3),
    _Setting(decode_steps=3),
    _Setting(decode_steps=8),
    _Setting(slots=3, decode_steps=16),
    _Setting(reverse=True, admissions=1),
    _Setting(cached=True),
    _Setting(page_size=4, pages=60),
  ):
    _compare(expected, _samples(config, params, setting))


@_deep
def test_single_and_grouped_scores_are_equal():
  config, params = families.decoder("llama", jnp.bfloat16)
  groups = _groups(_samples(config, params, _Setting()))
  together = _by_score(config, params, groups)
  # Each sample with a prompt of its own, and pages of another size.
  single_samples = dataclasses.replace(
    groups,
    prompts=jnp.repeat(groups.prompts, _SAMPLES, axis=0),
    prompt_lengths=jnp.repeat(groups.prompt_lengths, _SAMPLES),
    completions=groups.completions.reshape(-1, 1, _NEW),
    completion_lengths=groups.completion_lengths.reshape(-1, 1),
  )
  each = _by_score(config, params, single_samples, page_size=16)
  np.testing.assert_array_equal(each.reshape(together.shape), together)


@_deep
@pytest.mark.parametrize("name", ["llama", "gemma", "latents", "delta_net"])
def test_a_tree_of_turns_has_the_bits_of_whole_sequences(name):
  config, params = families.decoder(name)
  rng = np.random.default_rng(2)

  def drawn(*shape):
    return jnp.asarray(rng.integers(0, families.VOCABULARY, shape), jnp.int32)

  prompts, turns, replies = drawn(2, 9), drawn(2, 2, 7), drawn(2, 2, 3, 5)
  lengths = [drawn(*x.shape[:-1]) % x.shape[-1] + 1 for x in (turns, replies)]
  starts = jnp.asarray([9, 4], jnp.int32)
  call = functools.partial(models.grouped_log_probs, config=config)
  levels = (turns, replies)
  _, out = as_users.jit(call)(params, prompts, starts, levels, tuple(lengths))
  for branch in np.ndindex(2, 2, 3):
    part_lengths = starts[branch[0]], lengths[0][branch[:2]], lengths[1][branch]
    parts = prompts[branch[0]], turns[branch[:2]], replies[branch]
    tokens = [part[:n] for part, n in zip(parts, part_lengths, strict=True)]
    tokens = jnp.concatenate(tokens)
    logits = families.whole(config, params, tokens[None])[0]
    expected = as_users.jit(log_probs.of_tokens)(
      jnp.asarray(logits[:-1]), tokens[1:], jnp.ones(len(tokens) - 1)
    )
    count = int(part_lengths[2])
    np.testing.assert_array_equal(out[branch][:count], expected[-count:])


@_deep
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_two_devices_equal_one():
  config, params = families.decoder("llama", jnp.bfloat16)
  axes = sharding.MeshAxes(jax.make_mesh((2,), ("data",)), data="data")
  forward = functools.partial(models.forward, config=config)
  columns = -(-(_PROMPT + _NEW) // 16)
  sizes = jaxkv.CacheConfig(
    num_pages=100, page_size=16, num_slots=3, pages_per_slot=columns
  )
  options = rollout.RolloutConfig(num_samples=_SAMPLES, max_new_tokens=_NEW)
  prompts, lengths = (x[:4] for x in _prompts())
  key = jax.random.key(5)

  sampling = rollout.Sampling(temperature=jnp.float32(_TEMPERATURE))
  requests = rollout.Requests(prompts, lengths, sampling=sampling)

  def memory():
    return jaxkv.init(sizes, key), models.init_kv(config, sizes)

  cache, kv = sharding.init_memory(memory, axes=axes)
  state = sharding.init(cache, kv, requests, key, options, axes=axes)
  shardings = sharding.param_shardings(params, axes=axes)
  run = functools.partial(sharding.generate, axes=axes, model=forward)
  state = as_users.jit(run)(jax.device_put(params, shardings), state)
  out = sharding.generated(state, axes=axes)
  expected = rollout.init(*memory(), requests, key, options)
  expected = rollout.generated(_generate(config)(params, expected))
  for name in ("tokens", "log_probs", "lengths"):
    np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))


@_deep
def test_fast_numerics_differ_in_bits():
  """The tests above can fail: bits differ without exact numerics."""
  config, params = families.decoder("llama", jnp.bfloat16, numerics="fast")
  results = _samples(config, params, _Setting(slots=3))
  groups = _groups(results)
  forward, _ = _by_trainer(config, params, groups)
  mask = np.asarray(groups.mask)
  assert np.any(np.asarray(groups.log_probs)[mask] != forward[mask])
