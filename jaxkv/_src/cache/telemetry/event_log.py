"""What entered and left the prefix index, for whoever mirrors it elsewhere.

A log of fixed size on the device. Where it is full, further events are counted
and lost; the first ones stay.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.prefix.hashing import KEY_WORDS

STORED, REMOVED, CLEARED = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EventLog:
  """E events since the last reading, oldest first.

  Attributes:
    kind: STORED, REMOVED or CLEARED.  # int32[E]
    page: its number.  # int32[E]
    group: its group.  # int32[E]
    column: its place in the sequence; of stored pages.  # int32[E]
    key: its key.  # uint32[E, 4]
    parent: the key of the page before it; of stored pages.  # uint32[E, 4]
    root: the key before the sequence's first page.  # uint32[E, 4]
    tokens: what it holds; of stored pages.  # int32[E, S]
    count: events since the last reading, lost ones included.  # int32[]
    group_of: the group in which each page was stored.  # int32[N]
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


def init(config: CacheConfig) -> EventLog:
  """A log of nothing."""
  size = config.event_log
  return EventLog(
    kind=jnp.zeros((size,), jnp.int32),
    page=jnp.zeros((size,), jnp.int32),
    group=jnp.zeros((size,), jnp.int32),
    column=jnp.zeros((size,), jnp.int32),
    key=jnp.zeros((size, KEY_WORDS), jnp.uint32),
    parent=jnp.zeros((size, KEY_WORDS), jnp.uint32),
    root=jnp.zeros((size, KEY_WORDS), jnp.uint32),
    tokens=jnp.zeros((size, max(config.page_sizes)), jnp.int32),
    count=jnp.int32(0),
    group_of=jnp.zeros((config.num_pages,), jnp.int32),
  )


def stored(
  log: EventLog, valid: Array, pages: Array, group: Array, **fields: Array
) -> EventLog:
  """Notes valid pages that were published, in the order given.

  Args:
    log: the log.
    valid: bool[W].
    pages: int32[W], the valid ones all different.
    group: int32[W].
    **fields: column, key, parent, root and tokens, as in `EventLog`.
  """
  place = masked.where_valid(valid, pages)
  log = dataclasses.replace(
    log, group_of=masked.put(log.group_of, place, values=group)
  )
  kind = jnp.full_like(pages, STORED)
  return _pushed(log, valid, kind=kind, page=pages, group=group, **fields)


def removed(log: EventLog, valid: Array, pages: Array, keys: Array) -> EventLog:
  """Notes valid pages that were taken out, in the order given."""
  group = masked.take(log.group_of, pages)
  kind = jnp.full_like(pages, REMOVED)
  return _pushed(log, valid, kind=kind, page=pages, group=group, key=keys)


def cleared(log: EventLog, done: Array) -> EventLog:
  """Notes that all pages were taken out, if that was done."""
  return _pushed(log, done[None], kind=jnp.full((1,), CLEARED, jnp.int32))


def emptied(log: EventLog) -> EventLog:
  """The log after a reading."""
  return dataclasses.replace(log, count=jnp.zeros_like(log.count))


def _pushed(log: EventLog, valid: Array, **fields: Array) -> EventLog:
  rank = jnp.cumsum(valid, dtype=jnp.int32)
  place = masked.where_valid(valid, log.count + rank - 1)
  written = {
    name: masked.put(getattr(log, name), place, values=values)
    for name, values in fields.items()
  }
  # Counting stops far beyond any log, so that it cannot wrap.
  count = jnp.minimum(log.count, masked.NOWHERE - rank[-1]) + rank[-1]
  return dataclasses.replace(log, count=count, **written)
