"""Sequences that continue in another rollout."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import guides
from jaxkv import rollout
from tests.engine import by_hand
from tests.models import exact_families as families
from tests.transfer import moves

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


def _target(config=_CONFIG, secret_of=None) -> rollout.RolloutState:
  """Returns an empty rollout, with the secret of `secret_of` if it is given."""
  state = by_hand.begun_at(_begun(_EMPTY, config), 1.0)
  return state if secret_of is None else _with_key(state, secret_of)


def _with_key(state: rollout.RolloutState, secret_of) -> rollout.RolloutState:
  """Returns the rollout with the secret of another one."""
  donor = secret_of.memory.cache
  cache = dataclasses.replace(
    state.memory.cache,
    secret=jnp.copy(donor.secret),
    root=jnp.copy(donor.root),
  )
  return by_hand.with_cache(state, cache)


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


@pytest.mark.slow
def test_codes_of_export_and_import():
  """Unknown ids, ids in use, too few groups, and older weights."""
  source = _begun((2, 2, 2, 2))
  original = source
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
  new_state, out = rollout.import_sequences(target, exported)
  assert out.code.tolist()[0] == _BAD
  _, empty_export = rollout.export(target, [])
  assert rollout.import_sequences(target, empty_export)[1].code.shape == (0,)
  # A sample joins those of its prompt.
  source, out = rollout.import_sequences(source, exported)
  assert out.ok.tolist() == exported.ok.tolist()
  _same_sequences(source, original)
  newer = rollout.update_weights(original)
  newer, exported = rollout.export(newer, [0], max_pages=0)
  new_state, out = rollout.import_sequences(_begun(_EMPTY), exported)
  assert out.code.tolist() == [jaxkv.Status.STALE]
  assert new_state.queue.status.tolist() == [by_hand.EMPTY] * 8


def _same_sequences(state, expected):
  for name in ("tokens", "ids", "length", "limit", "status", "order"):
    np.testing.assert_array_equal(
      getattr(state.queue, name), getattr(expected.queue, name), err_msg=name
    )
  np.testing.assert_array_equal(
    jax.random.key_data(state.queue.keys),
    jax.random.key_data(expected.queue.keys),
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
  other_export = dataclasses.replace(exported, queue=queue)
  with pytest.raises(ValueError, match=r"`exported` must .*sampling.top_k"):
    jax.eval_shape(rollout.import_sequences, state, other_export)


@pytest.mark.parametrize(
  "change",
  [lambda layout: layout[:-1], lambda layout: (*layout, ("option", "1"))],
)
def test_other_layouts_are_refused(change):
  """Another version of jaxkv has fewer or more options."""
  state = _begun((1, 0, 0, 0))
  _, exported = rollout.export(state, [0], max_pages=0)
  layout = change(exported.layout)
  exported = dataclasses.replace(exported, layout=layout)
  with pytest.raises(ValueError, match="equal settings and versions of jaxkv"):
    jax.eval_shape(rollout.import_sequences, state, exported)


@pytest.mark.slow
@pytest.mark.parametrize(
  "kv_options",
  [
    {"dtype": jnp.bfloat16},
    # The page has as many elements.
    {"num_layers": 2, "head_dim": by_hand.WIDTH // 2},
  ],
)
def test_pages_of_another_memory_are_refused(kv_options):
  defaults = {"num_layers": 1, "num_kv_heads": 1, "head_dim": by_hand.WIDTH}
  kv = jaxkv.kv.init(
    by_hand.sizes(60, 7), **(defaults | {"dtype": jnp.float32} | kv_options)
  )
  _, exported = rollout.export(_begun((1, 0, 0, 0)), [0])
  state = _begun(_EMPTY)
  memory = dataclasses.replace(state.memory, kv=kv)
  state = dataclasses.replace(state, memory=memory)
  with pytest.raises(ValueError, match="with the same pages"):
    rollout.import_sequences(state, exported)
  with pytest.raises(TypeError, match="must be an Exported, got tuple"):
    rollout.import_sequences(state, (state, exported))


_ROOM = (moves.Spec(20, 200, 8), moves.Spec(24, 300, 10))
"""A slot for each sequence that arrives."""
_SCARCE = (
  moves.Spec(4, 24, 8),
  moves.Spec(6, 30, 10, page_size=8),
  moves.Spec(5, 16, 8, offload_pages=60),
)
"""No slot is empty for long, and page sizes differ."""
_UNMOVED = moves.Spec(5, 200, 8)
"""The rollout whose sequences never move."""


@functools.cache
def _unmoved_results(name, numerics, count, spec):
  return _run_fleet(name, numerics, count, (spec,), False).results


def _run_fleet(name, numerics, count, specs, has_moves=True, **options):
  """Runs `count` prompts to their ends; returns the rollouts."""
  config, params = families.decoder(name, numerics=numerics)
  max_pages = options.pop("max_pages", None)
  fleet = moves.Fleet(config, params, specs, moves.prompts_of(count), **options)
  fleet.run(moves=has_moves, max_pages=max_pages)
  fleet.check()
  return fleet


def _check_moves(
  name, count, specs, numerics="exact", unmoved_spec=_UNMOVED, **options
):
  """Checks results against those of sequences that never moved."""
  fleet = _run_fleet(name, numerics, count, specs, **options)
  expected = _unmoved_results(name, numerics, count, unmoved_spec)
  assert len(expected) == count * moves.SAMPLES
  assert len(fleet.moved) > len(expected) // 2
  for seq_id, (tokens, log_probs) in expected.items():
    moved_tokens, moved_log_probs = fleet.results[seq_id]
    assert moved_tokens == tokens, seq_id
    if numerics == "exact":
      assert moved_log_probs == log_probs, seq_id
  return fleet


@pytest.mark.slow
def test_moves_change_no_bit():
  """No token is computed again where slots are empty."""
  # Equal sizes, so that one program serves all.
  fleet = _check_moves("llama", 15, _ROOM[:1] * 2, unmoved_spec=_ROOM[0])
  assert fleet.recomputed() == 0


@pytest.mark.deep
@pytest.mark.parametrize("name", families.NAMES)
def test_every_family_moves_without_recomputing(name):
  assert _check_moves(name, 20, _ROOM).recomputed() == 0


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
def test_moves_with_cache_options_change_no_bit(options):
  fleet = _check_moves("gemma", 20, _ROOM, **options)
  assert ("max_pages" in options) == (fleet.recomputed() > 0)


@pytest.mark.deep
@pytest.mark.parametrize(
  "options", [{"draft_tokens": 3, "draft_match": 1}, {"decode_steps": 3}]
)
def test_moves_between_decode_options_change_no_bit(options):
  specs = [
    dataclasses.replace(spec, options=tuple(changes.items()))
    for spec, changes in zip(_ROOM, ({}, options), strict=True)
  ]
  assert _check_moves("llama", 20, specs).recomputed() == 0


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
@pytest.mark.parametrize("specs", [_ROOM, _SCARCE], ids=["room", "scarce"])
def test_a_thousand_moves_change_no_bit(name, numerics, specs):
  fleet = _check_moves(name, 650, specs, numerics)
  assert len(fleet.moved) >= 1000
  assert (fleet.recomputed() > 0) == (specs is _SCARCE)


@pytest.mark.deep
def test_kept_pages_of_older_weights_move():
  """Tokens are unchanged, as the model does not read its weights."""
  run = by_hand.program()
  source = run(_begun((2, 2, 2, 1)), 1.0, 3)
  source = rollout.update_weights(source, "keep")
  target = rollout.update_weights(_target(secret_of=source), "keep")
  _, exported = rollout.export(source, [0, 1, 2, 3, 4, 5, 6])
  target, out = rollout.import_sequences(target, exported)
  assert out.ok.all()
  assert int(jnp.sum(target.queue.status == by_hand.RUNS)) > 2
  rollout.check(target)
  stayed = run(source, 1.0)
  moved = run(target, 1.0)
  assert int(moved.counters.recomputed) == 0
  for seq_id in range(7):
    (row,) = np.flatnonzero(moved.queue.ids == seq_id)
    (home,) = np.flatnonzero(stayed.queue.ids == seq_id)
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
  assert int(target.memory.cache.pool.queue.num_free[0]) == 59
  target, _ = rollout.extend(target, [0], [[4]], [1], max_tokens=[1])
  target = run(target, 1.0)
  assert int(target.memory.cache.stats.hit_tokens) == 10
  assert int(target.counters.recomputed) == 0


@pytest.mark.deep
def test_settings_and_automata_move():
  """Stop strings, a guide, penalties, salts and priorities of each sequence."""
  texts = guides.token_bytes([b"abcdefghijk"[i : i + 1] for i in range(11)])
  guide = guides.guide("([a-d]|e[a-h])*", texts, 10)
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
      model=by_hand.all_logits(by_hand.model),
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
    expected, actual = (getattr(x.queue, name) for x in (stayed, moved))
    expected = jax.tree.map(lambda array: array[order], expected)
    jax.tree.map(np.testing.assert_array_equal, expected, actual)
  assert len(set(moved.queue.length.tolist())) > 1
