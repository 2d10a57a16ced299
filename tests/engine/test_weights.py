"""Updates of the weights during a rollout, and between rollouts."""

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
from tests.models import tiny_decoders as tiny

_MODEL = tiny.decoder(tiny.LAYERS["llama"])
_SIZES = jaxkv.CacheConfig(
  num_pages=60, page_size=4, num_slots=3, pages_per_slot=8
)
_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=12, prefill_chunk=8, admissions=2
)
_RNG = np.random.default_rng(0)
_PROMPTS = np.concatenate(
  [np.tile(_RNG.integers(0, 23, 9), (3, 1)), _RNG.integers(0, 23, (3, 7))],
  axis=1,
).astype(np.int32)
_LENGTHS = np.asarray([16, 12, 14], np.int32)


def _weights(seed: int):
  params = models.init_params(jax.random.key(seed), _MODEL)
  # Larger logits, so that other weights give other tokens.
  return params | {"embed": params["embed"] * 3}


def _begun(cache=None, version=None, config=_CONFIG, **options):
  options = {"kv": models.init_kv(_MODEL, _SIZES)} | options
  prompts = [row[:n] for row, n in zip(_PROMPTS, _LENGTHS, strict=True)]
  return by_hand.begun(
    _SIZES, config, prompts, cache=cache, version=version, **options
  )


_generate = jax.jit(
  functools.partial(
    rollout.generate, model=functools.partial(models.forward, config=_MODEL)
  )
)


def _run(params, state, steps=by_hand.NO_LIMIT) -> rollout.RolloutState:
  """Runs the rollout; limits of one type compile once."""
  return _generate(params, state, rollout.Until(steps=jnp.int32(steps)))


@jax.jit
def _trainer(params, tokens, positions):
  """Returns log-probs of all tokens, each in the column of its token."""
  logits = models.forward_uncached(params, tokens, positions, config=_MODEL)
  scores = jax.nn.log_softmax(logits[:, :-1])
  log_probs = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=2)[..., 0]
  return jnp.pad(log_probs, ((0, 0), (1, 0)))


def _gaps(out: rollout.Generated, params, version: int) -> np.ndarray:
  """Returns gaps to a trainer's log-probs, for the tokens of `version`."""
  trainer_log_probs = _trainer(params, out.tokens, out.positions)
  has_version = np.asarray(out.versions) == version
  return np.abs(np.asarray(out.log_probs - trainer_log_probs))[has_version]


def _results_of_update(how: str) -> rollout.Generated:
  """Returns results of a rollout whose weights change after seven steps."""
  state = _run(_weights(0), _begun(), 7)
  state = rollout.update_weights(state, how)
  rollout.check(state)
  return rollout.generated(_run(_weights(1), state))


@pytest.mark.slow
class TestUpdateWeights:
  def test_recompute(self):
    """Each token has the log-prob of the weights that sampled it."""
    out = _results_of_update("recompute")
    for version in (0, 1):
      gaps = _gaps(out, _weights(version), version)
      assert gaps.size > 5 and gaps.max() <= 1e-5
    versions = np.asarray(out.versions)
    assert np.array_equal(versions >= 0, np.asarray(out.mask))
    for row in versions:
      sampled_versions = row[row >= 0]
      assert np.all(np.diff(sampled_versions) >= 0)

  def test_keep(self):
    """Old K/V is used, and the versions are recorded."""
    out = _results_of_update("keep")
    assert _gaps(out, _weights(0), 0).max() <= 1e-5
    later = _gaps(out, _weights(1), 1)
    assert later.size > 5 and later.max() > 1e-3
    # What had not begun is of the new weights alone.
    fresh = np.all(np.asarray(out.versions) != 0, axis=1)
    assert np.any(fresh)
    new_rows = jax.tree.map(lambda leaf: leaf[fresh], out)
    assert _gaps(new_rows, _weights(1), 1).max() <= 1e-5

  def test_drop(self):
    out = _results_of_update("drop")
    ended_before = np.any(np.asarray(out.versions) == 0, axis=1)
    whole = rollout.generated(_run(_weights(1), _begun()))
    for row in np.flatnonzero(~ended_before):
      assert out.tokens[row].tolist() == whole.tokens[row].tolist()
    assert _gaps(out, _weights(1), 1).max() <= 1e-5

  def test_unknown_policies_are_refused(self):
    with pytest.raises(ValueError, match=r"`policy` must be one of .*'keep'"):
      rollout.update_weights(_begun(), "forget")

  def test_requeued_sequences_hit_no_old_page(self):
    """A requeued sequence that ran on old K/V computes all of it again."""
    state = _run(_weights(0), _begun(), 7)
    state = _run(_weights(1), rollout.update_weights(state, "keep"), 2)
    is_running = state.queue.status == by_hand.RUNS
    state, out = rollout.requeue(state, state.queue.ids, mask=is_running)
    assert np.any(np.asarray(out.ok))
    rows = np.flatnonzero(out.ok)
    old_lengths = np.asarray(state.queue.length)
    out = rollout.generated(_run(_weights(1), state))
    expected = _trainer(_weights(1), out.tokens, out.positions)
    gaps = np.abs(np.asarray(out.log_probs - expected))
    for row in rows:
      assert gaps[row, old_lengths[row] : int(out.lengths[row])].max() <= 1e-5


