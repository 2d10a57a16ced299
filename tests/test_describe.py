"""One line about a cache, whatever its leaves are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Status
from jaxkv._src.cache.describe import describe

_CONFIG = jaxkv.CacheConfig(
  num_pages=16, page_size=4, num_slots=3, pages_per_slot=8
)


@pytest.fixture
def state():
  """Slot 0 has 6 tokens; slot 1 had 9, and two of its pages stay cached."""
  tokens = jnp.arange(27, dtype=jnp.int32).reshape(3, 9)
  num_tokens = jnp.asarray([6, 9, 0], jnp.int32)
  state, _ = jaxkv.allocate(jaxkv.init(_CONFIG), num_tokens)
  state, _ = jaxkv.commit(state, tokens, num_tokens)
  return jaxkv.free(state, slots=[1])[0]


@pytest.mark.slow
def test_values_are_told(state):
  assert describe(state, Status) == (
    "CacheState(2 of 15 pages in use, 2 free pages cached;"
    " 1 of 3 slots, 6 tokens; FullAttention; OK)"
  )
  assert describe(jaxkv.init(_CONFIG), Status) == (
    "CacheState(0 of 15 pages in use, 0 free pages cached;"
    " 0 of 3 slots, 0 tokens; FullAttention; OK)"
  )


def test_an_error_is_told(state):
  much = jnp.asarray([0, 0, 32], jnp.int32)
  state, _ = jaxkv.allocate(state, much)
  state, _ = jaxkv.allocate(state, much.at[1].set(28))
  assert describe(state, Status).endswith("; OUT_OF_PAGES)")


def test_groups_are_named():
  config = jaxkv.CacheConfig(
    num_pages=16,
    page_size=4,
    num_slots=3,
    pages_per_slot=8,
    groups=(jaxkv.FullAttention(), *[jaxkv.SlidingWindow(8)] * 5),
    prefix_caching=False,
  )
  assert describe(jaxkv.init(config), Status) == (
    "CacheState(0 of 15 pages in use; 0 of 3 slots, 0 tokens;"
    " FullAttention, 5 SlidingWindow; OK)"
  )


def test_sizes_are_told_where_values_are_not_there(state):
  sizes = "CacheState(15 pages of 4 tokens; 3 slots; FullAttention; "
  said = []

  def look(state):
    said.append(describe(state, Status))
    return state

  jax.jit(look)(state)
  stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
  jax.vmap(look)(stack)
  said.append(describe(stack, Status))
  said.append(describe(jax.eval_shape(lambda: state), Status))
  said.append(describe(jax.eval_shape(lambda: stack), Status))
  said.append(describe(jax.tree.map(lambda _: 0, state), Status))
  said.append(describe(jax.tree.map(lambda _: None, state), Status))
  said.append(describe(jax.tree.map(np.asarray, state), Status))
  assert [line.removeprefix(sizes) for line in said] == [
    "traced)",
    "traced)",
    "a stack of (2,))",
    "leaves are not arrays)",
    "leaves are not arrays)",
    "leaves are not arrays)",
    "leaves are not arrays)",
    describe(state, Status),
  ]


def test_a_state_that_a_trace_closes_over_is_told(state):
  said = []
  jax.make_jaxpr(lambda: said.append(describe(state, Status)))()
  assert said == [describe(state, Status)]


def test_a_donated_state_is_told(state):
  lost = jax.tree.map(jnp.copy, state)
  jax.tree.map(lambda leaf: leaf.delete(), lost)
  assert describe(lost, Status).endswith("; donated)")
