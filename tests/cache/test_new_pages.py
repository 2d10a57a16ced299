"""take_new_pages: what was handed out since the last call."""

import dataclasses

import jax.numpy as jnp
import pytest

import jaxkv
import jaxkv.telemetry

CONFIG = jaxkv.CacheConfig(
  num_pages=8,
  page_size=2,
  num_slots=2,
  pages_per_slot=3,
  track_new_pages=True,
)
TOKENS = jnp.asarray([[1, 2, 3, 4, 5]], jnp.int32)


def admitted(state, slot):
  slots, five = jnp.asarray([slot], jnp.int32), jnp.asarray([5], jnp.int32)
  state, out = jaxkv.admit(state, slots, TOKENS, five)
  assert out.ok.all()
  return state


def taken(state):
  """The state, and the new pages' numbers."""
  state, new = jaxkv.telemetry.take_new_pages(state)
  return state, jnp.flatnonzero(new).tolist()


@pytest.mark.slow
def test_pages_are_told_once():
  state, new = taken(admitted(jaxkv.init(CONFIG), 0))
  assert new == [1, 2, 3]
  assert taken(state)[1] == []


def test_found_pages_are_not_new():
  state = admitted(jaxkv.init(CONFIG), 0)
  state, _ = jaxkv.commit(state, TOKENS, [5], slots=[0])
  state, _ = taken(state)
  state, new = taken(admitted(state, 1))
  assert new == [4]


def test_a_page_handed_out_again_is_new_again():
  state, _ = taken(admitted(jaxkv.init(CONFIG), 0))
  state, _ = jaxkv.free(state, slots=_first())
  assert taken(admitted(state, 0))[1] == [1, 2, 3]


def test_pages_of_every_kind_are_told():
  kinds = jaxkv.FullAttention(), jaxkv.SlidingWindow(3), jaxkv.ChunkedLocal(4)
  state = jaxkv.init(dataclasses.replace(CONFIG, groups=kinds, num_pages=12))
  state, out = jaxkv.allocate(state, jnp.asarray([5, 0], jnp.int32))
  assert out.ok.all()
  assert taken(state)[1] == [*range(1, 10)]


def test_a_cache_that_does_not_track_them_says_so():
  state = jaxkv.init(dataclasses.replace(CONFIG, track_new_pages=False))
  with pytest.raises(ValueError, match="track_new_pages"):
    jaxkv.telemetry.take_new_pages(state)


def _first():
  return jnp.asarray([0], jnp.int32)
