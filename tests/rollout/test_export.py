"""Sequences that continue in another rollout."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkv
from jaxkv import rollout
from jaxkv import sharding
from tests.models import exact_families as families
from tests.rollout import by_hand
from tests.rollout import moves
from tests.rollout import recipes

_OK, _SKIPPED = jaxkv.Status.OK, jaxkv.Status.SKIPPED
_BAD, _FULL = jaxkv.Status.BAD_SEQUENCE, jaxkv.Status.QUEUE_FULL
_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=3
)
_EMPTY = (0, 0, 0, 0)


def _begun(counts, config=_CONFIG, slots=7, **options):
  options = {"first_sequence": 0} | options
  sizes = by_hand.sizes(60, slots)
  prompts = by_hand.PROMPTS
  return by_hand.begun(
    sizes, config, prompts, num_samples=list(counts), **options
  )


def _target(config=_CONFIG, like=None) -> rollout.RolloutState:
  """A rollout without sequences, perhaps with the secret of another one."""
  state = by_hand.begun_at(_begun(_EMPTY, config), 1.0)
  return state if like is None else _with_key(state, like)


def _with_key(state: rollout.RolloutState, like) -> rollout.RolloutState:
  """Gives a rollout without sequences the secret of another one."""
  cache, other = state.memory.cache, like.memory.cache
  cache = dataclasses.replace(
    cache, secret=jnp.copy(other.secret), root=jnp.copy(other.root)
  )
  return by_hand.with_cache(state, cache)


@pytest.mark.slow
def test_sequences_continue_elsewhere():
  """In other slots and pages, beside others; no token is computed again."""
  run = by_hand.program()
  source = run(_begun((2, 2, 2, 1)), 1.0, 2)
  status = source.queue.status.tolist()
  assert {by_hand.RUNS} <= set(status)
  # Some run, some wait for the prompt of a sample, or to be computed.
  lengths = source.memory.cache.length.tolist()
  assert 0 in lengths and any(length % 2 for length in lengths)
  # The prompt of a sequence that is in the way.
  target = _begun((1, 0, 0, 0), first_sequence=100)
  target = run(_with_key(target, source), 1.0, 3)
  moved = [3, 0, 5, 4, 1, 2]
  source, exported = rollout.export(source, moved)
  assert exported.ok.all()
  target, out = rollout.import_sequences(target, exported, mask=[True] * 6)
  assert out.code.tolist() == [_OK] * 6
  rollout.check(source)
  rollout.check(target)
  target, source = run(target, 1.0), run(source, 1.0)
  assert int(target.counters.recomputed) == 0
  found = {}
  for state in (source, target):
    queue = state.queue
    for row in np.flatnonzero(queue.status == by_hand.DONE).tolist():
      found[int(queue.ids[row])] = queue, row
  assert sorted(found) == [0, 1, 2, 3, 4, 5, 6, 100]
  for number in [*range(7), 100]:
    prompt = by_hand.PROMPTS[number // 2 if number < 100 else 0]
    expected = by_hand.expected(number, prompt, 1.0, _CONFIG)
    by_hand.check_sequence(*found[number], expected)


def test_exported_sequences_can_be_pickled():
  _, exported = rollout.export(_begun((2, 1, 0, 0)), [0, 1, 2], max_pages=1)
  copy = pickle.loads(pickle.dumps(jax.device_get(exported)))
  assert jax.tree.structure(copy) == jax.tree.structure(exported)
  data = [
    jax.random.key_data(keys) for keys in (copy.queue.keys, exported.queue.keys)
  ]
  np.testing.assert_array_equal(*data)
  _, out = rollout.import_sequences(_target(), copy)
  assert out.ok.all()


@pytest.mark.deep
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_sequences_move_between_shards():
  """In one program: each shard exports, and imports what the other sent."""
  run = by_hand.program()
  source = run(_begun((2, 2, 2, 1)), 1.0, 2)
  target = run(
    _with_key(_begun((1, 0, 0, 0), first_sequence=100), source), 1.0, 3
  )
  states = jax.tree.map(lambda *leaves: jnp.stack(leaves), source, target)
  axes = recipes.axes_of(data=2)

  def move(state):
    is_source = lax.axis_index("data") == 0
    ids = jnp.where(is_source, jnp.asarray([3, 0, 5, 4, 1, 2], jnp.int32), -1)
    state, exported = rollout.export(state, ids)
    exported = lax.ppermute(exported, "data", [(0, 1), (1, 0)])
    return rollout.import_sequences(state, exported)

  states = jax.device_put(states, sharding.state_shardings(states, axes=axes))
  moved = functools.partial(sharding.each_shard, move, axes=axes)
  states, out = jax.jit(moved)(states)
  assert out.code.tolist() == [[_SKIPPED] * 6, [_OK] * 6]
  target = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), states)
  rollout.check(target)
  end = run(target, 1.0)
  assert int(end.counters.recomputed) == 0
  for number in range(6):
    (row,) = np.flatnonzero(np.asarray(end.queue.ids) == number).tolist()
    prompt = by_hand.PROMPTS[number // 2]
    expected = by_hand.expected(number, prompt, 1.0, _CONFIG)
    by_hand.check_sequence(end.queue, row, expected)


@pytest.mark.slow
def test_codes():
  """Ids of nobody, ids in use, too few groups, and weights of the past."""
  source = _begun((2, 2, 2, 2))
  before = source
  source, exported = rollout.export(
    source, [1, 9, 6, 1, 4], mask=[True, True, True, True, False], max_pages=0
  )
  assert exported.code.tolist() == [_OK, _BAD, _OK, _BAD, _SKIPPED]
  assert source.queue.status.tolist() == [0, 4, 0, 0, 0, 0, 4, 0]
  rollout.check(source)
  # Sequences of other prompts have taken all groups but one.
  target = _begun((1, 1, 1, 0), first_sequence=50)
  target, out = rollout.import_sequences(target, exported)
  assert out.code.tolist() == [_OK, _SKIPPED, _FULL, _SKIPPED, _SKIPPED]
  assert int(target.queue.ids[7]) == 1 and int(target.queue.next_id) == 56
  rollout.check(target)
  after, out = rollout.import_sequences(target, exported)
  assert out.code.tolist()[0] == _BAD
  _, nothing = rollout.export(target, [])
  assert rollout.import_sequences(target, nothing)[1].code.shape == (0,)
  # A sample joins those of its prompt.
  source, out = rollout.import_sequences(source, exported)
  assert out.ok.tolist() == exported.ok.tolist()
  _same_sequences(source, before)
  newer = rollout.update_weights(before)
  newer, exported = rollout.export(newer, [0], max_pages=0)
  after, out = rollout.import_sequences(_begun(_EMPTY), exported)
  assert out.code.tolist() == [jaxkv.Status.STALE]
  assert after.queue.status.tolist() == [by_hand.EMPTY] * 8


def _same_sequences(state, other):
  for name in ("tokens", "ids", "length", "limit", "status", "order"):
    np.testing.assert_array_equal(
      getattr(state.queue, name), getattr(other.queue, name), err_msg=name
    )
  np.testing.assert_array_equal(
    jax.random.key_data(state.queue.keys),
    jax.random.key_data(other.queue.keys),
  )


@pytest.mark.parametrize(
  ("changes", "name"),
  [
    ({"stop_token": 5}, "RolloutConfig.stop_token"),
    ({"max_length": 15}, "RolloutConfig.max_length"),
  ],
)
def test_other_settings_are_refused(changes, name):
  _, exported = rollout.export(_begun((1, 0, 0, 0)), [0], max_pages=0)
  state = _begun(_EMPTY, dataclasses.replace(_CONFIG, **changes))
  with pytest.raises(ValueError, match=f"with the same {name}"):
    jax.eval_shape(rollout.import_sequences, state, exported)


def test_stacks_and_other_sampling_are_refused():
  state = _begun((1, 0, 0, 0))
  _, exported = rollout.export(state, [0], max_pages=0)
  stack = jax.tree.map(lambda leaf: leaf[None], exported)
  with pytest.raises(
    ValueError, match=r"`exported` .* stack of shape \[1, 1\]"
  ):
    rollout.import_sequences(state, stack)
  sampling = dataclasses.replace(
    exported.queue.sampling, top_k=jnp.ones(1, jnp.int32)
  )
  queue = dataclasses.replace(exported.queue, sampling=sampling)
  other = dataclasses.replace(exported, queue=queue)
  with pytest.raises(ValueError, match=r"`exported` must .*sampling.top_k"):
    jax.eval_shape(rollout.import_sequences, state, other)


@pytest.mark.parametrize(
  "change",
  [lambda layout: layout[:-1], lambda layout: (*layout, ("option", "1"))],
)
def test_another_version_is_refused(change):
  """Another version of jaxkv has fewer or more options."""
  state = _begun((1, 0, 0, 0))
  _, exported = rollout.export(state, [0], max_pages=0)
  layout = change(exported.layout)
  exported = dataclasses.replace(exported, layout=layout)
  with pytest.raises(ValueError, match="equal settings and versions of jaxkv"):
    jax.eval_shape(rollout.import_sequences, state, exported)


@pytest.mark.slow
@pytest.mark.parametrize(
  "other",
  [
    {"dtype": jnp.bfloat16},
    # The page has as many elements.
    {"num_layers": 2, "head_dim": by_hand.WIDTH // 2},
  ],
)
def test_pages_of_another_memory_are_refused(other):
  size = {"num_layers": 1, "num_kv_heads": 1, "head_dim": by_hand.WIDTH}
  kv = jaxkv.kv.init(
    by_hand.sizes(60, 7), **(size | {"dtype": jnp.float32} | other)
  )
  _, exported = rollout.export(_begun((1, 0, 0, 0)), [0])
  state = _begun(_EMPTY)
  memory = dataclasses.replace(state.memory, kv=kv)
  state = dataclasses.replace(state, memory=memory)
  with pytest.raises(ValueError, match="with the same pages"):
    rollout.import_sequences(state, exported)
  with pytest.raises(TypeError, match="must be an Exported, got tuple"):
    rollout.import_sequences(state, (state, exported))


_ROOM = (moves.Place(20, 200, 8), moves.Place(24, 300, 10))
"""A slot for each sequence that arrives."""
_SCARCE = (
  moves.Place(4, 24, 8),
  moves.Place(6, 30, 10, page_size=8),
  moves.Place(5, 16, 8, offload_pages=60),
)
"""No slot is empty for long, and page sizes differ."""
_ALONE = moves.Place(5, 200, 8)
"""The rollout whose sequences never move."""


@functools.cache
def _undisturbed(name, numerics, count, place):
  return _ended(name, numerics, count, (place,), False).results


def _ended(name, numerics, count, places, has_moves=True, **options):
  """Runs so many prompts to their ends; returns the rollouts."""
  config, params = families.decoder(name, numerics=numerics)
  max_pages = options.pop("max_pages", None)
  fleet = moves.Fleet(
    config, params, places, moves.prompts_of(count), **options
  )
  fleet.run(moves=has_moves, max_pages=max_pages)
  fleet.check()
  return fleet


def _check_moves(
  name, count, places, numerics="exact", alone=_ALONE, **options
):
  """Checks results against those of sequences that never moved."""
  fleet = _ended(name, numerics, count, places, **options)
  expected = _undisturbed(name, numerics, count, alone)
  assert len(expected) == count * moves.SAMPLES
  assert len(fleet.moved) > len(expected) // 2
  for number, (tokens, log_probs) in expected.items():
    found, found_log_probs = fleet.results[number]
    assert found == tokens, number
    if numerics == "exact":
      assert found_log_probs == log_probs, number
  return fleet


@pytest.mark.slow
def test_moves_change_no_bit():
  """No token is computed again where slots are empty."""
  # Equal sizes, so that one program serves all.
  fleet = _check_moves("llama", 15, _ROOM[:1] * 2, alone=_ROOM[0])
  assert fleet.recomputed() == 0


@pytest.mark.deep
@pytest.mark.parametrize("name", families.NAMES)
def test_windows_states_latents_and_experts_move(name):
  assert _check_moves(name, 20, _ROOM).recomputed() == 0


@pytest.mark.deep
def test_scarce_slots_and_pages():
  assert _check_moves("llama", 20, _SCARCE).recomputed() > 0


@pytest.mark.deep
@pytest.mark.parametrize(
  "options",
  [
    {"max_pages": 0},
    {"max_pages": 6},
    {"merge_duplicates": True},
    {"prefix_caching": False},
    {"free_policy": "lru"},
    {"prefix_retention_interval": 8},
    {"use_eagle": True},
  ],
  ids=str,
)
def test_caches_of_other_options(options):
  fleet = _check_moves("gemma", 20, _ROOM, **options)
  assert ("max_pages" in options) == (fleet.recomputed() > 0)


@pytest.mark.deep
@pytest.mark.parametrize(
  "options", [{"draft_tokens": 3, "draft_match": 1}, {"decode_steps": 3}]
)
def test_loops_of_other_options(options):
  places = [
    dataclasses.replace(place, options=tuple(changes.items()))
    for place, changes in zip(_ROOM, ({}, options), strict=True)
  ]
  assert _check_moves("llama", 20, places).recomputed() == 0


@pytest.mark.deep
@pytest.mark.parametrize(
  ("name", "numerics"),
  [
    ("llama", "exact"),
    ("gemma", "exact"),
    ("delta_net", "exact"),
    ("llama", "fast"),
  ],
)
@pytest.mark.parametrize("places", [_ROOM, _SCARCE], ids=["room", "scarce"])
def test_a_thousand_sequences(name, numerics, places):
  fleet = _check_moves(name, 650, places, numerics)
  assert len(fleet.moved) >= 1000
  assert (fleet.recomputed() > 0) == (places is _SCARCE)


@pytest.mark.deep
def test_other_secrets_and_versions_compute_again():
  """Pages of another secret, or of older weights, are not used."""
  run = by_hand.program()
  source = run(_begun((2, 2, 2, 1)), 1.0, 3)
  _, exported = rollout.export(source, [0, 1, 2, 3, 4, 5, 6])
  assert int(jnp.max(exported.num_computed)) > 3
  updated = rollout.update_weights(_target(like=source))
  for state in (_target(), updated):
    state, out = rollout.import_sequences(state, exported)
    assert out.ok.all()
    assert not jnp.any(state.queue.status == by_hand.RUNS)
    assert not jnp.any(state.memory.cache.length)
    end = run(state, 1.0)
    assert int(end.counters.recomputed) > 0
    for number in range(7):
      (row,) = np.flatnonzero(end.queue.ids == number)
      expected = by_hand.expected(
        number, by_hand.PROMPTS[number // 2], 1.0, _CONFIG
      )
      length = int(end.queue.length[row])
      assert end.queue.tokens[row, :length].tolist() == expected.tokens


@pytest.mark.deep
def test_kept_pages_of_older_weights_move():
  """As if the sequence had stayed: the model's weights have no effect here."""
  run = by_hand.program()
  source = run(_begun((2, 2, 2, 1)), 1.0, 3)
  source = rollout.update_weights(source, "keep")
  target = rollout.update_weights(_target(like=source), "keep")
  _, exported = rollout.export(source, [0, 1, 2, 3, 4, 5, 6])
  target, out = rollout.import_sequences(target, exported)
  assert out.ok.all()
  assert int(jnp.sum(target.queue.status == by_hand.RUNS)) > 2
  rollout.check(target)
  stayed, moved = run(source, 1.0), run(target, 1.0)
  assert int(moved.counters.recomputed) == 0
  for number in range(7):
    (row,) = np.flatnonzero(moved.queue.ids == number)
    (home,) = np.flatnonzero(stayed.queue.ids == number)
    np.testing.assert_array_equal(
      moved.queue.tokens[row], stayed.queue.tokens[home]
    )


