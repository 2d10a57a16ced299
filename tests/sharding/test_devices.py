"""Rollouts on meshes: equal tokens, two all-reduces, one compilation."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv import sharding
from tests.sharding import recipes
from tests.sharding.recipes import assert_equal_results
from tests.sharding.recipes import axes_of
from tests.tools.collectives import assert_two_all_reduces_a_layer
from tests.tools.collectives import collectives
from tests.tools.pool_copies import pool_sized_rewrites

pytestmark = [
  pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
]

_EXPLICIT, _AUTO = AxisType.Explicit, AxisType.Auto


@pytest.fixture(scope="module")
def expected():
  """The job's results on one device."""
  names = recipes.llama()
  state = recipes.done(names, recipes.begun(names))
  results = jax.device_get(rollout.generated(state))
  assert len(set(results.lengths.tolist())) > 8
  return results


def _cache_keys(state):
  """Returns types and shardings of arrays; jit compiles once for equal ones."""
  return [
    (jax.typeof(leaf), leaf.sharding, leaf.committed)
    for leaf in jax.tree.leaves(state)
  ]


class _Run:
  """A rollout on a mesh that has made its first call, and its program."""

  def __init__(self, axes: sharding.MeshAxes, **options: Any):
    names = recipes.llama(**options)
    state = recipes.begun_on(names, axes)
    run = functools.partial(sharding.generate, model=names["model"], axes=axes)
    inputs = names["params"], state, rollout.Until(steps=recipes.STEPS)
    self.axes = axes
    self._params, _, self._until = inputs
    self.compiled = jax.jit(run, donate_argnums=1).lower(*inputs).compile()
    self.state = self.compiled(*inputs)

  def end(self) -> rollout.RolloutState:
    """Runs the rollout to its end, which compiles nothing."""
    state = jax.tree.map(jnp.copy, self.state)
    assert not bool(rollout.is_done(state))
    while not bool(rollout.is_done(state)):
      state = self.compiled(self._params, state, self._until)
    assert _cache_keys(state) == _cache_keys(self.state)
    return state

  def assert_pages_stay(self) -> None:
    """Two all-reduces a layer in each call of the model, and nothing else."""
    compiled = self.compiled
    pool = self.state.memory.kv.k
    shape = pool.addressable_shards[0].data.shape[-4:]
    calls = np.asarray(self.state.counters.calls).shape[-1]
    pool_size = math.prod(shape)
    assert_two_all_reduces_a_layer(
      compiled.as_text(), loops=calls, layers=1, pool=pool_size
    )
    assert pool_sized_rewrites(compiled, shape) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool_size * 4
    assert memory.temp_size_in_bytes < pool_size * 4


@pytest.fixture(
  scope="module",
  params=[_EXPLICIT, pytest.param(_AUTO, marks=pytest.mark.deep)],
  ids=["explicit", "auto"],
)
def data_parallel(request):
  return _Run(axes_of(data=8, axis_type=request.param))


@pytest.fixture(
  scope="module", params=[2, pytest.param(8, marks=pytest.mark.deep)]
)
def tensor_parallel(request):
  return _Run(axes_of(model=request.param, axis_type=_EXPLICIT))


class TestDataParallel:
  def test_results_equal_one_device(self, data_parallel, expected):
    state = data_parallel.end()
    assert_equal_results(
      sharding.generated(state, axes=data_parallel.axes), expected
    )
    # No shard waits for another one.
    assert len(set(np.asarray(state.counters.steps).tolist())) > 1
    caches = jax.device_get(state.memory.cache)
    for shard in range(8):
      jaxkv.check(jax.tree.map(lambda leaf, i=shard: leaf[i], caches))

  def test_program_has_no_collectives(self, data_parallel):
    compiled = data_parallel.compiled
    assert collectives(compiled.as_text()) == {}
    pool = data_parallel.state.memory.kv.k
    assert pool_sized_rewrites(compiled, pool.shape[1:]) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool.nbytes // 8

  @pytest.mark.slow
  def test_two_shards_on_each_device(self, expected):
    """Two shards of one device run one after another."""
    names, axes = recipes.llama(), axes_of(data=4)
    state = recipes.begun_on(names, axes, num_shards=8)
    state = recipes.done(names, state, axes)
    assert_equal_results(sharding.generated(state, axes=axes), expected)
    for call in (
      sharding.rebalance,
      functools.partial(sharding.submit, requests=names["requests"]),
    ):
      with pytest.raises(ValueError, match="one shard for each device"):
        call(state, axes=axes)


