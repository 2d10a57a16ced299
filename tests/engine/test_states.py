"""Recurrent layers in the loop: a state that is a hash of all tokens before."""

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import checkpoint
from jaxkv import kv as memory
from jaxkv import rollout
from jaxkv import sharding
from tests.engine import by_hand
from tests.sampling import by_definition
from tests.tools.pool_copies import pool_sized_rewrites
from tests.tools.tiers import slow_except

pytestmark = pytest.mark.slow

_PRIMES = (2039, 2029, 2027)  # A product with _FACTOR is exact in float32.
_FACTOR, _LAYERS, _PAGE = 4093, 2, 4
_HASH = {"hash": ((len(_PRIMES),), "float32")}
_WAVES = np.random.default_rng(3).uniform(
  0.5, 3, (len(_PRIMES), by_hand.VOCABULARY)
)
_RECURRENT = (jaxkv.FullAttention(), jaxkv.Recurrent())
_RETAINED = {
  "groups": (jaxkv.FullAttention(), jaxkv.Recurrent(pool=1)),
  "prefix_retention_interval": jaxkv.StateRetention(),
}
_PROMPTS = [[*prompt, *range(4)] for prompt in by_hand.PROMPTS] + [[7] * 17]


def _next_hash(state, token, layer):
  """Returns the hash after one more token."""
  primes = np.asarray([_PRIMES], np.float32)
  state = state * _FACTOR + (token + 1).astype(np.float32)[:, None]
  return (state + layer) % primes


def _hash_logits(state, np=jnp):
  """Returns the term of a hash in the logits, [X, V], at most 3."""
  waves = np.asarray(_WAVES, np.float32)
  return np.sum(np.sin(state[..., None] * waves[None]), axis=1)


def _hash_rows(states, view, layer, tokens, first_columns):
  """Hashes packed tokens; returns the states and the hash after each token.

  Args:
    states: the pages.
    view: the rows.
    layer: int32[].
    tokens: int32[C].
    first_columns: int32[B], the column of each row's first token.
  """
  state = memory.read_state(states, view, layer)["hash"]
  columns = tokens.shape[0]
  out = jnp.zeros((columns, len(_PRIMES)), jnp.float32)

  def step(offset, carry):
    state, out = carry
    real = offset < view.num_tokens
    column = jnp.where(real, first_columns + offset, columns)
    new_state = _next_hash(
      state, tokens.at[column].get(mode="clip"), layer.astype(jnp.float32)
    )
    state = jnp.where(real[:, None], new_state, state)
    return state, out.at[column].set(state, mode="drop")

  longest = jnp.max(view.num_tokens)
  state, out = lax.fori_loop(0, longest, step, (state, out))
  return memory.write_state(states, view, layer, {"hash": state}), out


def _model(params, batch, kv):
  """Runs the model of `by_hand`, and two recurrent layers."""
  tokens = batch.tokens
  pages, states = kv
  attention = dataclasses.replace(batch, views=batch.views[:1])
  logits, pages = by_hand.model(params, attention, pages)
  view = batch.views[1]
  single = view.decode.starts.shape[0]

  def layer(index, carry):
    states, scores = carry
    first_columns = jnp.arange(single, dtype=jnp.int32)
    states, out = _hash_rows(
      states, view.decode, index, tokens[0, :single], first_columns
    )
    if view.prefill is not None:
      num_tokens = view.prefill.num_tokens
      first_columns = jnp.cumsum(num_tokens, dtype=jnp.int32) - num_tokens
      states, prefill_out = _hash_rows(
        states, view.prefill, index, tokens[0, single:], first_columns
      )
      out = jnp.concatenate([out, prefill_out])
    return states, scores + _hash_logits(out)

  states, scores = lax.fori_loop(
    0, _LAYERS, layer, (states, jnp.zeros_like(logits[0]))
  )
  return logits + scores[None], (pages, states)


