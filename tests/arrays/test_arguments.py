"""Arguments of another shape or kind are refused by name; integers are cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.cache.by_hand import ints
from tests.cache.by_hand import tiny


@pytest.mark.parametrize("name", ["admit", "commit", "fork", "free"])
def test_zero_rows_are_refused(name):
  empty = jnp.zeros((0,), jnp.int32)
  arguments_of = {
    "admit": {"slots": empty, "tokens": empty[None], "lengths": empty},
    "commit": {
      "tokens": jnp.zeros((3, 0), jnp.int32),
      "num_tokens": ints(0, 0, 0),
    },
    "fork": {"src": empty, "dst": empty},
    "free": {"slots": empty},
  }
  with pytest.raises(ValueError, match=r"must have the shape \[.*got \[.*0"):
    getattr(jaxkv, name)(tiny(), **arguments_of[name])


@pytest.mark.parametrize(
  "num_tokens",
  [
    [1, 0, 2],
    (1, 0, 2),
    np.array([1, 0, 2]),
    np.array([1, 0, 2], np.uint8),
    jnp.array([1, 0, 2], jnp.int16),
    [jnp.int32(1), 0, 2],
  ],
)
def test_whole_numbers_are_cast(num_tokens):
  state, out = jaxkv.allocate(tiny(), num_tokens)
  assert out.num_new_pages.tolist() == [1, 0, 1]
  assert state.num_pages.dtype == jnp.int32


def test_lists_of_traced_numbers_are_cast():
  def program(count):
    return jaxkv.allocate(tiny(), [count, 0, 2])[1].num_new_pages

  assert jax.jit(program)(jnp.int32(1)).tolist() == [1, 0, 1]


@pytest.mark.parametrize(
  ("num_tokens", "error", "message"),
  [
    ([1.0, 0, 2], TypeError, "`num_tokens` must hold integers, got float64"),
    (jnp.ones(3), TypeError, "`num_tokens` must hold integers, got float32"),
    ([True, False, True], TypeError, "must hold integers, got bool"),
    (["1", "0", "2"], TypeError, "must hold integers, got <U1"),
    ([2**31, 0, 0], ValueError, "`num_tokens` must fit int32, got values from"),
    ([[1], [2, 3]], ValueError, "`num_tokens` must be a rectangular array"),
    ([1, 2], ValueError, r"shape \[3\], one for each slot, got \[2\]"),
  ],
)
def test_other_values_are_named(num_tokens, error, message):
  with pytest.raises(error, match=message):
    jaxkv.allocate(tiny(), num_tokens)


def test_wide_integers_are_not_cut_in_a_trace():
  """Their values are unknown, and two tokens must not become one."""
  with jax.enable_x64(True):
    wide = jax.ShapeDtypeStruct((3,), jnp.int64)
    with pytest.raises(TypeError, match="`num_tokens` must be int32 in a trac"):
      jax.eval_shape(lambda n: jaxkv.allocate(tiny(), n)[1], wide)


def test_masks_and_salts_have_their_own_kinds():
  with pytest.raises(TypeError, match="`mask` must hold True and False"):
    jaxkv.free(tiny(), mask=[1, 0, 0])
  with pytest.raises(TypeError, match="`salts` must be uint32, got int64"):
    jaxkv.match(tiny(), [[1, 2]], [2], salts=[[1, 2, 3, 4]])
  with pytest.raises(ValueError, match=r"`mask` must have the shape \[3\]"):
    jaxkv.free(tiny(), mask=[True, False])