def test_an_extended_sequence_restarts_with_the_limit_of_its_prompt():
  config = dataclasses.replace(_CONFIG, max_new_tokens=4, max_length=24)
  state = _begun(config=config)
  state, out = rollout.extend(
    state, [2, 5], [[7, 8, 9]] * 2, [2, 3], max_tokens=[3, 2]
  )
  assert out.ok.all()
  assert state.queue.limit.tolist() == [20, 20, 17, 16, 18, 19]
  extended = state.queue
  state = rollout.update_weights(state, "drop")
  rollout.check(state)
  lengths = np.repeat(_LENGTHS, 2)
  for name in ("length", "start"):
    assert getattr(extended, name)[5] == 17, name
    np.testing.assert_array_equal(getattr(state.queue, name), lengths)
  np.testing.assert_array_equal(state.queue.limit, lengths + 4)
  assert extended.tokens[5, 14:17].tolist() == [7, 8, 9]
  assert not np.any(state.queue.tokens[5, 14:])


@pytest.mark.slow
def test_a_leader_of_older_weights_is_not_followed():
  """A kept leader has old K/V, so its sibling computes the whole prompt."""
  prompt = [1, 2, 3, 4, 5, 6, 7, 8]
  sizes = by_hand.sizes(40, 2)
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=4
  )
  kv = models.init_kv(_MODEL, sizes)
  state = by_hand.begun(sizes, config, [prompt], kv=kv)
  state = _run(_weights(0), state, 1)
  assert 0 < int(state.memory.cache.length[0]) < len(prompt)
  state, out = rollout.requeue(state, [1])
  assert out.ok.tolist() == [True]
  state = rollout.update_weights(state, "keep")
  state = _run(_weights(1), state, 60)
  out = rollout.generated(state)
  expected = _trainer(_weights(1), out.tokens, out.positions)
  gaps = jnp.where(out.mask, jnp.abs(out.log_probs - expected), 0)
  # The first one goes on with K/V of both weights.
  assert float(gaps[0].max()) > 1e-4
  assert float(gaps[1].max()) <= 1e-5


class TestVersions:
  @pytest.mark.slow
  def test_missing_version_is_refused(self):
    state = _run(_weights(0), _begun())
    with pytest.raises(ValueError, match="`version` must be given, because"):
      _begun(state.memory.cache)
    with pytest.raises(
      ValueError, match=r"must be 0, the version .* got 1; call"
    ):
      _begun(state.memory.cache, 1)
    cache, _ = jaxkv.new_epoch(state.memory.cache)
    with pytest.raises(ValueError, match=r"must be 1, the version of .* got 0"):
      _begun(cache, 0)
    assert int(_begun(cache, 1).memory.cache.epoch) == 1

  @pytest.mark.slow
  def test_traced_wrong_versions_fail(self):
    """A traced version cannot raise, so the sequences fail."""
    state = _run(_weights(0), _begun())

    @jax.jit
    def begun(version):
      return _begun(state.memory.cache, version)

    assert np.all(np.asarray(begun(0).queue.status) == by_hand.WAITS)
    refused = begun(3).queue
    assert np.all(np.asarray(refused.status) == by_hand.FAILED)
    assert set(refused.code.tolist()) == {jaxkv.Status.STALE}

  @pytest.mark.slow
  def test_many_updates(self):
    """Equal prompts hit pages of their round, never of an earlier one."""
    state = _begun()
    cached = 0
    for version in range(50):
      params = _weights(version)
      state = _begun(state.memory.cache, version, kv=state.memory.kv)
      state = _run(params, state)
      gaps = _gaps(rollout.generated(state), params, version)
      assert gaps.size and gaps.max() <= 1e-5, version
      hits = int(state.memory.cache.stats.hit_tokens)
      assert hits > cached
      cached = hits
      state = rollout.update_weights(state)
