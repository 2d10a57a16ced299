"""jaxkv: a functional, JAX-native paged key-value cache."""

from jaxkv import kv
from jaxkv import rollout
from jaxkv.cache.admitting import Admitted
from jaxkv.cache.admitting import Matched
from jaxkv.cache.admitting import admit
from jaxkv.cache.admitting import match
from jaxkv.cache.allocating import Allocated
from jaxkv.cache.allocating import allocate
from jaxkv.cache.codes import Code
from jaxkv.cache.committing import Committed
from jaxkv.cache.committing import commit
from jaxkv.cache.config import CacheConfig
from jaxkv.cache.events import Cleared
from jaxkv.cache.events import Drained
from jaxkv.cache.events import Removed
from jaxkv.cache.events import Stored
from jaxkv.cache.events import drain_events
from jaxkv.cache.forgetting import Reset
from jaxkv.cache.forgetting import clear_error
from jaxkv.cache.forgetting import new_epoch
from jaxkv.cache.forgetting import reset_prefix_cache
from jaxkv.cache.forking import Copies
from jaxkv.cache.forking import Forked
from jaxkv.cache.forking import fork
from jaxkv.cache.hashing import salt
from jaxkv.cache.invariants import CacheError
from jaxkv.cache.invariants import check
from jaxkv.cache.invariants import check_invariants
from jaxkv.cache.kinds import ChunkedLocal
from jaxkv.cache.kinds import CrossAttention
from jaxkv.cache.kinds import FullAttention
from jaxkv.cache.kinds import GroupKind
from jaxkv.cache.kinds import Recurrent
from jaxkv.cache.kinds import SlidingWindow
from jaxkv.cache.looking import cached_pages
from jaxkv.cache.looking import free_pages
from jaxkv.cache.looking import num_common_prefix_pages
from jaxkv.cache.looking import residency
from jaxkv.cache.looking import stats
from jaxkv.cache.looking import usage
from jaxkv.cache.pinning import PageCodes
from jaxkv.cache.pinning import Pinned
from jaxkv.cache.pinning import evict
from jaxkv.cache.pinning import pin
from jaxkv.cache.pinning import touch
from jaxkv.cache.pinning import unpin
from jaxkv.cache.recycling import Recycled
from jaxkv.cache.recycling import recycle
from jaxkv.cache.releasing import Freed
from jaxkv.cache.releasing import Truncated
from jaxkv.cache.releasing import free
from jaxkv.cache.releasing import truncate
from jaxkv.cache.residency import Residency
from jaxkv.cache.state import CacheState
from jaxkv.cache.state import Stats
from jaxkv.cache.state import init
from jaxkv.cache.zeroing import take_new_pages

__all__ = [
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
