"""The longest cached prefix of token sequences."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv.cache import hashing
from jaxkv.cache import prefix_index
from jaxkv.cache.state import CacheState


class Prefix(NamedTuple):
  """What is cached of R sequences; P = T // S.

  Attributes:
    num_pages: int32[R], pages of the prefix that every group has.
    pages: int32[G, R, P]; only the first `num_pages` columns mean something.
    root: uint32[R, 4], the key before the first page.
    chain: uint32[R, 4], the key after the prefix.
  """

  num_pages: Array
  pages: Array
  root: Array
  chain: Array


def find(
  state: CacheState,
  tokens: Array,
  lengths: Array,
  salts: Array | None,
  asked: Array,
) -> Prefix | None:
  """Looks sequences up, page by page until the first miss.

  At most `length - 1` tokens are found: at least one has to be computed for
  its logits.

  Args:
    state: the cache.
    tokens: int32[R, T].
    lengths: int32[R]; a length outside of 1 .. T finds nothing.
    salts: uint32[R, 4] or None.
    asked: bool[R], the sequences to look for. Costs nothing when all False.

  Returns:
    What was found; None without prefix caching.
  """
  config, index = state.config, state.pool.index
  if index is None:
    return None
  size = config.page_size
  rows, columns = tokens.shape[0], tokens.shape[1] // size
  groups = jnp.arange(config.num_groups, dtype=jnp.int32)[:, None, None]
  possible = jnp.where(
    asked & (lengths >= 1) & (lengths <= tokens.shape[1]),
    (lengths - 1) // size,
    0,
  )
  root = hashing.root_key(config, state.epoch, salts)
  root = jnp.broadcast_to(root, (rows, hashing.KEY_WORDS))
  nothing = Prefix(
    num_pages=possible & 0,
    pages=jnp.zeros((config.num_groups, rows, columns), jnp.int32)
    + (possible & 0)[None, :, None],
    root=root,
    chain=root,
  )
  if columns == 0:
    return nothing

  def search() -> Prefix:
    held = tokens[:, : columns * size].reshape(rows, columns, size)
    keys = hashing.chain_keys(root, hashing.page_digests(config, held))
    shape = (config.num_groups, rows, columns)
    group_keys = hashing.group_key(
      config,
      jnp.broadcast_to(keys, (*shape, hashing.KEY_WORDS)),
      jnp.broadcast_to(groups, shape),
    )
    pages = prefix_index.lookup(
      index,
      group_keys.reshape(-1, hashing.KEY_WORDS),
      jnp.broadcast_to(held, (*shape, size)).reshape(-1, size),
    ).reshape(shape)
    column = jnp.arange(columns, dtype=jnp.int32)
    hit = jnp.all(pages > 0, axis=0) & (column[None] < possible[:, None])
    found = jnp.sum(
      jnp.cumprod(hit, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32
    )
    last = jnp.maximum(found - 1, 0)[:, None, None]
    chain = jnp.take_along_axis(keys, last, axis=1)[:, 0]
    chain = jnp.where(found[:, None] > 0, chain, root)
    return Prefix(found, pages, root, chain)

  return lax.cond(jnp.any(possible > 0), search, lambda: nothing)
