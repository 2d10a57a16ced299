"""The state, its statuses, and verbs that are given something else."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Status
from jaxkv._src.cache import state as status
from tests.cache.by_hand import config
from tests.cache.by_hand import ints
from tests.cache.by_hand import tiny

CONFIG = jaxkv.CacheConfig(
  num_pages=16, page_size=4, num_slots=2, pages_per_slot=4
)
TWO = jnp.asarray([2, 0], jnp.int32)
# Looks on the host, looks that are traced, and a state given by name.
LOOKS = {
  "check": jaxkv.check,
  "free_pages": jaxkv.free_pages,
  "cached_pages": jaxkv.cached_pages,
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

  def test_results_of_verbs_are_refused(self, look):
    result = jaxkv.allocate(jaxkv.init(CONFIG), TWO)
    with pytest.raises(TypeError, match=r"got tuple; unpack .* `state, out"):
      look(result)

  @pytest.mark.parametrize("state", [None, {}, [1]])
  def test_other_objects_are_refused(self, look, state):
    text = f"`state` must be a CacheState, got {type(state).__name__}"
    with pytest.raises(TypeError, match=text):
      look(state)


def test_donated_states_are_refused():
  state = jaxkv.init(CONFIG)
  spend = jax.jit(lambda state: jaxkv.allocate(state, TWO)[0], donate_argnums=0)
  newest = spend(state)
  for look in (jaxkv.check, lambda state: jaxkv.allocate(state, TWO)):
    with pytest.raises(ValueError, match="`state` must be the newest, got"):
      look(state)
    look(newest)


@pytest.mark.parametrize("look", [jaxkv.check, jaxkv.check_invariants])
@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_slots": 3}, r"state\.page_table` .* \(3, 1, 4\), got \(2, 1, 4\)"),
    ({"pages_per_slot": 5}, r"state\.page_table` .* \(2, 1, 5\), got \(2,"),
    ({"page_size": 2}, r"state\.hashes\.tail` .* \(2, 2\), got \(2, 4\)"),
    ({"num_pages": 17}, r"state\.pool\.ref_count` .* \(17,\), got \(16,\)"),
    ({"prefix_caching": False}, r"state\.secret` .* no array, got \(3, 4\)"),
    (
      {"prefix_retention_interval": 0},
      r"state\.hashes\.prompt_length` .* \(2,\), got no array",
    ),
  ],
)
def test_arrays_of_another_config_are_refused(look, changes, message):
  other_config = dataclasses.replace(CONFIG, **changes)
  state = dataclasses.replace(jaxkv.init(CONFIG), config=other_config)
  with pytest.raises(ValueError, match=message):
    look(state)
  with pytest.raises(ValueError, match=message):
    jaxkv.allocate(state, [2] * other_config.num_slots)


def test_sizes_are_compared_inside_vmap():
  """There the shapes are those of a single cache."""
  stack = jax.tree.map(lambda x: jnp.stack([x, x]), jaxkv.init(CONFIG))
  allocate = jax.vmap(lambda state: jaxkv.allocate(state, TWO)[1].ok)
  assert allocate(stack).all()
  other_config = dataclasses.replace(CONFIG, num_pages=17)
  with pytest.raises(ValueError, match=r"`state\.pool\.ref_count` must have"):
    allocate(dataclasses.replace(stack, config=other_config))


def test_dictionaries_of_sizes_are_refused():
  with pytest.raises(TypeError, match="must be a CacheConfig, got dict"):
    jaxkv.init(dataclasses.asdict(CONFIG))


class TestKey:
  def test_default_secrets_are_random(self):
    secrets = [np.asarray(jaxkv.init(CONFIG).secret) for _ in range(2)]
    assert not np.any(secrets[0] == secrets[1])

  def test_equal_keys_make_equal_secrets(self):
    """On the host, traced, and as a key of jax's or its bits."""
    key = jax.random.key(3)
    bits = jax.random.bits(key, (4,), jnp.uint32)
    states = [
      jaxkv.init(CONFIG, key),
      jaxkv.init(CONFIG, bits),
      jaxkv.init(CONFIG, np.asarray(bits)),
      jax.jit(lambda key: jaxkv.init(CONFIG, key))(key),
      jax.jit(lambda key: jaxkv.init(CONFIG, key))(bits),
    ]
    for state in states[1:]:
      chex.assert_trees_all_equal(state, states[0])

  def test_batched_keys_make_different_secrets(self):
    make = jax.vmap(lambda key: jaxkv.init(CONFIG, key))
    stack = make(jax.random.split(jax.random.key(0), 3))
    assert len(np.unique(stack.secret[:, 0], axis=0)) == 3

  def test_a_traced_init_needs_a_key(self):
    with pytest.raises(ValueError, match="`key` must be given under jit"):
      jax.jit(lambda: jaxkv.init(CONFIG))()

  @pytest.mark.parametrize(
    ("key", "error", "message"),
    [
      (3, TypeError, "`key` must be uint32, got int64; pass a jax.random.key"),
      (np.zeros(2, np.uint32), ValueError, r"`key` must have the shape \[4\]"),
      (jax.random.split(jax.random.key(0)), ValueError, "`key` must have"),
      ("secret", TypeError, "`key` must be uint32"),
    ],
  )
  def test_bad_keys_are_refused(self, key, error, message):
    with pytest.raises(error, match=message):
      jaxkv.init(CONFIG, key)

  def test_secrets_are_not_printed(self):
    state = jaxkv.init(CONFIG)
    words = np.asarray(state.secret).ravel().tolist()
    assert not any(str(word) in repr(state) for word in words)