def _expected(seq_id, prompt, key, temperature, config):
  """Returns the tokens of one sequence, without a cache."""
  key = jax.random.fold_in(key, seq_id)
  tokens = [*prompt]
  for count in range(config.max_new_tokens):
    logits = by_hand.logits_of(tokens)
    for layer in range(_LAYERS):
      state = np.zeros((1, len(_PRIMES)), np.float32)
      for token in tokens:
        state = _next_hash(state, np.asarray([token]), np.float32(layer))
      logits = logits + _hash_logits(state, np)[0]
    weights = (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64)
    if temperature:
      row = by_definition.Row(temperature=temperature)
      weights = by_definition.weights(logits, row)
    tokens.append(by_definition.drawn(weights, key, count))
  return tokens


def _sizes(pages, slots, **more):
  """Returns a cache, with a `StateRetention` if it has two pools."""
  if isinstance(pages, tuple):
    more = _RETAINED | more
  return jaxkv.CacheConfig(
    num_pages=pages,
    page_size=_PAGE,
    num_slots=slots,
    pages_per_slot=8,
    **{"groups": _RECURRENT, **more},
  )


def _memory(sizes):
  states = memory.init_states(sizes, num_layers=_LAYERS, shapes=_HASH)
  return by_hand.pages(sizes), states


def _begun(sizes, config, kv=None, **options):
  kv = _memory(sizes) if kv is None else kv
  return by_hand.begun(sizes, config, _PROMPTS, kv=kv, **options)


_program = functools.cache(lambda: by_hand.Runner(by_hand.all_logits(_model)))
_CONFIG = rollout.RolloutConfig(
  num_samples=3, max_new_tokens=9, prefill_chunk=6, admissions=4
)


