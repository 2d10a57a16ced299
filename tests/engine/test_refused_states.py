"""States, caches, axes and tokens that a rollout refuses by name."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import checkpoint
from jaxkv import models
from jaxkv import rollout
from jaxkv import sharding
from tests.engine import by_hand
from tests.models import tiny_decoders as tiny

_CONFIG = rollout.RolloutConfig(max_new_tokens=4)
_SIZES = by_hand.sizes(12, 2)
_ONE_ID = np.zeros((1,), np.int32)


def _kv():
  return jaxkv.kv.init(
    _SIZES, num_layers=1, num_kv_heads=1, head_dim=4, dtype=jnp.float32
  )


def _requests(*prompt: int) -> rollout.Requests:
  return rollout.Requests([list(prompt)], [len(prompt)])


def _init(cache=None, kv=None, requests=None, key=None, config=_CONFIG):
  return rollout.init(
    jaxkv.init(_SIZES) if cache is None else cache,
    _kv() if kv is None else kv,
    _requests(1, 2, 3) if requests is None else requests,
    jax.random.key(0) if key is None else key,
    config,
  )


@functools.cache
def _state():
  return _init()


def _model(params, batch, kv):
  raise AssertionError("The state is checked before the model is called.")


_AXES = sharding.MeshAxes(jax.make_mesh((1,), ("data",)), data="data")

_CALLS = {
  "abort": lambda state: rollout.abort(state, _ONE_ID),
  "requeue": lambda state: rollout.requeue(state, _ONE_ID),
  "extend": lambda state: rollout.extend(state, _ONE_ID, [[1]], [1]),
  "submit": lambda state: rollout.submit(state, _requests(1)),
  "harvest": rollout.harvest,
  "generated": rollout.generated,
  "generate": lambda state: rollout.generate({}, state, model=_model),
  "is_done": rollout.is_done,
  "timeline": rollout.timeline,
  "update_weights": lambda state: rollout.update_weights(state, "keep"),
  "export": lambda state: rollout.export(state, _ONE_ID),
  "import_sequences": lambda state: rollout.import_sequences(state, None),
  "check": rollout.check,
}
_CALLS_ON_MESH = {
  "generated": lambda state, axes: sharding.generated(state, axes=axes),
  "harvest": lambda state, axes: sharding.harvest(state, axes=axes),
  "rebalance": lambda state, axes: sharding.rebalance(state, axes=axes),
  "submit": lambda state, axes: sharding.submit(state, _requests(1), axes=axes),
  "generate": lambda state, axes: sharding.generate(
    {}, state, axes=axes, model=_model
  ),
  "state_shardings": lambda state, axes: sharding.state_shardings(
    state, axes=axes
  ),
}


@pytest.mark.parametrize("name", _CALLS)
def test_another_value_is_no_state(name):
  cache = jaxkv.init(_SIZES)
  for value, kind in ((None, "NoneType"), (cache, "CacheState"), (3, "int")):
    match = f"`state` must be a RolloutState, got {kind}; make one with"
    with pytest.raises(TypeError, match=match):
      _CALLS[name](value)
  match = "got tuple; unpack what a function returned: `state, out = ...`"
  with pytest.raises(TypeError, match=re.escape(match)):
    _CALLS[name]((_state(), None))


@pytest.mark.parametrize("name", _CALLS)
def test_a_donated_state(name):
  state = jax.tree.map(jnp.copy, _state())
  state.queue.tokens.delete()
  match = "`state` must be the newest, got one whose arrays were donated"
  with pytest.raises(ValueError, match=match):
    _CALLS[name](state)


@pytest.mark.parametrize("name", _CALLS_ON_MESH)
def test_another_value_on_a_mesh(name):
  call = _CALLS_ON_MESH[name]
  for axes in (None, "data", _AXES.mesh):
    match = r"`axes` must be a MeshAxes, got [^;]*; make it with jaxkv.sharding"
    with pytest.raises(TypeError, match=match):
      call(_state(), axes)
  with pytest.raises(TypeError, match="`state` must be a RolloutState"):
    call(None, _AXES)


def test_axes_of_functions_without_a_state():
  calls = [
    lambda: sharding.init_memory(lambda: None, axes="data"),  # pyright: ignore
    lambda: sharding.param_shardings({}, axes=None),  # pyright: ignore
    lambda: sharding.each_shard(jnp.sum, jnp.ones(2), axes=3),  # pyright: ignore
    lambda: sharding.init(
      jaxkv.init(_SIZES),
      _kv(),
      _requests(1),
      jax.random.key(0),
      _CONFIG,
      axes=_AXES.mesh,  # pyright: ignore
    ),
  ]
  for call in calls:
    with pytest.raises(TypeError, match="`axes` must be a MeshAxes"):
      call()


class TestInit:
  def test_names_the_cache(self):
    """A forgotten or misplaced first argument."""
    match = r"`cache` must be a CacheState, got .*; make one with jaxkv.init\("
    for value in (_SIZES, _CONFIG, _kv()):
      with pytest.raises(TypeError, match=match):
        _init(cache=value)
    with pytest.raises(TypeError, match="unpack what a verb returned"):
      _init(cache=(jaxkv.init(_SIZES), None))

  def test_names_the_config(self):
    with pytest.raises(TypeError, match="`config` must be a RolloutConfig"):
      _init(config=_SIZES)

  def test_a_donated_cache(self):
    cache = jaxkv.init(_SIZES)
    cache.length.delete()
    match = "`cache` must be the newest, got one whose arrays were donated"
    with pytest.raises(ValueError, match=match):
      _init(cache=cache)

  def test_donated_pages(self):
    kv = _kv()
    kv.k.delete()
    with pytest.raises(ValueError, match="`kv` must be the newest"):
      _init(kv=kv)

  def test_on_a_mesh(self):
    with pytest.raises(TypeError, match="`cache` must be a CacheState"):
      sharding.init(
        _SIZES,  # pyright: ignore
        _kv(),
        _requests(1),
        jax.random.key(0),
        _CONFIG,
        axes=_AXES,
      )


def test_scores_with_a_donated_memory():
  memory = jax.tree.map(jnp.copy, _state().memory)
  memory.cache.length.delete()
  with pytest.raises(ValueError, match="`state` must be the newest"):
    rollout.score({}, memory, [[1]], [1], [[[1]]], [[1]], model=_model)


def test_a_snapshot_of_a_donated_state(tmp_path):
  pytest.importorskip("orbax.checkpoint")
  state = jax.tree.map(jnp.copy, _state())
  state.queue.tokens.delete()
  with pytest.raises(ValueError, match="`state` must be the newest"):
    checkpoint.save(tmp_path / "donated", state)


class TestTokens:
  def test_negative(self):
    """Padding and rows that are masked out may be anything."""
    match = "must be tokens of at least 0, got -5"
    with pytest.raises(ValueError, match=f"`requests.tokens` {match}"):
      _init(requests=_requests(1, -5))
    with pytest.raises(ValueError, match=f"`requests.tokens` {match}"):
      rollout.submit(_state(), _requests(-5))
    with pytest.raises(ValueError, match=f"`tokens` {match}"):
      rollout.extend(_state(), _ONE_ID, [[-5]], [1])
    _init(requests=rollout.Requests([[1, 2, -5]], [2]))
    _, out = rollout.extend(_state(), _ONE_ID, [[-5]], [1], mask=[False])
    assert out.code.tolist() == [jaxkv.Status.SKIPPED]

  def test_beyond_the_vocabulary(self):
    """Where the model is known, and the tokens are not traced."""
    decoder = tiny.llama(vocab_size=7)
    model = functools.partial(models.forward, config=decoder)
    state = _init(requests=_requests(1, 7))
    match = "must be tokens below 7, the size of the model's vocabulary, got 7"
    with pytest.raises(ValueError, match=f"`tokens` {match}"):
      rollout.generate({}, state, model=model)
    for prompt, answer in ((7, 1), (1, 7)):
      name = "prompts" if prompt == 7 else "completions"
      with pytest.raises(ValueError, match=f"`{name}` {match}"):
        rollout.score(
          {}, state, [[prompt]], [1], [[[answer]]], [[1]], model=model
        )
