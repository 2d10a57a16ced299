"""The pool of pages: references, hashes and the free queue."""

import secrets
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache import state as cache_state
from jaxkv._src.host import calls
from jaxkv._src.host.atomic import Atomic
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.calls import at_least
from jaxkv._src.host.device_cache import DeviceCache
from jaxkv._src.host.esurge import changes
from jaxkv._src.host.esurge.hashes import PageHash
from jaxkv._src.host.esurge.hashes import PageHashWithGroupId
from jaxkv._src.host.esurge.keys import ChainKeys
from jaxkv._src.host.esurge.keys import DigestKeys
from jaxkv._src.host.esurge.keys import Keys
from jaxkv._src.host.esurge.keys import stacked
from jaxkv._src.host.esurge.pages import CachePage
from jaxkv._src.host.esurge.queue import FreeCachePageQueue
from jaxkv._src.host.esurge.queue import config_of
from jaxkv._src.host.request import tokens_of


def refuse_shards(
  num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None
) -> None:
  """Raises for more than one shard.

  Ignores shards that do not divide the pages, as eSurge does.
  """
  shards = data_parallel_size or 1
  if shards > 1 and num_pages % shards:
    return
  if dp_shard_hint not in (None, 0) or shards != 1:
    raise ValueError(
      "`dp_shard_hint` and `data_parallel_size` must be None or 0 and None or "
      f"1, got {dp_shard_hint} and {data_parallel_size}; make a CacheManager "
      "for each shard."
    )


