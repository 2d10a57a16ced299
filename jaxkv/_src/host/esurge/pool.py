"""The pool of pages: references, hashes and the free queue."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.arguments import at_least
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.esurge.hashes import PageHash
from jaxkv._src.host.esurge.hashes import PageHashWithGroupId
from jaxkv._src.host.esurge.keys import DigestKeys
from jaxkv._src.host.esurge.keys import ManagerKeys
from jaxkv._src.host.esurge.pages import CachePage
from jaxkv._src.host.esurge.queue import FreeCachePageQueue
from jaxkv._src.host.esurge.queue import check_pages
from jaxkv._src.host.esurge.queue import different
from jaxkv._src.host.esurge.queue import manager_without_requests
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.request import tokens_of


def refuse_shards(
  num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None
) -> None:
  """Raises for more than one shard.

  Ignores shards that do not divide the pages, as eSurge does.
  """
  # eSurge's schedulers pass 1 to engines without data parallelism.
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
  """Pages with references, hashes and a free queue.

  Page 0 is the null page. The pool drops only references that it took;
  `CacheManager.free` drops those of requests.

  Args:
    num_pages: pages, including the null page.
    enable_caching: gives pages hashes.

  Attributes:
    num_pages, enable_caching: the arguments.
    pages: a view of each page, by id.
    null_page: page 0.
    free_page_queue: the free pages.
    cached_page_hash_to_page: the pages with a hash, see `CachedPages`.
    keys: converts hashes to keys.
    undo_log: that of the manager of the pages.

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
    cache = manager_without_requests(num_pages, bool(enable_caching))
    self._join(cache, DigestKeys(cache.pages))

  @classmethod
  def of_manager(cls, cache: CacheManager) -> "PagePool":
    """Returns the pool of a manager."""
    pool = cls.__new__(cls)
    pool._join(cache, ManagerKeys(cache.pages, cache.config.page_sizes))
    return pool

  def _join(self, cache: CacheManager, keys: DigestKeys | ManagerKeys) -> None:
    self._cache, self.keys = cache, keys
    self.undo_log = cache.undo_log
    self.num_pages = cache.config.num_pages
    self.enable_caching = cache.config.prefix_caching
    self.pages = [CachePage(n, is_null=not n) for n in range(self.num_pages)]
    for page in self.pages:
      page.pool = self
    self.null_page = self.pages[0]
    self.free_page_queue = FreeCachePageQueue.of_pool(cache, self.pages)
    self.cached_page_hash_to_page = CachedPages(self)

  @atomic
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
    if not self.enable_caching:
      return None
    pages = [self.keys.find(page_hash, group) for group in kv_cache_group_ids]
    if not all(pages):
      return None
    return [self.pages[page_ids[0]] for page_ids in pages]

  @atomic
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
    if len(page_hashes) < num_full_pages:
      # The list is the caller's, and an undo must shorten it again.
      self._check_caching()
      _check_tokens(request, num_full_pages, page_size)
      self.undo_log.save_length(page_hashes)
      page_hashes += self.keys.request_hashes(
        request, page_hashes, num_full_pages, page_size
      )
    span = slice(num_cached_pages, num_full_pages)
    self.publish(pages[span], page_hashes[span], kv_cache_group_id)

  @atomic
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
    self.free_page_queue.check_free(at_least("num_pages", num_pages, 0))
    return [self.pages[page] for page in self._cache.pages.take(num_pages)]

  @atomic
  def touch(self, pages: Iterable[Iterable[CachePage]]) -> None:
    """Adds a reference to each page of each group.

    Free pages leave the queue. Null pages are skipped.

    Raises:
      RuntimeError: a page was taken out of the free queue by hand.
    """
    page_ids = self._ids([page for group in pages for page in group])
    # A loose page has left the queue already. But if a request found it in the
    # cache, it has references, and may get another one.
    loose = self.free_page_queue.loose
    counts = self.free_page_queue.references(page_ids)
    pairs = zip(page_ids, counts, strict=True)
    check_pages(
      page_ids,
      [page not in loose or count > 0 for page, count in pairs],
      "stand in the free queue to be touched without a reference; append it "
      "first.",
    )
    self._cache.pages.hold(page_ids)

  @atomic
  def free_pages(self, ordered_pages: Iterable[CachePage]) -> None:
    """Removes a reference from each page, the first to be reused first.

    Pages without references are appended to the free queue and keep their
    hashes. Null pages are skipped.

    Raises:
      RuntimeError: a page has fewer references of this pool; nothing is done.
    """
    page_ids = self._ids(ordered_pages)
    self._check_references(page_ids)
    self._cache.pages.release(page_ids)

  @atomic
  def evict(self, pages: Iterable[CachePage]) -> None:
    """Removes the hashes of pages; references and queue do not change."""
    self._cache.pages.evict(self._ids(pages))

  def reset_prefix_cache(self) -> bool:
    """Removes all hashes and returns True, if all pages are free."""
    return self._cache.reset_prefix_cache()

  def get_num_free_pages(self) -> int:
    """Returns the number of free pages."""
    return self._cache.num_free_pages

  def get_usage(self) -> float:
    """Returns the fraction of pages that are not free, with the null page."""
    return 1 - self._cache.num_free_pages / self.num_pages

  def references(self, pages: Sequence[CachePage]) -> list[int]:
    """Returns the number of references of each page."""
    return self.free_page_queue.references([page.page_id for page in pages])

  def are_hashed(self, pages: Sequence[CachePage]) -> list[bool]:
    """Returns for each page True if it has a hash."""
    return self._cache.pages.are_cached([page.page_id for page in pages])

  # Atomic, because another thread could evict the page between the two reads.
  @atomic
  def hash_of(self, page: CachePage) -> PageHashWithGroupId | None:
    """Returns the hash of a page; None if lookups cannot find it."""
    if not self.are_hashed([page])[0]:
      return None
    return self.keys.hashes_of([page.page_id])[0]

  @property
  def num_hashes(self) -> int:
    """The number of different hashes of pages."""
    return self._cache.pages.num_keys()

  @atomic
  def hashes_in_order(self) -> dict[int, PageHashWithGroupId]:
    """Returns the pages with a hash, by id in the order of publication."""
    page_ids = self._cache.pages.cached_in_order()
    return dict(zip(page_ids, self.keys.hashes_of(page_ids), strict=True))

  @atomic
  def add_reference(self, page: CachePage) -> None:
    """Adds a reference to a page, see `CachePage.incr_ref`."""
    queue = self.free_page_queue
    if page.page_id in queue.loose:
      # The queue's reference passes to the caller, so no count changes.
      queue.set_loose(page.page_id, False)
    else:
      self._cache.pages.hold(self._ids([page]))

  @atomic
  def remove_reference(self, page: CachePage) -> None:
    """Removes a reference from a page, see `CachePage.decr_ref`."""
    (count,), page_ids = self.references([page]), [page.page_id]
    check_pages(page_ids, [count > 0], "have a reference to lose one.")
    self._check_references(page_ids)
    if count > 1 or page.page_id in self.free_page_queue.loose:
      self._cache.pages.release(page_ids)
    else:
      # The last reference passes to the queue, so the page stays out of it.
      self.free_page_queue.set_loose(page.page_id, True)

  @atomic
  def publish(
    self,
    pages: Sequence[CachePage],
    page_hashes: Sequence[PageHash],
    group: int,
  ) -> None:
    """Gives pages of a group their hashes, in order; skips null pages.

    Raises:
      RuntimeError: a page has a hash.
      ValueError: caching is disabled, or a hash is not of this pool's form.
    """
    # All pages are checked before the first one gets its hash.
    self._check_caching()
    pairs = [*zip(pages, page_hashes, strict=True)]
    # A list of hashes may name the null page, which never gets one.
    page_ids = different([page for page in pages if not page.is_null])
    hashed = self._cache.pages.are_cached(self._ids(pages))
    conditions = [not is_hashed for is_hashed in hashed]
    check_pages(page_ids, conditions, "have no hash to get one.")
    for page, page_hash in pairs:
      if not page.is_null:
        self.keys.publish(page.page_id, page_hash, group)

  def _check_references(self, page_ids: Sequence[int]) -> None:
    """Raises if the pool's users hold fewer references than they give back."""
    # The callers' counts exclude the references of requests, but include the
    # queue's reference to a loose page.
    loose, removed = self.free_page_queue.loose, Counter(page_ids)
    counts = self._cache.pages.caller_counts(page_ids)
    pairs = zip(page_ids, counts, strict=True)
    check_pages(
      page_ids,
      [removed[page] <= count - (page in loose) for page, count in pairs],
      "have as many references of the pool as are given back; "
      "CacheManager.free gives back those of a request.",
    )

  def _check_caching(self) -> None:
    if not self.enable_caching:
      raise ValueError(
        "`enable_caching` must be True for pages to have hashes; make the pool "
        "with it."
      )

  def _ids(self, pages: Iterable[CachePage]) -> list[int]:
    """Returns the ids of pages of this pool, without null pages."""
    page_ids = []
    for page in pages:
      if page.pool is not self:
        raise ValueError(f"{page} must be a page of this pool; use `pages`.")
      if not page.is_null:
        page_ids.append(page.page_id)
    return page_ids


class CachedPages(Mapping[PageHashWithGroupId, dict[int, CachePage]]):
  """A view of the pages with a hash, by hash and then by page id.

  Pages of one hash are in the order of publication, and hashes in the order of
  their first pages.
  """

  def __init__(self, pool: PagePool):
    self._pool = pool

  def __len__(self) -> int:
    return self._pool.num_hashes

  def __iter__(self) -> Iterator[PageHashWithGroupId]:
    # Pages can share a hash, which is listed once, at its first page.
    return iter(dict.fromkeys(self._pool.hashes_in_order().values()))

  def __getitem__(self, key: PageHashWithGroupId) -> dict[int, CachePage]:
    page_ids = self._pool.keys.find(*key)
    if not page_ids:
      raise KeyError(key)
    return {page: self._pool.pages[page] for page in page_ids}


def _check_tokens(request: Any, num_pages: int, page_size: int) -> None:
  num_tokens = len(tokens_of(request))
  if num_tokens < num_pages * page_size:
    raise RuntimeError(
      f"Tokens of {request.request_id!r} must fill {num_pages} pages of "
      f"{page_size}, got {num_tokens}."
    )