class TestTensorParallel:
  @pytest.mark.slow
  def test_results_equal_one_device(self, tensor_parallel, expected):
    run = tensor_parallel
    state = run.end()
    assert_equal_results(sharding.generated(state, axes=run.axes), expected)
    jaxkv.check(jax.device_get(state.memory.cache))
    shards = state.memory.kv.k.addressable_shards
    parts = {shard.data.shape[1] for shard in shards}
    heads = recipes.LLAMA.layers[0].attention.num_kv_heads
    assert parts == {heads // run.axes.num_parts}

  @pytest.mark.slow
  def test_two_all_reduces_a_layer(self, tensor_parallel):
    tensor_parallel.assert_pages_stay()

  @pytest.mark.deep
  @pytest.mark.parametrize("data", [0, 2], ids=["one", "shards"])
  def test_each_device_attends_to_its_own_heads(self, data, expected):
    """Kernels that XLA cannot split need this; here the backend is XLA."""
    axes = axes_of(data=data, model=4)
    run = _Run(axes, head_sharding=NamedSharding(axes.mesh, P("model")))
    assert_equal_results(sharding.generated(run.end(), axes=axes), expected)
    run.assert_pages_stay()


class TestExamples:
  """The programs in the docstring of `jaxkv.sharding`."""

  @pytest.mark.slow
  @pytest.mark.parametrize(
    "title",
    [
      "Data parallel",
      pytest.param("Tensor parallel", marks=pytest.mark.deep),
      pytest.param("Both", marks=pytest.mark.deep),
    ],
  )
  def test_example_equals_one_device(self, title, expected):
    names = recipes.llama()
    recipes.run(title, names)
    program = recipes.pieces("All four")[0]
    if title == "Tensor parallel":
      program = program.replace("rebalance(generate(*x))", "generate(*x)")
    exec(program, names)
    assert_equal_results(names["results"], expected)
    lines = [*recipes.pieces(title)[0].split("\n"), *program.split("\n")]
    assert sum(bool(line.strip()) for line in lines) <= 12

  @pytest.mark.slow
  def test_calls_inside_set_mesh(self, expected):
    """One program generates and indexes the results, as trainers do."""
    names, axes = recipes.llama(), axes_of(data=8, axis_type=_EXPLICIT)
    state = recipes.begun_on(names, axes)

    @jax.jit
    def longest(params, state):
      state = sharding.generate(params, state, axes=axes, model=names["model"])
      results = sharding.generated(state, axes=axes)
      return jnp.max(results.lengths[:4] + 1)

    with jax.set_mesh(axes.mesh):
      assert (
        int(longest(names["params"], state)) == max(expected.lengths[:4]) + 1
      )


class TestPlacement:
  @pytest.mark.slow
  def test_rollout_has_the_sharding_of_its_memory(self):
    """All arrays follow the memory, also in a next rollout on its cache."""
    names = recipes.attention_alone()
    everywhere = NamedSharding(axes_of(data=8).mesh, P())
    kv = jax.device_put(names["memory"]()[1], everywhere)
    state = recipes.begun(names, kv=kv)
    for leaf in jax.tree.leaves(state):
      assert leaf.sharding.is_equivalent_to(everywhere, leaf.ndim)
    memory = recipes.done(names, state).memory
    state = recipes.begun(names, cache=memory.cache, kv=memory.kv)
    assert int(state.counters.steps) == 0
    recipes.done(names, state)

  def test_rollout_has_the_device_of_its_memory(self):
    names = recipes.attention_alone()
    last_device = jax.devices()[-1]
    kv = jax.device_put(names["memory"]()[1], last_device)
    state = recipes.begun(names, kv=kv)
    assert {leaf.device for leaf in jax.tree.leaves(state)} == {last_device}
    free = recipes.begun(names)
    assert not any(leaf.committed for leaf in jax.tree.leaves(free))

  @pytest.mark.slow
  def test_next_rollout_hits_the_cache(self):
    """A next rollout needs the version of the weights, and hits the pages."""
    names, axes = recipes.attention_alone(), axes_of(data=2)
    end_state = recipes.done(names, recipes.begun_on(names, axes), axes)
    memory = end_state.memory.cache, end_state.memory.kv
    arguments = names["requests"], names["key"], names["config"]
    with pytest.raises(ValueError, match="`version` must be given"):
      sharding.init(*memory, *arguments, axes=axes)
    state = sharding.init(*memory, *arguments, axes=axes, version=0)
    second_end = recipes.done(names, state, axes)
    first_prefilled, second_prefilled = (
      np.asarray(state.counters.prefilled) for state in (end_state, second_end)
    )
    assert (second_prefilled < first_prefilled).all()


def test_shards_have_the_keys_of_one_device():
  names = recipes.attention_alone()
  axes = axes_of(data=2)
  keys = recipes.begun_on(names, axes).queue.keys.reshape(-1)
  expected = recipes.begun(names).queue.keys
  assert (jax.device_get(keys) == jax.device_get(expected)).all()


class TestArguments:
  @pytest.mark.parametrize(
    ("names", "text"),
    [
      ({"data": "rows"}, "`data` must be an axis of the mesh, one of .'data',"),
      ({"model": "heads"}, "`model` must be an axis of the mesh"),
      ({"data": "data", "model": "data"}, "two axes of the mesh"),
    ],
  )
  def test_axes(self, names, text):
    mesh = axes_of(data=2).mesh
    with pytest.raises(ValueError, match=text):
      sharding.MeshAxes(mesh, **names)
    with pytest.raises(TypeError, match=r"`mesh` must be a jax\.sharding"):
      sharding.MeshAxes(2, data="data")

  def test_heads_that_cannot_be_split(self):
    names, axes = recipes.attention_alone(), axes_of(model=2)
    with pytest.raises(ValueError, match="divides 1 K/V heads"):
      sharding.init_memory(names["memory"], axes=axes)
    with pytest.raises(ValueError, match="divides 1 K/V heads"):
      sharding.state_shardings(recipes.begun(names), axes=axes)

  def test_shards_that_do_not_fit(self):
    names, axes = recipes.attention_alone(), axes_of(data=2)
    with pytest.raises(
      ValueError, match=r"`num_shards` .* multiple of 2, .* got 3"
    ):
      sharding.init_memory(names["memory"], axes=axes, num_shards=3)
    state = recipes.begun_on(names, axes)
    with pytest.raises(ValueError, match="a multiple of 4 shards"):
      sharding.state_shardings(state, axes=axes_of(data=4))

  def test_rebalance_needs_a_data_axis(self):
    with pytest.raises(ValueError, match="`axes` must have the axis `data`"):
      sharding.rebalance(None, axes=axes_of(model=2))

  @pytest.mark.parametrize("seq_id", [-5, 2**31 - 3])
  def test_ids_out_of_range(self, seq_id):
    names, axes = recipes.attention_alone(), axes_of(data=2)
    memory = sharding.init_memory(names["memory"], axes=axes)
    arguments = names["requests"], names["key"], names["config"]
    with pytest.raises(ValueError, match=f"`first_sequence` .* got {seq_id}"):
      sharding.init(*memory, *arguments, axes=axes, first_sequence=seq_id)

  def test_slots_in_use(self):
    names, axes = recipes.attention_alone(), axes_of(data=2)
    cache, kv = sharding.init_memory(names["memory"], axes=axes)
    cache = dataclasses.replace(cache, num_pages=cache.num_pages + 1)
    arguments = names["requests"], names["key"], names["config"]
    with pytest.raises(ValueError, match="must have no slot in use"):
      sharding.init(cache, kv, *arguments, axes=axes)

  def test_exact_numerics_and_offload_pages(self):
    names, axes = recipes.llama(), axes_of(model=2)
    decoder = names["model"].keywords["config"]
    decoder = dataclasses.replace(decoder, numerics="exact")
    model = functools.partial(models.forward, config=decoder)
    state = recipes.begun_on(names, axes)
    with pytest.raises(ValueError, match='must have numerics="fast" with'):
      sharding.generate(names["params"], state, axes=axes, model=model)
    names, axes = recipes.attention_alone(), axes_of(data=2)
    sizes = dataclasses.replace(names["sizes"], offload_pages=4)
    pages = names["memory"]()[1]
    names["memory"] = lambda: (jaxkv.init(sizes, jax.random.key(4)), pages)
    with pytest.raises(ValueError, match="no offloaded pages, got 4"):
      recipes.begun_on(names, axes)

  def test_stacked_states_are_refused(self):
    names = recipes.attention_alone()
    state = recipes.begun_on(names, axes_of(data=2))
    for call in (
      lambda state: rollout.generate(None, state, model=names["model"]),
      rollout.generated,
      rollout.harvest,
      rollout.update_weights,
      lambda state: rollout.submit(state, names["requests"]),
      lambda state: rollout.abort(state, [0]),
      lambda state: rollout.export(state, [0]),
      lambda state: rollout.import_sequences(state, None),
      rollout.check,
    ):
      with pytest.raises(ValueError, match=r"a stack of shape \(2,\); call"):
        jax.eval_shape(call, state)

  def test_unplaced_params_are_refused(self):
    names, axes = recipes.llama(), axes_of(data=2, axis_type=_EXPLICIT)
    params = names["params"]
    state = recipes.begun_on(names, axes)
    run = functools.partial(sharding.generate, axes=axes, model=names["model"])
    for call in (run, jax.jit(run)):
      with pytest.raises(
        ValueError, match=r"`params\['embed'\]` must be on all"
      ):
        call(params, state)

  def test_heads_over_two_axes_are_refused(self):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(_AUTO,) * 2)
    names = recipes.llama(head_sharding=NamedSharding(mesh, P("x", "y")))
    state = recipes.begun(names)
    run = functools.partial(rollout.generate, model=names["model"])
    with pytest.raises(
      ValueError, match="`head_sharding` must be a NamedSharding"
    ):
      jax.eval_shape(run, names["params"], state)
