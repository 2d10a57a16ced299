"""The state, and verbs that are given something else than one state."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import jaxkv.telemetry
from tests.cache.by_hand import ints
from tests.cache.test_config import config

CONFIG = jaxkv.CacheConfig(
  num_pages=16, page_size=4, num_slots=2, pages_per_slot=4
)
TWO = jnp.asarray([2, 0], jnp.int32)
# Looks on the host, looks that are traced, and a state given by name.
LOOKS = {
  "check": jaxkv.check,
  "free_pages": jaxkv.free_pages,
  "cached_pages": jaxkv.cached_pages,
  "drain_events": jaxkv.telemetry.drain_events,
  "usage": jaxkv.usage,
  "num_common_prefix_pages": jaxkv.num_common_prefix_pages,
  "allocate": lambda state: jaxkv.allocate(state, TWO),
  "allocate by name": lambda state: jaxkv.allocate(num_tokens=TWO, state=state),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
class TestStates:
  def test_a_stack_of_caches_is_refused(self, look):
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), jaxkv.init(CONFIG))
    with pytest.raises(ValueError, match=r"stack of caches of shape \(2,\)"):
      look(stack)

  def test_all_that_a_verb_returned_is_refused(self, look):
    both = jaxkv.allocate(jaxkv.init(CONFIG), TWO)
    with pytest.raises(TypeError, match=r"got tuple; unpack .* `state, out"):
      look(both)

  @pytest.mark.parametrize("state", [None, {}, [1]])
  def test_what_is_no_cache_is_refused(self, look, state):
    text = f"`state` must be a CacheState, got {type(state).__name__}"
    with pytest.raises(TypeError, match=text):
      look(state)


def test_sizes_are_a_config():
  with pytest.raises(TypeError, match="must be a CacheConfig, got dict"):
    jaxkv.init(dataclasses.asdict(CONFIG))


def test_the_smallest_cache():
  sizes = config(num_pages=2, page_size=1, num_slots=1, pages_per_slot=1)
  state = jaxkv.init(sizes)
  state, _ = jaxkv.allocate(state, ints(1))
  state, _ = jaxkv.commit(state, ints([5]), ints(1))
  state, full = jaxkv.allocate(state, ints(1))
  assert full.code.tolist() == [jaxkv.Status.SLOT_FULL]
  state, _ = jaxkv.free(state, slots=ints(0))
  found = jaxkv.match(state, ints([5, 6]), ints(2))
  assert found.num_cached_tokens.tolist() == [1]


def test_metadata_is_small():
  large = jaxkv.CacheConfig(
    num_pages=65536, page_size=16, num_slots=256, pages_per_slot=4096
  )
  state = jax.eval_shape(lambda: jaxkv.init(large))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  assert size <= 16 * 2**20
