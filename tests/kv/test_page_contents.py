"""Contents of pages that move between memories."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.kv.page_contents import read_pages
from jaxkv._src.kv.page_contents import write_pages
from tests.kv.memory import LAYERS
from tests.kv.memory import make

_PAGES = 64


def _pages_of(kv):
  return np.asarray(kv.k).reshape(LAYERS, _PAGES, -1)


def test_more_pages_than_a_trip_of_the_loop():
  """40 of 45 entries are written, in three trips; other pages stay."""
  rng = np.random.default_rng(0)
  kv = make(num_pages=_PAGES)
  kv = dataclasses.replace(
    kv, k=jnp.arange(kv.k.size, dtype=jnp.float32).reshape(kv.k.shape)
  )
  listed = rng.permutation(np.arange(1, _PAGES))[:42].astype(np.int32)
  contents = read_pages(kv, [jnp.asarray(listed)])
  sources = rng.integers(0, 42, 45).astype(np.int32)
  pages = rng.permutation(np.arange(1, _PAGES))[:45].astype(np.int32)
  pages[[0, 7, 8, 30, 44]] = 0
  out = jax.jit(write_pages)(
    kv, contents, jnp.asarray(sources), jnp.asarray(pages)
  )
  expected = _pages_of(kv).copy()
  for source, page in zip(sources, pages, strict=True):
    if page:
      expected[:, page] = _pages_of(kv)[:, listed[source]]
  np.testing.assert_array_equal(_pages_of(out), expected)
