"""The experts of all tokens of a rollout, also of cached prefixes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as memory
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.engine import expert_records
from tests.models.chosen_experts import chosen_experts
from tests.rollout import by_hand
from tests.tools.pool_copies import pool_sized_rewrites

pytestmark = pytest.mark.slow

_LAYERS, _CHOSEN = 2, 3
_CONFIG = rollout.RolloutConfig(
  num_samples=2,
  max_new_tokens=6,
  max_length=15,
  prefill_chunk=4,
  draft_tokens=2,
  draft_match=1,
  draft_columns=3,
  record_experts=True,
)


def _experts_of(tokens: Any, positions: Any, version: Any) -> Any:
  """Returns the experts of tokens of a toy model: [..., J, k], below 256."""
  base = tokens * 7 + positions * 3 + version * 50
  offsets = np.arange(_LAYERS * _CHOSEN, dtype=np.int32)
  offsets = offsets.reshape((1,) * base.ndim + (_LAYERS, _CHOSEN))
  return base[..., None, None] + offsets


def _model(version, batch, kv):
  """Runs the model of `by_hand`; experts depend on the weights' version."""
  pages, expert_ids = kv
  logits, pages = by_hand.model(None, batch, pages)
  used = _experts_of(batch.tokens, batch.positions, version)
  for layer in range(_LAYERS):
    expert_ids = memory.write_expert_ids(
      expert_ids, batch.views[0], layer, used[:, :, layer]
    )
  return logits, (pages, expert_ids)


def _begun(
  pages=14,
  slots=3,
  config=_CONFIG,
  prompts=by_hand.PROMPTS,
  temperature=1.0,
  **options,
):
  """Returns a rollout in pages of two tokens, too few for all slots."""
  sizes = dataclasses.replace(by_hand.sizes(pages, slots), **options)
  kv = memory.init(
    sizes, num_layers=1, num_kv_heads=1, head_dim=by_hand.WIDTH, dtype="float32"
  )
  expert_ids = memory.init_expert_ids(sizes, num_layers=_LAYERS, width=_CHOSEN)
  expert_ids = dataclasses.replace(expert_ids, values=expert_ids.values + 255)
  width = max(map(len, prompts))
  rows = [[*prompt, *[10] * (width - len(prompt))] for prompt in prompts]
  return rollout.init(
    jaxkv.init(sizes),
    (kv, expert_ids),
    rollout.Requests(
      rows,
      list(map(len, prompts)),
      sampling=rollout.Sampling(temperature=temperature),
    ),
    jax.random.key(7),
    config,
  )


@functools.cache
def runner() -> by_hand.Runner:
  """Returns a rollout that is compiled once for all tests."""
  return by_hand.Runner(rollout.all_logits(_model), jnp.int32(0))


def _run(state, steps=by_hand.NO_LIMIT, version=0):
  program = runner()
  program._params = jnp.int32(version)
  return program(state, 1.0, steps)


def _check(out: rollout.Generated, rows, version=0, counts=None) -> None:
  """Checks the experts of all tokens but the last, or of the first `counts`."""
  for row in rows:
    length = int(out.lengths[row]) - 1 if counts is None else int(counts[row])
    tokens = np.asarray(out.tokens[row])
    expected = _experts_of(tokens, np.arange(len(tokens)), version)
    expected[length:] = -1
    np.testing.assert_array_equal(out.experts[row], expected, str(row))


@pytest.mark.fast
def test_experts_under_which_a_token_was_sampled_are_kept():
  """After preemption, pages have other experts for the first five tokens."""
  state = _begun(slots=2)
  width = state.queue.width
  # Of each row, tokens 4 to 7 were sampled; row 3 has no experts yet.
  versions = np.full((8, width), -1, np.int32)
  versions[:, 4:8] = 0
  experts = np.full(state.queue.experts.shape, -1, np.int16)
  experts[5, :7] = 3
  state = by_hand.with_queue(
    state, versions=jnp.asarray(versions), experts=jnp.asarray(experts)
  )
  cache, _ = jaxkv.allocate(state.memory.cache, [5, 5])
  cache, _ = jaxkv.commit(cache, [[1] * 5] * 2, [5, 5])
  pools: Any = state.memory.kv
  kv, expert_ids = pools
  expert_ids = dataclasses.replace(
    expert_ids, values=jnp.full_like(expert_ids.values, 9)
  )
  queue = jax.jit(expert_records.save_experts)(
    state.queue, (kv, expert_ids), cache, jnp.asarray([5, 3], jnp.int32)
  )
  saved = np.asarray(queue.experts)
  assert (saved == saved[:, :, :1, :1]).all()
  none = [-1] * width
  # Token 3 and later ones predict tokens that were sampled.
  expected = [none] * 8
  expected[5] = [9, 9, 9, 3, 3, 3, 3, *none[7:]]
  expected[3] = [9, 9, 9, 9, 9, *none[5:]]
  assert saved[:, :, 0, 0].tolist() == expected


