"""The pool, its free queue and page keys, as schedulers look at them."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs import inspect as looking
from jaxkv._src.host import requests


class PageHash(NamedTuple):
  """The key of a page, as it stands in the index and in events.

  Attributes:
    key: 16 bytes.
    tokens: what the page holds; a hit is believed only if they are equal.
    group: the group that the key is for.
    chain: 16 bytes, the same for all groups: what the next page follows.
  """

  key: bytes
  tokens: tuple[int, ...]
  group: int
  chain: bytes


def hash_page_tokens(
  config: CacheConfig,
  parent: PageHash | None,
  tokens: Sequence[int],
  *,
  group: int = 0,
  salt: np.ndarray | None = None,
  epoch: int = 0,
) -> PageHash:
  """The key of one page.

  Args:
    config: the cache's sizes; its seed is used.
    parent: the page before it, None for the first of a sequence.
    tokens: a whole page of the group.
    group: which one.
    salt: uint32[4] of the sequence; only the first page needs it.
    epoch: of the state; likewise.

  Returns:
    The key.

  Raises:
    ValueError: the tokens are no whole page, or not 32-bit integers.
  """
  size = config.page_sizes[group]
  if len(tokens) != size:
    raise ValueError(
      f"tokens must be a page of {size} for group {group}, got {len(tokens)}."
    )
  try:
    held = requests.int32s(tokens)
  except (OverflowError, TypeError) as error:
    raise ValueError(f"tokens are not all 32-bit integers: {error}.") from error
  before = None if parent is None else _words(parent.chain)
  return _hashed(config, before, held, group, salt, epoch)[0]


def hash_request_tokens(
  config: CacheConfig, request: Any, *, group: int = 0, epoch: int = 0
) -> list[PageHash]:
  """The keys of all full pages of a request.

  Args:
    config: the cache's sizes; its seed is used.
    request: any object with the attributes of `Request`.
    group: which one.
    epoch: of the state.

  Returns:
    A key for each full page of the group.
  """
  size = config.page_sizes[group]
  full = len(requests.tokens_of(request)) // size * size
  if full == 0:
    return []
  tokens = requests.content(request, 0, full)
  salt = requests.salt_of(request)
  return _hashed(config, None, tokens, group, salt, epoch)


def _hashed(
  config: CacheConfig,
  before: np.ndarray | None,
  tokens: np.ndarray,
  group: int,
  salt: np.ndarray | None,
  epoch: int,
) -> list[PageHash]:
  salt = np.zeros((hashing.KEY_WORDS,), np.uint32) if salt is None else salt
  root = hashing.root_key(config, jnp.uint32(epoch), jnp.asarray(salt)[None])
  start = root if before is None else jnp.asarray(before)[None]
  held = jnp.asarray(tokens, jnp.int32).reshape(1, -1, config.page_size)
  chain = hashing.row_keys(config, start, held)
  keys = hashing.keys_of_group(config, chain, group)[0]
  size = config.page_sizes[group]
  step = size // config.page_size
  pages = np.asarray(tokens).reshape(-1, size).tolist()
  return [
    PageHash(key_bytes(key), tuple(page), group, key_bytes(link))
    for key, page, link in zip(
      np.asarray(keys),
      pages,
      np.asarray(chain[0, step - 1 :: step]),
      strict=True,
    )
  ]


class PagePool:
  """The pages of a manager's state; looks, and changes nothing.

  Args:
    manager: whose `state` is looked at, always the newest one.
  """

  def __init__(self, manager: Any):
    self._manager = manager
    self.free_page_queue = FreeCachePageQueue(manager)

  @property
  def num_pages(self) -> int:
    """Pages, the null page counted."""
    return self._manager.config.num_pages

  def get_num_free_pages(self) -> int:
    """How many pages are free."""
    return self._manager.num_free_pages

  def get_usage(self) -> float:
    """The part of the pages that is held; the null page does not count."""
    return self._manager.usage

  def ref_count(self, page_id: int) -> int:
    """Requests that hold a page."""
    return int(self._manager.state.pool.ref_count[page_id])

  def get_cached_page(self, page_hash: PageHash) -> int | None:
    """The page published first under a key; None if there is none."""
    index = self._manager.state.pool.index
    if index is None:
      return None
    width = index.tokens.shape[1]
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(page_hash.tokens)] = page_hash.tokens
    return (
      int(_looked_up(index, _words(page_hash.key)[None], tokens)[0]) or None
    )


class FreeCachePageQueue:
  """The free pages in the order in which they will be handed out.

  Args:
    manager: whose `state` is looked at, always the newest one.
  """

  def __init__(self, manager: Any):
    self._manager = manager

  @property
  def num_free_pages(self) -> int:
    """How many there are."""
    return self._manager.num_free_pages

  def get_all_free_pages(self) -> list[int]:
    """All of them."""
    state: CacheState = self._manager.state
    return looking.free_pages(state)

  def __len__(self) -> int:
    return self.num_free_pages

  def __iter__(self) -> Iterator[int]:
    return iter(self.get_all_free_pages())


@jax.jit
def _looked_up(index: PrefixIndex, keys: Array, tokens: Array) -> Array:
  return prefix_index.lookup(index, keys, tokens)


def _words(key: bytes) -> np.ndarray:
  return np.frombuffer(key, "<u4").astype(np.uint32)