class PagePool:
  """The pages, with their references, hashes and free queue.

  Page 0 is the null page. The pool drops only references that it took;
  `CacheManager.free` drops those of requests.

  Args:
    num_pages: pages, including the null page.
    enable_caching: gives pages hashes.

  Attributes:
    num_pages, enable_caching: the arguments.
    pages: a view of each page.
    null_page: the first of them.
    free_page_queue: the free pages.
    cached_page_hash_to_page: the pages with a hash, see `CachedPages`.

  Raises:
    TypeError: `num_pages` is not an int.
    ValueError: it is less than 2.

  Examples:
    >>> from jaxkv.host.esurge import PageHash, PageHashWithGroupId, PagePool
    >>> pool = PagePool(5, True)
    >>> one, two = pool.get_new_pages(2)
    >>> one.page_hash = PageHashWithGroupId(PageHash(1, (7, 8)), 0)
    >>> pool.free_pages([two, one])
    >>> [page.page_id for page in pool.free_page_queue.get_all_free_pages()]
    [3, 4, 2, 1]
    >>> pool.get_cached_page(PageHash(1, (7, 8)), [0]) == [one]
    True
  """

  def __init__(self, num_pages: int, enable_caching: bool):
    at_least("num_pages", num_pages, 2)
    config = config_of(num_pages, caching=bool(enable_caching))
    holder = Atomic(cache_state.init(config))
    keys = DigestKeys(secrets.token_bytes(32)) if enable_caching else None
    self._join(holder, keys, num_pages)

  @classmethod
  def of_manager(cls, cache: DeviceCache) -> "PagePool":
    """Returns the pool of a manager."""
    pool = cls.__new__(cls)
    keys = ChainKeys(cache) if cache.config.prefix_caching else None
    pool._join(cache, keys, cache.config.num_pages)
    return pool

  def _join(self, holder: Atomic, keys: Keys | None, num_pages: int) -> None:
    self._holder, self._keys = holder, keys
    self.num_pages, self.enable_caching = num_pages, keys is not None
    self.pages = [CachePage.of_pool(self, page) for page in range(num_pages)]
    self.null_page = self.pages[0]
    self.free_page_queue = FreeCachePageQueue.of_pool(holder, self.pages)
    self.cached_page_hash_to_page = CachedPages(self)

  @property
  def keys(self) -> Keys | None:
    """The conversion of hashes to keys; None without caching."""
    return self._keys

  def get_cached_page(
    self,
    page_hash: PageHash,
    kv_cache_group_ids: Sequence[int],
    *,
    dp_shard_hint: int | None = None,
    data_parallel_size: int | None = None,
  ) -> list[CachePage] | None:
    """Returns each group's page with a hash; None if a group has none.

    Of several pages, it is the one that has had the hash longest.
    """
    refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    if self._keys is None:
      return None
    keys = [self._keys.key_of(page_hash, group) for group in kv_cache_group_ids]
    known = [key for key in keys if key is not None]
    if len(known) < len(keys):
      return None
    if not known:
      return []
    packed = stacked(known, calls.width_for(len(known)))
    found = self._read(changes.find, *packed)[: len(known)].tolist()
    return None if 0 in found else [self.pages[page] for page in found]

  def cache_full_pages(
    self,
    request: Any,
    pages: Sequence[CachePage],
    page_hashes: list[PageHash],
    num_cached_pages: int,
    num_full_pages: int,
    page_size: int,
    kv_cache_group_id: int,
  ) -> None:
    """Gives pages of a request their hashes.

    Args:
      request: its tokens give the missing hashes.
      pages: its pages in one group; null pages are skipped.
      page_hashes: hashes of its first pages; missing ones are appended.
      num_cached_pages: leading pages to leave unchanged.
      num_full_pages: one past the last page to hash.
      page_size: tokens a page.
      kv_cache_group_id: the group.

    Raises:
      RuntimeError: a page has a hash, or the request too few tokens.
      ValueError: there are fewer hashes than `num_cached_pages`.
    """
    if num_cached_pages >= num_full_pages:
      return
    if len(page_hashes) < num_cached_pages:
      raise ValueError(
        f"`page_hashes` must be at least {num_cached_pages}, as many as "
        f"num_cached_pages, got {len(page_hashes)}."
      )
    self._complete(request, pages, page_hashes, num_full_pages, page_size)
    span = slice(num_cached_pages, num_full_pages)
    pairs = list(zip(pages[span], page_hashes[span], strict=True))
    pairs = [pair for pair in pairs if not pair[0].is_null]
    self.publish(
      [page for page, _ in pairs],
      [page_hash for _, page_hash in pairs],
      kv_cache_group_id,
    )

  def _complete(
    self,
    request: Any,
    pages: Sequence[CachePage],
    page_hashes: list[PageHash],
    num_full_pages: int,
    page_size: int,
  ) -> None:
    """Appends the missing hashes of a request's first full pages."""
    first = len(page_hashes)
    if first >= num_full_pages:
      return
    known = len(tokens_of(request))
    if known < num_full_pages * page_size:
      raise RuntimeError(
        f"Tokens of {request.request_id!r} must fill {num_full_pages} pages of "
        f"{page_size}, got {known}."
      )
    keys = self._caching()
    parent = page_hashes[-1].hash_value if page_hashes else None
    page_hashes += keys.missing(
      request, parent, first, num_full_pages, page_size
    )

  def get_new_pages(
    self,
    num_pages: int,
    *,
    dp_shard_hint: int | None = None,
    data_parallel_size: int | None = None,
  ) -> list[CachePage]:
    """Takes the first free pages and removes their hashes.

    Raises:
      ValueError: too few are free.
    """
    refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    count = min(at_least("num_pages", num_pages, 0), self.num_pages)
    width = calls.width_for(count)
    taken = self._change(changes.take_new, np.int32(count), width=width)
    return [self.pages[page] for page in taken[1 : 1 + count]]

  def touch(self, pages: Iterable[Iterable[CachePage]]) -> None:
    """Adds a reference to each page of each group.

    Free pages leave the queue. Null pages are skipped.

    Raises:
      RuntimeError: a page was taken out of the free queue by hand.
    """
    flat = [page for group in pages for page in group]
    self._change(changes.touch, self._numbers(flat))

  def free_pages(self, ordered_pages: Iterable[CachePage]) -> None:
    """Removes a reference from each page, the first to be reused first.

    Pages without references are appended to the free queue and keep their
    hashes. Null pages are skipped.

    Raises:
      RuntimeError: a page has fewer references of this pool; nothing is done.
    """
    self._change(changes.release, self._numbers(ordered_pages))

  def evict(self, pages: Iterable[CachePage]) -> None:
    """Removes the hashes of pages; references and queue do not change."""
    numbers = self._numbers(pages)
    self._change(changes.evict, calls.pad_pages(sorted({*numbers.tolist()})))

  def reset_prefix_cache(self) -> bool:
    """Removes all hashes and returns True, if all pages are free."""
    return bool(self._change(changes.reset)[0])

  def get_num_free_pages(self) -> int:
    """Returns the number of free pages."""
    return self.free_page_queue.num_free_pages

  def get_usage(self) -> float:
    """Returns the fraction of pages that are not free, with the null page."""
    return 1 - self.get_num_free_pages() / self.num_pages

  def references(self, pages: Sequence[CachePage]) -> list[int]:
    """Returns the number of references of each page."""
    numbers = self._numbers(pages)
    return self._read(changes.references, numbers)[: len(pages)].tolist()

  def are_hashed(self, pages: Sequence[CachePage]) -> list[bool]:
    """Returns for each page True if it has a hash."""
    numbers = self._numbers(pages)
    return self._read(changes.are_hashed, numbers)[: len(pages)].tolist()

  def hash_of(self, page: CachePage) -> PageHashWithGroupId | None:
    """Returns the hash of a page; None if lookups cannot find it."""
    if self._keys is None:
      return None
    return next(iter(_named(self._holder, self._keys, [page.page_id])), None)

  def add_reference(self, page: CachePage) -> None:
    """See `CachePage.incr_ref`."""
    self._change(changes.add_reference, np.asarray([page.page_id], np.int32))

  def remove_reference(self, page: CachePage) -> None:
    """See `CachePage.decr_ref`."""
    self._change(changes.remove_reference, np.asarray([page.page_id], np.int32))

  def publish(
    self,
    pages: Sequence[CachePage],
    page_hashes: Sequence[PageHash],
    group: int,
  ) -> None:
    """Gives pages of a group their hashes, in order.

    Raises:
      RuntimeError: a page has a hash.
      ValueError: caching is disabled, or a hash is not of this pool's form.
    """
    keys = self._caching()
    if pages:
      numbers = self._numbers(pages)
      _publish(self._holder, keys, numbers, page_hashes, group)

  def _caching(self) -> Keys:
    if self._keys is None:
      raise ValueError(
        "`enable_caching` must be True for pages to have hashes; make the pool "
        "with it."
      )
    return self._keys

  def _numbers(self, pages: Iterable[CachePage]) -> np.ndarray:
    numbers = []
    for page in pages:
      if page.pool is not self:
        raise ValueError(f"{page} must be a page of this pool; use `pages`.")
      numbers.append(page.page_id)
    return calls.pad_pages(numbers)

  def _change(self, specialized: Any, *args: Any, **static: Any) -> Any:
    return changes.change(self._holder, specialized, *args, **static)

  def _read(self, specialized: Any, *args: Any) -> Any:
    return changes.read(self._holder, specialized, *args)


