"""The recipes for many devices: equal tokens, few words, one compilation."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import rollout
from jaxkv.rollout import devices
from tests.rollout import recipes
from tests.tools.collectives import assert_two_all_reduces_a_layer
from tests.tools.collectives import collectives
from tests.tools.compiled_programs import num_compiled
from tests.tools.pool_copies import pool_sized_rewrites

pytestmark = [
  pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
]


def _done_without_compiling(names) -> rollout.RolloutState:
  """The end of a rollout of which a call has been made."""
  assert not bool(rollout.is_done(names["state"]))
  state = jax.tree.map(jnp.copy, names["state"])
  while not bool(rollout.is_done(state)):
    before = num_compiled()
    state = names["run"](names["params"], state)
    assert num_compiled() == before
  return state


def _merged(state: rollout.RolloutState) -> rollout.Generated:
  """The results of all shards."""
  return devices.merged(jax.vmap(rollout.generated)(state))


def _compiled_run(names):
  return names["run"].lower(names["params"], names["state"]).compile()


def _assert_equal(results, wanted) -> None:
  for name in ("tokens", "lengths", "finish", "valid"):
    np.testing.assert_array_equal(getattr(results, name), getattr(wanted, name))
  # A sum of float32 numbers may be taken in another order, as where the token
  # is computed in a call of another width.
  np.testing.assert_allclose(
    results.log_probs, wanted.log_probs, rtol=1e-5, atol=1e-5
  )


@pytest.fixture(scope="module")
def alone():
  """The job's results on one device."""
  names = recipes.llama()
  run = jax.jit(names["generate"])
  end = recipes.done(names, run, recipes.begun(names))
  results = jax.device_get(rollout.generated(end))
  assert len(set(results.lengths.tolist())) > 8
  return results


def _ran(*recipe: tuple[str, int], device_count=None, **options):
  """The names of a recipe that has made its first call."""
  names = recipes.llama(**options)
  for title, piece in recipe:
    recipes.run(title, names, piece, device_count=device_count)
  return names


_DATA = (("Data parallel", 0), ("Data parallel", 1))
_TENSOR = (("Tensor parallel", 0), ("Tensor parallel", 1))
_BOTH = (
  ("Data parallel", 0),
  ("Tensor parallel", 0),
  ("Data and tensor parallel", 0),
)


@pytest.fixture(scope="module")
def data_parallel():
  return _ran(*_DATA)


@pytest.fixture(
  scope="module", params=[2, pytest.param(8, marks=pytest.mark.slow)]
)
def tensor_parallel(request):
  return _ran(*_TENSOR, device_count=request.param)


class TestDataParallel:
  def test_sequences_are_one_devices(self, data_parallel, alone):
    end = _done_without_compiling(data_parallel)
    _assert_equal(jax.device_get(_merged(end)), alone)
    # No shard waits for another one.
    assert len(set(np.asarray(end.counters.steps).tolist())) > 1
    for shard in range(8):
      jaxkv.check(jax.tree.map(lambda leaf, i=shard: leaf[i], end.memory.cache))

  @pytest.mark.slow
  def test_several_calls_of_a_step(self, alone):
    names = recipes.llama()
    names["config"] = dataclasses.replace(names["config"], decode_steps=3)
    for title, piece in _DATA:
      recipes.run(title, names, piece)
    end = _done_without_compiling(names)
    _assert_equal(jax.device_get(_merged(end)), alone)

  def test_nothing_is_communicated(self, data_parallel):
    compiled = _compiled_run(data_parallel)
    assert collectives(compiled.as_text()) == {}
    pool = data_parallel["state"].memory.kv.k
    assert pool_sized_rewrites(compiled, pool.shape[1:]) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool.nbytes // 8


