"""The pages of the reference model: references, free queue and keys."""

NULL = 0


class ReferencePool:
  """SEMANTICS 4.1 to 4.4 and 4.12.

  Attributes:
    free: free pages in the order in which they will be popped.
    refs: a count for every page; that of the null page stays 0.
    key: page -> key.
    pages: key -> pages that carry it, in the order of publication.
  """

  def __init__(self, num_pages: int, caching: bool, unhashed_first: bool):
    self.caching = caching
    self.unhashed_first = unhashed_first
    self.free = list(range(1, num_pages))
    self.refs = [0] * num_pages
    self.key: dict[int, tuple] = {}
    self.pages: dict[tuple, dict[int, None]] = {}

  def pop(self, count: int) -> list[int]:
    """Takes pages from the front; what was cached in them is lost."""
    if count > len(self.free):
      raise ValueError(f"cannot pop {count} of {len(self.free)} free pages")
    popped = [self.free.pop(0) for _ in range(count)]
    for page in popped:
      self.forget(page)
      self.refs[page] = 1
    return popped

  def touch(self, pages: list[int]) -> None:
    """One more reference each; a free page leaves the queue where it is."""
    for page in pages:
      if page == NULL:
        continue
      if self.refs[page] == 0:
        self.free.remove(page)
      self.refs[page] += 1

  def release(self, pages: list[int]) -> None:
    """Gives back one reference each, in the order of eviction."""
    freed = []
    for page in pages:
      if page == NULL:
        continue
      self.refs[page] -= 1
      if self.refs[page] == 0:
        freed.append(page)
    front = []
    if self.unhashed_first:
      front = [p for p in freed if not self.caching or p not in self.key]
    back = [page for page in freed if page not in front]
    self.free = front + self.free + back

  def publish(self, page: int, key: tuple) -> None:
    """Makes a page findable, after all others with the same key."""
    self.forget(page)
    self.key[page] = key
    self.pages.setdefault(key, {})[page] = None

  def find(self, key: tuple) -> int | None:
    """The page published first among those that carry the key."""
    return next(iter(self.pages.get(key, ())), None)

  def forget(self, page: int) -> None:
    """Drops the key of a page, if it has one; the page stays where it is."""
    key = self.key.pop(page, None)
    if key is not None:
      del self.pages[key][page]
      if not self.pages[key]:
        del self.pages[key]

  def reset(self) -> bool:
    """Drops all keys if nothing is held; the order of the queue stays."""
    if any(self.refs):
      return False
    self.key.clear()
    self.pages.clear()
    return True

  @property
  def usage(self) -> float:
    """Part of the pages that is held, the null page not counted."""
    usable = len(self.refs) - 1
    return 1 - len(self.free) / usable if usable else 0.0
