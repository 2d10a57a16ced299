"""What is cached, as told by events alone, beside what an oracle knows."""

import jaxkv
from jaxkv.telemetry import Cleared
from jaxkv.telemetry import Drained
from jaxkv.telemetry import Removed
from jaxkv.telemetry import Stored
from tests.model_of_the_cache.pool import Pool


class Mirror:
  """Follows the events of one cache.

  Attributes:
    pages: page -> the event that told of it.
    seen: kinds of events.
    keys: the oracle's key of a page -> that of events, published or not.
    roots: the oracle's root of a sequence -> that of events.
  """

  def __init__(self):
    self.pages: dict[int, Stored] = {}
    self.seen: set[type] = set()
    self.keys: dict[tuple, bytes | None] = {}
    self.roots: dict[tuple, bytes] = {}

  def follow(self, drained: Drained) -> list[str]:
    """Takes a reading in; what of it makes no sense."""
    found = [f"{drained.num_lost} events lost"] if drained.num_lost else []
    for event in drained.events:
      self.seen.add(type(event))
      match event:
        case Stored(page):
          if page in self.pages:
            found.append(f"{event}, which was cached")
          self.pages[page] = event
        case Removed(page, group, key):
          known = self.pages.pop(page, None)
          if known is None or (known.group, known.key) != (group, key):
            found.append(f"{event}, but {known} was cached")
        case Cleared():
          self.pages.clear()
    return found

  def differences(self, pool: Pool, config: jaxkv.CacheConfig) -> list[str]:
    """In what this is not what the oracle knows, one line a difference."""
    if self.pages.keys() != pool.keys.keys():
      told, wanted = sorted(self.pages), sorted(pool.keys)
      return [f"cached pages: oracle {wanted}, events {told}"]
    found = [
      f"{event}: the oracle's key is {pool.keys[page]}"
      for page, event in self.pages.items()
      if not self._agree(event, pool.keys[page], config)
    ]
    for names in (self.keys, self.roots):
      if len(set(names.values())) < len(names):
        found.append(f"one name for two: {names}")
    return found

  def _agree(
    self, event: Stored, key: tuple, config: jaxkv.CacheConfig
  ) -> bool:
    """Whether an event tells what the oracle says, and names it as before."""
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
