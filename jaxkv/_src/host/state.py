"""The state of a manager, in Python lists and numbers."""

import dataclasses
import hashlib
import os
from typing import Any

import numpy as np

from jaxkv._src.arrays.arguments import as_secret
from jaxkv._src.cache.prefix import prefix_rules
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.bridge.prefix_index import IndexArrays
from jaxkv._src.host.config import ManagerOptions
from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.identity import salt_of
from jaxkv._src.host.page_pool import HostPool
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import PrefixNode
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.telemetry import EventList
from jaxkv._src.host.telemetry import PrefixCacheStats


@dataclasses.dataclass(slots=True, eq=False)
class HeldSequence:
  """The pages of a request, which occupies a slot.

  Once it is in `HostState.held`, the undo log records each change of a field.

  Attributes:
    request_id: the name of the request.
    slot: the row of the request in `CacheState`.
    tables: a list of page numbers for each group; 0 for the null page.
    skipped: the number of leading null columns of each table, which the hit
      omits or which were freed. A recurrent table can have later null columns.
    request: the newest object that the scheduler passed for the request.
    length: the number of final tokens, see `publish`.
    room: the number of tokens that fit the tables.
    root: the node before the first page; None without prefix caching.
    nodes: a node for every `CacheConfig.page_size` final tokens.
    prompt_length: see `SlotHashes`.
    boundary: see `SlotHashes.shared_prefix_boundary`.
  """

  request_id: str
  slot: int
  tables: list[list[int]]
  skipped: list[int]
  request: Any = None
  length: int = 0
  room: int = 0
  root: PrefixNode | None = None
  nodes: list[PrefixNode] = dataclasses.field(default_factory=list)
  prompt_length: int = 0
  boundary: int = 0


class HostState:
  """The pages of requests, the pool and the prefix index.

  Attributes:
    options: the options of the manager.
    config: the sizes and options of the cache, those of `options`.
    undo_log: the changes of the current call.
    groups: the layer groups.
    skipping: the groups with `skips_pages`.
    skipping_kinds: one group of `skipping` for each kind and page size.
    has_plain_hits: see `prefix_rules.has_plain_hits`.
    pool: the pages.
    held: the requests that hold pages, by name.
    vacant: slots without pages; the last one in the list is used next.
    secret: the secret of digests and masks; empty without prefix caching.
    device_keys: computes keys as the device does; None without prefix caching.
    index_arrays: converts the prefix index; None without prefix caching.
    events: the event log; None if `num_events` is 0.
    statistics: hits and resets since the last `take_statistics`.
    read_counts: the pool's counts, by their names in `PrefixCacheStats`, at the
      last `take_statistics`.
    step_clock: the pool's clock at the last `new_step_starts` or `take`.
  """

  def __init__(self, options: ManagerOptions, key: Any):
    self.options = options
    self.config = config = options.config
    self.undo_log = UndoLog()
    self.groups = tuple(
      LayerGroup(group_id, config, most_pages)
      for group_id, most_pages in enumerate(options.most_pages)
    )
    self.skipping = tuple(group for group in self.groups if group.skips_pages)
    kinds = {(group.kind, group.size): group for group in self.skipping}
    self.skipping_kinds = tuple(kinds.values())
    self.has_plain_hits = prefix_rules.has_plain_hits(config)
    self.pool = HostPool(options, self.undo_log)
    self.held: dict[str, HeldSequence] = {}
    # Slots are filled from 0 on.
    self.vacant = list(range(config.num_slots))[::-1]
    self.device_keys: DeviceKeys | None = None
    self.index_arrays: IndexArrays | None = None
    self.events: EventList | None = None
    self.secret = b""
    # `as_secret` makes a JAX array, so it is called only if there is a key.
    words: Any = np.frombuffer(os.urandom(16), "<u4")
    if key is not None:
      words = np.asarray(as_secret("key", key))
    if config.prefix_caching:
      keys = DeviceKeys(words, config.num_groups, config.page_size)
      self.device_keys = keys
      self.secret = keys.secret.tobytes()
      self.index_arrays = IndexArrays(config, self.pool, keys, self.groups)
      if options.num_events:
        self.events = EventList(
          options.num_events, self.pool, keys, self.groups
        )
        self.pool.listeners.append(self.events)
    self.statistics = PrefixCacheStats()
    self.read_counts = self._counts()
    self.step_clock = 0
    # The construction is never undone.
    self.undo_log.commit()

  def root_of(self, request: RequestFields) -> PrefixNode:
    """Returns the node before the first page of a request."""
    salt = salt_of(request.salt, request.items, self.config.page_size)
    # A key of BLAKE2b has at most 64 bytes.
    digest = hashlib.blake2b(salt, key=self.secret[:64], digest_size=16)
    return PrefixNode(digest.digest(), None, salt)

  def set_request(self, held: HeldSequence, request: Any) -> None:
    """Stores the newest object of a request, whose tokens are read later."""
    if held.request is not request:
      self.undo_log.replace(held, request=request)

  def remove(self, held: HeldSequence) -> None:
    """Removes a request from its slot; its pages keep their references."""
    self.undo_log.save_key(self.held, held.request_id)
    del self.held[held.request_id]
    self.undo_log.save_length(self.vacant)
    self.vacant.append(held.slot)

  def take_statistics(self) -> PrefixCacheStats:
    """Returns the statistics since the last call."""
    # The pool does not reset its counts, so earlier readings are subtracted.
    counts = self._counts()
    new = {
      name: (count - self.read_counts[name]).tolist()
      for name, count in counts.items()
    }
    statistics = dataclasses.replace(self.statistics, **new)
    self.undo_log.replace(
      self, statistics=PrefixCacheStats(), read_counts=counts
    )
    return statistics

  def lower_readings(self) -> None:
    """Lowers `read_counts` to counts that `take` lowered."""
    counts = {
      name: np.minimum(count, self.read_counts[name])
      for name, count in self._counts().items()
    }
    self.undo_log.replace(self, read_counts=counts)

  def _counts(self) -> dict[str, np.ndarray]:
    """Returns the ages of evicted pages and the counts of moves, if any."""
    counts = {}
    pool = self.pool
    if pool.released is not None:
      counts |= {"lifetime": pool.lifetime, "idle": pool.idle}
    if pool.saved is not None:
      counts |= pool.saved.counts
    return {name: np.array(count, np.int64) for name, count in counts.items()}
