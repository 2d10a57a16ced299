"""Pages: references, the free queue, and the keys of what is cached."""

NULL = 0
"""The null page: the placeholder for a page that is no longer needed."""


class Pool:
  """The pages: references, the free queue and keys.

  Attributes:
    unhashed_first: True if pages without a key go to the front of the queue.
    free: free pages in the order in which they will be popped.
    refs, pins: a count for every page; a pin is one of the references. Those
      of the null page stay 0.
    keys: page -> key, in the order of publication.
    popped, evicted, published, merged: as in `Stats`.
    clock: the number of pages that got a key, published or not.
    born: page -> value of the clock when it got its key.
    released: value of the clock when each page last became free.
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
    """Pops the first free page and evicts its content."""
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
    """Adds a reference to each page; a free page leaves the queue."""
    for page in pages:
      if page == NULL:
        continue
      if self.refs[page] == 0:
        self.free.remove(page)
      self.refs[page] += 1

  def release(self, pages: list[int]) -> None:
    """Removes a reference of each page; the first freed page is used first."""
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
    """Returns the page published first under a key, or None."""
    return next((page for page, k in self.keys.items() if k == key), None)

  def forget(self, page: int) -> None:
    """Drops the key of a page, if any; the page keeps its queue position."""
    self.keys.pop(page, None)

  def reset(self) -> bool:
    """Drops all keys if no page is held; the queue keeps its order."""
    if any(self.refs):
      return False
    self.keys.clear()
    return True
