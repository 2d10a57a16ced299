"""The event log, and the ages of evicted pages."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import jaxkv.telemetry
from jaxkv._src.cache.prefix import prefix_index
from tests.cache.pair import Pair
from tests.cache.pair import wander
from tests.cache.setups import MERGE
from tests.cache.setups import SETUPS
from tests.cache.setups import Setup


def cached(state):
  """Page -> key, as the state has it."""
  pages = jaxkv.cached_pages(state)
  keys = prefix_index.key_of(state.pool.index, jnp.asarray(pages, jnp.int32))
  keys = jax.device_get(keys).astype("<u4")
  return {page: key.tobytes() for page, key in zip(pages, keys, strict=True)}


def logged(name: str, size: int, **options) -> Setup:
  """A setup whose cache keeps events."""
  setup = SETUPS[name]
  config = dataclasses.replace(setup.config, event_log=size, **options)
  return dataclasses.replace(setup, config=config)


@pytest.mark.parametrize(
  "setup",
  [
    pytest.param(
      logged("hybrid", 500, **MERGE), id="hybrid", marks=pytest.mark.slow
    ),
    pytest.param(logged("draft", 500), id="draft", marks=pytest.mark.deep),
  ],
)
def test_replaying_tells_what_is_cached(setup):
  seen = set()
  with setup.patched():
    for seed in range(2):
      # The pair reads events after every third move.
      pair = Pair(setup)
      wander(pair, seed, 96)
      keys = {page: event.key for page, event in pair.mirror.pages.items()}
      assert keys == cached(pair.state)
      seen |= pair.mirror.seen
  assert seen >= {jaxkv.telemetry.Stored, jaxkv.telemetry.Removed}


CONFIG = jaxkv.CacheConfig(
  num_pages=8,
  page_size=2,
  num_slots=2,
  pages_per_slot=4,
  groups=(jaxkv.FullAttention(), jaxkv.SlidingWindow(3)),
  event_log=5,
)
TOKENS = jnp.asarray([[1, 2, 3, 4, 5, 6]] * 2, jnp.int32)


def committed(num_tokens, state=None):
  """A cache in which slots hold so many of TOKENS."""
  state = jaxkv.init(CONFIG) if state is None else state
  num_tokens = jnp.asarray(num_tokens, jnp.int32)
  state, out = jaxkv.allocate(state, num_tokens)
  assert out.ok.all()
  return jaxkv.commit(state, TOKENS, num_tokens)[0]


class TestStored:
  @pytest.mark.slow
  def test_pages_name_their_parents(self):
    _, drained = jaxkv.telemetry.drain_events(committed([4, 0]))
    first, second, window_first, window_second = drained.events
    assert [event.page for event in drained.events] == [1, 2, 3, 4]
    assert [event.group for event in drained.events] == [0, 0, 1, 1]
    assert first.parent is None and second.parent == first.key
    assert window_second.parent == window_first.key
    assert first.tokens == (1, 2) and second.tokens == (3, 4)
    assert len({event.key for event in drained.events}) == 4

  def test_the_parent_of_an_earlier_call_is_known(self):
    state, before = jaxkv.telemetry.drain_events(committed([2, 0]))
    state, after = jaxkv.telemetry.drain_events(committed([2, 0], state))
    assert after.events[0].parent == before.events[0].key

  def test_the_root_tells_salts_apart(self):
    roots = set()
    for name in ("a", "b"):
      state, _ = jaxkv.admit(
        jaxkv.init(CONFIG),
        jnp.zeros((1,), jnp.int32),
        TOKENS[:1],
        jnp.asarray([3], jnp.int32),
        salts=jaxkv.salt(name)[None],
      )
      state, _ = jaxkv.commit(state, TOKENS, jnp.asarray([3, 0], jnp.int32))
      _, drained = jaxkv.telemetry.drain_events(state)
      roots |= {event.root for event in drained.events}
    assert len(roots) == 2


class TestOverflow:
  def test_lost_events_are_counted_and_the_first_ones_stay(self):
    state = committed([6, 0])
    _, drained = jaxkv.telemetry.drain_events(state)
    assert [event.page for event in drained.events] == [1, 2, 3, 4, 5]
    assert drained.num_lost == 1

  def test_a_reading_makes_room(self):
    state, _ = jaxkv.telemetry.drain_events(committed([6, 0]))
    state, _ = jaxkv.free(state, slots=jnp.asarray([0], jnp.int32))
    state, out = jaxkv.reset_prefix_cache(state)
    assert out.ok
    _, drained = jaxkv.telemetry.drain_events(state)
    assert drained == ([jaxkv.telemetry.Cleared()], 0)


def test_a_cache_without_a_log_says_so():
  config = dataclasses.replace(CONFIG, event_log=0)
  with pytest.raises(ValueError, match="event_log"):
    jaxkv.telemetry.drain_events(jaxkv.init(config))


def test_a_log_needs_prefix_caching():
  with pytest.raises(ValueError, match="prefix_caching"):
    dataclasses.replace(CONFIG, prefix_caching=False)


AGED = jaxkv.CacheConfig(
  num_pages=4,
  page_size=2,
  num_slots=1,
  pages_per_slot=3,
  track_residency=True,
)
ZERO, SIX = jnp.zeros((1,), jnp.int32), jnp.full((1,), 6, jnp.int32)


def passed(state, text):
  """A sequence of three pages comes, is published and goes."""
  tokens = jnp.arange(6, dtype=jnp.int32)[None] + 10 * text
  state, out = jaxkv.admit(state, ZERO, tokens, SIX)
  assert out.ok.all()
  state, _ = jaxkv.commit(state, tokens[:, :], SIX - out.num_cached_tokens)
  state, _ = jaxkv.free(state, slots=ZERO)
  return state


def ages(counts):
  """Number of bits -> pages, for those that there are."""
  return {bits: n for bits, n in enumerate(counts.tolist()) if n}


@pytest.mark.slow
def test_ages_of_evicted_pages():
  state = passed(jaxkv.init(AGED), 0)
  before = jaxkv.telemetry.residency(state)
  assert (ages(before.lifetime), ages(before.idle)) == ({}, {})
  state = passed(state, 1)
  # After pages 1, 2 and 3, two, one and no pages were published; they were
  # given back and evicted after all three.
  found = jaxkv.telemetry.residency(state)
  assert ages(found.lifetime) == {0: 1, 1: 1, 2: 1}
  assert ages(found.idle) == {0: 3}
  later = jaxkv.telemetry.residency(passed(state, 2)) - found
  assert ages(later.lifetime) == {0: 1, 1: 1, 2: 1}
  assert ages(later.idle) == {0: 3}


@pytest.mark.slow
def test_only_what_makes_room_is_evicted():
  state = passed(jaxkv.init(AGED), 0)
  state, _ = jaxkv.evict(state, jnp.asarray([1], jnp.int32))
  state, _ = jaxkv.reset_prefix_cache(state)
  state = passed(state, 1)
  assert ages(jaxkv.telemetry.residency(state).lifetime) == {}


def test_the_default_keeps_nothing():
  state = jaxkv.init(dataclasses.replace(AGED, track_residency=False))
  assert state.pool.ages is None
  with pytest.raises(ValueError, match="track_residency=True"):
    jaxkv.telemetry.residency(state)
  with pytest.raises(ValueError, match="track_residency` needs"):
    dataclasses.replace(AGED, prefix_caching=False)
