"""Arrays of another shape or dtype are refused by name."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv._src.cache import checks
from tests.cache.by_hand import ints
from tests.cache.by_hand import tiny


@pytest.mark.parametrize("name", ["admit", "commit", "fork", "free"])
def test_no_rows_at_all_is_refused(name):
  none = jnp.zeros((0,), jnp.int32)
  arguments_of = {
    "admit": (none, jnp.zeros((0, 4), jnp.int32), none),
    "commit": (jnp.zeros((3, 0), jnp.int32), ints(0, 0, 0)),
    "fork": (none, none),
    "free": (none,),
  }
  with pytest.raises(ValueError, match=r"must be int32\[.*0"):
    getattr(jaxkv, name)(tiny(), *arguments_of[name])


def test_a_list_says_what_to_do():
  with pytest.raises(ValueError, match=r"Wrap it in jnp.asarray"):
    checks.check_array("slots", [0], ("R",), jnp.int32)


def test_another_dtype_is_named():
  with pytest.raises(ValueError, match=r"num_tokens must be int32\[3\]"):
    jaxkv.allocate(tiny(), jnp.ones((3,), jnp.float32))