@pytest.mark.slow
def test_the_smallest_cache():
  smallest_config = config(
    num_pages=2, page_size=1, num_slots=1, pages_per_slot=1
  )
  state = jaxkv.init(smallest_config)
  state, _ = jaxkv.allocate(state, ints(1))
  state, _ = jaxkv.commit(state, ints([5]), ints(1))
  state, full = jaxkv.allocate(state, ints(1))
  assert full.code.tolist() == [jaxkv.Status.SLOT_FULL]
  state, _ = jaxkv.free(state, slots=ints(0))
  hit = jaxkv.match(state, ints([5, 6]), ints(2))
  assert hit.num_cached_tokens.tolist() == [1]


def test_metadata_is_small():
  large = jaxkv.CacheConfig(
    num_pages=65536, page_size=16, num_slots=256, pages_per_slot=4096
  )
  state = jax.eval_shape(lambda: jaxkv.init(large, jaxkv.salt("")))
  num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  assert num_bytes <= 16 * 2**20


def test_an_error_stays_until_it_is_cleared():
  state, _ = jaxkv.free(tiny(), slots=ints(7))
  with pytest.raises(jaxkv.CacheError, match="BAD_SLOT"):
    jaxkv.check(state)
  jaxkv.check(jaxkv.clear_error(state)[0])


def test_running_out_of_pages_is_no_error():
  """Two pages of two tokens for five tokens."""
  state, out = jaxkv.allocate(tiny(num_pages=3), ints(5, 0, 0))
  assert out.code[0] == Status.OUT_OF_PAGES
  jaxkv.check(state)
  assert int(jaxkv.stats(state).failed_rows) == 1


@pytest.mark.parametrize(
  ("old_error", "codes", "new_error"),
  [
    (Status.OK, [Status.OK, Status.SKIPPED], Status.OK),
    (Status.OK, [Status.OK, Status.BAD_SLOT, Status.NO_ROOM], Status.BAD_SLOT),
    # The first failure stays.
    (Status.BAD_SLOT, [Status.NO_ROOM], Status.BAD_SLOT),
    (Status.BAD_SLOT, [Status.OUT_OF_PAGES], Status.BAD_SLOT),
    # Running out of pages hides no mistake, before it or behind it.
    (Status.OK, [Status.OUT_OF_PAGES, Status.NO_ROOM], Status.NO_ROOM),
    (Status.OUT_OF_PAGES, [Status.NO_ROOM], Status.NO_ROOM),
    (Status.OUT_OF_PAGES, [Status.OK], Status.OUT_OF_PAGES),
  ],
)
def test_first_failure_except_out_of_pages_sticks(old_error, codes, new_error):
  assert status.sticky(jnp.int32(old_error), ints(*codes)) == new_error


def test_first_true_condition_gives_the_code():
  lengths = ints(-1, 5, 500)
  code = status.first_code(
    (lengths < 0, Status.BAD_LENGTH),
    ((lengths < 0) | (lengths > 99), Status.SLOT_FULL),
  )
  assert code.tolist() == [Status.BAD_LENGTH, Status.OK, Status.SLOT_FULL]
  assert status.is_failure(code).tolist() == [True, False, True]
