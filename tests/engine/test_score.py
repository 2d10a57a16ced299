"""Log-probabilities of given completions, against a forward pass of each."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import jaxkv
from jaxkv import models
from jaxkv import rollout
from tests.engine import by_hand
from tests.engine.by_forward import CHUNK
from tests.engine.by_forward import GROUPS
from tests.engine.by_forward import MODELS
from tests.engine.by_forward import SIZES
from tests.engine.by_forward import Groups
from tests.engine.by_forward import check_scored
from tests.engine.by_forward import compiled
from tests.engine.by_forward import distributions
from tests.engine.by_forward import fresh
from tests.engine.by_forward import mask_of
from tests.engine.by_forward import pages_held
from tests.engine.by_forward import rows_to_compute
from tests.engine.by_forward import weights
from tests.models import tiny_decoders as tiny
from tests.tools.pool_copies import pool_sized_rewrites
from tests.tools.tiers import slow_except

pytestmark = pytest.mark.slow


@pytest.mark.fast
@slow_except("name", MODELS, "llama")
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_equal_a_forward_pass(name):
  """Ragged groups, twice: the second time, prompts are cached.

  A third time, the page is found that the prompt's last token fills.
  """
  # Other seeds have tokens whose log-prob one rounding changes by 5e-5.
  params = weights(name, seed=2)
  program = compiled(name)
  state, scored = program(params, fresh(name), *GROUPS)
  check_scored(scored, params, GROUPS, name)
  assert scored.code.tolist() == [jaxkv.Status.OK] * 3
  assert int(scored.computed_tokens) == rows_to_compute(GROUPS, [0, 0, 0])
  jaxkv.check(state.cache)
  assert pages_held(state) == 0
  state, scored = program(params, state, *GROUPS)
  check_scored(scored, params, GROUPS, name)
  assert int(scored.computed_tokens) == rows_to_compute(GROUPS, [8, 0, 0])
  longer = GROUPS._replace(prompt_lengths=np.asarray([13, 1, 8], np.int32))
  state, scored = program(params, state, *longer)
  check_scored(scored, params, longer, name)
  jaxkv.check(state.cache)
  assert pages_held(state) == 0


def test_computed_completions_are_cached():
  """A page that ends inside a completion is found."""
  state, _ = compiled()(weights(), fresh(), *GROUPS)
  whole = np.concatenate([GROUPS.prompts[0, :12], GROUPS.completions[0, 0]])
  match = jaxkv.match(state.cache, whole[None], [19])
  # The last token of a completion is never computed.
  assert match.num_cached_tokens.tolist() == [16]
  sibling = np.concatenate([GROUPS.prompts[0, :12], GROUPS.completions[0, 2]])
  match = jaxkv.match(state.cache, sibling[None], [17])
  assert match.num_cached_tokens.tolist() == [16]


def test_entropy_and_top_log_probs():
  params = weights()
  program = compiled(entropy=True, top_log_probs=3)
  for temperature in (0.7, 0.0):
    _, scored = program(params, fresh(), *GROUPS, temperature=temperature)
    at = temperature or 1.0
    check_scored(scored, params, GROUPS, temperature=at)
    log_probs = distributions(params, GROUPS, temperature=at)
    mask = mask_of(GROUPS)
    entropy = np.where(mask, -np.sum(np.exp(log_probs) * log_probs, axis=3), 0)
    np.testing.assert_allclose(scored.entropy, entropy, atol=1e-5)
    order = np.argsort(-log_probs, axis=3, kind="stable")[..., :3]
    np.testing.assert_array_equal(
      scored.top_tokens, np.where(mask[..., None], order, 0)
    )
    best = np.take_along_axis(log_probs, order, axis=3)
    np.testing.assert_allclose(
      scored.top_log_probs, np.where(mask[..., None], best, 0), atol=1e-5
    )


def test_groups_of_one_completion():
  """The completion continues in the prompt's slot."""
  groups = Groups(
    prompts=np.repeat(GROUPS.prompts, 3, axis=0),
    prompt_lengths=np.repeat(GROUPS.prompt_lengths, 3),
    completions=GROUPS.completions.reshape(9, 1, -1),
    lengths=GROUPS.lengths.reshape(9, 1),
  )
  params = weights()
  state, scored = compiled()(params, fresh(), *groups)
  check_scored(scored, params, groups)
  # The second and the third completion of a prompt find its full pages.
  cached = [0, 8, 8, 0, 0, 0, 0, 0, 0]
  assert int(scored.computed_tokens) == rows_to_compute(groups, cached)
  assert pages_held(state) == 0