@pytest.mark.slow
def test_a_conversation_moves_with_its_pages():
  """Between two turns: only the new tokens, and the last one, are computed."""
  run = by_hand.program()
  config = dataclasses.replace(_CONFIG, max_new_tokens=3)
  source = run(_begun((1, 0, 0, 0), config), 1.0)
  source, exported = rollout.export(source, [0])
  assert int(exported.num_computed[0]) == 10  # Of 11 tokens, in whole pages.
  target, out = rollout.import_sequences(_target(config, source), exported)
  assert out.ok.all() and target.queue.status[0] == by_hand.DONE
  rollout.check(target)
  assert int(target.memory.cache.pool.queue.num_free) == 59
  target, _ = rollout.extend(target, [0], [[4]], [1], max_tokens=[1])
  target = run(target, 1.0)
  assert int(target.memory.cache.stats.hit_tokens) == 10
  assert int(target.counters.recomputed) == 0


@pytest.mark.deep
def test_settings_and_automata_travel():
  """Stop strings, a guide, penalties, salts and priorities of each sequence."""
  texts = rollout.token_bytes([b"abcdefghijk"[i : i + 1] for i in range(11)])
  guide = rollout.guide("([a-d]|e[a-h])*", texts, 10)
  config = dataclasses.replace(
    _CONFIG, num_samples=1, max_new_tokens=5, stop_token=10
  )
  strings = [["ab", "d"], [], ["aa"], ["ef", "b"]]

  def begun(counts):
    return _begun(
      counts,
      config,
      sampling=rollout.Sampling(
        temperature=np.asarray([0.5, 1.0, 2.0, 3.0], np.float32),
        repetition_penalty=np.asarray([1.0, 1.5, 1.0, 0.7], np.float32),
        stop_strings=rollout.stop_strings(strings, texts),
        logit_bias=[{3: 2.0}, {}, {4: 3.0}, {0: 1.0}],
        min_tokens=[0, 3, 0, 1],
      ),
      extra=guide.init(4),
      salts=np.arange(16, dtype=np.uint32).reshape(4, 4),
      priority=np.asarray([3, 1, 2, 0], np.int32),
    )

  @jax.jit
  def run(guide, state, steps):
    return rollout.generate(
      None,
      state,
      rollout.Until(steps=steps),
      model=rollout.all_logits(by_hand.model),
      process=guide.process,
    )

  source = run(guide, begun((1, 1, 1, 1)), jnp.int32(4))
  assert np.any(np.asarray(source.queue.status) == by_hand.RUNS)
  _, exported = rollout.export(source, [3, 1, 0, 2])
  target = _with_key(begun(_EMPTY), source)
  target, out = rollout.import_sequences(target, exported)
  assert out.ok.all()
  rollout.check(target)
  stayed, moved = (
    run(guide, state, jnp.int32(by_hand.NO_LIMIT)) for state in (source, target)
  )
  assert int(moved.counters.recomputed) == 0
  order = np.asarray(moved.queue.ids)
  for name in ("tokens", "length", "finish", "stop", "stop_states", "extra"):
    expected, found = (getattr(x.queue, name) for x in (stayed, moved))
    expected = jax.tree.map(lambda array: array[order], expected)
    jax.tree.map(np.testing.assert_array_equal, expected, found)
  assert len(set(moved.queue.length.tolist())) > 1


@pytest.mark.slow
def test_drafts_do_not_copy_removed_sequences():
  """A group is imported without the sample that was in its first row."""
  config = dataclasses.replace(_CONFIG, draft_tokens=2, draft_match=1)
  state, _ = rollout.export(_begun((2, 0, 0, 0), config), [0, 1])
  source = _begun((0, 2, 0, 0), config)
  _, exported = rollout.export(source, [3])
  state, out = rollout.import_sequences(state, exported)
  assert out.code.tolist() == [_OK]
  row = int(jnp.argmax(state.queue.status != by_hand.EMPTY))
  # An entry is 1 + 2 * (the place after an n-gram) + the number of its sample.
  places = (state.queue.ngrams.table[row // 2] - 1) // 2
  assert int(jnp.max(places)) < int(state.queue.length[row])
