"""Groups that fail in `score`, and arguments that it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from tests.engine.by_forward import GROUPS
from tests.engine.by_forward import MODELS
from tests.engine.by_forward import SIZES
from tests.engine.by_forward import check_scored
from tests.engine.by_forward import compiled
from tests.engine.by_forward import fresh
from tests.engine.by_forward import mask_of
from tests.engine.by_forward import pages_held
from tests.engine.by_forward import rows_to_compute
from tests.engine.by_forward import weights

pytestmark = pytest.mark.slow


class TestGroups:
  def test_group_beyond_a_slot_is_nan(self):
    """Log-probs, entropies and top log-probs are NaN."""
    program = compiled(entropy=True, top_log_probs=3)
    short = fresh(sizes=dataclasses.replace(SIZES, pages_per_slot=4))
    _, scored = program(weights(), short, *GROUPS)
    assert scored.code.tolist() == [jaxkv.Status.SLOT_FULL, 0, 0]
    assert scored.ok.tolist() == [False, True, True]
    check_scored(scored, weights(), GROUPS, rows=[False, True, True])
    tops = np.moveaxis(np.asarray(scored.top_log_probs), -1, 0)
    for values in (scored.entropy, *tops):
      failed = np.where(mask_of(GROUPS)[0], np.nan, 0)
      np.testing.assert_array_equal(values[0], failed)
      assert np.isfinite(values[1:]).all()
    assert not np.any(scored.top_tokens[0])

  @pytest.mark.fast
  def test_lengths_out_of_range_give_nan(self):
    groups = GROUPS._replace(
      prompt_lengths=np.asarray([0, 14, 8], np.int32),
      lengths=np.asarray([[1, 2, 0], [1, 1, 7], [-1, 8, 3]], np.int32),
    )
    state, scored = compiled()(weights(), fresh(), *groups)
    assert set(scored.code.tolist()) == {jaxkv.Status.BAD_LENGTH}
    num_nans = [[1, 2, 0], [1, 1, 7], [7, 7, 3]]
    assert np.isnan(scored.log_probs).sum(axis=2).tolist() == num_nans
    real = np.arange(7) < np.asarray(num_nans)[..., None]
    expected = np.where(real, np.nan, 0)
    np.testing.assert_array_equal(scored.log_probs, expected)
    assert int(scored.computed_tokens) == 0
    assert pages_held(state) == 0

  def test_groups_without_samples(self):
    """Groups without samples, as of `grouped`, are OK and compute nothing."""
    groups = GROUPS._replace(prompt_lengths=np.asarray([12, 1, 0], np.int32))
    params = weights()
    state, scored = compiled()(params, fresh(), *groups)
    assert scored.ok.all()
    assert int(scored.computed_tokens) == rows_to_compute(groups, [0, 0, 0])
    check_scored(scored, params, groups)
    # Such a one alone, in a cache without an empty slot.
    cache, _ = jaxkv.allocate(state.cache, jnp.ones((5,), jnp.int32))
    state = dataclasses.replace(state, cache=cache)
    new_state, scored = compiled()(params, state, *(x[2:] for x in groups))
    assert scored.ok.all() and not np.any(scored.log_probs)
    assert pages_held(new_state) == pages_held(state)

  def test_group_beyond_the_pool_is_nan(self):
    """Four pages of four tokens: the second group fits, and the first not."""
    sizes = dataclasses.replace(SIZES, num_pages=5)
    params = weights()
    state, scored = compiled()(params, fresh(sizes=sizes), *GROUPS)
    assert scored.code.tolist() == [jaxkv.Status.OUT_OF_PAGES, 0, 0]
    check_scored(scored, params, GROUPS, rows=[False, True, True])
    jaxkv.check(state.cache)
    assert pages_held(state) == 0

  def test_one_slot(self):
    """Completions one after another, on top of the prompt's full pages."""
    sizes = dataclasses.replace(SIZES, num_slots=1, page_size=5)
    params = weights()
    state, scored = compiled()(params, fresh(sizes=sizes), *GROUPS)
    check_scored(scored, params, GROUPS)
    # 11 of the prompt, and twice the one of them that fills no page.
    assert int(scored.computed_tokens) == 11 + 2 * 1 + 15 + 9
    jaxkv.check(state.cache)


def test_small_temperatures():
  """The most likely token has probability 1, and all results are finite."""
  program = compiled(entropy=True, top_log_probs=3)
  tiny = float(np.finfo(np.float32).tiny)
  _, plain = program(weights(), fresh(), *GROUPS)
  for temperature in (tiny, 2e-38, 1e-30):
    _, scored = program(weights(), fresh(), *GROUPS, temperature=temperature)
    for values in (scored.entropy, scored.top_log_probs[..., 0]):
      assert not np.any(values)
    best = np.asarray(plain.top_tokens)[..., 0]
    np.testing.assert_array_equal(scored.top_tokens[..., 0], best)
    wrong = mask_of(GROUPS) & (GROUPS.completions != best)
    log_probs = np.asarray(scored.log_probs)
    assert np.all(log_probs[wrong] < -1e20) and not np.any(log_probs[~wrong])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3e-3])
