"""Experts split by number over shards: equal tokens, and no weights move."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv import models
from jaxkv import rollout
from jaxkv import sharding
from tests.sharding import recipes
from tests.tools.collectives import collectives

pytestmark = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs eight devices"
)
_VOCABULARY = 48
_EXPERTS = models.Experts(
  num_experts=8, num_chosen=2, inner_dim=16, shared_dim=8, shared_gated=True
)
_BIASED = models.Experts(
  num_experts=16, num_chosen=4, inner_dim=8, router_biased=True, biased=True
)
_LATENTS = models.LatentAttention(
  num_heads=4,
  latent_dim=12,
  plain_dim=8,
  rotated_dim=4,
  value_dim=8,
  query_rank=10,
)
_SOFTMAX = models.Attention(num_heads=4, num_kv_heads=2, head_dim=4)
_MLP = models.Mlp(inner_dim=32)
# A dense layer comes first, as in DeepSeek's models.
_FAMILIES = {
  "deepseek": (
    models.Layer(attention=_LATENTS, mlp=_MLP),
    models.Layer(attention=_LATENTS, mlp=_EXPERTS),
    models.Layer(attention=_LATENTS, mlp=_EXPERTS),
  ),
  "gpt_oss": (models.Layer(attention=_SOFTMAX, mlp=_BIASED),) * 2,
}


def _names(name, **options):
  """Returns names as in `recipes`, for shards with different step counts."""
  decoder = models.Decoder(
    vocab_size=_VOCABULARY,
    embed_dim=24,
    layers=_FAMILIES[name],
    tied_embeddings=False,
  )
  rng = np.random.default_rng(1)
  prompts = [
    rng.integers(0, _VOCABULARY, 1 + 3 * row % 13).tolist() for row in range(13)
  ]
  params = models.init_params(jax.random.key(0), decoder)
  # Larger than the initial biases, which are zeros.
  params = jax.tree.map(lambda leaf: jnp.where(leaf == 0, 0.1, leaf), params)
  return recipes.of_decoder(
    decoder,
    params,
    prompts,
    num_pages=60,
    pages_per_slot=6,
    raw_log_probs=True,
    record_experts=True,
    timeline=64,
    **options,
  )


def _axes(data, model=0):
  axes = recipes.axes_of(data=data, model=model)
  return dataclasses.replace(axes, experts="data")


def _program(names, axes, state, **options):
  model = functools.partial(names["model"], expert_axis="data", **options)
  run = functools.partial(sharding.generate, axes=axes, model=model)
  arguments = names["params"], state, rollout.Until(steps=5)
  return jax.jit(run, donate_argnums=1).lower(*arguments).compile()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "data", "model", "options"),
  [
    pytest.param("deepseek", 4, 0, {"decode_steps": 3}, marks=pytest.mark.deep),
    pytest.param("deepseek", 2, 2, {}, marks=pytest.mark.deep),
    pytest.param("gpt_oss", 2, 2, {"decode_steps": 3}, marks=pytest.mark.deep),
    ("gpt_oss", 4, 0, {"draft_tokens": 2}),
  ],
)
def test_results_equal_one_device(name, data, model, options):
  """Shards that have nothing to do make idle calls for the others."""
  names, axes = _names(name, **options), _axes(data, model)
  expected = rollout.generated(recipes.done(names, recipes.begun(names)))
  state = recipes.begun_on(names, axes)
  layer = names["params"]["layers"][-1][0]
  for leaf in ("expert_gate", "expert_up", "expert_down"):
    num_experts = layer[leaf].shape[1] // data
    assert layer[leaf].addressable_shards[0].data.shape[1] == num_experts
  heads = {}
  if model and name == "deepseek":
    heads["head_sharding"] = NamedSharding(axes.mesh, P("model"))
  compiled = _program(names, axes, state, **heads)
  steps = []
  while not rollout.is_done(state):
    state = compiled(names["params"], state, rollout.Until(steps=5))
    steps.append(np.asarray(state.counters.steps).tolist())
  # All shards count all calls, and none passes the limit.
  for num_calls, counts in enumerate(steps, 1):
    assert len(set(counts)) == 1 and counts[0] <= 5 * num_calls, steps
  for shard in range(data):
    state_of_shard = jax.tree.map(lambda leaf, i=shard: leaf[i], state)
    log = rollout.timeline(state_of_shard)
    np.testing.assert_array_equal(log.kinds == 0, log.sequences == -1)
  results = sharding.generated(state, axes=axes)
  recipes.assert_equal_results(results, expected)
  count = len(expected.lengths)
  np.testing.assert_array_equal(results.experts[:count], expected.experts)
  np.testing.assert_allclose(
    results.records.raw_log_probs[:count],
    expected.records.raw_log_probs,
    rtol=1e-5,
    atol=1e-5,
  )


def _sizes(lines, opcode):
  """Returns the numbers of elements of collectives with an opcode."""
  return [
    math.prod(map(int, shape.split(",")))
    for line in lines
    if line.opcode.startswith(opcode)
    for shape in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", line.text)
  ]


@pytest.mark.slow
def test_only_activations_move():
  """In a layer, inputs are gathered once and outputs are scattered once."""
  names, axes = _names("deepseek"), _axes(4)
  state = recipes.begun_on(names, axes)
  lines = collectives(_program(names, axes, state).as_text())
  layers = {
    name: lines
    for name, lines in lines.items()
    if any("reduce-scatter" in line.opcode for line in lines)
  }
  # One loop over the layers with experts for each width.
  assert len(layers) == np.asarray(state.counters.calls).shape[-1]
  weights = names["params"]["layers"][-1][0]["expert_gate"]
  for lines in layers.values():
    kinds = {line.opcode.removesuffix("-start") for line in lines}
    assert kinds == {"all-gather", "reduce-scatter"}, lines
    assert max(map(max, map(functools.partial(_sizes, lines), kinds))) < (
      weights[0].size
    )


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here")
def test_example_equals_one_device():
  """The program of `help(jaxkv.sharding)`, with twelve lines."""
  names = _names("deepseek")
  expected = rollout.generated(recipes.done(names, recipes.begun(names)))
  recipes.run("Data parallel attention", names)
  recipes.run("All four", names)
  recipes.assert_equal_results(names["results"], expected)
  pieces = map(recipes.pieces, ("Data parallel attention", "All four"))
  lines = "".join(next(zip(*pieces, strict=False))).split("\n")
  assert sum(bool(line.strip()) for line in lines) <= 12


@pytest.mark.deep
def test_two_shards_on_each_device():
  names, axes = _names("deepseek"), _axes(2)
  expected = rollout.generated(recipes.done(names, recipes.begun(names)))
  state = recipes.begun_on(names, axes, num_shards=4)
  names["model"] = functools.partial(names["model"], expert_axis="data")
  state = recipes.done(names, state, axes)
  results = sharding.generated(state, axes=axes)
  recipes.assert_equal_results(results, expected)


class TestArguments:
  def test_an_axis_without_shards(self):
    axes = recipes.axes_of(data=2, model=2)
    with pytest.raises(ValueError, match="`experts` must be None or the axis"):
      dataclasses.replace(axes, experts="model")

  @pytest.mark.slow
  def test_too_many_devices(self):
    params = _names("deepseek")["params"]
    with pytest.raises(ValueError, match="multiple of the 3 devices") as error:
      sharding.param_shardings(params, axes=_axes(3))
    assert "['expert_" in str(error.value)

  def test_a_decoder_without_experts(self):
    with pytest.raises(ValueError, match="experts` must be None for"):
      sharding.param_shardings(recipes.llama()["params"], axes=_axes(2))

  @pytest.mark.slow
  def test_a_model_without_the_axis(self):
    names, axes = _names("deepseek"), _axes(2)
    state = recipes.begun_on(names, axes)
    with pytest.raises(ValueError, match="pass `expert_axis` to"):
      sharding.generate(names["params"], state, axes=axes, model=names["model"])

  @pytest.mark.slow
  def test_exact_numerics(self):
    names, axes = _names("deepseek"), _axes(2)
    decoder = names["model"].keywords["config"]
    decoder = dataclasses.replace(decoder, numerics="exact")
    forward = functools.partial(
      models.forward, config=decoder, expert_axis="data"
    )
    params, state = names["params"], recipes.begun_on(names, axes)
    with pytest.raises(ValueError, match='must have numerics="fast" with'):
      sharding.generate(params, state, axes=axes, model=forward)
    state = recipes.begun(_names("deepseek"))
    with pytest.raises(ValueError, match="`expert_axis` must be None with"):
      rollout.generate(
        names["params"], state, model=lambda *values: forward(*values)
      )

  @pytest.mark.slow
  def test_a_loop_without_the_axis(self):
    """An expert axis without lockstep raises, as shards would wait forever."""
    names = _names("deepseek")
    state = recipes.begun(names)
    model = functools.partial(names["model"], expert_axis="data")
    message = "must be the `lockstep_axis` of the rollout, None, got 'data'"
    with pytest.raises(ValueError, match=message):
      rollout.generate(names["params"], state, model=model)
    answers = np.ones((1, 1, 1), np.int32)
    with pytest.raises(ValueError, match=message):
      rollout.score(
        names["params"],
        state.memory,
        np.ones((1, 2), np.int32),
        np.ones(1, np.int32),
        answers,
        np.ones((1, 1), np.int32),
        model=model,
      )

  def test_parameters_that_are_split_otherwise(self):
    names, axes = _names("deepseek"), _axes(2)
    state = recipes.begun_on(names, axes)
    whole = dataclasses.replace(axes, experts=None)
    options = {"model": names["model"]}
    with pytest.raises(ValueError, match=r"expert_.* split as `axes` says"):
      sharding.generate(names["params"], state, axes=whole, **options)
    params = jax.device_put(names["params"], axes.everywhere())
    with pytest.raises(ValueError, match=r"expert_.* split as `axes` says"):
      sharding.generate(params, state, axes=axes, **options)

  def test_a_bad_axis_of_the_loop(self):
    with pytest.raises(TypeError, match="lockstep_axis` must be"):
      rollout.RolloutConfig(lockstep_axis=3)
