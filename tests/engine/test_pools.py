"""Rollouts of decoders whose data is in several pools."""

import dataclasses
import functools
import importlib.util

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import checkpoint
from jaxkv import models
from jaxkv import rollout
from jaxkv import sharding
from tests.engine import by_hand
from tests.engine import uncached
from tests.models import tiny_decoders as tiny
from tests.sharding import recipes

pytestmark = pytest.mark.slow


def _local(window: int | None, base: float) -> models.Layer:
  attention = tiny.attention(
    window=window, query_key_norm=True, rope=models.Rope(base=base)
  )
  return tiny.layer(attention, post_norms=True)


_GATED = tiny.attention(query_key_norm=True, gated=True)
_DECODERS = {
  "gemma 3": tiny.decoder((_local(6, 1e4),) * 5 + (_local(None, 1e6),)),
  "qwen3-next": tiny.decoder(
    (tiny.layer(tiny.DELTA_NET, tiny.EXPERTS),) * 3
    + (tiny.layer(_GATED, tiny.EXPERTS),)
  ),
}
_PAGES = {"gemma 3": (10, 22), "qwen3-next": (8, 16)}
"""Few pages of windows or states, and of full attention."""
_LENGTHS = [25, 30, 20, 1, 9]


def _prompts() -> np.ndarray:
  """Returns prompts of which three begin with the same 17 tokens."""
  prompts = np.random.default_rng(0).integers(4, tiny.VOCABULARY, (5, 30))
  prompts[1:3, :17] = prompts[0, :17]
  return prompts.astype(np.int32)


def _begun(
  name: str, config: rollout.RolloutConfig, **requests
) -> rollout.RolloutState:
  decoder = _DECODERS[name]
  sizes = models.cache_config(
    decoder,
    num_slots=4,
    max_length=48,
    page_size=4,
    num_pages=_PAGES[name],
    offload_pages=(20, 40),
  )
  kv = by_hand.poisoned(models.init_kv(decoder, sizes))
  return rollout.init(
    jaxkv.init(sizes, jax.random.key(2)),
    kv,
    rollout.Requests(_prompts(), _LENGTHS, **requests),
    jax.random.key(1),
    config,
    offload=jaxkv.kv.init_offload(kv, sizes),
  )


@pytest.mark.parametrize(
  "decode_steps", [pytest.param(1, marks=pytest.mark.deep), 8]
)
@pytest.mark.parametrize("name", _DECODERS)
def test_tokens_equal_an_uncached_pass(name, decode_steps, tmp_path):
  """Of samples that fork, are preempted, restored, saved and moved."""
  decoder = _DECODERS[name]
  params = models.init_params(jax.random.key(0), decoder)
  # Larger logits: a wrong one leads to other tokens soon.
  params |= {"embed": params["embed"] * 3}
  config = rollout.RolloutConfig(
    num_samples=2,
    max_new_tokens=16,
    stop_token=3,
    prefill_chunk=10,
    decode_steps=decode_steps,
  )
  state = by_hand.begun_at(_begun(name, config), 1.0)
  expected = jax.jit(
    functools.partial(uncached.generate, decoder=decoder, config=config)
  )(params, state.queue, np.float32(1))
  run = by_hand.Runner(
    functools.partial(models.forward, config=decoder), params
  )
  state = run(state, 1.0, 11)
  if importlib.util.find_spec("orbax") is not None:
    checkpoint.save(tmp_path / "middle", state)
    state = checkpoint.restore(tmp_path / "middle", state)
  state = run(state, 1.0, 5)
  counters = state.counters
  assert int(counters.forked) > 0
  # Windows release pages before a sequence lacks one; `test_hybrids` preempts.
  if name == "qwen3-next":
    assert int(counters.preempted) > 0
  target = by_hand.begun_at(_begun(name, config, num_samples=[0] * 5), 1.0)
  running = np.flatnonzero(state.queue.status == by_hand.RUNS)
  state, exported = rollout.export(state, np.resize(running, 4))
  assert exported.num_computed.max() > 0
  target, out = rollout.import_sequences(target, exported)
  num_moved = int(out.ok.sum())
  assert num_moved == len(running) > 1
  for index, part in enumerate((state, target)):
    part = run(part, 1.0)
    rollout.check(part)
    assert bool(rollout.is_done(part))
    has_ended = np.asarray(part.queue.status) == by_hand.DONE
    assert has_ended.sum() == (num_moved if index else 10 - num_moved)
    rows = np.asarray(part.queue.ids)[has_ended]
    for field in ("tokens", "length"):
      np.testing.assert_array_equal(
        np.asarray(getattr(part.queue, field))[has_ended],
        np.asarray(getattr(expected, field))[rows],
      )
    np.testing.assert_allclose(
      np.asarray(part.queue.log_probs)[has_ended],
      np.asarray(expected.log_probs)[rows],
      atol=2e-5,
    )