_COLUMNS, _SAMPLES, _NEW = 9, 3, 5


@pytest.mark.slow
def test_forks_have_the_states_of_their_leaders():
  """In three slots, another prompt is computed before two forks go on."""
  rng = np.random.default_rng(0)
  groups = Groups(
    prompts=rng.integers(0, tiny.VOCABULARY, (3, 20)).astype(np.int32),
    prompt_lengths=np.asarray([20, 13, 20], np.int32),
    completions=rng.integers(0, tiny.VOCABULARY, (3, 2, 12)).astype(np.int32),
    lengths=np.full((3, 2), 12, np.int32),
  )
  sizes = dataclasses.replace(SIZES, num_slots=3, pages_per_slot=8)
  params = weights("states")
  _, scored = compiled("states")(params, fresh("states", sizes), *groups)
  check_scored(scored, params, groups, "states")


_RANDOM = ["llama", "windows and caps", "states"]
_SMALL = dataclasses.replace(SIZES, num_pages=30, page_size=2, pages_per_slot=8)


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=25)
@pytest.mark.parametrize("name", _RANDOM)
def test_random_groups(name, data):
  """Groups are scored, or refused, whatever pages and slots others hold.

  A group that fits is never refused.
  """
  tokens = st.integers(0, 2)

  def drawn(strategy, *shape):
    count = int(np.prod(shape))
    flat = data.draw(st.lists(strategy, min_size=count, max_size=count))
    return np.asarray(flat, np.int32).reshape(shape)

  groups = Groups(
    prompts=drawn(tokens, 2, _COLUMNS),
    prompt_lengths=drawn(st.integers(1, _COLUMNS), 2),
    completions=drawn(tokens, 2, _SAMPLES, _NEW),
    lengths=drawn(st.integers(0, _NEW), 2, _SAMPLES),
  )
  state = fresh(name, _SMALL)
  num_held_tokens = drawn(st.sampled_from([0, 0, 1, 5, 11]), _SMALL.num_slots)
  cache, _ = jaxkv.allocate(state.cache, jnp.asarray(num_held_tokens))
  cache, _ = jaxkv.clear_error(cache)
  state = dataclasses.replace(state, cache=cache)
  empty = int(np.sum(np.asarray(cache.num_pages)[:, 0] == 0))
  free = int(cache.pool.queue.num_free[0])
  params = weights(name)
  new_state, scored = compiled(name)(params, state, *groups)
  ok = np.asarray(scored.ok)
  check_scored(scored, params, groups, name, rows=ok)
  longest = groups.prompt_lengths - 1 + groups.lengths.max(axis=1)
  pages = -(-longest // _SMALL.page_size)
  # Two groups of at most two states; windows of no more pages than the whole.
  pages = {
    "llama": pages,
    "states": pages + 2 * 2,
    "windows and caps": 2 * pages,
  }[name]
  has_tokens = groups.lengths.max(axis=1) > 0
  assert np.all(ok | (has_tokens & ((empty == 0) | (free < pages))))
  assert np.all(~ok | ~has_tokens | (empty > 0))
  refused = set(np.asarray(scored.code)[~ok].tolist())
  assert refused <= {jaxkv.Status.OUT_OF_PAGES}
  jaxkv.check(new_state.cache)
  for field in ("page_table", "num_pages", "length"):
    np.testing.assert_array_equal(
      getattr(new_state.cache, field), getattr(cache, field)
    )
  assert pages_held(new_state) == pages_held(state)


def _begun(version=None, cache=None, kv=None, sizes=SIZES):
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=6, prefill_chunk=8
  )
  sampling = rollout.Sampling(temperature=[0.8] * 6)
  requests = rollout.Requests(
    GROUPS.prompts[:, :10], [10, 1, 8], sampling=sampling
  )
  memory = fresh(sizes=sizes)
  return rollout.init(
    memory.cache if cache is None else cache,
    memory.kv if kv is None else kv,
    requests,
    jax.random.key(1),
    config,
    version=version,
  )


