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
def test_counts_and_status_are_shown(state):
  assert describe(state, Status) == (
    "CacheState(2 of 15 pages in use, 2 free pages cached;"
    " 1 of 3 slots, 6 tokens; FullAttention; OK)"
  )
  assert describe(jaxkv.init(_CONFIG), Status) == (
    "CacheState(0 of 15 pages in use, 0 free pages cached;"
    " 0 of 3 slots, 0 tokens; FullAttention; OK)"
  )


def test_an_error_is_shown(state):
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


def test_traced_states_show_sizes_alone(state):
  prefix = "CacheState(15 pages of 4 tokens; 3 slots; FullAttention; "
  texts = []

  def look(state):
    texts.append(describe(state, Status))
    return state

  jax.jit(look)(state)
  stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
  jax.vmap(look)(stack)
  texts.append(describe(stack, Status))
  texts.append(describe(jax.eval_shape(lambda: state), Status))
  texts.append(describe(jax.eval_shape(lambda: stack), Status))
  texts.append(describe(jax.tree.map(lambda _: 0, state), Status))
  texts.append(describe(jax.tree.map(lambda _: None, state), Status))
  texts.append(describe(jax.tree.map(np.asarray, state), Status))
  assert [line.removeprefix(prefix) for line in texts] == [
    "traced)",
    "traced)",
    "a stack of (2,))",
    "leaves are not arrays)",
    "leaves are not arrays)",
    "leaves are not arrays)",
    "leaves are not arrays)",
    describe(state, Status),
  ]


def test_a_concrete_state_in_a_trace_shows_its_values(state):
  texts = []
  jax.make_jaxpr(lambda: texts.append(describe(state, Status)))()
  assert texts == [describe(state, Status)]


def test_a_donated_state_is_shown_as_donated(state):
  lost = jax.tree.map(jnp.copy, state)
  jax.tree.map(lambda leaf: leaf.delete(), lost)
  assert describe(lost, Status).endswith("; donated)")
