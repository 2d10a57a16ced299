"""The experts of all tokens of a rollout, those of cached prefixes included."""

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


def _used(tokens: Any, positions: Any, version: Any) -> Any:
  """What tokens use in a model by hand: [..., J, k], below 256."""
  first = tokens * 7 + positions * 3 + version * 50
  place = np.arange(_LAYERS * _CHOSEN, dtype=np.int32)
  place = place.reshape((1,) * first.ndim + (_LAYERS, _CHOSEN))
  return first[..., None, None] + place


def _model(version, batch, kv):
  """That of `by_hand`, whose experts depend on its weights' version, too."""
  pages, numbers = kv
  logits, pages = by_hand.model(None, batch, pages)
  used = _used(batch.tokens, batch.positions, version)
  for layer in range(_LAYERS):
    numbers = memory.write_expert_ids(
      numbers, batch.views[0], layer, used[:, :, layer]
    )
  return logits, (pages, numbers)


def _begun(
  pages=14,
  slots=3,
  config=_CONFIG,
  prompts=by_hand.PROMPTS,
  temperature=1.0,
  **options,
):
  """Pages of two tokens, too few for all slots."""
  sizes = dataclasses.replace(by_hand.sizes(pages, slots), **options)
  kv = memory.init(
    sizes, num_layers=1, num_kv_heads=1, head_dim=by_hand.WIDTH, dtype="float32"
  )
  numbers = memory.init_expert_ids(sizes, num_layers=_LAYERS, width=_CHOSEN)
  numbers = dataclasses.replace(numbers, values=numbers.values + 255)
  width = max(map(len, prompts))
  rows = [[*prompt, *[10] * (width - len(prompt))] for prompt in prompts]
  return rollout.init(
    jaxkv.init(sizes),
    (kv, numbers),
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
  """Compiled once for all tests."""
  return by_hand.Runner(rollout.all_logits(_model), jnp.int32(0))


def _run(state, steps=by_hand.NO_LIMIT, version=0):
  program = runner()
  program._params = jnp.int32(version)
  return program(state, 1.0, steps)


def _check(out: rollout.Generated, rows, version=0, known=None) -> None:
  """All tokens but the last have their experts; or as many as are known."""
  for row in rows:
    length = int(out.lengths[row]) - 1 if known is None else int(known[row])
    tokens = np.asarray(out.tokens[row])
    wanted = _used(tokens, np.arange(len(tokens)), version)
    wanted[length:] = -1
    np.testing.assert_array_equal(out.experts[row], wanted, str(row))


@pytest.mark.deep
def test_scarce_pages():
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
def test_several_calls_of_a_step():
  """With pages for all, and with so few that steps have fewer calls."""
  config = dataclasses.replace(_CONFIG, draft_tokens=0, decode_steps=4)
  for pages in (60, 14):
    state = _run(_begun(pages, config=config))
    _check(rollout.generated(state), range(8))
    rollout.check(state)


def test_verbs():
  """While they run, and after each verb; and new prompts in old rows."""
  state = _run(_begun(), 6)
  running = np.asarray(state.slots.row).tolist()
  busy = [row for row in running if row < 8]
  known = {
    row: int(state.memory.cache.length[slot])
    for slot, row in enumerate(running)
  }
  assert len(busy) >= 2 and min(known[row] for row in busy) > 0
  _check(rollout.generated(state), busy, known=known)
  # What stood in pages only is not lost with them.
  state, _ = rollout.abort(state, busy[:1])
  state, _ = rollout.requeue(state, busy[1:2])
  _check(rollout.generated(state), busy, known=known)
  state = _run(state)
  state, out = rollout.extend(
    state, [4, 5], [[5, 4]] * 2, [2, 2], max_tokens=[1, 1]
  )
  assert np.all(np.asarray(out.ok)) and busy[0] not in (4, 5)
  state, taken = rollout.harvest(_run(state))
  assert np.all(np.asarray(taken.ok))
  _check(taken.results, busy[:1], known=known)
  _check(taken.results, [row for row in range(8) if row != busy[0]])
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
  wanted = _used(tokens, columns, version)
  wanted[length:] = -1
  np.testing.assert_array_equal(out.experts[row], wanted, str(row))


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
    logits, (pages, numbers) = _model(params, batch, kv)
    used = _used(batch.tokens, batch.positions, batch.rows.numbers[None])
    for layer in range(_LAYERS):
      numbers = memory.write_expert_ids(
        numbers, batch.views[0], layer, used[:, :, layer]
      )
    return logits, (pages, numbers)

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
    wanted = _used(tokens[2:8], columns, np.int32(row))
    np.testing.assert_array_equal(out.experts[row, 2:8], wanted)


def test_new_weights():
  """Those of the weights of a log-prob, else of those that ran last."""
  begun = _run(_begun(), 6)
  ended = np.asarray(begun.queue.status) == by_hand.DONE
  before = rollout.generated(begun)
  known = np.asarray(before.experts) >= 0
  for how in ("recompute", "drop"):
    state = rollout.update_weights(begun, how)
    now = _run(state, 1, version=1) if how == "recompute" else state
    left = np.asarray(rollout.generated(now).experts) >= 0
    # Until they are computed again, or not at all.
    wanted = known if how == "recompute" else known & ended[:, None, None, None]
    assert np.array_equal(left & known, wanted)
    out = rollout.generated(_run(state, version=1))
    _check(out, np.flatnonzero(ended))
    rows = np.flatnonzero(~ended)
    if how == "recompute":
      was_sampled = np.asarray(before.mask).any(axis=1)
      for row in np.flatnonzero(~ended & was_sampled):
        _check_kept(out, before, row)
      rows = np.flatnonzero(~ended & ~was_sampled)
    _check(out, rows, version=1)


def test_in_place():
  """Neither pool is copied, nor what is kept of all sequences."""
  config = dataclasses.replace(_CONFIG, draft_tokens=0, num_samples=1)
  state = _begun(3000, 4, config, [[1] * 8] * 700)
  leaves = jax.tree.leaves((state.memory.kv, state.queue))
  sizes = [leaf.size for leaf in leaves]
  kv: Any = state.memory.kv
  pool, kept = kv[1].values, state.queue.experts
  assert kept is not None
  assert sorted(sizes)[-2:] == [pool.size, kept.size]
  program = jax.jit(runner(), donate_argnums=0)
  compiled = program.lower(state, jnp.float32(1)).compile()
  assert pool_sized_rewrites(compiled, pool.shape) == []


class TestArguments:
  def test_nothing_is_kept_unasked(self):
    config = dataclasses.replace(_CONFIG, record_experts=False)
    assert rollout.generated(_begun(config=config)).experts is None

  def test_a_memory_without_experts(self):
    state = _begun()
    kv: Any = state.memory.kv
    cache, requests = state.memory.cache, rollout.Requests([[1]], [1])
    message = "`kv` must have ExpertIdPages as its"
    for pools in (kv[0], kv[::-1]):
      with pytest.raises(ValueError, match=message):
        rollout.init(cache, pools, requests, jax.random.key(0), _CONFIG)

  def test_a_group_that_loses_them(self):
    groups = (jaxkv.SlidingWindow(3), jaxkv.FullAttention())
    sizes = dataclasses.replace(by_hand.sizes(40, 3), groups=groups)
    kv = memory.init(sizes, num_layers=1, num_kv_heads=1, head_dim=4)
    numbers = memory.init_expert_ids(sizes, num_layers=1, width=1, group=0)
    cache, requests = jaxkv.init(sizes), rollout.Requests([[1]], [1])
    message = r"`ExpertIdPages.group` must .* got 0, Slid"
    with pytest.raises(ValueError, match=message):
      rollout.init(cache, (kv, numbers), requests, jax.random.key(0), _CONFIG)


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
  """Of a decoder; routers are large, and those of a trainer differ a bit."""
  params = models.init_params(jax.random.key(0), _DECODER)

  def changed(path: Any, leaf: jax.Array) -> jax.Array:
    if path[-1].key != "router":
      return leaf
    more = jax.random.normal(jax.random.key(key), leaf.shape, leaf.dtype)
    return leaf * 5 + noise * more

  params = jax.tree_util.tree_map_with_path(changed, params)
  return params | {"embed": params["embed"] * 3}


def test_a_trainer_uses_the_same():
  """In a second rollout of equal prompts, which finds them in the cache.

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
  lengths, params = [16, 13, 14], _weights(1, 0.0)
  run = jax.jit(
    functools.partial(
      rollout.generate, model=functools.partial(models.forward, config=_DECODER)
    )
  )
  cache = jaxkv.init(sizes)
  kv = models.init_kv(_DECODER, sizes, record_experts=True)
  hits, requests = 0, rollout.Requests(prompts, lengths)
  for key in (1, 2):
    state = rollout.init(
      cache, kv, requests, jax.random.key(key), config, version=0
    )
    state = run(params, state)
    out = rollout.generated(state)
    cache, kv = state.memory.cache, state.memory.kv
    before, hits = hits, int(cache.stats.hit_tokens)
  # Full pages of all prompts, but for the token that is drawn from.
  assert hits - before >= 12 + 12 + 12
  ran = np.arange(24)[None] < np.asarray(out.lengths)[:, None] - 1
  rows = (out.tokens, out.positions)
  chosen = chosen_experts(params, *rows, config=_DECODER)
  wanted = np.where(ran[:, :, None, None], chosen, -1)
  np.testing.assert_array_equal(out.experts, wanted)

  def log_probs(weights, experts):
    logits = models.forward_uncached(
      weights, *rows, config=_DECODER, experts=experts
    )
    scores = jax.nn.log_softmax(logits[:, :-1])
    return jnp.take_along_axis(scores, out.tokens[:, 1:, None], axis=2)[..., 0]

  mask = np.asarray(out.mask)[:, 1:]
  gaps = np.abs(log_probs(params, out.experts) - out.log_probs[:, 1:])
  assert mask.sum() == 6 * 8 and np.max(gaps[mask]) <= 1e-5
  other = _weights(2, 0.5)
  own = chosen_experts(other, *rows, config=_DECODER)
  assert np.mean(np.asarray(own)[ran] != wanted[ran]) > 0.05
  replayed = chosen_experts(other, *rows, config=_DECODER, experts=out.experts)
  np.testing.assert_array_equal(np.asarray(replayed)[ran], wanted[ran])