@functools.cache
def _generate():
  model = functools.partial(models.forward, config=MODELS["llama"])
  generate = jax.jit(functools.partial(rollout.generate, model=model))

  def run(params, state, steps=by_hand.NO_LIMIT):
    # Limits of one type compile once.
    return generate(params, state, rollout.Until(steps=jnp.int32(steps)))

  return run


def _generated_groups(out: rollout.Generated) -> Groups:
  """Returns the samples of a rollout as arguments of `score`."""
  lengths = np.asarray(out.lengths - out.prompt_lengths)
  tokens = np.zeros((len(lengths), 6), np.int32)
  for row, prompt_length in enumerate(np.asarray(out.prompt_lengths)):
    samples = np.asarray(out.tokens[row, prompt_length : int(out.lengths[row])])
    tokens[row, : len(samples)] = samples
  return Groups(
    prompts=GROUPS.prompts[:, :10],
    prompt_lengths=np.asarray([10, 1, 8], np.int32),
    completions=tokens.reshape(3, 2, 6),
    lengths=lengths.reshape(3, 2),
  )


def test_score_does_not_disturb_a_rollout():
  """A rollout interrupted by `score` has the same results."""
  params = weights()
  whole = rollout.generated(_generate()(params, _begun()))
  # Sequences take six slots.
  state = _begun(sizes=dataclasses.replace(SIZES, num_slots=8))
  for _ in range(4):
    state = _generate()(params, state, 2)
    state, scored = compiled()(params, state, *GROUPS)
    check_scored(scored, params, GROUPS)
    rollout.check(state)
  state = _generate()(params, state)
  out = rollout.generated(state)
  np.testing.assert_array_equal(out.tokens, whole.tokens)
  np.testing.assert_allclose(out.log_probs, whole.log_probs, atol=1e-6)


class TestWeights:
  def test_pages_of_old_weights_are_not_hit(self):
    """After an update, a rollout's prompts are computed anew."""
    state = _generate()(weights(), _begun())
    groups = _generated_groups(rollout.generated(state))
    state = rollout.update_weights(state)
    new_params = weights(seed=1)
    state, scored = compiled()(new_params, state, *groups)
    check_scored(scored, new_params, groups)
    # A new rollout of the same weights finds what was computed here.
    new_state = _begun(1, state.memory.cache, state.memory.kv)
    end_state = _generate()(new_params, new_state)
    old_hits = int(state.memory.cache.stats.hit_tokens)
    assert int(end_state.memory.cache.stats.hit_tokens) - old_hits >= 12

  def test_wrong_versions_are_refused(self):
    state, _ = compiled()(weights(), fresh(), *GROUPS)
    model = functools.partial(models.forward, config=MODELS["llama"])
    with pytest.raises(ValueError, match=r"`version` must be 0, the version"):
      rollout.score(weights(), state, *GROUPS, model=model, version=1)
    _, scored = compiled()(weights(), state, *GROUPS, version=1)
    assert set(scored.code.tolist()) == {jaxkv.Status.STALE}
    check_scored(scored, weights(), GROUPS, rows=[False, False, False])
    assert int(scored.computed_tokens) == 0
    _, scored = compiled()(weights(), state, *GROUPS, version=0)
    assert np.all(scored.ok)


def test_different_salts_share_no_page():
  groups = Groups(*(np.repeat(x[:1], 3, axis=0) for x in GROUPS))
  salts = jnp.stack([jaxkv.salt("a"), jaxkv.salt("b"), jaxkv.salt("a")])
  params = weights()
  state, scored = compiled()(params, fresh(), *groups, salts=salts)
  check_scored(scored, params, groups)
  jaxkv.check(state.cache)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_score_inside_shard_map():
  """Each device scores one part of the groups, in a separate cache."""
  auto = jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((2,), ("data",), axis_types=(auto,))
  spec = jax.sharding.PartitionSpec("data")
  model = functools.partial(models.forward, config=MODELS["llama"])

  def score(params, *groups):
    _, scored = rollout.score(
      params, fresh(), *groups, model=model, chunk=CHUNK
    )
    # A mesh axis for the count, which is no array of groups.
    num_computed = scored.computed_tokens[None]
    return dataclasses.replace(scored, computed_tokens=num_computed)

  groups = Groups(*(np.concatenate([x, x[:1]]) for x in GROUPS))
  params = weights()
  scored = jax.jit(
    jax.shard_map(
      score,
      mesh=mesh,
      in_specs=(jax.sharding.PartitionSpec(), *[spec] * 4),
      out_specs=spec,
    )
  )(params, *groups)
  check_scored(scored, params, groups)
  halves = (Groups(*(x[n : n + 2] for x in groups)) for n in (0, 2))
  expected = [rows_to_compute(half, [0, 0]) for half in halves]
  assert scored.computed_tokens.tolist() == expected


