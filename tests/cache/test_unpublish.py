"""Pages of a sequence that leave the index, unless a slot holds them."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import roots
from jaxkv._src.cache.steps.unpublish import unpublish_unheld

_TOKENS = [[1, 2, 3, 4]]


def _cache(**options):
  config = jaxkv.CacheConfig(
    num_pages=7, page_size=2, num_slots=3, pages_per_slot=3, **options
  )
  return jaxkv.init(config, jax.random.key(0))


def _computed(state, slots):
  """Computes the tokens in several slots at once, so that pages are equal."""
  counts = jnp.where(jnp.isin(jnp.arange(3), jnp.asarray(slots)), 4, 0)
  counts = counts.astype(jnp.int32)
  state, out = jaxkv.allocate(state, counts)
  assert out.ok.all()
  return jaxkv.commit(state, jnp.asarray(_TOKENS * 3), counts)[0]


def _freed(state):
  return jaxkv.free(state, mask=state.num_pages[:, 0] > 0)[0]


def _unpublished(state, num_tokens=4):
  pages = jnp.asarray(_TOKENS, jnp.int32).reshape(1, 2, 2)
  keys = hashing.row_keys(state.secret, roots(state, None)[None], pages)
  state, was_cached = jax.jit(unpublish_unheld)(
    state, keys[0], pages[0], jnp.int32(num_tokens)
  )
  jaxkv.check(state)
  return state, bool(was_cached)


def _num_cached(state):
  return int(np.count_nonzero(state.pool.index.buckets))


def test_equal_pages_leave_one_by_one():
  state = _freed(_computed(_cache(), [0, 1]))
  for num_cached in (2, 0):
    state, was_cached = _unpublished(state)
    assert was_cached and _num_cached(state) == num_cached
  assert not _unpublished(state)[1]


def test_held_pages_stay_and_hide_no_others():
  """Slot 0 holds the pages that a lookup prefers; those of slot 1 leave."""
  state, _ = jaxkv.free(_computed(_cache(), [0, 1]), slots=[1])
  state, was_cached = _unpublished(state)
  assert was_cached and jaxkv.cached_pages(state) == [1, 2]
  state, was_cached = _unpublished(state)
  assert not was_cached and jaxkv.cached_pages(state) == [1, 2]


def test_a_pin_holds_no_page_in_the_index():
  """No sequence reads it; the pin itself stays."""
  state, _ = jaxkv.touch(_computed(_cache(), [0]), [1])
  state = _freed(state)
  state, was_cached = _unpublished(state)
  assert was_cached and _num_cached(state) == 0
  assert int(state.pool.pin_count[1]) == 1


def test_offloaded_pages():
  """Pages with equal keys in both memories."""
  state = _freed(_computed(_cache(offload_pages=6), [0]))
  state, out = jaxkv.allocate(state, [6, 6, 0])
  assert int(out.moves.count) == 2
  state = _freed(state)
  state = _computed(state, [2])
  state = _freed(state)
  assert _num_cached(state) == 4
  for num_cached in (2, 0):
    state, was_cached = _unpublished(state)
    assert was_cached and _num_cached(state) == num_cached


def test_pages_past_the_end_stay():
  state = _freed(_computed(_cache(), [0]))
  state, was_cached = _unpublished(state, num_tokens=3)
  assert was_cached and jaxkv.cached_pages(state) == [2]
