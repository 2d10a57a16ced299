"""Layers of a user's own model, in groups by window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as paged
from tests.kv.memory import dense

_WINDOWS = (4, None, 4, 4, None)
_PLAN = paged.plan_layers(_WINDOWS)
_SIZES = {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}


def _config() -> jaxkv.CacheConfig:
  return _PLAN.cache_config(num_slots=1, max_length=16, page_size=4)


def _memory(kv) -> paged.LayerMemory:
  state, _ = jaxkv.allocate(jaxkv.init(_config()), [6])
  views = tuple(
    jaxkv.view(state, group=group, num_tokens=[6]) for group in range(2)
  )
  tokens = jnp.zeros((1, 6), jnp.int32)
  batch = paged.Batch(tokens=tokens, positions=tokens, views=views)
  return paged.LayerMemory(_PLAN, batch, kv)


def test_each_layer_has_its_part_of_a_pool():
  memory = _memory(_PLAN.init_kv(_config(), **_SIZES))
  inputs = jax.random.normal(jax.random.key(0), (len(_WINDOWS), 6, 8))
  for x in inputs:
    x = x[None, :, None]
    out = memory.attend(x, x, x)
    assert out.shape == x.shape
  assert [pool.num_layers for pool in memory.kv] == [3, 2]
  ranks = [0, 0]
  for window, x in zip(_WINDOWS, inputs, strict=True):
    group = int(window is None)
    table = memory.batch.views[group].page_table
    keys, values = dense(memory.kv[group], ranks[group], table)
    np.testing.assert_array_equal(keys[0, :6, 0], x)
    np.testing.assert_array_equal(values[0, :6, 0], x)
    ranks[group] += 1


def test_pools_are_sized_from_bytes():
  sizes = {"num_slots": 1, "max_length": 16, "page_size": 4}
  # A token of a layer has a key and a value of 8 numbers in float32.
  page_bytes = (3 * 4 * 64, 2 * 4 * 64)
  config = _PLAN.cache_config(**sizes, memory=2**16, page_bytes=page_bytes)
  kv = jax.eval_shape(lambda: _PLAN.init_kv(config, **_SIZES))
  assert paged.page_bytes(kv) == page_bytes
  num_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(kv))
  assert 2**16 - sum(page_bytes) < num_bytes <= 2**16
  with pytest.raises(ValueError, match="`page_bytes` must be the bytes of"):
    _PLAN.cache_config(**sizes, memory=2**16)


def test_memory_of_other_groups_is_refused():
  kv = _PLAN.init_kv(_config(), **_SIZES)
  with pytest.raises(
    ValueError, match="`kv` must have the 2 pools of the plan"
  ):
    _memory(kv[0])
  other = paged.plan_layers((4, None)).cache_config(num_slots=1, max_length=16)
  with pytest.raises(ValueError, match=r"`config.groups` .*plan.cache_config"):
    _PLAN.init_kv(other, **_SIZES)
