"""`view`: a cache's slots as the rows of one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import view

CONFIG = jaxkv.CacheConfig(
  num_pages=16,
  page_size=4,
  num_slots=3,
  pages_per_slot=4,
  groups=(jaxkv.FullAttention(), jaxkv.SlidingWindow(4)),
)


@pytest.fixture(scope="module")
def state():
  """Slots with 5, 0 and 2 tokens."""
  num_tokens = jnp.asarray([5, 0, 2], jnp.int32)
  tokens = jnp.ones((3, 5), jnp.int32)
  state, _ = jaxkv.allocate(jaxkv.init(CONFIG), num_tokens)
  return jaxkv.commit(state, tokens, num_tokens)[0]


def own_pages(state, group, slot):
  """Pages of a slot in one group, from the cache."""
  table = np.asarray(state.page_table)
  # The groups' axis is the one of size 2.
  return np.moveaxis(table, table.shape.index(2), 0)[group, slot]


@pytest.mark.parametrize("group", [0, 1])
def test_rows_are_the_slots_of_a_group(state, group):
  rows = view(state, group=group, num_tokens=[1, 0, 3])
  assert isinstance(rows, View)
  assert rows.page_table.shape == (3, 4)
  for slot in range(3):
    pages = own_pages(state, group, slot)
    np.testing.assert_array_equal(rows.page_table[slot], pages)
  np.testing.assert_array_equal(rows.starts, [5, 0, 2])
  np.testing.assert_array_equal(rows.num_tokens, [1, 0, 3])
  assert rows.shared is None


def test_groups_have_separate_pages(state):
  tables = [view(state, group=g, num_tokens=[0] * 3).page_table for g in (0, 1)]
  assert (tables[0][0] != tables[1][0]).any()
  default = view(state, num_tokens=[0] * 3)
  np.testing.assert_array_equal(default.page_table, tables[0])


@pytest.mark.parametrize(
  "num_tokens",
  [
    [1, 0, 3],
    (1, 0, 3),
    np.asarray([1, 0, 3], np.int64),
    np.asarray([1, 0, 3], np.uint8),
    jnp.asarray([1, 0, 3], jnp.int8),
    [np.int16(1), jnp.int32(0), 3],
  ],
)
def test_any_integers_are_cast(state, num_tokens):
  rows = view(state, num_tokens=num_tokens)
  assert isinstance(rows.num_tokens, jax.Array)
  assert rows.num_tokens.dtype == jnp.int32
  np.testing.assert_array_equal(rows.num_tokens, [1, 0, 3])


def test_traced_numbers_of_tokens(state):
  """The numbers may be traced, also one by one."""

  @jax.jit
  def run(state, num_tokens):
    listed = view(state, num_tokens=[num_tokens[0], 0, num_tokens[2]])
    return view(state, num_tokens=num_tokens), listed

  num_tokens = jnp.asarray([1, 0, 3], jnp.int32)
  for rows in run(state, num_tokens):
    jax.tree.map(
      np.testing.assert_array_equal, rows, view(state, num_tokens=num_tokens)
    )


@pytest.mark.parametrize(
  ("num_tokens", "error", "message"),
  [
    (
      [1.0, 0.0, 3.0],
      TypeError,
      "`num_tokens` must hold integers, got float64",
    ),
    (jnp.ones(3), TypeError, "`num_tokens` must hold integers, got float32"),
    ([True, False, True], TypeError, "must hold integers, got bool"),
    (None, TypeError, "`num_tokens` must hold integers, got object"),
    ([1, 2], ValueError, r"shape \[3\], one for each slot, got \[2\]"),
    (3, ValueError, r"`num_tokens` must have the shape \[3\], .* got \[\]"),
    ([1, 2**40, 3], ValueError, "`num_tokens` must fit int32"),
  ],
)
def test_bad_numbers_of_tokens(state, num_tokens, error, message):
  with pytest.raises(error, match=message):
    view(state, num_tokens=num_tokens)


@pytest.mark.parametrize(
  ("group", "error", "message"),
  [
    (2, ValueError, "`group` must be from 0 to 1, got 2"),
    (-1, ValueError, "`group` must be from 0 to 1, got -1"),
    (0.0, TypeError, "`group` must be a Python int, got 0.0"),
    (True, TypeError, "`group` must be a Python int, got True"),
  ],
)
def test_bad_groups(state, group, error, message):
  with pytest.raises(error, match=message):
    view(state, group=group, num_tokens=[1, 0, 0])


def test_bad_states(state):
  with pytest.raises(TypeError, match="CacheState"):
    view(CONFIG, num_tokens=[1, 0, 0])
  stack = jax.tree.map(lambda x: jnp.stack([x, x]), state)
  with pytest.raises(ValueError, match="stack"):
    view(stack, num_tokens=[1, 0, 0])


def test_views_under_vmap(state):
  stack = jax.tree.map(lambda x: jnp.stack([x, x]), state)
  rows = jax.vmap(lambda state: view(state, num_tokens=[1, 0, 3]))(stack)
  assert rows.page_table.shape == (2, 3, 4)
  assert rows.num_tokens.shape == (2, 3)
