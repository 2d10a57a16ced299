"""Telemetry of a cache: the event log, and the ages of evicted pages.

The log has a fixed size. It records the changes of the prefix index, so that
another program, such as a router, can mirror the index. When the log is full,
further events are counted but not stored.

Ages are measured by `PrefixIndex.clock`, which advances by one for each page
that gets a key. So an age is a number of pages and does not depend on speed.
The ages of evicted pages show how many pages a larger cache would have kept.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.hashing import key_bytes

STORED, REMOVED, CLEARED = 0, 1, 2

NUM_BINS = 33
"""One bin for each bit length of a uint32, 0 to 32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EventLog:
  """The first E events since the last reading, oldest first.

  A REMOVED event has only `kind`, `page`, `group` and `key`, and a CLEARED
  event only `kind`. N is `CacheConfig.num_numbers`.

  Attributes:
    kind: STORED, REMOVED or CLEARED.  # int32[E]
    page: the page's number.  # int32[E]
    group: the page's group.  # int32[E]
    column: the page's column in the page table.  # int32[E]
    key: the page's key.  # uint32[E, 4]
    parent: the key of the preceding page.  # uint32[E, 4]
    root: the root of the sequence, see `hashing.root_key`.  # uint32[E, 4]
    tokens: the page's tokens.  # int32[E, S]
    count: events since the last reading, including lost events.  # int32[]
    group_of: the group of each cached page.  # int32[N]
  """

  kind: Array
  page: Array
  group: Array
  column: Array
  key: Array
  parent: Array
  root: Array
  tokens: Array
  count: Array
  group_of: Array


class Stored(NamedTuple):
  """A page was published.

  Attributes:
    page: the page's number.
    group: the page's group.
    key: 16 bytes, a hash of the root, the group and all tokens so far.
    parent: the key of the preceding page in this group, published or not; None
      for the first page of a sequence.
    root: 16 bytes, equal for all sequences with the same salt and epoch.
    tokens: the page's tokens.
  """

  page: int
  group: int
  key: bytes
  parent: bytes | None
  root: bytes
  tokens: tuple[int, ...]


class Removed(NamedTuple):
  """A page left the index, for example by eviction.

  A move to offload memory or back is not logged, but it changes the page's
  number. So `page` can differ from the number in the page's `Stored` event.
  """

  page: int
  group: int
  key: bytes


class Cleared(NamedTuple):
  """All pages left the index."""


class Drained(NamedTuple):
  """The events since the last reading.

  Attributes:
    events: oldest first.
    num_lost: the number of later events, for which the log had no room. If this
      is not 0, a mirror is out of date; see `jaxkv.cached_pages`.
  """

  events: list[Stored | Removed | Cleared]
  num_lost: int


def init_log(size: int, num_pages: int, page_size: int) -> EventLog:
  """Returns a log for `size` events of pages of at most `page_size` tokens."""
  return EventLog(
    kind=jnp.zeros((size,), jnp.int32),
    page=jnp.zeros((size,), jnp.int32),
    group=jnp.zeros((size,), jnp.int32),
    column=jnp.zeros((size,), jnp.int32),
    key=jnp.zeros((size, KEY_WORDS), jnp.uint32),
    parent=jnp.zeros((size, KEY_WORDS), jnp.uint32),
    root=jnp.zeros((size, KEY_WORDS), jnp.uint32),
    tokens=jnp.zeros((size, page_size), jnp.int32),
    count=jnp.int32(0),
    group_of=jnp.zeros((num_pages,), jnp.int32),
  )


def with_groups(log: EventLog, groups: Array) -> EventLog:
  """Replaces the groups of all pages by `groups`, int32[N]."""
  return dataclasses.replace(log, group_of=groups)


def log_stored(
  log: EventLog, valid: Array, pages: Array, group: Array, **fields: Array
) -> EventLog:
  """Logs valid pages that were published, in the given order.

  Args:
    log: the log.
    valid: bool[W], the items to log.
    pages: int32[W], the page of each item; valid pages are distinct.
    group: int32[W], the group of each page.
    **fields: column, key, parent, root and tokens, as in `EventLog`.
  """
  # The group is stored for the REMOVED event of the page, because the pool does
  # not have the groups of its pages.
  place = indexing.where_valid(valid, pages)
  log = dataclasses.replace(
    log, group_of=indexing.put(log.group_of, place, values=group)
  )
  kind = jnp.full_like(pages, STORED)
  return _push(log, valid, kind=kind, page=pages, group=group, **fields)


def log_removed(
  log: EventLog, valid: Array, pages: Array, keys: Array
) -> EventLog:
  """Logs valid pages that left the index, in the given order."""
  group = indexing.take(log.group_of, pages)
  kind = jnp.full_like(pages, REMOVED)
  return _push(log, valid, kind=kind, page=pages, group=group, key=keys)


def move_groups(
  log: EventLog, sources: Array, targets: Array, valid: Array
) -> EventLog:
  """Copies groups from `sources` to valid `targets`, int32[X] each."""
  groups = indexing.take(log.group_of, sources)
  # `log_removed` read `group_of` and wrote the groups to the log. This update
  # depends on the log, so it follows that read, and XLA copies no array.
  place = indexing.where_valid(valid, targets)
  place = loops.read_before(log.group[0], place)
  return with_groups(log, indexing.put(log.group_of, place, values=groups))


