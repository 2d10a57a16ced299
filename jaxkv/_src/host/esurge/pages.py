"""Pages for eSurge's schedulers: views of a pool, and lists of them."""

import dataclasses
from typing import Any

from jaxkv._src.host.esurge.hashes import PageHashWithGroupId
from jaxkv._src.host.types import CachePages


class CachePage:
  """One page.

  A page of a pool is a view, whose properties read the newest state. A page
  made alone has its own count and hash.

  Args:
    page_id: its id.
    ref_cnt: references, of a page made alone.
    is_null: True for a null page.

  Attributes:
    page_id: its id.
    is_null: True for the null page, which is never free and has no references.

  Examples:
    >>> from jaxkv.host.esurge import CachePage
    >>> page = CachePage(3)
    >>> page.incr_ref()
    >>> page
    CachePage(page_id=3, ref_cnt=1, _page_hash=None, prev_free_page=None,
      next_free_page=None)
  """

  __slots__ = ("_count", "_hash", "_pool", "_queue", "is_null", "page_id")

  def __init__(self, page_id: int, ref_cnt: int = 0, is_null: bool = False):
    self.page_id = page_id
    self.is_null = is_null
    self._count = ref_cnt
    self._hash: PageHashWithGroupId | None = None
    self._pool: Any = None
    self._queue: Any = None

  @classmethod
  def of_pool(cls, pool: Any, page_id: int) -> "CachePage":
    """Returns the view of a pool's page."""
    page = cls(page_id, is_null=page_id == 0)
    page._pool = pool
    return page

  @property
  def pool(self) -> Any:
    """Its pool; None for a page made alone."""
    return self._pool

  @property
  def queue(self) -> Any:
    """The free queue to which it can belong."""
    return self._queue

  def join(self, queue: Any) -> None:
    """Sets the queue that gives the page's neighbors."""
    self._queue = queue

  @property
  def ref_cnt(self) -> int:
    """The reference count; 0 for the null page of a pool."""
    if self._pool is None:
      return self._count
    return self._pool.references([self])[0]

  @ref_cnt.setter
  def ref_cnt(self, count: int) -> None:
    if self._pool is not None:
      raise AttributeError(
        "`ref_cnt` must be changed by the pool's touch and free_pages, or by "
        f"incr_ref and decr_ref of page {self.page_id}."
      )
    self._count = count

  def incr_ref(self) -> None:
    """Adds a reference. A free page leaves the queue."""
    if self._pool is None:
      self._count += 1
    elif not self.is_null:
      self._pool.add_reference(self)

  def decr_ref(self) -> None:
    """Removes a reference, without an effect on the queue; see `append`.

    Raises:
      RuntimeError: it has none, or only those of requests.
    """
    if self._pool is not None:
      self._pool.remove_reference(self)
    elif self._count <= 0:
      raise RuntimeError(
        f"Page {self.page_id} must have a reference to lose one."
      )
    else:
      self._count -= 1

  @property
  def page_hash(self) -> PageHashWithGroupId | None:
    """The page's hash; None if lookups cannot find it."""
    return self._hash if self._pool is None else self._pool.hash_of(self)

  @page_hash.setter
  def page_hash(self, page_hash: PageHashWithGroupId) -> None:
    if self._pool is not None:
      self._pool.publish([self], [page_hash.page_hash], page_hash.group_id)
    elif self._hash is not None:
      raise RuntimeError(f"Page {self.page_id} must have no hash to get one.")
    else:
      self._hash = page_hash

  def reset_hash(self) -> None:
    """Removes the hash."""
    if self._pool is not None:
      self._pool.evict([self])
    self._hash = None

  @property
  def prev_free_page(self) -> "CachePage | None":
    """The page before it in the free queue, or the queue's end."""
    return self._queue.neighbors(self)[0] if self._queue else None

  @property
  def next_free_page(self) -> "CachePage | None":
    """The page after it in the free queue, or the queue's end."""
    return self._queue.neighbors(self)[1] if self._queue else None

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, CachePage):
      return NotImplemented
    if self._pool is not None or other.pool is not None:
      return self is other
    return (self.page_id, self._count, self._hash, self.is_null) == (
      other.page_id,
      other.ref_cnt,
      other.page_hash,
      other.is_null,
    )

  def __hash__(self) -> int:
    return hash(self.page_id)

  def __repr__(self) -> str:
    before, after = (
      None if page is None else page.page_id
      for page in (self.prev_free_page, self.next_free_page)
    )
    return (
      f"CachePage(page_id={self.page_id}, ref_cnt={self.ref_cnt}, "
      f"_page_hash={self.page_hash}, prev_free_page={before}, "
      f"next_free_page={after})"
    )


@dataclasses.dataclass
class EsurgeCachePages:
  """Pages by group.

  Attributes:
    pages: a list of `CachePage` for each group, with the null page behind a
      window.
    found: the result of a lookup, whose hashes the allocation reuses.
  """

  pages: tuple[list[CachePage], ...]
  found: CachePages | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  def __add__(self, other: "EsurgeCachePages") -> "EsurgeCachePages":
    """Concatenates the pages of each group."""
    if len(self.pages) != len(other.pages):
      raise ValueError(
        f"CachePages must have {len(self.pages)} groups to be added, got "
        f"{len(other.pages)}."
      )
    both = zip(self.pages, other.pages, strict=True)
    return EsurgeCachePages(tuple(one + two for one, two in both))

  def get_page_ids(self) -> tuple[list[int], ...]:
    """Returns page ids by group."""
    return tuple([page.page_id for page in group] for group in self.pages)

  def get_unhashed_page_ids(self) -> list[int]:
    """Returns ids of the pages that have no hash now.

    Raises:
      ValueError: there is not exactly one group.
    """
    if len(self.pages) != 1:
      raise ValueError(
        f"CachePages must have one group for this, got {len(self.pages)}."
      )
    pages = self.pages[0]
    if not pages or pages[0].pool is None:
      return [page.page_id for page in pages if page.page_hash is None]
    hashed = pages[0].pool.are_hashed(pages)
    marked = zip(pages, hashed, strict=True)
    return [page.page_id for page, known in marked if not known]

  def new_empty(self) -> "EsurgeCachePages":
    """Returns empty pages with as many groups."""
    return EsurgeCachePages(tuple([] for _ in self.pages))