@pytest.mark.deep
def test_preempted_sequences_keep_their_experts():
  """Forks, drafts, cached prefixes, and sequences that lose their pages."""
  state = _run(_begun())
  assert int(state.counters.preempted) > 0
  assert int(state.counters.forked) > 0
  assert 0 < int(state.counters.accepted) < int(state.counters.drafted)
  out = rollout.generated(state)
  assert out.experts.shape == (8, 15, _LAYERS, _CHOSEN)
  assert out.experts.dtype == jnp.int16
  _check(out, range(8))
  rollout.check(state)


@pytest.mark.deep
def test_decode_steps_record_all_experts():
  """60 pages are enough; 14 shorten the rounds."""
  config = dataclasses.replace(_CONFIG, draft_tokens=0, decode_steps=4)
  for pages in (60, 14):
    state = _run(_begun(pages, config=config))
    _check(rollout.generated(state), range(8))
    rollout.check(state)


def test_verbs_keep_recorded_experts():
  """Experts of running sequences, after each verb, and of reused rows."""
  state = _run(_begun(), 6)
  running = np.asarray(state.slots.row).tolist()
  busy = [row for row in running if row < 8]
  counts = {
    row: int(state.memory.cache.length[slot])
    for slot, row in enumerate(running)
  }
  assert len(busy) >= 2 and min(counts[row] for row in busy) > 0
  _check(rollout.generated(state), busy, counts=counts)
  # What stood in pages only is not lost with them.
  state, _ = rollout.abort(state, busy[:1])
  state, _ = rollout.requeue(state, busy[1:2])
  _check(rollout.generated(state), busy, counts=counts)
  state = _run(state)
  state, out = rollout.extend(
    state, [4, 5], [[5, 4]] * 2, [2, 2], max_tokens=[1, 1]
  )
  assert np.all(np.asarray(out.ok)) and busy[0] not in (4, 5)
  state, harvested = rollout.harvest(_run(state))
  assert np.all(np.asarray(harvested.ok))
  _check(harvested.results, busy[:1], counts=counts)
  _check(harvested.results, [row for row in range(8) if row != busy[0]])
  state, _ = rollout.submit(state, rollout.Requests([[7, 8, 3]], [3]))
  assert np.all(np.asarray(rollout.generated(state).experts) == -1)
  out = rollout.generated(_run(state))
  _check(out, [0, 1])
  assert np.all(np.asarray(out.experts)[2:] == -1)


def _check_kept(out: rollout.Generated, before: rollout.Generated, row) -> None:
  """Checks experts of a row that another version of the model recomputed.

  Tokens whose next token is in `before` and was sampled have the experts of
  version 0.
  """
  length = int(out.lengths[row]) - 1
  tokens = np.asarray(out.tokens[row])
  columns = np.arange(len(tokens))
  was_sampled = np.asarray(before.mask[row])
  version = 1 - np.append(was_sampled[1:], False).astype(np.int32)
  assert set(version[:length]) == {0, 1}
  expected = _experts_of(tokens, columns, version)
  expected[length:] = -1
  np.testing.assert_array_equal(out.experts[row], expected, str(row))


def test_log_probs_and_experts_are_of_one_computation():
  """Sequences lose their pages, and another model computes them again."""
  state = _run(_begun(60), 9)
  before = rollout.generated(state)
  waiting = [row for row in np.asarray(state.slots.row).tolist() if row < 8]
  waiting = [row for row in waiting if np.asarray(before.mask[row]).any()]
  assert waiting
  state, _ = rollout.requeue(state, state.queue.ids)
  cache, _ = jaxkv.reset_prefix_cache(state.memory.cache)
  memory = dataclasses.replace(state.memory, cache=cache)
  state = _run(dataclasses.replace(state, memory=memory), version=1)
  out = rollout.generated(state)
  for row in waiting:
    _check_kept(out, before, row)


