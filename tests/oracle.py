"""The cache in Python lists: slow, obvious, the definition of correct.

Every verb of `jaxkv` stands here or in `Sequences` with the same arguments as
lists, and gives a dict of what the real one must return. Keys are tuples of the
tokens themselves, the free queue is a list, and rows are worked off one by one,
so that the batch law is how these files are written, not something they check.
"""

import copy
import itertools

import jax
import numpy as np

from jaxkv import CacheState
from jaxkv import Code
from tests.oracle_sequences import Sequence
from tests.oracle_sequences import Sequences


class Oracle(Sequences):
  """A whole cache; SEMANTICS 4.1 to 4.12 are the rules it follows."""

  def copy(self) -> "Oracle":
    """A cache that shares nothing with this one."""
    return copy.deepcopy(self)

  # --- branching -------------------------------------------------------------

  def fork(self, src, dst, mask=None):
    """Shares full pages; sources are read as they were before the call."""
    before = copy.deepcopy(self.slots)
    codes, copies, named = [], [], set()
    for index, (source, target) in enumerate(zip(src, dst, strict=True)):
      code = self._check_fork(before, source, target, named)
      if mask is not None and not mask[index]:
        code = Code.SKIPPED
      owed = self._nothing_owed()
      if code == Code.OK:
        named.add(target)
        partial = len(before[source].tokens) % self.config.page_size > 0
        if partial and self.config.num_groups > len(self.pool.free):
          code = Code.OUT_OF_PAGES
        else:
          owed = self._share(before[source], target, partial) or owed
      codes.append(code)
      copies.append(owed)
    return {"code": self._note(codes), "copies": _columns(copies)}

  def _check_fork(self, before, source, target, named):
    if not (self._in_range(source) and self._in_range(target)):
      return Code.BAD_SLOT
    if before[source].empty or not before[source].tokens:
      return Code.SLOT_EMPTY
    if not before[target].empty or target in named:
      return Code.SLOT_IN_USE
    return Code.OK

  def _share(self, source, target, partial):
    """Fills a slot from another; the copies owed, nothing without any."""
    full = len(source.tokens) // self.config.page_size
    tables, owed = [], []
    for pages in source.pages:
      for page in pages[:full]:
        self.pool.hold(page)
      tables.append(pages[:full])
      if partial:
        owed.append((pages[full], self.pool.pop()))
        tables[-1].append(owed[-1][1])
    self.slots[target] = Sequence(tables, list(source.tokens), source.root)
    return owed

  def _nothing_owed(self):
    return [(self.config.no_page,) * 2] * self.config.num_groups

  # --- rolling back ----------------------------------------------------------

  def truncate(self, lengths, mask=None):
    """Rolls back; all releases come before any copy is given a page."""
    room, codes, plans = len(self.pool.free), [], {}
    for slot, length in enumerate(lengths):
      code = self._check_truncate(slot, length)
      if mask is not None and not mask[slot]:
        code = Code.SKIPPED
      if code == Code.OK:
        shared = self._shared_groups(slot, length)
        if sum(shared) > room:
          code = Code.OUT_OF_PAGES
        else:
          room -= sum(shared)
          plans[slot] = length, shared
      codes.append(code)
    for slot, (length, shared) in plans.items():
      self._cut(slot, length, shared)
    copies = [
      pair
      for slot in range(len(codes))
      for pair in self._copied(slot, *plans.get(slot, (0, [])))
    ]
    return {"code": self._note(codes), "copies": _columns([copies])}

  def _check_truncate(self, slot, length):
    if self.slots[slot].empty:
      return Code.SLOT_EMPTY
    in_range = 0 <= length <= len(self.slots[slot].tokens)
    return Code.OK if in_range else Code.BAD_LENGTH

  def _reopens(self, slot, length):
    """Whether the new last page was full and will be written again."""
    size, before = self.config.page_size, len(self.slots[slot].tokens)
    return length % size > 0 and length // size < before // size

  def _shared_groups(self, slot, length):
    """For each group whether somebody else needs the page that is reopened."""
    last = length // self.config.page_size
    return [
      self._reopens(slot, length) and self.pool.refs[pages[last]] > 1
      for pages in self.slots[slot].pages
    ]

  def _cut(self, slot, length, shared):
    """Gives pages back; a shared last page too, but it stays in the table."""
    sequence, keep = self.slots[slot], self._pages_for(length)
    reopens = self._reopens(slot, length)
    for pages, copied in zip(sequence.pages, shared, strict=True):
      self.pool.release(pages[keep - copied :][::-1])
      pages[keep:] = []
      if reopens and not copied:
        self.pool.keys.pop(pages[-1], None)
    sequence.tokens = sequence.tokens[:length]

  def _copied(self, slot, length, shared):
    """Fresh last pages instead of shared ones; the copies owed."""
    owed = self._nothing_owed()
    for group, copied in enumerate(shared):
      if copied:
        pages = self.slots[slot].pages[group]
        owed[group] = (pages[-1], self.pool.pop())
        pages[-1] = owed[group][1]
    return owed

  # --- pages by name ---------------------------------------------------------

  def touch(self, pages):
    """Pins pages given as [X][P], leading axes flattened."""
    return self._by_page(self.pool.touch, pages)

  def evict(self, pages):
    """Drops the keys of pages."""
    return self._by_page(self.pool.evict, pages)

  def unpin(self, pages):
    """Gives pins back."""
    codes = self.pool.unpin(pages)
    self._note(list(itertools.chain(*codes)))
    return {"code": codes}

  def _by_page(self, verb, pages):
    codes = [[verb(page) for page in row] for row in pages]
    self._note(list(itertools.chain(*codes)))
    return {"code": codes}

  def pin(self, tokens, lengths, salts=None, mask=None):
    """Pins the longest cached prefix of each row."""
    codes, hits = [], []
    rows = self._rows(tokens, lengths, salts)
    for index, (row, length, salt) in enumerate(rows):
      hit = self._match(row, length, salt)
      code = Code.OK if hit[0] else Code.NOT_CACHED
      if not 1 <= length <= len(row):
        code = Code.BAD_LENGTH
      if mask is not None and not mask[index]:
        code, hit = Code.SKIPPED, [[] for _ in hit]
      codes.append(code)
      hits.append(hit)
    for hit in hits:
      for page in itertools.chain(*hit):
        self.pool.touch(page)
    return {
      "code": self._note(codes),
      "num_cached": [len(hit[0]) * self.config.page_size for hit in hits],
      "pages": self._padded(hits, len(tokens[0]) // self.config.page_size),
    }

  # --- everything ------------------------------------------------------------

  def reset_prefix_cache(self):
    """Forgets all cached pages if none is held."""
    return {"code": self._note([self.pool.reset()])[0]}

  def new_epoch(self):
    """Nothing published so far will be found again."""
    self.epoch += 1
    return {}

  def num_common_prefix_pages(self):
    """Leading pages that all sequences share, for each group."""
    running = [slot.pages for slot in self.slots if not slot.empty]
    common = []
    for tables in zip(*running, strict=True):
      columns = zip(*tables, strict=False)
      same = [len(set(column)) == 1 for column in columns]
      common.append([*same, False].index(False))
    return common or [0] * self.config.num_groups


def _columns(rows):
  """Copies owed by rows, as `Copies(src, dst)` lists them."""
  pairs = list(itertools.chain(*rows))
  return {"src": [s for s, _ in pairs], "dst": [d for _, d in pairs]}


# --- comparison ---------------------------------------------------------------


def differences(oracle: Oracle, state: CacheState) -> list[str]:
  """Everything in which a state is not what the oracle says."""
  wanted, got = _expected(oracle), _found(state)
  return [
    f"{name}: oracle {wanted[name]}, state {got[name]}"
    for name in wanted
    if wanted[name] != got[name]
  ]


def _expected(oracle):
  pool, config = oracle.pool, oracle.config
  tables = [
    [
      slot.pages[g]
      + [config.no_page] * (config.pages_per_slot - len(slot.pages[g]))
      for slot in oracle.slots
    ]
    for g in range(config.num_groups)
  ]
  return {
    "page_table": tables,
    "num_pages": [
      [len(slot.pages[g]) for slot in oracle.slots]
      for g in range(config.num_groups)
    ],
    "length": [len(slot.tokens) for slot in oracle.slots],
    "ref_count": pool.refs,
    "pin_count": pool.pins,
    "free_pages": pool.free,
    "cached_pages": sorted(pool.keys),
    "epoch": oracle.epoch,
    "error": int(oracle.error),
    "queries": oracle.queries,
    "hits": oracle.hits,
    "popped": pool.popped,
    "evicted": pool.evicted,
    "published": pool.published,
    "merged": pool.merged,
    "failed": oracle.failed,
  }


def _found(state):
  host = jax.device_get(state)
  found = {
    "page_table": host.page_table,
    "num_pages": host.num_pages,
    "length": host.length,
    "ref_count": host.pool.ref_count,
    "pin_count": host.pool.pin_count,
    "free_pages": _in_order(host.pool.queue),
    "cached_pages": _cached(host.pool.index),
    "epoch": host.epoch,
    "error": host.error,
  }
  found |= {name: getattr(host.stats, name) for name in vars(host.stats)}
  return {name: np.asarray(value).tolist() for name, value in found.items()}


def _in_order(queue):
  """Live entries of the ring: those that their page points back at."""
  places = (queue.head + np.arange(queue.span)) % len(queue.ring)
  return [
    queue.ring[place]
    for place in places
    if queue.position[queue.ring[place]] == place
  ]


def _cached(index):
  """Pages that stand in a bucket."""
  return [] if index is None else np.sort(index.buckets[index.buckets > 0])