class TestTensorParallel:
  def test_sequences_are_one_devices(self, tensor_parallel, alone):
    end = _done_without_compiling(tensor_parallel)
    _assert_equal(jax.device_get(rollout.generated(end)), alone)
    jaxkv.check(jax.device_get(end.memory.cache))
    count = tensor_parallel["mesh"].size
    parts = {part.data.shape[1] for part in end.memory.kv.k.addressable_shards}
    assert parts == {recipes.LLAMA.layers[0].attention.num_kv_heads // count}

  def test_two_all_reduces_a_layer(self, tensor_parallel):
    _assert_pages_stay(tensor_parallel)

  @pytest.mark.slow
  @pytest.mark.parametrize(
    "recipe",
    [_TENSOR, pytest.param(_BOTH, marks=pytest.mark.deep)],
    ids=["tensor", "both"],
  )
  def test_each_device_attends_to_its_own_heads(self, recipe, alone):
    """As kernels need it that XLA cannot split; here the backend is XLA's."""
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    names = _ran(*recipe, head_sharding=NamedSharding(mesh, P("model")))
    end = _done_without_compiling(names)
    is_split = recipe == _BOTH
    results = _merged(end) if is_split else rollout.generated(end)
    _assert_equal(jax.device_get(results), alone)
    _assert_pages_stay(names)


def _assert_pages_stay(names) -> None:
  """Two all-reduces a layer in each call of the model, and nothing else."""
  compiled, state = _compiled_run(names), names["state"]
  shape = state.memory.kv.k.addressable_shards[0].data.shape
  size, calls = math.prod(shape), np.asarray(state.counters.calls).shape[-1]
  assert_two_all_reduces_a_layer(compiled.as_text(), layers=calls, pool=size)
  assert pool_sized_rewrites(compiled, shape) == []
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= 2 * size * 4
  assert memory.temp_size_in_bytes < size * 4


class TestBoth:
  @pytest.mark.deep
  def test_two_shards_of_four_devices(self, alone):
    names = _ran(*_BOTH)
    end = _done_without_compiling(names)
    _assert_equal(jax.device_get(_merged(end)), alone)
    assert len(set(np.asarray(end.counters.steps).tolist())) > 1
    _assert_pages_stay(names)


class TestPlaces:
  @pytest.mark.slow
  def test_a_rollout_lies_where_its_memory_lies(self):
    """Nobody has to move the rest; the next one on this cache needs nothing."""
    names = recipes.attention_alone()
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    kv = jax.device_put(names["memory"](), NamedSharding(mesh, P()))
    run = jax.jit(names["generate"], donate_argnums=1)
    state = recipes.begun(names, kv=kv)
    everywhere = NamedSharding(mesh, P())
    for leaf in jax.tree.leaves(state):
      assert leaf.sharding.is_equivalent_to(everywhere, leaf.ndim)
    names |= {"run": run, "state": run(None, state)}
    end = _done_without_compiling(names)
    names["state"] = again = recipes.begun(
      names, cache=end.memory.cache, kv=end.memory.kv
    )
    assert int(again.counters.steps) == 0
    _done_without_compiling(names)

  def test_on_one_device(self):
    names = recipes.attention_alone()
    last = jax.devices()[-1]
    state = recipes.begun(names, kv=jax.device_put(names["memory"](), last))
    assert {leaf.device for leaf in jax.tree.leaves(state)} == {last}
    free = recipes.begun(names)
    assert not any(leaf.committed for leaf in jax.tree.leaves(free))


def test_keys_are_numbered_over_all_shards():
  sizes = jaxkv.CacheConfig(
    num_pages=200, page_size=2, num_slots=2, pages_per_slot=80
  )

  def queue_of(count, **options):
    requests = rollout.Requests([[1, 1]] * count, [2] * count)
    return rollout.init(
      jaxkv.init(sizes),
      jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
      requests,
      jax.random.key(1),
      rollout.RolloutConfig(num_samples=3),
      **options,
    ).queue

  whole, part = queue_of(6), queue_of(2, first_sequence=12)
  assert (part.keys == whole.keys[12:]).all()


class TestArguments:
  def test_a_shard_of_two_states(self):
    with pytest.raises(ValueError, match=r"must have arrays \[1, ...\]"):
      devices.local(jnp.zeros((2, 3)))

  def test_numbers_of_shards(self):
    with pytest.raises(ValueError, match=r"must have arrays \[X, Q, ...\]"):
      devices.merged({"steps": jnp.zeros((8,))})

  def test_heads_that_cannot_be_split(self):
    names = recipes.attention_alone()
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    state = recipes.begun(names)
    with pytest.raises(ValueError, match="divides 1 K/V heads"):
      devices.shardings(state, mesh, heads="model")
    with pytest.raises(ValueError, match="`shards` must be an axis"):
      devices.shardings(state, mesh, heads="model", shards="data")

  def test_heads_over_two_axes(self):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    names = recipes.llama(head_sharding=NamedSharding(mesh, P("x", "y")))
    state = recipes.begun(names)
    with pytest.raises(
      ValueError, match="`head_sharding` must be a NamedSharding"
    ):
      jax.eval_shape(names["generate"], names["params"], state)
