"""How old pages were when they were evicted, in pages published meanwhile."""

import dataclasses

import jax.numpy as jnp
import pytest

import jaxkv
import jaxkv.telemetry

CONFIG = jaxkv.CacheConfig(
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


def test_ages_of_evicted_pages():
  state = passed(jaxkv.init(CONFIG), 0)
  before = jaxkv.telemetry.residency(state)
  assert (ages(before.lifetime), ages(before.idle)) == ({}, {})
  state = passed(state, 1)
  # Pages 1 to 3 were published at 0, 1 and 2, given back and evicted at 3.
  found = jaxkv.telemetry.residency(state)
  assert ages(found.lifetime) == {1: 1, 2: 2}
  assert ages(found.idle) == {0: 3}
  later = jaxkv.telemetry.residency(passed(state, 2)) - found
  assert (ages(later.lifetime), ages(later.idle)) == ({1: 1, 2: 2}, {0: 3})


def test_only_what_makes_room_is_evicted():
  state = passed(jaxkv.init(CONFIG), 0)
  state, _ = jaxkv.evict(state, jnp.asarray([1], jnp.int32))
  state, _ = jaxkv.reset_prefix_cache(state)
  state = passed(state, 1)
  assert ages(jaxkv.telemetry.residency(state).lifetime) == {}


def test_the_default_keeps_nothing():
  state = jaxkv.init(dataclasses.replace(CONFIG, track_residency=False))
  assert state.pool.ages is None
  with pytest.raises(ValueError, match="track_residency=True"):
    jaxkv.telemetry.residency(state)
  with pytest.raises(ValueError, match="track_residency` needs"):
    dataclasses.replace(CONFIG, prefix_caching=False)
