"""The idioms for XLA do what they are for."""

import jax
import jax.numpy as jnp

from jaxkv._src.cache import xla
from tests.cache.by_hand import ints


def test_a_fence_changes_no_index():
  """It only makes an index depend on a count that is never negative."""
  assert xla.read_before(ints(0)[0], ints(1, 2)).tolist() == [1, 2]
  text = jax.jit(xla.read_before).lower(ints(0)[0], ints(1, 2)).as_text()
  assert "compare" in text and "select" in text


def test_a_body_runs_once_or_not_at_all():
  for condition, wanted in ((True, 6), (False, 5)):
    out = xla.at_most_once(jnp.asarray(condition), lambda x: x + 1, ints(5))
    assert out.tolist() == [wanted]


def test_zeros_keep_the_dtype():
  for dtype in (jnp.int32, jnp.uint32, jnp.bool_):
    ones = jnp.ones((2,), dtype)
    zeros = xla.zeros_like(ones)
    assert zeros.dtype == dtype and not zeros.any()
