"""Which row an item belongs to, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.cache import work_items as ragged


@pytest.mark.parametrize(
  "search", [ragged._row_in_loop, ragged._row_in_one_kernel]
)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_rows_of_items_on_every_platform(search, rows):
  counts = np.random.default_rng(rows).integers(0, 4, rows)
  expected = np.repeat(np.arange(rows), counts)
  ends = jnp.cumsum(jnp.asarray(counts, jnp.int32), dtype=jnp.int32)
  items = jnp.arange(len(expected) + 5, dtype=jnp.int32)
  found = np.asarray(search(ends, items))
  np.testing.assert_array_equal(found[: len(expected)], expected)
  np.testing.assert_array_equal(found[len(expected) :], rows)
