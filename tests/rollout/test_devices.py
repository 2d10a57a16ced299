"""Rollouts on meshes: equal tokens, few words, one compilation."""

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
from jaxkv import rollout
from jaxkv import sharding
from tests.rollout import recipes
from tests.rollout.recipes import assert_equal_results
from tests.rollout.recipes import axes_of
from tests.tools.collectives import assert_two_all_reduces_a_layer
from tests.tools.collectives import collectives
from tests.tools.pool_copies import pool_sized_rewrites

pytestmark = [
  pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
]

_EXPLICIT, _AUTO = AxisType.Explicit, AxisType.Auto


@pytest.fixture(scope="module")
def alone():
  """The job's results on one device."""
  names = recipes.llama()
  end = recipes.done(names, recipes.begun(names))
  results = jax.device_get(rollout.generated(end))
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
    self.axes, self._params, _, self._until = axes, *inputs
    self.compiled = jax.jit(run, donate_argnums=1).lower(*inputs).compile()
    self.state = self.compiled(*inputs)

  def end(self) -> rollout.RolloutState:
    """The end of the rollout; nothing compiles."""
    state = jax.tree.map(jnp.copy, self.state)
    assert not bool(rollout.is_done(state))
    while not bool(rollout.is_done(state)):
      state = self.compiled(self._params, state, self._until)
    assert _cache_keys(state) == _cache_keys(self.state)
    return state

  def assert_pages_stay(self) -> None:
    """Two all-reduces a layer in each call of the model, and nothing else."""
    compiled, pool = self.compiled, self.state.memory.kv.k
    shape = pool.addressable_shards[0].data.shape[-4:]
    calls = np.asarray(self.state.counters.calls).shape[-1]
    size = math.prod(shape)
    assert_two_all_reduces_a_layer(
      compiled.as_text(), loops=calls, layers=1, pool=size
    )
    assert pool_sized_rewrites(compiled, shape) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * size * 4
    assert memory.temp_size_in_bytes < size * 4


@pytest.fixture(
  scope="module",
  params=[_EXPLICIT, pytest.param(_AUTO, marks=pytest.mark.deep)],
  ids=["explicit", "auto"],
)
def data_parallel(request):
  return _Run(axes_of(data=8, kind=request.param))


@pytest.fixture(
  scope="module", params=[2, pytest.param(8, marks=pytest.mark.deep)]
)
def tensor_parallel(request):
  return _Run(axes_of(model=request.param, kind=_EXPLICIT))


class TestDataParallel:
  def test_sequences_are_one_devices(self, data_parallel, alone):
    end = data_parallel.end()
    assert_equal_results(
      sharding.generated(end, axes=data_parallel.axes), alone
    )
    # No shard waits for another one.
    assert len(set(np.asarray(end.counters.steps).tolist())) > 1
    caches = jax.device_get(end.memory.cache)
    for shard in range(8):
      jaxkv.check(jax.tree.map(lambda leaf, i=shard: leaf[i], caches))

  def test_nothing_is_communicated(self, data_parallel):
    compiled = data_parallel.compiled
    assert collectives(compiled.as_text()) == {}
    pool = data_parallel.state.memory.kv.k
    assert pool_sized_rewrites(compiled, pool.shape[1:]) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool.nbytes // 8

  @pytest.mark.slow
  def test_two_shards_on_each_device(self, alone):
    """They run one after another, as where a snapshot had more devices."""
    names, axes = recipes.llama(), axes_of(data=4)
    state = recipes.begun_on(names, axes, num_shards=8)
    end = recipes.done(names, state, axes)
    assert_equal_results(sharding.generated(end, axes=axes), alone)
    for call in (
      sharding.rebalance,
      functools.partial(sharding.submit, requests=names["requests"]),
    ):
      with pytest.raises(ValueError, match="one shard for each device"):
        call(end, axes=axes)


