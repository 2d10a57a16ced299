"""The acceptance rates of drafts from n-grams."""

import jax.numpy as jnp
import numpy as np

from jaxkv._src.engine import ngrams


def test_rates_follow_the_accepted_drafts():
  """And rise slowly if a match is not tried; other rows keep theirs."""
  rates = jnp.asarray([0.8, 0.8, 0.25, 0.6, 0.3, 0.795], jnp.float32)
  tables = ngrams.NgramTables(table=jnp.zeros((6, 1), jnp.int32), rate=rates)
  learned = ngrams.learn(
    tables,
    # Row 6 is none.
    jnp.asarray([0, 1, 2, 3, 6], jnp.int32),
    jnp.asarray([True, True, True, True, True]),
    drafted=jnp.asarray([4, 4, 0, 0, 4], jnp.int32),
    accepted=jnp.asarray([1, 4, 0, 0, 4], jnp.int32),
  )
  expected = [0.8 * 0.8 + 0.2 / 4, 0.8 * 0.8 + 0.2, 0.26, 0.6, 0.3, 0.795]
  np.testing.assert_allclose(learned.rate, expected, rtol=1e-6)
  same = ngrams.learn(
    tables, jnp.arange(5), jnp.zeros((5,), bool), *(jnp.zeros((5,), int),) * 2
  )
  assert same.rate.tolist() == rates.tolist()
