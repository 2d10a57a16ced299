"""The pages of the oracle: references, pins, keys and the free list."""

from jaxkv import CacheConfig
from jaxkv import Code

NULL = 0
"""The page that stands in a table where none is needed any more."""


class Pool:
  """Which pages are free, in which order, and what can be found in them.

  Attributes:
    free: free pages in the order in which they will be popped.
    refs, pins: a count for every page; a pin is one of the references.
    keys: page -> key, in the order of publication.
    popped, evicted, published, merged: as in `Stats`.
    clock: pages that got a key, of use or not.
    born: page -> value of the clock when it got its key.
    released: value of the clock when each page was last given back.
    lifetime, idle: evicted pages by the bits of their age.
  """

  def __init__(self, config: CacheConfig):
    self.config = config
    self.free = list(range(1, config.num_pages))
    self.refs = [0] * config.num_pages
    self.pins = [0] * config.num_pages
    self.keys: dict[int, tuple] = {}
    self.popped = self.evicted = self.published = self.merged = 0
    self.clock, self.born = 0, {}
    self.released = [0] * config.num_pages
    self.lifetime, self.idle = [0] * 33, [0] * 33

  def pop(self) -> int:
    """Takes the first free page; whatever was cached in it is lost."""
    page = self.free.pop(0)
    self.popped += 1
    if self.keys.pop(page, None) is not None:
      self.evicted += 1
      self.lifetime[(self.clock - self.born[page]).bit_length()] += 1
      self.idle[(self.clock - self.released[page]).bit_length()] += 1
    self.refs[page] = 1
    return page

  def hold(self, page: int) -> None:
    """One more reference; a free page leaves the free list where it stands."""
    if self.refs[page] == 0:
      self.free.remove(page)
    self.refs[page] += 1

  def release(self, pages: list[int]) -> None:
    """Gives back one reference each; the first of the list is used first."""
    freed = []
    for page in pages:
      self.refs[page] -= 1
      if self.refs[page] == 0:
        freed.append(page)
        self.released[page] = self.clock
    front = []
    if self.config.unhashed_first:
      front = [page for page in freed if page not in self.keys]
    back = [page for page in freed if page not in front]
    self.free = front + self.free + back

  def publish(self, page: int, key: tuple) -> None:
    """Makes a page findable, after all others with the same key."""
    assert page not in self.keys
    self.keys[page] = key

  def find(self, key: tuple) -> int | None:
    """The page published first among those that carry the key."""
    return next((page for page, k in self.keys.items() if k == key), None)

  def touch(self, page: int) -> Code:
    """A pin on a page that is held or cached."""
    if page == self.config.no_page:
      return Code.SKIPPED
    if not 0 < page < self.config.num_pages:
      return Code.BAD_PAGE
    if self.refs[page] == 0 and page not in self.keys:
      return Code.NOT_CACHED
    self.hold(page)
    self.pins[page] += 1
    return Code.OK

  def unpin(self, rows: list[list[int]]) -> list[list[Code]]:
    """Gives pins back, in each row the last page first."""
    codes = []
    for row in rows:
      backwards = [self._unpin(page) for page in row[::-1]]
      codes.append(backwards[::-1])
      given = [
        page
        for page, code in zip(row, codes[-1], strict=True)
        if code == Code.OK
      ]
      self.release(given[::-1])
    return codes

  def _unpin(self, page: int) -> Code:
    """Takes a pin away, but not yet its reference."""
    if page == self.config.no_page:
      return Code.SKIPPED
    if not 0 < page < self.config.num_pages:
      return Code.BAD_PAGE
    if self.pins[page] == 0:
      return Code.NOT_PINNED
    self.pins[page] -= 1
    return Code.OK

  def evict(self, page: int) -> Code:
    """Drops the key of a page; it stays where it is."""
    if page == self.config.no_page:
      return Code.SKIPPED
    if not 0 < page < self.config.num_pages:
      return Code.BAD_PAGE
    if page not in self.keys:
      return Code.NOT_CACHED
    del self.keys[page]
    return Code.OK

  def reset(self) -> Code:
    """Drops all keys if nothing is held; the order of the pages stays."""
    if any(self.refs):
      return Code.STILL_HELD
    self.keys.clear()
    return Code.OK