def test_merged_pages():
  """Of equal samples, each has its own experts, though they share pages."""

  def model(params, batch, kv):
    logits, (pages, expert_ids) = _model(params, batch, kv)
    used = _experts_of(batch.tokens, batch.positions, batch.rows.numbers[None])
    for layer in range(_LAYERS):
      expert_ids = memory.write_expert_ids(
        expert_ids, batch.views[0], layer, used[:, :, layer]
      )
    return logits, (pages, expert_ids)

  config = dataclasses.replace(_CONFIG, draft_tokens=0)
  state = _begun(
    60, 2, config, [[1, 2, 3]], merge_duplicates=True, temperature=0.0
  )
  generate = functools.partial(
    rollout.generate, model=rollout.all_logits(model)
  )
  state = jax.jit(generate)(jnp.int32(0), state)
  assert int(state.memory.cache.stats.merged_pages) > 0
  out = rollout.generated(state)
  np.testing.assert_array_equal(out.tokens[0], out.tokens[1])
  for row in range(2):
    tokens, columns = np.asarray(out.tokens[row]), np.arange(2, 8)
    expected = _experts_of(tokens[2:8], columns, np.int32(row))
    np.testing.assert_array_equal(out.experts[row, 2:8], expected)


def test_experts_of_new_weights():
  """Experts are those of a log-prob's weights, else of those that ran last."""
  start_state = _run(_begun(), 6)
  ended = np.asarray(start_state.queue.status) == by_hand.DONE
  before = rollout.generated(start_state)
  has_ids = np.asarray(before.experts) >= 0
  for how in ("recompute", "drop"):
    state = rollout.update_weights(start_state, how)
    new_state = _run(state, 1, version=1) if how == "recompute" else state
    left = np.asarray(rollout.generated(new_state).experts) >= 0
    # Until they are computed again, or not at all.
    expected = has_ids & (ended[:, None, None, None] | (how == "recompute"))
    assert np.array_equal(left & has_ids, expected)
    out = rollout.generated(_run(state, version=1))
    _check(out, np.flatnonzero(ended))
    rows = np.flatnonzero(~ended)
    if how == "recompute":
      was_sampled = np.asarray(before.mask).any(axis=1)
      for row in np.flatnonzero(~ended & was_sampled):
        _check_kept(out, before, row)
      rows = np.flatnonzero(~ended & ~was_sampled)
    _check(out, rows, version=1)


def test_pools_are_updated_in_place():
  """Neither the pools nor the recorded experts are copied."""
  config = dataclasses.replace(_CONFIG, draft_tokens=0, num_samples=1)
  state = _begun(3000, 4, config, [[1] * 8] * 700)
  leaves = jax.tree.leaves((state.memory.kv, state.queue))
  leaf_sizes = [leaf.size for leaf in leaves]
  kv: Any = state.memory.kv
  pool = kv[1].values
  experts = state.queue.experts
  assert experts is not None
  assert sorted(leaf_sizes)[-2:] == [pool.size, experts.size]
  program = jax.jit(runner(), donate_argnums=0)
  compiled = program.lower(state, jnp.float32(1)).compile()
  assert pool_sized_rewrites(compiled, pool.shape) == []


class TestArguments:
  def test_experts_are_none_by_default(self):
    config = dataclasses.replace(_CONFIG, record_experts=False)
    assert rollout.generated(_begun(config=config)).experts is None

  def test_memory_without_expert_ids_is_refused(self):
    state = _begun()
    kv: Any = state.memory.kv
    cache = state.memory.cache
    requests = rollout.Requests([[1]], [1])
    message = "`kv` must have ExpertIdPages as its"
    for pools in (kv[0], kv[::-1]):
      with pytest.raises(ValueError, match=message):
        rollout.init(cache, pools, requests, jax.random.key(0), _CONFIG)

  def test_expert_ids_in_a_window_group_are_refused(self):
    groups = (jaxkv.SlidingWindow(3), jaxkv.FullAttention())
    sizes = dataclasses.replace(by_hand.sizes(40, 3), groups=groups)
    kv = memory.init(sizes, num_layers=1, num_kv_heads=1, head_dim=4)
    experts = memory.init_expert_ids(sizes, num_layers=1, width=1, group=0)
    cache = jaxkv.init(sizes)
    requests = rollout.Requests([[1]], [1])
    message = r"`ExpertIdPages.group` must .* got 0, Slid"
    with pytest.raises(ValueError, match=message):
      rollout.init(cache, (kv, experts), requests, jax.random.key(0), _CONFIG)


