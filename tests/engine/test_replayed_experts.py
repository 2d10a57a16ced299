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
from tests.engine import by_hand
from tests.models import tiny_decoders as tiny
from tests.models.chosen_experts import chosen_experts
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


def _experts_of(tokens: Any, positions: Any, row: Any) -> Any:
  """Returns the experts of tokens of a toy model: [..., J, k], below 256."""
  base = tokens * 7 + positions * 3 + row * 50
  offsets = np.arange(_LAYERS * _CHOSEN, dtype=np.int32)
  offsets = offsets.reshape((1,) * base.ndim + (_LAYERS, _CHOSEN))
  return base[..., None, None] + offsets


def _model(params, batch, kv):
  """Runs the model of `by_hand`; experts depend on the row of the queue."""
  pages, expert_ids = kv
  logits, pages = by_hand.model(params, batch, pages)
  used = _experts_of(batch.tokens, batch.positions, batch.rows.numbers[None])
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
  **options,
):
  """Returns a rollout in pages of two tokens."""
  sizes = dataclasses.replace(by_hand.sizes(pages, slots), **options)
  expert_ids = memory.init_expert_ids(sizes, num_layers=_LAYERS, width=_CHOSEN)
  expert_ids = dataclasses.replace(expert_ids, values=expert_ids.values + 255)
  kv = by_hand.pages(sizes), expert_ids
  return by_hand.begun(sizes, config, prompts, kv=kv)


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


def test_merged_pages():
  """Of equal samples, each has its own experts, though they share pages."""
  config = dataclasses.replace(_CONFIG, draft_tokens=0)
  state = _begun(60, 2, config, [[1, 2, 3]], merge_duplicates=True)
  state = by_hand.Runner(by_hand.all_logits(_model))(state, 0.0)
  assert int(state.memory.cache.stats.merged_pages) > 0
  out = rollout.generated(state)
  np.testing.assert_array_equal(out.tokens[0], out.tokens[1])
  for row in range(2):
    tokens, columns = np.asarray(out.tokens[row]), np.arange(2, 8)
    expected = _experts_of(tokens[2:8], columns, np.int32(row))
    np.testing.assert_array_equal(out.experts[row, 2:8], expected)


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
  runner = by_hand.Runner(by_hand.all_logits(_model))
  program = jax.jit(runner, donate_argnums=0)
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


_DECODER = tiny.decoder(
  (
    tiny.layer(tiny.attention(window=5), tiny.EXPERTS),
    tiny.layer(tiny.attention(), tiny.EXPERTS),
  )
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
  sizes = tiny.cache_config(
    _DECODER, num_pages=90, page_size=4, num_slots=3, pages_per_slot=8
  )
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
