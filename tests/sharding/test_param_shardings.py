"""Parameters split over devices: equal tokens, two all-reduces a layer."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv import models
from jaxkv import rollout
from jaxkv import sharding
from tests.sharding import recipes
from tests.tools.ahead_of_time import mesh_of
from tests.tools.ahead_of_time import needs
from tests.tools.collectives import assert_two_all_reduces_a_layer
from tests.tools.pool_copies import pool_sized_rewrites

needs_eight = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs eight devices"
)
_VOCABULARY = 48


def _layer(attention, mlp=None):
  mlp = models.Mlp(inner_dim=32) if mlp is None else mlp
  return models.Layer(attention=attention, mlp=mlp)


def _softmax(**fields):
  return models.Attention(num_heads=16, num_kv_heads=8, head_dim=4, **fields)


_EXPERTS = models.Experts(
  num_experts=6, num_chosen=2, inner_dim=16, shared_dim=8, shared_gated=True
)
_BIASED_EXPERTS = models.Experts(
  num_experts=6, num_chosen=2, inner_dim=16, router_biased=True, biased=True
)
_LATENTS = models.LatentAttention(
  num_heads=8,
  latent_dim=12,
  plain_dim=8,
  rotated_dim=4,
  value_dim=8,
  query_rank=10,
)
_DELTA = models.DeltaNet(
  num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, kernel_size=4
)
_SINKS = _softmax(sinks=True, output_biased=True)

# The layers of a pattern, which is repeated twice.
_FAMILIES = {
  "llama": (_layer(_softmax()),),
  "qwen3": (_layer(_softmax(biased=True, query_key_norm=True)),),
  "experts": (_layer(_softmax(), _EXPERTS),),
  "gpt_oss": (_layer(_SINKS, _BIASED_EXPERTS),),
  "deepseek": (_layer(_LATENTS, _EXPERTS),),
  "qwen3_next": (
    _layer(_DELTA, _EXPERTS),
    _layer(_softmax(gated=True), _EXPERTS),
  ),
}
_MLP = {"gate": 1, "up": 1, "down": 0}
_HEADS = {"query": 1, "key": 1, "value": 1, "output": 0}
_EXPERTS_BY_INNER_DIM = {"expert_gate": 2, "expert_up": 2, "expert_down": 1}
_WITH_SHARED = _EXPERTS_BY_INNER_DIM | {
  f"shared_{name}": dimension for name, dimension in _MLP.items()
}
# The dimensions that are split, without the axis of repetitions.
_SPLIT = {
  "llama": (_HEADS | _MLP,),
  "qwen3": (_HEADS | _MLP | {"query_bias": 0, "key_bias": 0, "value_bias": 0},),
  "experts": (_HEADS | _WITH_SHARED,),
  "gpt_oss": (
    _HEADS
    | _EXPERTS_BY_INNER_DIM
    | {"sinks": 0, "expert_gate_bias": 1, "expert_up_bias": 1},
  ),
  "deepseek": (_HEADS | _WITH_SHARED,),
  "qwen3_next": (_WITH_SHARED, _HEADS | _WITH_SHARED | {"query_gate": 1}),
}


def _decoder(name):
  return models.Decoder(
    vocab_size=_VOCABULARY,
    embed_dim=24,
    layers=_FAMILIES[name] * 2,
    tied_embeddings=False,
  )


def _shapes(name):
  init = functools.partial(models.init_params, decoder=_decoder(name))
  return jax.eval_shape(init, jax.random.key(0))


def _axes(count):
  return recipes.axes_of(model=count, axis_type=AxisType.Explicit)


def _params(config):
  """Returns random parameters; `init_params` sets biases to zero."""
  params = models.init_params(jax.random.key(0), config)
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  noise = [rng.normal(size=leaf.shape) * 0.1 for leaf in leaves]
  noise = [jnp.asarray(x, jnp.float32) for x in noise]
  return jax.tree.unflatten(tree, list(map(jnp.add, leaves, noise)))


def _names(name):
  """Returns names as in `recipes`, for 12 prompts of 1 to 9 tokens."""
  decoder = _decoder(name)
  rng = np.random.default_rng(1)
  prompts = [
    rng.integers(0, _VOCABULARY, 1 + row % 9).tolist() for row in range(12)
  ]
  return recipes.of_decoder(decoder, _params(decoder), prompts)


@functools.cache
def _one_device_results(name):
  names = _names(name)
  state = recipes.done(names, recipes.begun(names))
  results = rollout.generated(state)
  assert len(np.unique(results.tokens)) > _VOCABULARY // 2
  return jax.device_get(results)


@needs_eight
@pytest.mark.deep
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", _FAMILIES)
def test_results_equal_one_device(name, count):
  """No page moves, and a layer has two all-reduces."""
  names = _names(name)
  axes = _axes(count)
  if name == "deepseek":
    head_sharding = NamedSharding(axes.mesh, P("model"))
    names["model"] = functools.partial(
      names["model"], head_sharding=head_sharding
    )
  state = recipes.begun_on(names, axes)
  run = functools.partial(sharding.generate, axes=axes, model=names["model"])
  program = jax.jit(run, donate_argnums=1)
  compiled = program.lower(names["params"], state).compile()
  pools = [
    leaf.addressable_shards[0].data.shape
    for leaf in jax.tree.leaves(state.memory.kv)
  ]
  assert_two_all_reduces_a_layer(
    compiled.as_text(),
    loops=np.asarray(state.counters.calls).shape[-1],
    layers=len(_FAMILIES[name]),
    pool=min(map(math.prod, pools)),
  )
  for pool in pools:
    assert pool_sized_rewrites(compiled, pool) == []
  state = compiled(names["params"], state)
  results = sharding.generated(state, axes=axes)
  expected = _one_device_results(name)
  for field in ("tokens", "lengths", "finish", "valid"):
    np.testing.assert_array_equal(
      getattr(results, field), getattr(expected, field)
    )
  # The partial sums of devices are float32, added in another order.
  np.testing.assert_allclose(
    results.log_probs, expected.log_probs, rtol=1e-5, atol=2e-5
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", _FAMILIES)
@pytest.mark.parametrize(
  "target", [pytest.param(x, marks=needs(x)) for x in ("h200", "v5e")]
)
def test_gpu_and_tpu_programs_have_two_all_reduces(target, name):
  """XLA would gather experts that are split by number on these devices."""
  mesh = mesh_of(target, "model", 4)
  shapes = _shapes(name)
  everywhere = NamedSharding(mesh, P())
  axes = sharding.MeshAxes(mesh, model="model")
  params, tokens = jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=place
    ),
    (shapes, jax.ShapeDtypeStruct((2, 16), jnp.int32)),
    (sharding.param_shardings(shapes, axes=axes), everywhere),
  )
  forward = jax.jit(
    functools.partial(models.forward_uncached, config=_decoder(name)),
    out_shardings=NamedSharding(mesh, P(None, None, "model")),
  )
  with jax.set_mesh(mesh):
    lowered = forward.lower(params, tokens, tokens)
  # `conftest` turns optimization off.
  options = {"xla_backend_optimization_level": 3} if target == "h200" else {}
  assert_two_all_reduces_a_layer(
    lowered.compile(compiler_options=options).as_text(),
    loops=1,
    layers=len(_FAMILIES[name]),
    pool=2**20,
  )


@pytest.mark.parametrize("name", _FAMILIES)
def test_splits_heads_and_inner_dimensions(name):
  shapes = _shapes(name)
  mesh = jax.make_mesh((2, 4), ("data", "model"))
  axes = sharding.MeshAxes(mesh, data="data", model="model")
  shardings = sharding.param_shardings(shapes, axes=axes)
  everywhere = NamedSharding(mesh, P())
  expected = jax.tree.map(lambda _: everywhere, shapes)
  expected["unembed"] = NamedSharding(mesh, P(None, "model"))
  for layer, split in zip(expected["layers"][0], _SPLIT[name], strict=True):
    for leaf, dimension in split.items():
      layer[leaf] = NamedSharding(mesh, P(None, *[None] * dimension, "model"))
  assert shardings == expected


class TestArguments:
  def test_parameters_without_layers(self):
    with pytest.raises(ValueError, match="`params` must be a dict with"):
      sharding.param_shardings({"embed": jnp.zeros((2, 2))}, axes=_axes(2))

  @pytest.mark.parametrize(
    ("name", "count", "leaf"),
    [
      ("llama", 3, "down"),
      ("deepseek", 3, "expert_down"),
      ("experts", 5, "expert_down"),
      ("qwen3_next", 3, "expert_down"),
    ],
  )
  def test_indivisible_dimensions_are_refused(self, name, count, leaf):
    with pytest.raises(ValueError, match="must be an array whose dim") as error:
      sharding.param_shardings(_shapes(name), axes=_axes(count))
    leaf = f"['layers'][0][0]['{leaf}']"
    assert str(error.value).startswith(f"`params{leaf}`")
    assert f"the {count} devices of the axis 'model'" in str(error.value)
