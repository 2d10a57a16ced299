"""The state of a manager, in Python lists and numbers."""

import dataclasses
import hashlib
import os
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.telemetry import NUM_BINS
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.device_mirror import DeviceMirror
from jaxkv._src.host.event_list import EventList
from jaxkv._src.host.groups import make_groups
from jaxkv._src.host.page_pool import HostPool
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import PrefixNode
from jaxkv._src.host.sequences import HeldSequence
from jaxkv._src.host.types import PoppedPages
from jaxkv._src.host.types import PrefixCacheStats


@dataclasses.dataclass(frozen=True)
class Limits:
  """The limits that a manager enforces.

  Attributes:
    config: the sizes of the device state.
    max_model_len: tokens of the longest sequence.
    max_encoder_tokens: tokens of the longest encoder input.
    max_requests: the most requests that hold pages at once.
    keep_free: pages that waiting requests leave free while others run.
    most_pages: the most pages of one sequence at once, by group.
  """

  config: CacheConfig
  max_model_len: int
  max_encoder_tokens: int
  max_requests: int
  keep_free: int
  most_pages: tuple[int, ...]


def continued(before: int, number: int) -> int:
  """Returns the count closest to `before` that is `number` modulo 2**32."""
  # A device counts modulo 2**32, and the host does not. A state that is older
  # than the host's lowers the count.
  return before + (number - before + 2**31) % 2**32 - 2**31


class HostState:
  """The pages of requests, the pool and the prefix index.

  Attributes:
    limits: the limits.
    config: the sizes of the device state.
    undo_log: the changes of the current call.
    groups: the layer groups.
    skipping: the groups that skip pages while a sequence runs.
    pool: the pages.
    held: the requests that hold pages, by name.
    popped: removed requests whose pages are not freed yet, by slot.
    vacant: slots without pages; the last one in the list is used next.
    secret: the secret of digests and masks.
    device_keys: computes keys as the device does; None without prefix caching.
    mirror: the prefix index of the device; missing without prefix caching.
    events: None unless `num_events` is positive.
    statistics: the statistics since the last reading.
    read_ages: `lifetime` and `idle` of `pool.ages` at that reading.
    num_queried, num_hit: tokens, as in `jaxkv.Stats`.
    num_merged, num_failed: pages merged, and rows that failed, on the device.
    step_clock: the pool's clock when the scheduling step began.
  """

  def __init__(self, limits: Limits, key: np.ndarray | None):
    config = limits.config
    self.limits = limits
    self.config = config
    self.undo_log = UndoLog()
    self.groups = make_groups(config, limits.most_pages)
    self.skipping = tuple(group for group in self.groups if group.skips_pages)
    self.pool = HostPool(
      config.num_pages,
      config.num_groups,
      undo_log=self.undo_log,
      caching=config.prefix_caching,
      unhashed_first=config.free_policy == "unhashed_first",
      track_new=config.track_new_pages,
      track_ages=config.track_residency,
    )
    self.held: dict[str, HeldSequence] = {}
    self.popped: dict[int, tuple[PoppedPages, HeldSequence]] = {}
    # Slots are filled from 0 on.
    self.vacant = list(range(config.num_slots))[::-1]
    self.device_keys: DeviceKeys | None = None
    self.secret = b""
    if config.prefix_caching:
      words = np.frombuffer(os.urandom(16), "<u4") if key is None else key
      self.device_keys = DeviceKeys(words, config.num_groups, config.page_size)
      self.secret = self.device_keys.secret.tobytes()
      self.mirror = DeviceMirror(config.num_pages, max(config.page_sizes))
    self.events: EventList | None = None
    if config.event_log:
      self.events = EventList(config.event_log, self.pool, config.page_sizes)
      self.pool.listeners.append(self.events)
    self.statistics = PrefixCacheStats()
    # The pool never resets its counts, so a reading returns the differences.
    self.read_ages = [0] * NUM_BINS, [0] * NUM_BINS
    self.num_queried = self.num_hit = self.num_merged = self.num_failed = 0
    self.step_clock = 0

  def root_of(self, salt: bytes) -> PrefixNode:
    """Returns the node before the first page of a request with a salt."""
    # A key of BLAKE2b has at most 64 bytes.
    digest = hashlib.blake2b(salt, key=self.secret[:64], digest_size=16)
    return PrefixNode(digest.digest(), None, salt)

  def all_held(self) -> list[HeldSequence]:
    """Returns the sequences with pages, those of removed requests included."""
    return [*self.held.values(), *(held for _, held in self.popped.values())]

  def is_unread(self, name: str) -> bool:
    """True if a removed request waits for `free_pages`."""
    return any(popped.request_id == name for popped, _ in self.popped.values())

  def counters(self) -> dict[str, int]:
    """Returns the fields of `jaxkv.Stats`."""
    return {
      "queried_tokens": self.num_queried,
      "hit_tokens": self.num_hit,
      "popped_pages": self.pool.num_popped,
      "evicted_pages": self.pool.num_evicted,
      "published_pages": self.pool.num_published,
      "merged_pages": self.num_merged,
      "failed_rows": self.num_failed,
    }

  def set_counters(self, stats: Any) -> None:
    """Replaces the counters by those of a device."""
    owners = {
      "popped_pages": self.pool,
      "evicted_pages": self.pool,
      "published_pages": self.pool,
    }
    names = {
      "queried_tokens": "num_queried",
      "hit_tokens": "num_hit",
      "popped_pages": "num_popped",
      "evicted_pages": "num_evicted",
      "published_pages": "num_published",
      "merged_pages": "num_merged",
      "failed_rows": "num_failed",
    }
    for field, before in self.counters().items():
      owner, name = owners.get(field, self), names[field]
      self.undo_log.save_attribute(owner, name)
      setattr(owner, name, continued(before, int(getattr(stats, field))))

  def reset_mirror(self) -> None:
    """Replaces the mirror by an empty one, which the next update fills."""
    config = self.config
    self.mirror = DeviceMirror(config.num_pages, max(config.page_sizes))
    self.pool.changed.update(range(config.num_pages))

  def take_statistics(self) -> PrefixCacheStats:
    """Returns the statistics since the last call."""
    statistics, ages = self.statistics, self.pool.ages
    self.undo_log.save_attribute(self, "statistics")
    self.statistics = PrefixCacheStats()
    if ages is None:
      return statistics
    before = self.read_ages
    self.undo_log.save_attribute(self, "read_ages")
    # The pool goes on counting in its lists.
    self.read_ages = ages.lifetime[:], ages.idle[:]
    lifetime, idle = (
      [new - old for new, old in zip(counts, read, strict=True)]
      for counts, read in zip(self.read_ages, before, strict=True)
    )
    return dataclasses.replace(statistics, lifetime=lifetime, idle=idle)

  def add_statistics(self, **changes: Any) -> None:
    """Replaces fields of the statistics."""
    self.undo_log.save_attribute(self, "statistics")
    self.statistics = dataclasses.replace(self.statistics, **changes)
