"""Prompts and their samples from a rollout, for a loss of groups."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rl
from jaxkv import rollout
from tests.engine import by_hand
from tests.models import tiny_decoders as tiny

_MODEL = tiny.decoder(tiny.LAYERS["llama"])
_SIZES = jaxkv.CacheConfig(
  num_pages=256, page_size=4, num_slots=16, pages_per_slot=4
)
_G = 3
_W = 9
# Three prompts: with all samples, with the last one alone, with none.
_PROMPTS = np.array([2, 2, 2, 0, 0, 4, 0, 0, 0], np.int32)
_LENGTHS = np.array([5, 2, 9, 0, 0, 7, 0, 0, 0], np.int32)


def _results() -> rollout.Generated:
  """Returns results in which all tokens and their data are distinct."""
  rows = len(_LENGTHS)
  columns = np.arange(_W, dtype=np.int32)
  real = columns[None] < _LENGTHS[:, None]
  answers = real & (columns[None] >= _PROMPTS[:, None])
  serials = 1 + np.arange(rows * _W, dtype=np.int32).reshape(rows, _W)
  # The samples of a prompt have its tokens, and others spoke in column 5.
  serials[1:3, :2] = serials[0, :2]
  mask = answers & (columns[None] != 5)
  tops = np.where(mask, serials, 0)[..., None] + np.zeros(2, np.int32)
  experts = np.where(real, serials, -1)[..., None, None]
  values = {
    "ids": np.arange(rows),
    "tokens": np.where(real, serials, 0),
    "positions": np.broadcast_to(columns, real.shape),
    "lengths": _LENGTHS,
    "prompt_lengths": _PROMPTS,
    "turn_starts": _PROMPTS,
    "mask": mask,
    "log_probs": np.where(mask, -serials, 0).astype(np.float32),
    "versions": np.where(mask, serials % 5, -1),
    "records": rollout.Records(top_tokens=jnp.asarray(tops)),
    "experts": (experts + np.zeros((2, 3), np.int32)).astype(np.int16),
    "finish": np.zeros(rows, np.int32),
    "code": np.zeros(rows, np.int32),
    "stop": np.zeros(rows, np.int32),
    "is_new": np.zeros(rows, bool),
    "valid": _LENGTHS > 0,
  }
  config = rollout.RolloutConfig(num_samples=3, max_new_tokens=4)
  return rollout.Generated(config=config, **jax.tree.map(jnp.asarray, values))


@pytest.mark.parametrize(
  ("max_length", "columns"), [(0, (_W - 4, 4)), (_W, (_W - 1, _W - 1))]
)
def test_default_sizes_are_those_of_the_rollout(max_length, columns):
  results = _results()
  config = dataclasses.replace(results.config, max_length=max_length)
  results = dataclasses.replace(results, config=config)
  groups = rollout.grouped(results)
  chex.assert_trees_all_equal(
    groups,
    rollout.grouped(
      results,
      num_samples=3,
      prompt_columns=columns[0],
      completion_columns=columns[1],
    ),
  )


@pytest.mark.parametrize(("prompt", "columns"), [(4, 7), (9, 9), (3, 2)])
def test_every_sample_begins_in_column_0(prompt, columns):
  results = _results()
  out = rollout.grouped(
    results,
    num_samples=_G,
    prompt_columns=prompt,
    completion_columns=columns,
  )
  shape = (3, _G, columns)
  fields: dict[str, Any] = {
    "completions": (out.completions, results.tokens, 0),
    "mask": (out.mask, results.mask, False),
    "log_probs": (out.log_probs, results.log_probs, 0),
    "versions": (out.versions, results.versions, -1),
    "tops": (out.records.top_tokens, results.records.top_tokens, 0),
    "experts": (out.experts[1], results.experts, -1),
  }
  for actual, source, fill in fields.values():
    expected = np.full((*shape, *source.shape[2:]), fill, source.dtype)
    for row, (start, length) in enumerate(zip(_PROMPTS, _LENGTHS, strict=True)):
      part = np.asarray(source)[row, start:length][:columns]
      expected[row // _G, row % _G, : len(part)] = part
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == source.dtype
  for actual, source, fill in (
    (out.prompts, results.tokens, 0),
    (out.experts[0], results.experts, -1),
  ):
    expected = np.full((3, prompt, *source.shape[2:]), fill, source.dtype)
    for group, row in ((0, 0), (1, 5)):
      part = np.asarray(source)[row, : _PROMPTS[row]][:prompt]
      expected[group, : len(part)] = part
    np.testing.assert_array_equal(actual, expected)
  np.testing.assert_array_equal(out.prompt_lengths, [2, 4, 0])
  np.testing.assert_array_equal(
    out.completion_lengths, (_LENGTHS - _PROMPTS).reshape(3, _G)
  )


def test_experts_of_a_prompt_whose_first_sample_never_ran():
  results = _results()
  expected = results.experts[1, :2]
  # The last sample chose other experts for the first token.
  experts = results.experts.at[0].set(-1).at[2, 0].set(7)
  results = dataclasses.replace(results, experts=experts)
  experts = rollout.grouped(results, prompt_columns=4).experts
  assert experts is not None
  prompt_experts, _ = experts
  np.testing.assert_array_equal(prompt_experts[0, :2], expected)
  np.testing.assert_array_equal(prompt_experts[0, 2:], -1)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_samples": 2}, "`num_samples` must divide the 9 sequences"),
    ({"num_samples": 0}, "`num_samples` must be at least 1 .* got 0"),
    ({"prompt_columns": 0}, "`prompt_columns` must be 1 .. 9"),
    ({"completion_columns": 10}, "`completion_columns` must be 1 .. 9"),
  ],
)
def test_sizes_out_of_range_are_refused(changes, message):
  options = {"num_samples": 3, "prompt_columns": 4, "completion_columns": 5}
  with pytest.raises(ValueError, match=message):
    rollout.grouped(_results(), **(options | changes))


@pytest.mark.parametrize(
  "name", ["num_samples", "prompt_columns", "completion_columns"]
)
@pytest.mark.parametrize("value", [3.0, "3", True, jnp.int32(3)])
def test_sizes_of_other_types_are_refused(name, value):
  options = {"num_samples": 3, "prompt_columns": 4, "completion_columns": 5}
  with pytest.raises(TypeError, match=f"`{name}` must be an int, got"):
    rollout.grouped(_results(), **(options | {name: value}))
  options = {name: np.int64(option) for name, option in options.items()}
  assert rollout.grouped(_results(), **options).mask.shape == (3, 3, 5)


@pytest.mark.deep
def test_states_and_tuples_are_refused():
  state = _rollout()
  options = {"num_samples": 4, "prompt_columns": 4, "completion_columns": 6}
  harvested = rollout.harvest(state)
  for value, message in (
    (state, r"got RolloutState; give generated\(state\)"),
    (harvested[1], "got Harvested; give its `.results`"),
    (harvested, "got tuple; give generated.* that harvest returns"),
  ):
    with pytest.raises(TypeError, match=f"`results` must be .* {message}"):
      rollout.grouped(value, **options)


class TestPrompts:
  """All sequences of a group must have one prompt."""

  @pytest.mark.parametrize(
    ("row", "changes", "num_samples", "bad_row"),
    [
      # A token of a prompt; one behind it; a length.
      (2, {"tokens": 1}, 3, 2),
      (2, {"tokens": 2}, 3, None),
      (1, {"prompt_lengths": 1}, 3, 1),
      # Absent rows have no prompt, in whatever group they are.
      (0, {}, 9, 5),
      (0, {}, 1, None),
    ],
  )
  def test_groups_of_two_prompts_are_refused(
    self, row, changes, num_samples, bad_row
  ):
    results = _results()
    if "tokens" in changes:
      tokens = results.tokens.at[row, changes["tokens"]].add(50)
      results = dataclasses.replace(results, tokens=tokens)
    if "prompt_lengths" in changes:
      lengths = results.prompt_lengths.at[row].set(changes["prompt_lengths"])
      results = dataclasses.replace(results, prompt_lengths=lengths)
    group = functools.partial(
      rollout.grouped,
      num_samples=num_samples,
      prompt_columns=4,
      completion_columns=5,
    )
    traced = jax.jit(group)(results)
    if bad_row is None:
      jax.tree.map(np.testing.assert_array_equal, group(results), traced)
      assert not np.any(traced.prompt_lengths == -1)
    else:
      message = f"`num_samples` .* got {num_samples}: sequence {bad_row} has"
      with pytest.raises(ValueError, match=message):
        group(results)
      expected = np.full(9 // num_samples, False)
      expected[bad_row // num_samples] = True
      np.testing.assert_array_equal(traced.prompt_lengths == -1, expected)

  @pytest.mark.slow
  def test_rows_in_another_order(self):
    """`harvest` gives rows in the order of the ids."""
    state = _rollout()
    options = {"prompt_columns": 4, "completion_columns": 6}
    # Both prompts of the first four; then the third one, and rows that are
    # not valid, since number 6 does not exist.
    ids = jnp.array([0, 4, 1, 5, 11, 6, 8, 9])
    _, batch = rollout.harvest(state, ids)
    with pytest.raises(ValueError, match="got 4: sequence 1 has another"):
      rollout.grouped(batch.results, num_samples=4, **options)
    _, batch = rollout.harvest(state, ids[jnp.array([2, 0, 3, 1, 5, 4, 6, 7])])
    out = rollout.grouped(batch.results, num_samples=2, **options)
    assert out.prompt_lengths.tolist() == [4, 3, 1, 1]


@functools.cache
def _rollout() -> rollout.RolloutState:
  """Runs prompts of three lengths; the second one has fewer samples."""
  state = by_hand.begun(
    _SIZES,
    rollout.RolloutConfig(num_samples=4, max_new_tokens=6),
    [[3, 1, 4, 1], [5, 9, 2], [6]],
    kv=models.init_kv(_MODEL, _SIZES),
    num_samples=[4, 2, 4],
  )
  model = functools.partial(models.forward, config=_MODEL)
  run = jax.jit(functools.partial(rollout.generate, model=model))
  return run(models.init_params(jax.random.key(0), _MODEL), state)


@pytest.mark.slow
def test_grouped_arrays_have_the_loss_of_flat_rows():
  """[P, G, R] arrays have the loss and weights of [P * G, R]."""
  draw = np.random.default_rng(1)
  mask = draw.random((3, 4, 5)) < 0.7
  new, old = (-draw.exponential(size=mask.shape).astype("f") for _ in range(2))
  good = draw.normal(size=mask.shape[:2]).astype("f")

  def flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 5)

  for mean in ("token", "sequence"):
    loss = functools.partial(rl.grpo_loss, mean=mean)
    by_group = loss(new, old, good, mask, reference=old)
    row_data = good.ravel(), flat(mask)
    rows = loss(flat(new), flat(old), *row_data, reference=flat(old))
    np.testing.assert_allclose(by_group[0], rows[0], rtol=1e-6)
    jax.tree.map(np.testing.assert_allclose, by_group[1], rows[1])
  weights = rl.importance_weights(new, old, mask=mask)
  row_weights = rl.importance_weights(flat(new), flat(old), mask=flat(mask))
  np.testing.assert_array_equal(flat(np.asarray(weights)), row_weights)
