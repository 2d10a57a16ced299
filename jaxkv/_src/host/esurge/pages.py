"""Pages for eSurge's schedulers: views of a pool, and lists of them."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.esurge.hashes import PageHashWithGroupId
from jaxkv._src.host.types import CachePages


class CachePage:
  """One page.

  A page of a pool is a view, whose properties read the newest state. A page
  made without a pool keeps a count and a hash itself.

  Args:
    page_id: its id.
    ref_cnt: the references of a page made without a pool.
    is_null: True for a null page.

  Attributes:
    page_id: its id.
    is_null: True for the null page, which is never free and has no references.
    pool: its pool, or None.
    queue: the free queue to which it can belong.

  Examples:
    >>> from jaxkv.host.esurge import CachePage
    >>> page = CachePage(3)
    >>> page.incr_ref()
    >>> page
    CachePage(page_id=3, ref_cnt=1, _page_hash=None, prev_free_page=None,
      next_free_page=None)
  """

  __slots__ = ("_count", "_hash", "is_null", "page_id", "pool", "queue")

  def __init__(self, page_id: int, ref_cnt: int = 0, is_null: bool = False):
    self.page_id = page_id
    self.is_null = is_null
    self.pool: Any = None
    self.queue: Any = None
    self._count = ref_cnt
    self._hash: PageHashWithGroupId | None = None

  @property
  def ref_cnt(self) -> int:
    """The reference count; 0 for the null page of a pool."""
    if self.pool is None:
      return self._count
    return self.pool.references([self])[0]

  @ref_cnt.setter
  def ref_cnt(self, count: int) -> None:
    if self.pool is not None:
      raise AttributeError(
        "`ref_cnt` must be changed by the pool's touch and free_pages, or by "
        f"incr_ref and decr_ref of page {self.page_id}."
      )
    self._count = count

  def incr_ref(self) -> None:
    """Adds a reference. A free page leaves the queue."""
    if self.pool is None:
      self._count += 1
    elif not self.is_null:
      self.pool.add_reference(self)

  def decr_ref(self) -> None:
    """Removes a reference. A page without one enters the queue by `append`.

    Raises:
      RuntimeError: it has none, or only those of requests.
    """
    if self.pool is not None:
      self.pool.remove_reference(self)
    elif self._count <= 0:
      raise RuntimeError(
        f"Page {self.page_id} must have a reference to lose one."
      )
    else:
      self._count -= 1

  @property
  def page_hash(self) -> PageHashWithGroupId | None:
    """The page's hash; None if lookups cannot find it."""
    return self._hash if self.pool is None else self.pool.hash_of(self)

  @property
  def is_hashed(self) -> bool:
    """True if the page has a hash."""
    if self.pool is None:
      return self._hash is not None
    return self.pool.are_hashed([self])[0]

  @page_hash.setter
  def page_hash(self, page_hash: PageHashWithGroupId) -> None:
    if self.pool is not None:
      self.pool.publish([self], [page_hash.page_hash], page_hash.group_id)
    elif self._hash is not None:
      raise RuntimeError(f"Page {self.page_id} must have no hash to get one.")
    else:
      self._hash = page_hash

  def reset_hash(self) -> None:
    """Removes the hash."""
    if self.pool is not None:
      self.pool.evict([self])
    self._hash = None

  @property
  def prev_free_page(self) -> "CachePage | None":
    """The page before it in the free queue, or the queue's end."""
    return self.queue.neighbors(self)[0] if self.queue else None

  @property
  def next_free_page(self) -> "CachePage | None":
    """The page after it in the free queue, or the queue's end."""
    return self.queue.neighbors(self)[1] if self.queue else None

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, CachePage):
      return NotImplemented
    # A pool makes one object for each page.
    if self.pool is not None or other.pool is not None:
      return self is other
    return (self.page_id, self._count, self._hash, self.is_null) == (
      other.page_id,
      other.ref_cnt,
      other.page_hash,
      other.is_null,
    )

  def __hash__(self) -> int:
    # The count and the hash change, but a page must stay in the same place of a
    # set.
    return hash(self.page_id)

  def __repr__(self) -> str:
    # Only ids, because the neighbors would print theirs without an end.
    before, after = (
      None if page is None else page.page_id
      for page in (self.prev_free_page, self.next_free_page)
    )
    return (
      f"CachePage(page_id={self.page_id}, ref_cnt={self.ref_cnt}, "
      f"_page_hash={self.page_hash}, prev_free_page={before}, "
      f"next_free_page={after})"
    )


class EsurgeCachePages:
  """Pages by group.

  Args:
    pages: a list of `CachePage` for each group.

  Attributes:
    pages: the argument, with the null page behind a window.
  """

  __slots__ = ("_host_pages", "_pages", "_views")

  def __init__(self, pages: tuple[list[CachePage], ...]):
    self._pages: tuple[list[CachePage], ...] | None = pages
    self._host_pages: CachePages | None = None
    self._views: Sequence[CachePage] = ()

  @classmethod
  def of_manager(
    cls, host_pages: CachePages, views: Sequence[CachePage]
  ) -> "EsurgeCachePages":
    """Returns pages of a manager; `views` are all pages of its pool."""
    pages = cls.__new__(cls)
    # Schedulers read the ids, so the lists of views are made only on demand.
    pages._host_pages, pages._pages, pages._views = host_pages, None, views
    return pages

  @property
  def pages(self) -> tuple[list[CachePage], ...]:
    """A list of pages for each group."""
    if self._pages is None:
      assert self._host_pages is not None
      lists = self._host_pages.pages
      self._pages = tuple([[self._views[n] for n in ids] for ids in lists])
    return self._pages

  def get_page_ids(self) -> tuple[list[int], ...]:
    """Returns page ids by group."""
    if self._pages is None and self._host_pages is not None:
      # Copies, so that a caller's change does not reach those of the lookup.
      return tuple([ids[:] for ids in self._host_pages.pages])
    return tuple([[page.page_id for page in group] for group in self.pages])

  def to_host(self) -> CachePages:
    """Returns the pages for the manager, with the hashes of their lookup."""
    page_ids = self.get_page_ids()
    # The caller may have changed the lists of pages since the lookup. Then its
    # hashes no longer fit.
    if self._host_pages is not None and self._host_pages.pages == page_ids:
      return self._host_pages
    return CachePages(page_ids)

  def __add__(self, other: "EsurgeCachePages") -> "EsurgeCachePages":
    """Concatenates the pages of each group."""
    if len(self.pages) != len(other.pages):
      raise ValueError(
        f"CachePages must have {len(self.pages)} groups to be added, got "
        f"{len(other.pages)}."
      )
    pairs = zip(self.pages, other.pages, strict=True)
    return EsurgeCachePages(tuple(first + second for first, second in pairs))

  def get_unhashed_page_ids(self) -> list[int]:
    """Returns ids of the pages that have no hash now.

    Raises:
      ValueError: there is not exactly one group.
    """
    if len(self.pages) != 1:
      raise ValueError(
        f"CachePages must have one group for this, got {len(self.pages)}."
      )
    return [page.page_id for page in self.pages[0] if not page.is_hashed]

  def new_empty(self) -> "EsurgeCachePages":
    """Returns empty pages with as many groups."""
    return EsurgeCachePages(tuple([] for _ in self.pages))

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, EsurgeCachePages):
      return NotImplemented
    return self.pages == other.pages

  def __repr__(self) -> str:
    return f"CachePages(pages={self.pages})"