def test_scarce_pages_recompute_the_prompt():
  """Eight tokens and five, in three pages of four tokens.

  The prompt holds two pages, of which a completion shares the full one; it
  lacks two more. So the first completion goes on in the prompt's slot, and each
  of the others computes the last three tokens of the prompt again.
  """
  sizes = dataclasses.replace(SIZES, num_pages=4)
  groups = GROUPS._replace(
    prompt_lengths=np.asarray([8, 8, 8], np.int32),
    lengths=np.asarray([[5, 5, 5], [6, 6, 6], [5, 0, 0]], np.int32),
  )
  params = weights()
  state, scored = compiled()(params, fresh(sizes=sizes), *groups)
  codes = [jaxkv.Status.OK, jaxkv.Status.OUT_OF_PAGES, jaxkv.Status.OK]
  assert scored.code.tolist() == codes
  check_scored(scored, params, groups, rows=[True, False, True])
  # The second group computes nine tokens, and then lacks a page.
  num_first = 7 + 2 * 3 + 15
  assert int(scored.computed_tokens) >= num_first + 7 + 5
  jaxkv.check(state.cache)
  assert pages_held(state) == 0


def _model(params, batch, kv):
  """Returns logits that depend on all inputs of the model."""
  del params, kv
  rows = batch.rows
  sums = rows.numbers * 7 + rows.ids * 5 + rows.counts * 3 + rows.lengths
  sums = sums + rows.last_tokens * 11 + rows.extra * 13 + batch.tokens[0] * 17
  logits = jnp.sin(sums[:, None] * jnp.arange(1, 5, dtype=jnp.int32)[None])
  return logits[batch.columns], None


def test_model_sees_the_rows_of_sampling():
  extra = np.asarray([3, 1, 4], np.int32)
  groups = GROUPS._replace(completions=GROUPS.completions % 4)
  score = functools.partial(rollout.score, model=_model, chunk=CHUNK)
  _, scored = jax.jit(score)(None, fresh(), *groups, extra=extra)
  for n, g, r in np.argwhere(mask_of(groups)):
    length = groups.prompt_lengths[n] + r
    last_token = groups.prompts[n, length - 1] if r == 0 else 0
    if r:
      last_token = groups.completions[n, g, r - 1]
    inputs = (n * 3 + g) * 12 + r * 3 + length + last_token * 28 + extra[n] * 13
    logits = np.sin(inputs * np.arange(1, 5))
    logit = logits[groups.completions[n, g, r]]
    expected = logit - np.log(np.exp(logits).sum())
    assert abs(scored.log_probs[n, g, r] - expected) < 1e-4


@slow_except("name", ["windows and caps", "states"], "windows and caps")
@pytest.mark.parametrize(
  "samples", [pytest.param(1, marks=pytest.mark.deep), 3]
)
@pytest.mark.parametrize("name", ["windows and caps", "states"])
def test_memory_is_updated_in_place(name, samples):
  """The memory is neither copied nor rewritten, if it is donated."""
  sizes = dataclasses.replace(SIZES, num_pages=3000)
  state = fresh(name, sizes)
  model = functools.partial(models.forward, config=MODELS[name])
  score = functools.partial(rollout.score, model=model, chunk=CHUNK)
  groups = GROUPS._replace(
    completions=GROUPS.completions[:, :samples],
    lengths=GROUPS.lengths[:, :samples],
  )
  groups = jax.tree.map(jnp.asarray, groups)
  program = jax.jit(score, donate_argnums=1)
  compiled = program.lower(weights(name), state, *groups).compile()
  smallest = min(
    leaf.size for leaf in jax.tree.leaves(state.kv) if leaf.ndim > 1
  )
  assert pool_sized_rewrites(compiled, (smallest,)) == []
