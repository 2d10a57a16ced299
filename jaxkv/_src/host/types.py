"""What schedulers get from a manager: pages, keys, statistics, views."""

import dataclasses
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
from jaxkv._src.host.request import Request
from jaxkv._src.host.request import content
from jaxkv._src.host.request import int32s
from jaxkv._src.host.request import read_request
from jaxkv._src.host.request import salt_of


@dataclasses.dataclass(frozen=True)
class CachePages:
  """Page ids by group; the null page 0 where a window has moved on.

  Attributes:
    pages: a list of page ids for each group.
    unhashed: the ids that were not cached when they were handed out.
  """

  pages: tuple[list[int], ...]
  unhashed: tuple[list[int], ...] = dataclasses.field(
    default=(), compare=False, repr=False
  )

  def __add__(self, other: "CachePages") -> "CachePages":
    """Pages of both, group by group."""
    if len(self.pages) != len(other.pages):
      raise ValueError(
        f"CachePages must have {len(self.pages)} groups to be added, got "
        f"{len(other.pages)}."
      )

    def joined(one, two):
      return tuple(a + b for a, b in zip(one, two, strict=True))

    unhashed = (one.get_unhashed_page_ids_all_groups() for one in (self, other))
    return CachePages(joined(self.pages, other.pages), joined(*unhashed))

  def get_page_ids(self) -> tuple[list[int], ...]:
    """Page ids by group."""
    return self.pages

  def get_unhashed_page_ids(self) -> list[int]:
    """Ids of the first group's pages that were not cached when handed out."""
    return [*self.unhashed[0]] if self.unhashed else []

  def get_unhashed_page_ids_all_groups(self) -> tuple[list[int], ...]:
    """Ids that were not cached when handed out, by group."""
    return self.unhashed or self.new_empty().pages

  def new_empty(self) -> "CachePages":
    """No pages, for the same number of groups."""
    return CachePages(tuple([] for _ in self.pages))


class PoppedPages(NamedTuple):
  """Pages of a request that is gone, still in the slot where it stood.

  Attributes:
    slot: the slot.
    pages: page ids by group.
  """

  slot: int
  pages: tuple[list[int], ...]


@dataclasses.dataclass
class PrefixCacheStats:
  """Prefix-cache hits of the requests admitted since the last reading.

  Attributes:
    requests: requests that got their first pages.
    queries: tokens that they were looked up with.
    hits: queried tokens that were cached.
    preempted_requests, preempted_queries, preempted_hits: the same for requests
      that had been preempted, which are not counted above.
    reset: whether the cache was reset.
    lifetime, idle: evicted pages by age, see `jaxkv.telemetry.Residency`; empty
      without `track_residency`.
  """

  requests: int = 0
  queries: int = 0
  hits: int = 0
  preempted_requests: int = 0
  preempted_queries: int = 0
  preempted_hits: int = 0
  reset: bool = False
  lifetime: list[int] = dataclasses.field(default_factory=list)
  idle: list[int] = dataclasses.field(default_factory=list)

  def record(self, request: Request, num_hits: int) -> None:
    """Counts a request, unless it skips the lookup."""
    if request.prompt_logprobs:
      return
    num_tokens = request.num_tokens
    if request.status == "preempted":
      self.preempted_requests += 1
      self.preempted_queries += num_tokens
      self.preempted_hits += num_hits
    else:
      self.requests += 1
      self.queries += num_tokens
      self.hits += num_hits


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
  tokens = content(known, known.token_ids, 0, full)
  return _hashed(state, None, tokens, group, salt_of(known), epoch)


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