def log_cleared(log: EventLog, done: Array) -> EventLog:
  """Logs that all pages left the index, if `done`, bool[]."""
  return _push(log, done[None], kind=jnp.full((1,), CLEARED, jnp.int32))


def empty_log(log: EventLog) -> EventLog:
  """Removes all events from the log."""
  return dataclasses.replace(log, count=jnp.zeros_like(log.count))


def _push(log: EventLog, valid: Array, **fields: Array) -> EventLog:
  # Events that do not fit have places out of range, so `put` drops them.
  rank = jnp.cumsum(valid, dtype=jnp.int32)
  place = indexing.where_valid(valid, log.count + rank - 1)
  written = {
    name: indexing.put(getattr(log, name), place, values=values)
    for name, values in fields.items()
  }
  # The count saturates at NOWHERE, so it cannot overflow.
  count = jnp.minimum(log.count, indexing.NOWHERE - rank[-1]) + rank[-1]
  return dataclasses.replace(log, count=count, **written)


def read_log(log: EventLog, page_sizes: tuple[int, ...]) -> Drained:
  """Reads the events on the host; `page_sizes` has one size for each group."""
  log = jax.device_get(log)
  count, size = int(log.count), len(log.kind)
  return Drained(
    [_event(log, row, page_sizes) for row in range(min(count, size))],
    max(count - size, 0),
  )


def _event(
  log: EventLog, row: int, sizes: tuple[int, ...]
) -> Stored | Removed | Cleared:
  kind = int(log.kind[row])
  if kind == CLEARED:
    return Cleared()
  page, group = int(log.page[row]), int(log.group[row])
  key = key_bytes(log.key[row])
  if kind == REMOVED:
    return Removed(page, group, key)
  parent = key_bytes(log.parent[row]) if log.column[row] > 0 else None
  tokens = tuple(np.asarray(log.tokens[row])[: sizes[group]].tolist())
  return Stored(page, group, key, parent, key_bytes(log.root[row]), tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residency:
  """Histograms of the ages of pages evicted since `init`.

  An age is a number of pages, see `PrefixIndex.clock`. Bin 0 counts ages of 0,
  and bin i counts ages of `2**(i - 1)` to `2**i - 1`. `later - earlier` counts
  the pages evicted between two readings.

  Attributes:
    lifetime: pages by their age since they got a key.  # uint32[33]
    idle: pages by their age since they became free.  # uint32[33]
  """

  lifetime: Array
  idle: Array

  def __sub__(self, earlier: "Residency") -> "Residency":
    """Returns the counts between two readings."""
    return jax.tree.map(lambda end, start: end - start, self, earlier)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PageAges:
  """Timestamps of pages, and the ages counted so far.

  Attributes:
    released: the clock when a page's last reference was removed.  # uint32[N]
    evicted: histograms of the ages of evicted pages.
  """

  released: Array
  evicted: Residency


def init_ages(num_pages: int) -> PageAges:
  """Returns empty histograms, and a release time of 0 for every page."""
  lifetime, idle = (jnp.zeros((NUM_BINS,), jnp.uint32) for _ in range(2))
  return PageAges(
    released=jnp.zeros((num_pages,), jnp.uint32),
    evicted=Residency(lifetime=lifetime, idle=idle),
  )


def stamp_released(
  ages: PageAges, pages: Array, valid: Array, clock: Array
) -> PageAges:
  """Stores the release time of valid pages, int32[W], which are distinct."""
  # `count_evicted` read `released` and wrote to the histogram. This update
  # depends on the histogram, so it follows that read, and XLA does not copy
  # `released`.
  count = (ages.evicted.idle[0] >> 1).astype(jnp.int32)
  place = loops.read_before(count, indexing.where_valid(valid, pages))
  return dataclasses.replace(
    ages, released=indexing.put(ages.released, place, values=clock)
  )


def count_evicted(
  ages: PageAges, pages: Array, valid: Array, stamps: Array, clock: Array
) -> PageAges:
  """Counts the ages of evicted pages.

  Args:
    ages: the ages so far.
    pages: int32[W], the popped pages.
    valid: bool[W], the popped pages that were cached.
    stamps: uint32[W], the clock when each page got its key.
    clock: uint32[], the current clock.
  """
  freed_at = indexing.take(ages.released, pages)
  counts = ages.evicted
  return dataclasses.replace(
    ages,
    evicted=Residency(
      # After `insert` took the stamp, it advanced the clock by 1 for the page.
      lifetime=_count(counts.lifetime, clock - stamps - 1, valid),
      idle=_count(counts.idle, clock - freed_at, valid),
    ),
  )


def _count(counts: Array, age: Array, valid: Array) -> Array:
  # An age of 0 has 32 leading zeros, so the bin is the age's bit length.
  bits = jnp.int32(32) - lax.clz(age).astype(jnp.int32)
  place = indexing.where_valid(valid, bits)
  return indexing.add(counts, place, values=jnp.uint32(1))
