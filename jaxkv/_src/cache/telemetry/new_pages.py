"""take_new_pages: pages that were handed out, for whoever must zero them."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verb import verb


@verb
def take_new_pages(state: CacheState) -> tuple[CacheState, Array]:
  """Tells which pages were handed out since the last call, and forgets it.

  For layers that read before they write all of a page, such as recurrent
  states: zero these pages before the next step. Pages found in the index are
  not new. Cost grows with the pool.

  Args:
    state: a cache with `CacheConfig.track_new_pages`.

  Returns:
    The cache, and bool[N].

  Raises:
    ValueError: the cache does not keep them.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(num_pages=4, page_size=2,
    ...   num_slots=1, pages_per_slot=2, track_new_pages=True))
    >>> state, _ = jaxkv.allocate(state, jnp.asarray([3], jnp.int32))
    >>> state, new = jaxkv.take_new_pages(state)
    >>> new.tolist()
    [False, True, True, False]
  """
  new = state.pool.new
  if new is None:
    raise ValueError(
      "The cache does not keep its new pages; make it with "
      "CacheConfig(track_new_pages=True)."
    )
  pool = dataclasses.replace(state.pool, new=jnp.zeros_like(new))
  return dataclasses.replace(state, pool=pool), new
