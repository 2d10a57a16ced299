"""Computes the keys of pages from tokens, before any K/V is computed."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import roots
from jaxkv._src.engine.queue.queue import Queue


def page_keys(
  cache: CacheState, tokens: Array, salts: Array | None
) -> Array | None:
  """Returns the chain key after each whole page of `tokens`, int32[R, X].

  The keys are uint32[R, X // page_size, 4]; None without prefix caching.
  """
  cache, tokens, salts = sharding.match_varying_axes((cache, tokens, salts))
  if cache.secret is None:
    return None
  page_size = cache.config.page_size
  rows = tokens.shape[0]
  columns = tokens.shape[1] // page_size
  if columns == 0:
    return jnp.zeros((rows, 0, hashing.KEY_WORDS), jnp.uint32)
  pages = tokens[:, : columns * page_size].reshape(rows, columns, page_size)
  root = jnp.broadcast_to(roots(cache, salts), (rows, hashing.KEY_WORDS))
  return hashing.row_keys(cache.secret, root, pages)


def keys_of_rows(queue: Queue, cache: CacheState, rows: Array) -> Array | None:
  """Returns the page keys of rows int32[R] for the current epoch."""
  tokens, salts = jax.tree.map(
    lambda array: indexing.take(array, rows), (queue.tokens, queue.salts)
  )
  return page_keys(cache, tokens, salts)


def rehash(queue: Queue, cache: CacheState, rows: Array) -> Queue:
  """Sets the page keys of rows int32[R] to those of the current epoch."""
  keys = keys_of_rows(queue, cache, rows)
  if keys is not None and queue.page_keys is not None:
    keys = indexing.put(queue.page_keys, rows, values=keys)
  epochs = indexing.put(queue.epochs, rows, values=cache.epoch)
  return dataclasses.replace(queue, page_keys=keys, epochs=epochs)