def test_entropy_and_top_log_probs_change_no_log_prob(temperature):
  program = compiled(entropy=True, top_log_probs=3)
  _, full = program(weights(), fresh(), *GROUPS, temperature=temperature)
  _, plain = compiled()(weights(), fresh(), *GROUPS, temperature=temperature)
  bits = np.asarray(plain.log_probs).view(np.int32)
  np.testing.assert_array_equal(np.asarray(full.log_probs).view(np.int32), bits)


class TestArguments:
  @pytest.mark.fast
  def test_bad_arrays_are_refused(self):
    state = fresh()
    with pytest.raises(TypeError, match="`state` must be a RolloutState"):
      _call(state.cache)
    with pytest.raises(ValueError, match=r"`completions` must have the shape"):
      _call(groups=GROUPS._replace(completions=GROUPS.prompts))
    with pytest.raises(TypeError, match="`prompts` must hold integers"):
      _call(groups=GROUPS._replace(prompts=GROUPS.prompts * 1.0))
    with pytest.raises(ValueError, match=r"`extra\['a'\]` .* for each prompt"):
      _call(extra={"a": jnp.zeros((2,))})
    with pytest.raises(ValueError, match="`temperature` must be 0, or"):
      _call(temperature=-1.0)
    with pytest.raises(ValueError, match=r"`salts` must have the shape"):
      _call(salts=jnp.zeros((2, 4), jnp.uint32))
    with pytest.raises(ValueError, match="one page size for all groups"):
      groups = (jaxkv.FullAttention(), jaxkv.FullAttention(page_size=8))
      sizes = dataclasses.replace(SIZES, groups=groups)
      _call(dataclasses.replace(state, cache=jaxkv.init(sizes)))

  def test_bad_static_arguments_are_refused(self):
    with pytest.raises(
      ValueError, match=r"`chunk` must be at least 1 .* got 0"
    ):
      _call(chunk=0)
    with pytest.raises(
      TypeError, match="`top_log_probs` must be an int, got 1"
    ):
      _call(top_log_probs=1.0)
    with pytest.raises(
      TypeError, match="`entropy` must be True or False, got 2"
    ):
      _call(entropy=2)
    message = "`entropy` must be True or False, got a jax.Array; it is static"
    with pytest.raises(TypeError, match=message):
      jax.jit(lambda entropy: _call(entropy=entropy))(True)
    state = fresh()
    model = functools.partial(models.forward, config=MODELS["llama"])
    run = functools.partial(
      rollout.score, model=model, chunk=np.int64(6), top_log_probs=np.int32(2)
    )
    _, scored = jax.eval_shape(run, weights(), state, *GROUPS)
    assert scored.top_tokens.shape == (3, 3, 7, 2)

  @pytest.mark.parametrize("model", [None, MODELS["llama"]])
  def test_models_of_other_types_are_refused(self, model):
    message = f"`model` must be .* got {type(model).__name__}; give functools"
    with pytest.raises(TypeError, match=message):
      _call(model=model)


def _call(state=None, groups=GROUPS, **options):
  model = functools.partial(models.forward, config=MODELS["llama"])
  options = {"model": model, **options}
  state = fresh() if state is None else state
  return rollout.score(weights(), state, *groups, **options)


class TestBadLogits:
  def test_bad_weights_leave_no_page(self):
    params = weights()
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
    expected = compiled()(params, fresh(), *GROUPS)[1]
    state, scored = compiled()(bad, fresh(), *GROUPS)
    # The third group has no completion, and nothing of it is computed.
    is_bad = jaxkv.Status.BAD_LOGITS
    assert scored.code.tolist() == [is_bad, is_bad, jaxkv.Status.OK]
    failed = np.where(mask_of(GROUPS)[:2], np.nan, 0)
    np.testing.assert_array_equal(scored.log_probs[:2], failed)
    assert pages_held(state) == 0
    assert not np.any(state.cache.pool.index.buckets)
    _, scored = compiled()(params, state, *GROUPS)
    assert scored.ok.all()
    assert int(scored.computed_tokens) == rows_to_compute(GROUPS, [0, 0, 0])
    np.testing.assert_array_equal(scored.log_probs, expected.log_probs)

  def test_log_probs_of_minus_infinity_are_no_failure(self):
    params = weights()
    token = int(GROUPS.completions[0, 0, 0])

    def model(params, batch, kv):
      logits, kv = models.forward(params, batch, kv, config=MODELS["llama"])
      return logits.at[:, token].set(-jnp.inf), kv

    score = functools.partial(rollout.score, model=model, chunk=6)
    _, scored = jax.jit(score)(params, fresh(), *GROUPS)
    assert scored.ok.all()
    assert scored.log_probs[0, 0, 0] == -np.inf
    assert not np.any(np.isnan(scored.log_probs))