class TestTensorParallel:
  @pytest.mark.slow
  def test_sequences_are_one_devices(self, tensor_parallel, alone):
    run = tensor_parallel
    end = run.end()
    assert_equal_results(sharding.generated(end, axes=run.axes), alone)
    jaxkv.check(jax.device_get(end.memory.cache))
    parts = {part.data.shape[1] for part in end.memory.kv.k.addressable_shards}
    heads = recipes.LLAMA.layers[0].attention.num_kv_heads
    assert parts == {heads // run.axes.num_parts}

  @pytest.mark.slow
  def test_two_all_reduces_a_layer(self, tensor_parallel):
    tensor_parallel.assert_pages_stay()

  @pytest.mark.deep
  @pytest.mark.parametrize("data", [0, 2], ids=["one", "shards"])
  def test_each_device_attends_to_its_own_heads(self, data, alone):
    """As kernels need it that XLA cannot split; here the backend is XLA's."""
    axes = axes_of(data=data, model=4)
    run = _Run(axes, head_sharding=NamedSharding(axes.mesh, P("model")))
    assert_equal_results(sharding.generated(run.end(), axes=axes), alone)
    run.assert_pages_stay()


class TestBoth:
  @pytest.mark.deep
  def test_two_shards_of_four_devices(self, alone):
    run = _Run(axes_of(data=2, model=4, kind=_EXPLICIT))
    end = run.end()
    assert_equal_results(sharding.generated(end, axes=run.axes), alone)
    assert len(set(np.asarray(end.counters.steps).tolist())) > 1
    run.assert_pages_stay()


class TestExamples:
  """The programs of `help(jaxkv.sharding)`, as they stand there."""

  @pytest.mark.slow
  @pytest.mark.parametrize(
    "title",
    [
      "Data parallel",
      pytest.param("Tensor parallel", marks=pytest.mark.deep),
      pytest.param("Both", marks=pytest.mark.deep),
    ],
  )
  def test_every_mesh(self, title, alone):
    names = recipes.llama()
    recipes.run(title, names)
    program = recipes.pieces("All four")[0]
    if title == "Tensor parallel":
      program = program.replace("rebalance(generate(*x))", "generate(*x)")
    exec(program, names)
    assert_equal_results(names["results"], alone)
    lines = [*recipes.pieces(title)[0].split("\n"), *program.split("\n")]
    assert sum(bool(line.strip()) for line in lines) <= 12

  @pytest.mark.slow
  def test_within_a_context_of_the_mesh(self, alone):
    """And in one program, with indices of the results, as trainers do."""
    names, axes = recipes.llama(), axes_of(data=8, kind=_EXPLICIT)
    state = recipes.begun_on(names, axes)

    @jax.jit
    def longest(params, state):
      state = sharding.generate(params, state, axes=axes, model=names["model"])
      results = sharding.generated(state, axes=axes)
      return jnp.max(results.lengths[:4] + 1)

    with jax.set_mesh(axes.mesh):
      assert int(longest(names["params"], state)) == max(alone.lengths[:4]) + 1


class TestPlaces:
  @pytest.mark.slow
  def test_a_rollout_lies_where_its_memory_lies(self):
    """Nobody has to move the rest; the next one on this cache needs nothing."""
    names = recipes.attention_alone()
    everywhere = NamedSharding(axes_of(data=8).mesh, P())
    kv = jax.device_put(names["memory"]()[1], everywhere)
    state = recipes.begun(names, kv=kv)
    for leaf in jax.tree.leaves(state):
      assert leaf.sharding.is_equivalent_to(everywhere, leaf.ndim)
    end = recipes.done(names, state)
    again = recipes.begun(names, cache=end.memory.cache, kv=end.memory.kv)
    assert int(again.counters.steps) == 0
    recipes.done(names, again)

  def test_on_one_device(self):
    names = recipes.attention_alone()
    last = jax.devices()[-1]
    kv = jax.device_put(names["memory"]()[1], last)
    state = recipes.begun(names, kv=kv)
    assert {leaf.device for leaf in jax.tree.leaves(state)} == {last}
    free = recipes.begun(names)
    assert not any(leaf.committed for leaf in jax.tree.leaves(free))

  @pytest.mark.slow
  def test_the_next_rollout_on_a_cache(self):
    """It needs the version of the weights, and hits the pages."""
    names, axes = recipes.attention_alone(), axes_of(data=2)
    end = recipes.done(names, recipes.begun_on(names, axes), axes)
    cache, kv = end.memory.cache, end.memory.kv
    arguments = names["requests"], names["key"], names["config"]
    with pytest.raises(ValueError, match="`version` must be given"):
      sharding.init(cache, kv, *arguments, axes=axes)
    state = sharding.init(cache, kv, *arguments, axes=axes, version=0)
    again = recipes.done(names, state, axes)
    before, after = (
      np.asarray(state.counters.prefilled) for state in (end, again)
    )
    assert (after < before).all()


def test_keys_are_numbered_over_all_shards():
  names = recipes.attention_alone()
  axes = axes_of(data=2)
  whole, parts = recipes.begun(names), recipes.begun_on(names, axes)
  keys = parts.queue.keys.reshape(-1)
  assert (jax.device_get(keys) == jax.device_get(whole.queue.keys)).all()


class TestArguments:
  @pytest.mark.parametrize(
    ("names", "text"),
    [
      ({"data": "rows"}, "`data` must be an axis of the mesh, one of .'data',"),
      ({"model": "heads"}, "`model` must be an axis of the mesh"),
      ({"data": "data", "model": "data"}, "two axes of the mesh"),
      ({}, "two axes of the mesh, or one of them None"),
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

  def test_only_shards_are_balanced(self):
    with pytest.raises(ValueError, match="`axes` must have the axis `data`"):
      sharding.rebalance(None, axes=axes_of(model=2))

  @pytest.mark.parametrize("first", [-5, 2**31 - 3])
  def test_ids_out_of_range(self, first):
    names, axes = recipes.attention_alone(), axes_of(data=2)
    memory = sharding.init_memory(names["memory"], axes=axes)
    arguments = names["requests"], names["key"], names["config"]
    with pytest.raises(ValueError, match=f"`first_sequence` .* got {first}"):
      sharding.init(*memory, *arguments, axes=axes, first_sequence=first)

  def test_slots_in_use(self):
    names, axes = recipes.attention_alone(), axes_of(data=2)
    cache, kv = sharding.init_memory(names["memory"], axes=axes)
    cache = dataclasses.replace(cache, num_pages=cache.num_pages + 1)
    arguments = names["requests"], names["key"], names["config"]
    with pytest.raises(ValueError, match="must have no slot in use"):
      sharding.init(cache, kv, *arguments, axes=axes)

  def test_exact_numerics_and_offload_pages(self):
    names, axes = recipes.llama(), axes_of(model=2)
    names["config"] = dataclasses.replace(names["config"], numerics="exact")
    with pytest.raises(ValueError, match=r'must be "fast" with `axes\.model`'):
      recipes.begun_on(names, axes)
    names, axes = recipes.attention_alone(), axes_of(data=2)
    sizes = dataclasses.replace(names["sizes"], offload_pages=4)
    pages = names["memory"]()[1]
    names["memory"] = lambda: (jaxkv.init(sizes, jax.random.key(4)), pages)
    with pytest.raises(ValueError, match="no offloaded pages, got 4"):
      recipes.begun_on(names, axes)

  def test_all_shards_instead_of_one_rollout(self):
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

  def test_parameters_that_were_not_placed(self):
    names, axes = recipes.llama(), axes_of(data=2, kind=_EXPLICIT)
    params = names["params"]
    state = recipes.begun_on(names, axes)
    run = functools.partial(sharding.generate, axes=axes, model=names["model"])
    for call in (run, jax.jit(run)):
      with pytest.raises(
        ValueError, match=r"`params\['embed'\]` must be on all"
      ):
        call(params, state)

  def test_heads_over_two_axes(self):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(_AUTO,) * 2)
    names = recipes.llama(head_sharding=NamedSharding(mesh, P("x", "y")))
    state = recipes.begun(names)
    run = functools.partial(rollout.generate, model=names["model"])
    with pytest.raises(
      ValueError, match="`head_sharding` must be a NamedSharding"
    ):
      jax.eval_shape(run, names["params"], state)
