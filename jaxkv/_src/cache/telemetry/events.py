"""drain_events: what entered and left the prefix index, on the host."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.telemetry import event_log
from jaxkv._src.cache.telemetry.event_log import EventLog


class Stored(NamedTuple):
  """A page was published.

  Attributes:
    page: its number.
    group: its group.
    key: 16 bytes; two pages with the same content and past share it.
    parent: the key of the page before it in this group, published or not; None
      for the first of a sequence.
    root: 16 bytes, the same for all sequences of one salt and epoch.
    tokens: what it holds.
  """

  page: int
  group: int
  key: bytes
  parent: bytes | None
  root: bytes
  tokens: tuple[int, ...]


class Removed(NamedTuple):
  """A page was taken out: evicted, dropped, or replaced by an equal one."""

  page: int
  group: int
  key: bytes


class Cleared(NamedTuple):
  """All pages were taken out."""


class Drained(NamedTuple):
  """What happened since the last reading.

  Attributes:
    events: oldest first.
    num_lost: later ones for which the log had no room. A mirror must start
      over then, from `cached_pages`.
  """

  events: list[Stored | Removed | Cleared]
  num_lost: int


def drain_events(state: CacheState) -> tuple[CacheState, Drained]:
  """Reads the event log and empties it. On the host.

  Args:
    state: a cache with `CacheConfig.event_log`.

  Returns:
    The cache, and the events.

  Raises:
    ValueError: the cache has no log.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(num_pages=8, page_size=2,
    ...   num_slots=1, pages_per_slot=4, event_log=16))
    >>> two = jnp.asarray([2], jnp.int32)
    >>> state, _ = jaxkv.allocate(state, two)
    >>> state, _ = jaxkv.commit(state, jnp.asarray([[7, 8]], jnp.int32), two)
    >>> state, drained = jaxkv.drain_events(state)
    >>> drained.events[0].page, drained.events[0].tokens
    (1, (7, 8))
  """
  check_single(state)
  log = state.pool.events
  if log is None:
    raise ValueError(
      "The cache keeps no events; make it with CacheConfig(event_log=...), the "
      "number of events between two readings."
    )
  sizes = state.config.page_sizes
  host = jax.device_get(log)
  count, size = int(host.count), len(host.kind)
  events = [_event(host, row, sizes) for row in range(min(count, size))]
  pool = dataclasses.replace(state.pool, events=event_log.emptied(log))
  state = dataclasses.replace(state, pool=pool)
  return state, Drained(events, max(count - size, 0))


def _event(
  log: EventLog, row: int, sizes: tuple[int, ...]
) -> Stored | Removed | Cleared:
  kind = int(log.kind[row])
  if kind == event_log.CLEARED:
    return Cleared()
  page, group = int(log.page[row]), int(log.group[row])
  key = key_bytes(log.key[row])
  if kind == event_log.REMOVED:
    return Removed(page, group, key)
  parent = key_bytes(log.parent[row]) if log.column[row] > 0 else None
  tokens = tuple(np.asarray(log.tokens[row])[: sizes[group]].tolist())
  return Stored(page, group, key, parent, key_bytes(log.root[row]), tokens)
