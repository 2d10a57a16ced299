"""jaxkv: a functional, JAX-native paged key-value cache."""

from jaxkv import kv
from jaxkv import rollout
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.groups.kinds import ChunkedLocal
from jaxkv._src.cache.groups.kinds import CrossAttention
from jaxkv._src.cache.groups.kinds import FullAttention
from jaxkv._src.cache.groups.kinds import GroupKind
from jaxkv._src.cache.groups.kinds import Recurrent
from jaxkv._src.cache.groups.kinds import SlidingWindow
from jaxkv._src.cache.invariants import CacheError
from jaxkv._src.cache.invariants import check
from jaxkv._src.cache.invariants import check_invariants
from jaxkv._src.cache.prefix.hashing import salt
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Stats
from jaxkv._src.cache.state import init
from jaxkv._src.cache.status import Code
from jaxkv._src.cache.telemetry.events import Cleared
from jaxkv._src.cache.telemetry.events import Drained
from jaxkv._src.cache.telemetry.events import Removed
from jaxkv._src.cache.telemetry.events import Stored
from jaxkv._src.cache.telemetry.events import drain_events
from jaxkv._src.cache.telemetry.new_pages import take_new_pages
from jaxkv._src.cache.telemetry.residency import Residency
from jaxkv._src.cache.verbs.admit import Admitted
from jaxkv._src.cache.verbs.admit import Matched
from jaxkv._src.cache.verbs.admit import admit
from jaxkv._src.cache.verbs.admit import match
from jaxkv._src.cache.verbs.allocate import Allocated
from jaxkv._src.cache.verbs.allocate import allocate
from jaxkv._src.cache.verbs.commit import Committed
from jaxkv._src.cache.verbs.commit import commit
from jaxkv._src.cache.verbs.fork import Copies
from jaxkv._src.cache.verbs.fork import Forked
from jaxkv._src.cache.verbs.fork import fork
from jaxkv._src.cache.verbs.free import Freed
from jaxkv._src.cache.verbs.free import Truncated
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.cache.verbs.free import truncate
from jaxkv._src.cache.verbs.inspect import cached_pages
from jaxkv._src.cache.verbs.inspect import free_pages
from jaxkv._src.cache.verbs.inspect import num_common_prefix_pages
from jaxkv._src.cache.verbs.inspect import residency
from jaxkv._src.cache.verbs.inspect import stats
from jaxkv._src.cache.verbs.inspect import usage
from jaxkv._src.cache.verbs.pin import PageCodes
from jaxkv._src.cache.verbs.pin import Pinned
from jaxkv._src.cache.verbs.pin import evict
from jaxkv._src.cache.verbs.pin import pin
from jaxkv._src.cache.verbs.pin import touch
from jaxkv._src.cache.verbs.pin import unpin
from jaxkv._src.cache.verbs.recycle import Recycled
from jaxkv._src.cache.verbs.recycle import recycle
from jaxkv._src.cache.verbs.reset import Reset
from jaxkv._src.cache.verbs.reset import clear_error
from jaxkv._src.cache.verbs.reset import new_epoch
from jaxkv._src.cache.verbs.reset import reset_prefix_cache
from jaxkv._src.cpu_options import CPU_COMPILER_OPTIONS

__all__ = [
  "CPU_COMPILER_OPTIONS",
  "Admitted",
  "Allocated",
  "CacheConfig",
  "CacheError",
  "CacheState",
  "ChunkedLocal",
  "Cleared",
  "Code",
  "Committed",
  "Copies",
  "CrossAttention",
  "Drained",
  "Forked",
  "Freed",
  "FullAttention",
  "GroupKind",
  "Matched",
  "PageCodes",
  "Pinned",
  "Recurrent",
  "Recycled",
  "Removed",
  "Reset",
  "Residency",
  "SlidingWindow",
  "Stats",
  "Stored",
  "Truncated",
  "admit",
  "allocate",
  "cached_pages",
  "check",
  "check_invariants",
  "clear_error",
  "commit",
  "drain_events",
  "evict",
  "fork",
  "free",
  "free_pages",
  "init",
  "kv",
  "match",
  "new_epoch",
  "num_common_prefix_pages",
  "pin",
  "recycle",
  "reset_prefix_cache",
  "residency",
  "rollout",
  "salt",
  "stats",
  "take_new_pages",
  "touch",
  "truncate",
  "unpin",
  "usage",
]
