"""Pages: references, the free queue, and the keys of what is cached."""

NULL = 0
"""The page that stands in a table where none is needed any more."""


class Pool:
  """Which pages are free, in which order, and what can be found in them.

  Attributes:
    unhashed_first: whether pages without a key go to the front of the queue.
    free: free pages in the order in which they will be popped.
    refs, pins: a count for every page; a pin is one of the references. Those
      of the null page stay 0.
    keys: page -> key, in the order of publication.
    popped, evicted, published, merged: as in `Stats`.
    clock: pages that got a key, of use or not.
    born: page -> value of the clock when it got its key.
    released: value of the clock when each page was last given back.
    lifetime, idle: evicted pages by the bits of their age.
  """

  def __init__(self, num_pages: int, unhashed_first: bool = True):
    self.unhashed_first = unhashed_first
    self.free = list(range(1, num_pages))
    self.refs = [0] * num_pages
    self.pins = [0] * num_pages
    self.keys: dict[int, tuple] = {}
    self.popped = self.evicted = self.published = self.merged = 0
    self.clock, self.born = 0, {}
    self.released = [0] * num_pages
    self.lifetime, self.idle = [0] * 33, [0] * 33

  def pop(self) -> int:
    """Takes the first free page; whatever was cached in it is lost."""
    page = self.free.pop(0)
    self.popped += 1
    if self.keys.pop(page, None) is not None:
      self.evicted += 1
      published = self.clock - self.born[page] - 1  # After this one.
      self.lifetime[published.bit_length()] += 1
      self.idle[(self.clock - self.released[page]).bit_length()] += 1
    self.refs[page] = 1
    return page

  def hold(self, pages: list[int]) -> None:
    """One more reference each; a free page leaves the queue where it stands."""
    for page in pages:
      if page == NULL:
        continue
      if self.refs[page] == 0:
        self.free.remove(page)
      self.refs[page] += 1

  def release(self, pages: list[int]) -> None:
    """Gives back one reference each; the first of the list is used first."""
    freed = []
    for page in pages:
      if page == NULL:
        continue
      self.refs[page] -= 1
      if self.refs[page] == 0:
        freed.append(page)
        self.released[page] = self.clock
    front = []
    if self.unhashed_first:
      front = [page for page in freed if page not in self.keys]
    back = [page for page in freed if page not in front]
    self.free = front + self.free + back

  def find(self, key: tuple) -> int | None:
    """The page published first among those that carry the key."""
    return next((page for page, k in self.keys.items() if k == key), None)

  def forget(self, page: int) -> None:
    """Drops the key of a page, if it has one; the page stays where it is."""
    self.keys.pop(page, None)

  def reset(self) -> bool:
    """Drops all keys if nothing is held; the order of the queue stays."""
    if any(self.refs):
      return False
    self.keys.clear()
    return True
