"""Views of a manager's pool and its page keys."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs import inspect
from jaxkv._src.host.request import content
from jaxkv._src.host.request import int32s
from jaxkv._src.host.request import read_request


class PageHash(NamedTuple):
  """The key of a page, as in the index and in events.

  Attributes:
    key: 16 bytes.
    tokens: the tokens of the page; a hit must hold equal tokens.
    group: the group that the key is for.
    chain: 16 bytes, the same for all groups: where the next page's key starts.
  """

  key: bytes
  tokens: tuple[int, ...]
  group: int
  chain: bytes


def hash_page_tokens(
  state: CacheState,
  parent: PageHash | None,
  tokens: Sequence[int],
  *,
  group: int = 0,
  salt: np.ndarray | None = None,
  epoch: int = 0,
) -> PageHash:
  """The key of one page.

  Args:
    state: a cache with prefix caching.
    parent: the page before it, None for the first of a sequence.
    tokens: a whole page of the group.
    group: the group's number.
    salt: uint32[4] of the sequence; only the first page needs it.
    epoch: of the state; only the first page needs it.

  Returns:
    The key.

  Raises:
    ValueError: the tokens are not a whole page of 32-bit integers.
  """
  size = state.config.page_sizes[group]
  if len(tokens) != size:
    raise ValueError(
      f"`tokens` must be a page of {size} for group {group}, got {len(tokens)}."
    )
  try:
    held = int32s(tokens)
  except (OverflowError, TypeError) as error:
    raise ValueError(f"`tokens` must be 32-bit integers: {error}.") from error
  salt = np.zeros((hashing.KEY_WORDS,), np.uint32) if salt is None else salt
  return _hashed(state, parent, held, group, salt, epoch)[0]


def hash_request_tokens(
  state: CacheState, request: Any, *, group: int = 0, epoch: int = 0
) -> list[PageHash]:
  """The keys of all full pages of a request.

  Args:
    state: a cache with prefix caching.
    request: any object with the attributes of `Request`.
    group: the group's number.
    epoch: of the state.

  Returns:
    A key for each full page of the group.
  """
  known, size = read_request(request), state.config.page_sizes[group]
  full = known.num_tokens // size * size
  if full == 0:
    return []
  secret = np.asarray(state.secret).tobytes()
  tokens = content(known, 0, full, state.config.page_size, secret)
  salt = np.frombuffer(known.salt, np.uint32)
  return _hashed(state, None, tokens, group, salt, epoch)


def _hashed(
  state: CacheState,
  parent: PageHash | None,
  tokens: np.ndarray,
  group: int,
  salt: np.ndarray,
  epoch: int,
) -> list[PageHash]:
  """The keys of full pages behind `parent`."""
  config, secret = state.config, state.secret
  assert secret is not None
  start = hashing.root_key(secret, jnp.uint32(epoch), jnp.asarray(salt)[None])
  if parent is not None:
    start = jnp.asarray(_words(parent.chain))[None]
  held = jnp.asarray(tokens).reshape(1, -1, config.page_size)
  chain = hashing.row_keys(secret, start, held)
  keys = np.asarray(hashing.keys_of_group(config, secret, chain, group)[0])
  size = config.page_sizes[group]
  step = size // config.page_size
  links = np.asarray(chain[0, step - 1 :: step])
  pages = tokens.reshape(-1, size).tolist()
  return [
    PageHash(key_bytes(key), tuple(page), group, key_bytes(link))
    for key, page, link in zip(keys, pages, links, strict=True)
  ]


_lookup = jax.jit(prefix_index.lookup)


class PagePool:
  """A read-only view of the pages of a manager's newest state."""

  def __init__(self, manager: Any):
    self._manager = manager
    self.free_page_queue = FreeCachePageQueue(manager)

  @property
  def num_pages(self) -> int:
    """The number of pages, the null page included."""
    return self._manager.config.num_pages

  def get_num_free_pages(self) -> int:
    """The number of free pages."""
    return self._manager.num_free_pages

  def get_usage(self) -> float:
    """The fraction of the pages that is held, the null page not counted."""
    return self._manager.usage

  def ref_count(self, page_id: int) -> int:
    """The number of references to a page."""
    return int(self._manager.state.pool.ref_count[page_id])

  def get_cached_page(self, page_hash: PageHash) -> int | None:
    """The page published first under a key; None if no page is cached."""
    index = self._manager.state.pool.index
    if index is None:
      return None
    tokens = np.zeros((1, index.tokens.shape[1]), np.int32)
    tokens[0, : len(page_hash.tokens)] = page_hash.tokens
    found = _lookup(index, _words(page_hash.key)[None], tokens)
    return int(found[0]) or None


class FreeCachePageQueue:
  """A read-only view of the free pages, in eviction order."""

  def __init__(self, manager: Any):
    self._manager = manager

  @property
  def num_free_pages(self) -> int:
    """The number of free pages."""
    return self._manager.num_free_pages

  def get_all_free_pages(self) -> list[int]:
    """The free pages, the next one first."""
    return inspect.free_pages(self._manager.state)

  def __len__(self) -> int:
    return self.num_free_pages

  def __iter__(self) -> Iterator[int]:
    return iter(self.get_all_free_pages())


def _words(key: bytes) -> np.ndarray:
  return np.frombuffer(key, "<u4").astype(np.uint32)