class CachedPages(Mapping[PageHashWithGroupId, dict[int, CachePage]]):
  """A view of the pages with a hash, by hash and then by page id.

  Pages of one hash are in the order of publication, and hashes in the order of
  their first pages.
  """

  def __init__(self, pool: PagePool):
    self._pool = pool

  def __len__(self) -> int:
    return len({words for _, words in self._entries()})

  def __iter__(self) -> Iterator[PageHashWithGroupId]:
    first = {words: page for page, words in reversed(self._entries())}
    pages = [page for page, words in self._entries() if first[words] == page]
    keys = self._pool.keys
    if keys is not None:
      yield from _named(self._pool._holder, keys, pages)

  def __getitem__(self, key: PageHashWithGroupId) -> dict[int, CachePage]:
    keys = self._pool.keys
    own = keys.key_of(*key) if keys is not None else None
    words = own.words.tobytes() if own is not None else None
    pages = [page for page, words_of in self._entries() if words_of == words]
    if not pages:
      raise KeyError(key)
    return {page: self._pool.pages[page] for page in pages}

  def _entries(self) -> list[tuple[int, bytes]]:
    """Returns pages with a hash and their keys, in order of publication."""
    if self._pool.keys is None:
      return []
    cached, age, words, _ = _hashes_of_all(self._pool)
    pages = np.flatnonzero(cached)
    pages = pages[np.argsort(-age[pages].astype(np.int64), kind="stable")]
    return [(page, words[page].tobytes()) for page in pages.tolist()]


def _hashes_of_all(pool: PagePool) -> Any:
  numbers = np.arange(pool.num_pages, dtype=np.int32)
  return changes.read(pool._holder, changes.hashes, numbers)


@atomic
def _named(
  holder: Atomic, keys: Keys, pages: list[int]
) -> list[PageHashWithGroupId]:
  """Returns the hashes of those pages that have one."""
  numbers = calls.pad_pages(pages)
  cached, _, words, groups = jax.device_get(holder.ask(changes.hashes, numbers))
  tokens = np.asarray(holder.ask(changes.tokens_of, numbers))
  return [
    keys.hash_of(words[row], tokens[row], int(groups[row]))
    for row in range(len(pages))
    if cached[row]
  ]


@atomic
def _publish(
  holder: Atomic,
  keys: Keys,
  pages: np.ndarray,
  page_hashes: Sequence[PageHash],
  group: int,
) -> None:
  """Runs `changes.publish`, after the keys have been remembered."""
  rows = []
  for page_hash in page_hashes:
    key = keys.key_of(page_hash, group)
    if key is None:
      raise ValueError(
        f"{page_hash} must be a hash of this manager's group {group}; take it "
        "from req_to_page_hashes."
      )
    rows.append(key)
  everything = np.arange(holder.config.num_pages, dtype=np.int32)
  if keys.remembers_many(len(everything)):
    cached, _, words, _ = jax.device_get(holder.ask(changes.hashes, everything))
    keys.forget_others(words[cached])
  for key, page_hash in zip(rows, page_hashes, strict=True):
    keys.remember(page_hash, group, key.words)
  words, tokens = stacked(rows, len(pages))
  groups = np.full((len(pages),), group, np.int32)
  changes.change(holder, changes.publish, pages, words, tokens, groups)