@functools.cache
def _all_expected(temperature):
  samples = _CONFIG.num_samples
  return [
    _expected(
      seq_id, _PROMPTS[seq_id // samples], by_hand.key(), temperature, _CONFIG
    )
    for seq_id in range(len(_PROMPTS) * samples)
  ]


def _assert_all(state, temperature):
  for seq_id, tokens in enumerate(_all_expected(temperature)):
    length = int(state.queue.length[seq_id])
    assert state.queue.tokens[seq_id, :length].tolist() == tokens
  jaxkv.check(state.memory.cache)
  rollout.check(state)


_SETTINGS = {
  "one pool": (100, {}),
  "few pages": (22, {}),
  "two pools": ((22, 8), {}),
  "offloaded": ((22, 8), {"offload_pages": (30, 12)}),
}


@slow_except("setting", _SETTINGS, "few pages", "two pools")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("setting", _SETTINGS)
def test_equal_to_a_run_without_cache(setting, temperature):
  """Samples fork, prefixes are hit, sequences are preempted and resume.

  All tokens are right, and no sequence holds more than two states.
  """
  pages, options = _SETTINGS[setting]
  state = _begun(_sizes(pages, 6, **options), _CONFIG)
  steps = 0
  while not bool(rollout.is_done(state)):
    state = _program()(state, temperature, 1)
    steps += 1
    table = np.asarray(state.memory.cache.page_table[:, 1])
    is_state = (table > 0) & (table < state.memory.cache.config.no_page)
    assert is_state.sum(axis=1).max() <= 2
    assert steps < 1000
  _assert_all(state, temperature)
  assert int(state.counters.forked) > 0
  assert (int(state.counters.preempted) > 0) == (pages != 100)
  if options:
    assert int(jaxkv.stats(state.memory.cache).restored_pages) > 0


def test_decode_steps_change_no_token():
  """More of them than a page has tokens."""
  config = dataclasses.replace(_CONFIG, decode_steps=8)
  _assert_all(_program()(_begun(_sizes((22, 8), 6), config), 1.0), 1.0)


@pytest.mark.parametrize("pages", [100, (100, 60)])
def test_a_later_rollout_hits_states(pages):
  state = _begun(_sizes(pages, 4), _CONFIG)
  first_end = _program()(state, 1.0)
  hits = int(first_end.memory.cache.stats.hit_tokens)
  second_state = _begun(
    _sizes(pages, 4),
    _CONFIG,
    kv=first_end.memory.kv,
    cache=first_end.memory.cache,
    version=0,
  )
  state = _program()(second_state, 1.0)
  _assert_all(state, 1.0)
  assert int(state.memory.cache.stats.hit_tokens) > hits + 20
  assert int(state.counters.prefilled) < int(first_end.counters.prefilled)


@pytest.mark.skipif(
  importlib.util.find_spec("orbax") is None, reason="orbax is not installed"
)
def test_snapshots_have_all_pools(tmp_path):
  """Also those without pages, which are computed again."""
  state = _program()(_begun(_sizes((22, 8), 6), _CONFIG), 1.0, 9)
  assert not bool(rollout.is_done(state))
  for pages in (True, False):
    checkpoint.save(tmp_path / str(pages), state, pages=pages)
    restored = checkpoint.restore(tmp_path / str(pages), state)
    rollout.check(restored)
    _assert_all(_program()(restored, 1.0), 1.0)


def test_states_are_updated_in_place():
  sizes = _sizes(400, 4)
  states = memory.init_states(
    sizes, num_layers=_LAYERS, shapes={"wide": ((2048,), "float32")}
  )

  def model(params, batch, kv):
    pages, states = kv
    attention = dataclasses.replace(batch, views=batch.views[:1])
    logits, pages = by_hand.model(params, attention, pages)
    view = batch.views[1]
    parts = [view.decode]
    if view.prefill is not None:
      parts.append(view.prefill)
    for part in parts:
      state = memory.read_state(states, part, 1)["wide"]
      states = memory.write_state(states, part, 1, {"wide": state + 1})
    return logits, (pages, states)

  state = _begun(sizes, _CONFIG, kv=(_memory(sizes)[0], states))
  run = functools.partial(rollout.generate, model=by_hand.all_logits(model))
  compiled = jax.jit(run, donate_argnums=1).lower(None, state).compile()
  shape = states.states["wide"].shape
  assert pool_sized_rewrites(compiled, shape) == []


@pytest.mark.fast
class TestInit:
  def test_states_are_needed(self):
    kv, states = _memory(_sizes(100, 4))
    with pytest.raises(ValueError, match=r"`kv` must have StatePages for the"):
      _begun(_sizes(100, 4), _CONFIG, kv=kv)
    with pytest.raises(ValueError, match=r"`kv` must have KVPages for the"):
      _begun(_sizes(100, 4), _CONFIG, kv=states)
    with pytest.raises(ValueError, match=r"`kv\[1\]` must have 50 pages of 4"):
      _begun(_sizes(50, 4), _CONFIG, kv=(_memory(_sizes(50, 4))[0], states))

  def test_drafts_are_refused(self):
    config = dataclasses.replace(_CONFIG, draft_tokens=2)
    with pytest.raises(ValueError, match=r"`RolloutConfig.draft_tokens` must"):
      _begun(_sizes(100, 4), config)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_shardings_of_several_pools():
  sizes = _sizes(100, 4)
  kv = memory.init(sizes, num_layers=1, num_kv_heads=2, head_dim=4)
  latents = memory.init(
    sizes, num_layers=1, num_kv_heads=1, head_dim=4, value_dim=2
  )
  state = _begun(sizes, _CONFIG, kv=(kv, latents, _memory(sizes)[1]))
  mesh = jax.make_mesh((2,), ("model",))
  axes = sharding.MeshAxes(mesh, model="model")
  shardings = sharding.state_shardings(state, axes=axes)
  split, whole = (NamedSharding(mesh, spec) for spec in (P(None, "model"), P()))
  pools: Any = shardings.memory.kv
  assert pools[0].k == split
  assert pools[1].k == whole
  assert pools[2].states["hash"] == whole
  jax.device_put(state, shardings)
