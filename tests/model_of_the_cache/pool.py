"""Pages: references, the free queue, and the keys of what is cached."""

NULL = 0
"""The null page: the placeholder for a page that is no longer needed."""


class Pool:
  """The pages of all pools: references, free queues and keys.

  Attributes:
    unhashed_first: True if pages without a key go to the front of the queue.
    pool_of: page -> its pool, offloaded pages too.
    free: for each pool, the free pages in the order in which they will be
      popped.
    refs, pins: a count for every page; a pin is one of the references. Those
      of the null page stay 0.
    keys: page -> key, in the order of publication.
    popped, evicted, published, merged: as in `Stats`.
    clock: the number of pages that got a key, published or not.
    born: page -> value of the clock when it got its key.
    released: value of the clock when each page last became free.
    lifetime, idle: evicted pages by the bits of their age.
    offload: for each pool, the numbers of offloaded pages, in the order in
      which they will be overwritten; they are larger than those of all device
      pages.
    stale_before: value of the clock at the last epoch. Pages that got their key
      before are not saved.
    reasons: cached page -> the reason to keep it; states without a reason are
      given up as soon as they are passed.
    has_evicted: for each pool, True if it had to evict a page.
    max_restored: the number of pages of a column that return at most.
    restored_tokens: for each pool, the tokens that a returned page must save;
      None if columns are judged.
    saved, restored, forgotten, dropped: as in `Stats`.
    moves: device page, offload page saved to, offload page restored from, for
      each move of the latest verb; None for no offload page.
  """

  def __init__(
    self,
    sizes: tuple[int, ...],
    unhashed_first: bool = True,
    offload_sizes: tuple[int, ...] = (0,),
    max_restored: float = float("inf"),
    restored_tokens: tuple[float, ...] | None = None,
  ):
    self.restored_tokens = restored_tokens
    self.max_restored = max_restored
    self.unhashed_first = unhashed_first
    self.num_pages = num_pages = sum(sizes)
    self.pool_of: dict[int, int] = {}
    self.free = self._numbered(sizes, 0)
    self.offload = self._numbered(
      [size + 1 for size in offload_sizes], num_pages
    )
    self.stale_before = self.saved = self.restored = self.forgotten = 0
    self.dropped = 0
    self.moves: list[tuple[int, int | None, int | None]] = []
    self.refs = [0] * num_pages
    self.pins = [0] * num_pages
    self.keys: dict[int, tuple] = {}
    self.reasons: dict[int, int] = {}
    self.has_evicted = [False for _ in sizes]
    self.popped = self.evicted = self.published = self.merged = 0
    self.clock = 0
    self.born = {}
    self.released = [0] * num_pages
    self.lifetime = [0] * 33
    self.idle = [0] * 33

  def _numbered(self, sizes, first_page: int) -> list[list[int]]:
    """Numbers the pages of all pools; nobody gets the first one of a pool."""
    pools = []
    for pool, size in enumerate(sizes):
      pools.append(list(range(first_page + 1, first_page + size)))
      self.pool_of |= dict.fromkeys(pools[-1], pool)
      first_page += size
    return pools

  def room(self) -> list[int]:
    """Counts the free pages of each pool."""
    return [len(pages) for pages in self.free]

  def count(self, pages) -> list[int]:
    """Counts the pages of each pool among some pages."""
    pools = [self.pool_of[page] for page in pages]
    return [pools.count(pool) for pool in range(len(self.free))]

  def pop(self, pool: int) -> int:
    """Pops the first free page of a pool and evicts its content."""
    page = self.free[pool].pop(0)
    self.popped += 1
    key = self.keys.pop(page, None)
    if key is not None:
      self.evicted += 1
      self.has_evicted[pool] = True
      is_current = self.born[page] >= self.stale_before
      saves = self.offload[pool] and self.max_restored > 0
      if saves and is_current:
        self._save(page, key)
      else:
        self.dropped += 1
      published = self.clock - self.born[page] - 1  # After this one.
      self.lifetime[published.bit_length()] += 1
      self.idle[(self.clock - self.released[page]).bit_length()] += 1
    self.refs[page] = 1
    return page

  def _save(self, page: int, key: tuple) -> None:
    """Moves the content of a device page to the pool's oldest offload page."""
    offload = self.offload[self.pool_of[page]]
    target = offload.pop(0)
    offload.append(target)
    self.forgotten += self.keys.pop(target, None) is not None
    self.keys[target] = key
    self.born[target] = self.born[page]
    self.reasons[target] = self.reasons[page]
    self.saved += 1
    self.moves.append((page, target, None))

  def is_offloaded(self, page: int) -> bool:
    """Returns True for the number of an offloaded page."""
    return page > self.num_pages

  def restore(self, pages: list[int]) -> dict[int, int]:
    """Moves offload pages to fresh device pages; returns the device pages."""
    contents = {
      page: (self.keys.pop(page), self.born[page], self.reasons[page])
      for page in pages
    }
    for pool, offload in enumerate(self.offload):
      first = [page for page in pages if self.pool_of[page] == pool]
      self.offload[pool] = first + [p for p in offload if p not in first]
    device_pages = {}
    for page, (key, born, reason) in contents.items():
      num_moves = len(self.moves)
      device_page = device_pages[page] = self.pop(self.pool_of[page])
      self.popped -= 1
      saved_to = self.moves.pop()[1] if len(self.moves) > num_moves else None
      self.moves.append((device_page, saved_to, page))
      self.keys[device_page] = key
      self.born[device_page] = born
      self.reasons[device_page] = reason
      self.refs[device_page] = 0
      self.restored += 1
    return device_pages

  def hold_hits(self, pages: list[int]) -> list[int]:
    """Adds a reference to each page, on the device; returns device pages."""
    offloaded = list(dict.fromkeys(p for p in pages if self.is_offloaded(p)))
    self.hold([page for page in pages if page not in offloaded])
    device_pages = self.restore(offloaded)
    for page in pages:
      if page in device_pages:
        self.refs[device_pages[page]] += 1
    return [device_pages.get(page, page) for page in pages]

  def hold(self, pages: list[int]) -> None:
    """Adds a reference to each page; a free page leaves the queue."""
    for page in pages:
      if page == NULL:
        continue
      if self.refs[page] == 0:
        self.free[self.pool_of[page]].remove(page)
      self.refs[page] += 1

  def release(self, pages: list[int], forgets: bool = False) -> None:
    """Removes a reference of each page; the first freed page is used first.

    With `forgets`, pages without a reason to keep them lose their keys.
    """
    freed = []
    for page in pages:
      if page == NULL:
        continue
      self.refs[page] -= 1
      if self.refs[page] == 0:
        freed.append(page)
        self.released[page] = self.clock
        worst = int(self.has_evicted[self.pool_of[page]])
        if forgets and page in self.keys and self.reasons[page] <= worst:
          self.forget(page)
    front = []
    if self.unhashed_first:
      front = [page for page in freed if page not in self.keys]
    back = [page for page in freed if page not in front]
    for pool, free in enumerate(self.free):
      before, after = (
        [page for page in pages if self.pool_of[page] == pool]
        for pages in (front, back)
      )
      self.free[pool] = before + free + after

  def find(self, key: tuple) -> int | None:
    """Returns the page published first under a key, or None.

    A page on the device comes before all pages on the host.
    """
    pages = [page for page, k in self.keys.items() if k == key]
    return min(
      pages,
      key=lambda page: (self.is_offloaded(page), self.born[page]),
      default=None,
    )

  def forget(self, page: int) -> None:
    """Drops the key of a page, if any; the page keeps its queue position."""
    self.keys.pop(page, None)

  def reset(self) -> bool:
    """Drops all keys if no page is held; the queue keeps its order."""
    if any(self.refs):
      return False
    self.keys.clear()
    return True
