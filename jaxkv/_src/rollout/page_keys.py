"""Keys of pages that sequences fill, before any of them is computed."""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import sharding
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import roots


def page_keys(
  cache: CacheState, tokens: Array, salts: Array | None
) -> Array | None:
  """The key after each page of some tokens, None without prefix caching.

  Args:
    cache: its secret and its epoch count.
    tokens: int32[R, X].
    salts: uint32[R, 4]; None for none.

  Returns:
    uint32[R, X // S, 4].
  """
  cache, tokens, salts = sharding.match_varying_axes((cache, tokens, salts))
  if cache.secret is None:
    return None
  size, rows = cache.config.page_size, tokens.shape[0]
  columns = tokens.shape[1] // size
  if columns == 0:
    return jnp.zeros((rows, 0, hashing.KEY_WORDS), jnp.uint32)
  pages = tokens[:, : columns * size].reshape(rows, columns, size)
  root = jnp.broadcast_to(roots(cache, salts), (rows, hashing.KEY_WORDS))
  return hashing.row_keys(cache.secret, root, pages)
