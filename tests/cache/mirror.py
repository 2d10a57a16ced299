"""Follows a cache's events, to compare the cached pages with an oracle's."""

import jaxkv
from jaxkv.telemetry import Cleared
from jaxkv.telemetry import Drained
from jaxkv.telemetry import Removed
from jaxkv.telemetry import Stored
from tests.model_of_the_cache.pool import Pool


class Mirror:
  """The cached pages of one cache, according to its events.

  Attributes:
    pages: the last `Stored` event of each cached page.
    seen: the kinds of events so far.
    keys: the events' key of each key of the oracle, published or not.
    roots: the events' root of each root of the oracle.
  """

  def __init__(self):
    self.pages: dict[int, Stored] = {}
    self.seen: set[type] = set()
    self.keys: dict[tuple, bytes | None] = {}
    self.roots: dict[tuple, bytes] = {}

  def follow(self, drained: Drained) -> list[str]:
    """Applies a reading of events; returns inconsistencies."""
    errors = [f"{drained.num_lost} events lost"] if drained.num_lost else []
    for event in drained.events:
      self.seen.add(type(event))
      match event:
        case Stored(page):
          if page in self.pages:
            errors.append(f"{event}, which was cached")
          self.pages[page] = event
        case Removed(page, group, key):
          stored = self.pages.pop(page, None)
          if stored is None or (stored.group, stored.key) != (group, key):
            errors.append(f"{event}, but {stored} was cached")
        case Cleared():
          self.pages.clear()
    return errors

  def differences(self, pool: Pool, config: jaxkv.CacheConfig) -> list[str]:
    """Returns the differences from the oracle, one a line."""
    if self.pages.keys() != pool.keys.keys():
      events, oracle = sorted(self.pages), sorted(pool.keys)
      return [f"cached pages: oracle {oracle}, events {events}"]
    lines = [
      f"{event}: the oracle's key is {pool.keys[page]}"
      for page, event in self.pages.items()
      if not self._agree(event, pool.keys[page], config)
    ]
    for names in (self.keys, self.roots):
      if len(set(names.values())) < len(names):
        lines.append(f"one name for two: {names}")
    return lines

  def _agree(
    self, event: Stored, key: tuple, config: jaxkv.CacheConfig
  ) -> bool:
    """True if an event agrees with the oracle and with the keys so far."""
    root, group, prefix = key
    before = prefix[: -config.page_sizes[group]]
    tokens = prefix[len(before) :]
    parent = None
    if before:
      parent = self.keys.setdefault((root, group, before), event.parent)
    return (event.group, event.tokens, event.key, event.parent, event.root) == (
      group,
      tokens,
      self.keys.setdefault(key, event.key),
      parent,
      self.roots.setdefault(root, event.root),
    )
