"""The cache in Python lists: slow, obvious, the definition of correct.

Every verb of `jaxkv` stands here or in a class below with the same arguments as
lists, and gives a dict of what the real one must return. Keys are tuples of the
tokens themselves, the free queue is a list, and rows are worked off one by one,
so that the batch law is how these files are written, not something they check.
"""

import copy
import dataclasses
import itertools

import jax
import numpy as np

from jaxkv import CacheState
from jaxkv import Code
from tests.model_of_the_cache.oracle_arrivals import Arrivals
from tests.model_of_the_cache.oracle_pool import NULL


class Oracle(Arrivals):
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
        tokens = len(before[source].tokens)
        partial = self._partial(tokens)
        scratch = sum(group.scratch for group in self.groups)
        if self._stateless(before[source], tokens):
          code = Code.RECYCLED
        elif sum(partial) + scratch > len(self.pool.free):
          code = Code.OUT_OF_PAGES
        else:
          owed = self._share(before[source], target, partial)
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

  def _partial(self, tokens):
    """For each group whether the last page is not full."""
    return [
      tokens % group.size > 0 and not group.is_cross for group in self.groups
    ]

  def _share(self, source, target, partial):
    """Fills a slot from another; the copies owed."""
    tables, owed = [], self._nothing_owed()
    for number, group in enumerate(self.groups):
      pages, full = source.pages[number], group.full_pages(len(source.tokens))
      full = len(pages) if group.is_cross else full
      for page in pages[:full]:
        if page != NULL:
          self.pool.hold(page)
      tables.append(pages[:full])
    gone = [
      min(n, len(pages)) for n, pages in zip(source.gone, tables, strict=True)
    ]
    for number, pages in enumerate(tables):
      if partial[number]:
        owed[number] = (source.pages[number][len(pages)], self.pool.pop())
        pages.append(owed[number][1])
      scratch = range(self.groups[number].scratch)
      pages.extend(self.pool.pop() for _ in scratch)
    self.slots[target] = dataclasses.replace(
      source, pages=tables, tokens=list(source.tokens), gone=gone
    )
    return owed

  def _stateless(self, sequence, length):
    """Whether some state after so many tokens is not in its page."""
    for group, pages in zip(self.groups, sequence.pages, strict=True):
      if not group.holds_states or length == 0:
        continue
      if pages[(length - 1) // group.size] == NULL:
        return True
      if length < len(sequence.tokens) and length % group.size:
        return True
    return False

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
    if not 0 <= length <= len(self.slots[slot].tokens):
      return Code.BAD_LENGTH
    lost = length > 0 and self._lost(self.slots[slot], length)
    return Code.RECYCLED if lost else Code.OK

  def _lost(self, sequence, length):
    """Whether a shorter sequence would need a page that was given back."""
    config, gone = self.config, sequence.gone
    if self._stateless(sequence, length):
      return True
    for group, missing in zip(self.groups, gone, strict=True):
      if group.skipped_pages(length) < missing:
        return True
    # Keys go on from the last place where all groups end a page. If that moves
    # back, the key there and the tokens behind are read from one group's pages.
    align = config.alignment
    if (
      not config.prefix_caching
      or length // align == len(sequence.tokens) // align
    ):
      return False
    aligned, text = length // align * align, config.text_group
    if self.groups[text].holds_states:
      return aligned < length
    return max(aligned - 1, 0) // self.groups[text].size < gone[text]

  def _reopens(self, slot, length):
    """For each group whether the last page was full and is written again."""
    before = len(self.slots[slot].tokens)
    return [
      partial and group.full_pages(length) < group.full_pages(before)
      for group, partial in zip(self.groups, self._partial(length), strict=True)
    ]

  def _shared_groups(self, slot, length):
    """For each group whether somebody else needs the page that is reopened."""
    tables, reopens = self.slots[slot].pages, self._reopens(slot, length)
    return [
      reopens[number]
      and self.pool.refs[tables[number][group.full_pages(length)]] > 1
      for number, group in enumerate(self.groups)
    ]

  def _cut(self, slot, length, shared):
    """Gives pages back; a shared last page too, but it stays in the table."""
    sequence = self.slots[slot]
    keeps = [self._kept(sequence, number, length) for number in self._numbers()]
    reopens = self._reopens(slot, length)
    for number, pages in enumerate(sequence.pages):
      (keep, scratch), copied = keeps[number], shared[number]
      end = len(pages) - scratch
      if reopens[number] and not copied:
        self.pool.keys.pop(pages[keep - 1], None)
      back = [page for page in pages[keep - copied : end] if page != NULL]
      self.pool.release(back[::-1])
      pages[keep:end] = []
      sequence.gone[number] = min(sequence.gone[number], keep)
    sequence.tokens = sequence.tokens[:length]

  def _numbers(self):
    return range(len(self.groups))

  def _kept(self, sequence, number, length):
    """Columns that a shorter sequence keeps, and scratch pages behind."""
    group, held = self.groups[number], len(sequence.pages[number])
    if length == 0 or group.is_cross:
      return (held if length else 0), 0
    keep = group.pages_for(length) - group.scratch
    return keep, min(group.scratch, held - keep)

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
      code = Code.OK if hit.tokens else Code.NOT_CACHED
      if not 1 <= length <= len(row):
        code = Code.BAD_LENGTH
      if mask is not None and not mask[index]:
        code, hit = Code.SKIPPED, self._miss()
      codes.append(code)
      hits.append(hit)
    for hit in hits:
      for page in hit.all_pages():
        self.pool.touch(page)
    return {
      "code": self._note(codes),
      "num_cached": [hit.tokens for hit in hits],
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
      same = [
        len(set(column)) == 1 and NULL not in column for column in columns
      ]
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
  aged = config.track_residency
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
    "first_page": _transposed([slot.gone for slot in oracle.slots]),
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
    **({"lifetime": pool.lifetime, "idle": pool.idle} if aged else {}),
  }


def _transposed(rows):
  return [list(column) for column in zip(*rows, strict=True)]


def _found(state):
  host = jax.device_get(state)
  found = {
    "page_table": host.page_table,
    "num_pages": host.num_pages,
    "first_page": host.first_page,
    "length": host.length,
    "ref_count": host.pool.ref_count,
    "pin_count": host.pool.pin_count,
    "free_pages": _in_order(host.pool.queue),
    "cached_pages": _cached(host.pool.index),
    "epoch": host.epoch,
    "error": host.error,
  }
  found |= {name: getattr(host.stats, name) for name in vars(host.stats)}
  if host.pool.ages is not None:
    found |= vars(host.pool.ages.evicted)
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