@pytest.mark.parametrize("decode_steps", [1, 8])
@pytest.mark.parametrize(
  "window", [4, *(pytest.param(w, marks=pytest.mark.deep) for w in (16, 17))]
)
def test_rollouts_end_with_the_least_pages(window, decode_steps):
  """Of each pool, for one sequence; four slots and pages of 16 tokens."""
  decoder = tiny.decoder(
    (
      tiny.layer(tiny.DELTA_NET),
      tiny.layer(tiny.attention(window=window)),
      # As many layers as the window has would share its pool.
      *(tiny.layer(tiny.attention()),) * 2,
    )
  )
  config = rollout.RolloutConfig(
    num_samples=2,
    max_new_tokens=30,
    prefill_chunk=20,
    decode_steps=decode_steps,
  )
  sizes = models.cache_config(
    decoder, num_slots=4, max_length=80, num_pages=(99, 99, 99)
  )
  most_in_flight = config.prefill_chunk + decode_steps - 1
  needed = sizes.sizes.max_pages(most_in_flight, 80)
  num_pages = [0, 0, 0]
  for kind, count in zip(sizes.groups, needed, strict=True):
    num_pages[kind.pool] = 1 + count
  sizes = dataclasses.replace(sizes, num_pages=tuple(num_pages))
  lengths = [50, 33, 48, 1, 16, 49]
  prompts = np.random.default_rng(0).integers(0, tiny.VOCABULARY, (6, 50))
  prompts[4:, :32] = prompts[0, :32]

  def model(params, batch, kv):
    del kv
    last_tokens = batch.tokens[0].at[batch.columns].get(mode="clip")
    return params[last_tokens], None

  state = rollout.init(
    jaxkv.init(sizes),
    models.init_kv(decoder, sizes),
    rollout.Requests(prompts.astype(np.int32), lengths),
    jax.random.key(1),
    config,
  )
  state = by_hand.Runner(model, jax.numpy.eye(tiny.VOCABULARY))(
    state, 1.0, 2000
  )
  rollout.check(state)
  assert set(state.queue.status.tolist()) == {by_hand.DONE}


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize(
  "name", [pytest.param("gemma 3", marks=pytest.mark.deep), "qwen3-next"]
)
def test_shards_sample_the_tokens_of_one_device(name, tmp_path):
  """Sequences move between two shards of two devices, which are restored."""
  decoder = _DECODERS[name]
  prompts = [
    prompt[:length].tolist()
    for prompt, length in zip(_prompts(), _LENGTHS, strict=True)
  ]
  names = recipes.of_decoder(
    decoder,
    models.init_params(jax.random.key(0), decoder),
    prompts,
    num_pages=60,
    pages_per_slot=10,
  )
  state = recipes.done(names, recipes.begun(names))
  expected = jax.device_get(rollout.generated(state))
  axes = recipes.axes_of(data=2, model=2)
  state = recipes.begun_on(names, axes)
  run = functools.partial(
    sharding.generate,
    names["params"],
    until=rollout.Until(steps=3),
    axes=axes,
    model=names["model"],
  )
  num_moved = 0
  while not bool(rollout.is_done(state)):
    state = run(state)
    ids = np.asarray(state.queue.ids)
    state = sharding.rebalance(state, axes=axes, max_pages=30)
    if not num_moved and importlib.util.find_spec("orbax") is not None:
      checkpoint.save(tmp_path / "moved", state)
      target = recipes.begun_on(names, axes)
      state = checkpoint.restore(tmp_path / "moved", target)
    num_moved += int((ids != np.asarray(state.queue.ids)).sum())
  assert num_moved > 0
  recipes.assert_equal_results(sharding.generated(state, axes=axes), expected)