_ATTENTION = models.Attention(num_heads=2, num_kv_heads=1, head_dim=8)
_EXPERTS = models.Experts(
  num_experts=6, num_chosen=2, inner_dim=12, scores="chosen_softmax"
)
_DECODER = models.Decoder(
  vocab_size=23,
  embed_dim=16,
  layers=(
    models.Layer(
      attention=dataclasses.replace(_ATTENTION, window=5), mlp=_EXPERTS
    ),
    models.Layer(attention=_ATTENTION, mlp=_EXPERTS),
  ),
)


def _weights(key: int, noise: float) -> Any:
  """Returns weights of a decoder; `noise` changes the routers a little."""
  params = models.init_params(jax.random.key(0), _DECODER)

  def changed(path: Any, leaf: jax.Array) -> jax.Array:
    if path[-1].key != "router":
      return leaf
    normal = jax.random.normal(jax.random.key(key), leaf.shape, leaf.dtype)
    return leaf * 5 + noise * normal

  params = jax.tree_util.tree_map_with_path(changed, params)
  return params | {"embed": params["embed"] * 3}


def test_trainer_replays_the_recorded_experts():
  """A second rollout finds its prompts, and their experts, in the cache.

  A trainer with the same weights has the same log-probabilities. One that
  would choose others replays those of the rollout.
  """
  sizes = jaxkv.CacheConfig(
    num_pages=90, page_size=4, num_slots=3, pages_per_slot=8,
    groups=models.cache_groups(_DECODER),
  )  # fmt: skip
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=8, prefill_chunk=8, record_experts=True
  )
  rng = np.random.default_rng(0)
  prompts = rng.integers(0, 23, (3, 16)).astype(np.int32)
  prompts[1, :9] = prompts[0, :9]
  params = _weights(1, 0.0)
  run = jax.jit(
    functools.partial(
      rollout.generate, model=functools.partial(models.forward, config=_DECODER)
    )
  )
  cache = jaxkv.init(sizes)
  kv = models.init_kv(_DECODER, sizes, record_experts=True)
  hits = [0]
  requests = rollout.Requests(prompts, [16, 13, 14])
  for key in (1, 2):
    state = rollout.init(
      cache, kv, requests, jax.random.key(key), config, version=0
    )
    state = run(params, state)
    out = rollout.generated(state)
    cache = state.memory.cache
    kv = state.memory.kv
    hits.append(int(cache.stats.hit_tokens))
  # Full pages of all prompts, but for the token that is drawn from.
  assert hits[2] - hits[1] >= 12 + 12 + 12
  ran = np.arange(24)[None] < np.asarray(out.lengths)[:, None] - 1
  rows = (out.tokens, out.positions)
  chosen = chosen_experts(params, *rows, config=_DECODER)
  expected = np.where(ran[:, :, None, None], chosen, -1)
  np.testing.assert_array_equal(out.experts, expected)

  def log_probs(weights, experts):
    logits = models.forward_uncached(
      weights, *rows, config=_DECODER, experts=experts
    )
    scores = jax.nn.log_softmax(logits[:, :-1])
    return jnp.take_along_axis(scores, out.tokens[:, 1:, None], axis=2)[..., 0]

  mask = np.asarray(out.mask)[:, 1:]
  gaps = np.abs(log_probs(params, out.experts) - out.log_probs[:, 1:])
  assert mask.sum() == 6 * 8 and np.max(gaps[mask]) <= 1e-5
  other_params = _weights(2, 0.5)
  other_experts = chosen_experts(other_params, *rows, config=_DECODER)
  assert np.mean(np.asarray(other_experts)[ran] != expected[ran]) > 0.05
  replayed = chosen_experts(
    other_params, *rows, config=_DECODER, experts=out.experts
  )
  np.testing.assert_array_equal(np.asarray(replayed)[ran], expected[ran])
