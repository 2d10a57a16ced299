"""`rollout.Engine` on meshes: equal tokens, shardings, and one compilation."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.service import programs
from tests.models import tiny_decoders
from tests.sharding.recipes import axes_of

pytestmark = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs eight devices"
)
_DECODER = tiny_decoders.llama(vocab_size=32, num_heads=4, num_kv_heads=2)
_CACHE = jaxkv.CacheConfig(
  num_pages=80, page_size=2, num_slots=3, pages_per_slot=16
)
_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=5, prefill_chunk=8, raw_log_probs=True
)
_PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5, 8], [9], [7, 9, 3, 2]]
_traces: list[int] = []


def _model(params, batch, kv, *, config):
  _traces.append(1)
  return models.forward(params, batch, kv, config=config)


_MODEL = functools.partial(_model, config=_DECODER)


@functools.cache
def _params(seed):
  return models.init_params(jax.random.key(seed), _DECODER)


def _sharded_by_trainer(params):
  """Returns parameters that are split over a mesh in a way of its own."""
  mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))

  def place(leaf):
    spec = P("fsdp") if leaf.shape[0] % 2 == 0 else P()
    return jax.device_put(leaf, NamedSharding(mesh, spec))

  return jax.tree.map(place, params)


def _engine(params, **options):
  return rollout.Engine(
    params, _MODEL, _CACHE, _CONFIG, num_prompts=8, **options
  )


def _shardings(engine):
  return [leaf.sharding for leaf in jax.tree.leaves(engine.state)]


@functools.cache
def _expected():
  """Returns samples of one device with two weights, and log-probs."""
  with _engine(_params(0)) as engine:
    results = [engine.generate(_PROMPTS).results]
    engine.update_weights(_params(1))
    results.append(engine.generate(_PROMPTS).results)
    scored = engine.score(_PROMPTS[:2], [[[1, 2]], [[3, 4]]])
  return results, scored.log_probs


def _check(results, expected):
  np.testing.assert_array_equal(results.tokens, expected.tokens)
  np.testing.assert_allclose(
    results.records.raw_log_probs, expected.records.raw_log_probs, atol=1e-5
  )


def _check_engine(engine, new_params):
  """Compares an engine with one device, in the contexts of other meshes."""
  results, log_probs = _expected()
  _check(engine.generate(_PROMPTS).results, results[0])
  num_traces = len(_traces)
  shardings = _shardings(engine)
  with jax.set_mesh(jax.make_mesh((2,), ("other",))):
    engine.update_weights(new_params)
    _check(engine.generate(_PROMPTS).results, results[1])
  assert len(_traces) == num_traces
  assert _shardings(engine) == shardings
  scored = engine.score(_PROMPTS[:2], [[[1, 2]], [[3, 4]]])
  np.testing.assert_allclose(scored.log_probs, log_probs, atol=1e-5)
  # The last token of a completion is not computed, nor are cached pages.
  num_tokens = sum(len(prompt) + 1 for prompt in _PROMPTS[:2])
  assert 4 <= int(scored.computed_tokens) <= num_tokens


def test_pages_are_split_by_heads():
  """On a mesh of Explicit axes, with parameters of one device."""
  axes = axes_of(model=2, axis_type=AxisType.Explicit)
  with _engine(_params(0), axes=axes) as engine:
    _check_engine(engine, _params(1))
    pages = engine.state.memory.kv.k
    assert pages.addressable_shards[0].data.shape[1] == pages.shape[1] // 2
    assert not pages.sharding.is_fully_replicated


@pytest.mark.slow
def test_parameters_keep_the_shardings_of_a_trainer():
  """The state is replicated on their devices."""
  params = _sharded_by_trainer(_params(0))
  with _engine(params) as engine:
    _check_engine(engine, _params(1))
    assert all(
      where.is_fully_replicated and len(where.device_set) == 4
      for where in _shardings(engine)
    )
    embed = engine._weights.read()["embed"]
    assert embed.sharding == params["embed"].sharding
    assert not embed.sharding.is_fully_replicated


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(("data", "model"), [(2, 0), (2, 2)])
def test_shards_have_queues_of_their_own(data, model, tmp_path):
  axes = axes_of(data=data, model=model, axis_type=AxisType.Explicit)
  with _engine(_params(0), axes=axes) as engine:
    assert engine.room().slots == 2 * _CACHE.num_slots
    _check_engine(engine, _params(1))
    assert engine.state.memory.kv.k.shape[0] == data
    # The prompts are on both shards.
    assert (np.asarray(engine.state.counters.steps) > 0).all()
    assert engine.match([[9, 2, 6, 5, 3, 5, 8], [1]]).tolist() == [6, 0]
    ids = engine.submit([[1, 2, 3], [4, 5], [6]], max_new_tokens=9)
    engine.step(4)
    kept = ids[1:].tolist()
    assert engine.abort([int(ids[0]), 999]) == [
      jaxkv.Status.OK,
      jaxkv.Status.BAD_SEQUENCE,
    ]
    assert engine.extend(kept, [[7], [8, 9]]) == [jaxkv.Status.OK] * 2
    with pytest.raises(ValueError, match=r"`axes\.data`"):
      engine.export()
    copies = engine.branch([999, *kept], 2)
    assert (copies[0] == -1).all()
    copies = copies[1:, 0].tolist()
    assert len({*copies, *ids.tolist()}) == 5
    pytest.importorskip("orbax.checkpoint")
    engine.save(tmp_path / "saved")
    ended, restored = [], []
    for ended_ids in (ended, restored):
      while engine.step():
        pass
      ended_ids += [out.id for out in engine.harvest()]
      engine.restore(tmp_path / "saved")
    assert sorted(ended) == sorted(restored) == sorted([*ids, *copies])


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here")
def test_shards_go_on_with_an_empty_cache_after_a_failure(monkeypatch):
  """With the version of the weights, and with prompts that record log-probs."""
  requests = rollout.Requests([[3, 1, 4]], [3], log_probs_from=[1])
  with _engine(_params(0), axes=axes_of(data=2)) as engine:
    engine.update_weights(_params(1))
    assert len({*engine.submit(requests), *engine.submit(requests)}) == 2
    advance = programs.advance

    def failing(*arguments, **options):
      advance(*arguments, **options)
      raise ValueError("out of memory")

    monkeypatch.setattr(programs, "advance", failing)
    with pytest.raises(RuntimeError, match="goes on with an empty cache"):
      engine.step()
    monkeypatch.undo()
    assert engine.generate(_PROMPTS[:2]).results.valid.all()
    scored = engine.score(_PROMPTS[:2], [[[1, 2]], [[3, 4]]])
    np.testing.assert_allclose(scored.log_probs, _expected()[1], atol=1e-5)


def test_parameters_on_devices_in_another_order_are_placed_again():
  axes = axes_of(model=2)
  reversed_mesh = Mesh(axes.mesh.devices[::-1], axes.mesh.axis_names)
  params = jax.device_put(_params(0), NamedSharding(reversed_mesh, P()))
  with _engine(params, axes=axes) as engine:
    devices = [*axes.mesh.devices.flat]
    for leaf in jax.tree.leaves(engine._weights.read()):
      assert [*leaf.sharding.mesh.devices.flat] == devices


def _exact_model():
  decoder = dataclasses.replace(_DECODER, numerics="exact")
  return functools.partial(models.forward, config=decoder)


@pytest.mark.parametrize(
  ("options", "text"),
  [
    (
      {"axes": dataclasses.replace(axes_of(data=2), experts="data")},
      "`axes.experts` must be None",
    ),
    ({"axes": axes_of(model=8)}, "must be an array whose dimension"),
    (
      {"axes": axes_of(model=2), "params": _sharded_by_trainer(_params(0))},
      "on 4 others",
    ),
    ({"axes": axes_of(model=2), "model": _exact_model()}, 'numerics="fast"'),
  ],
)
def test_what_cannot_be_served_is_refused(options, text):
  options = {"params": _params(0), "model": _MODEL} | options
  with pytest.raises(ValueError, match=text):
    rollout.Engine(cache=_CACHE, **options)


def test_a_mesh_instead_of_axes_is_refused():
  with pytest.raises(TypeError, match="`axes` must be a MeshAxes"):
    _engine(_params(0), axes=axes_of(model=2).mesh)
