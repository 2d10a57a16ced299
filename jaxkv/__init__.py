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
from jaxkv.cache.looking import cached_pages
from jaxkv.cache.looking import free_pages
from jaxkv.cache.looking import num_common_prefix_pages
from jaxkv.cache.looking import stats
from jaxkv.cache.looking import usage
from jaxkv.cache.pinning import PageCodes
from jaxkv.cache.pinning import Pinned
from jaxkv.cache.pinning import evict
from jaxkv.cache.pinning import pin
from jaxkv.cache.pinning import touch
from jaxkv.cache.pinning import unpin
from jaxkv.cache.releasing import Freed
from jaxkv.cache.releasing import Truncated
from jaxkv.cache.releasing import free
from jaxkv.cache.releasing import truncate
from jaxkv.cache.state import CacheState
from jaxkv.cache.state import Stats
from jaxkv.cache.state import init

__all__ = [
  "Admitted",
  "Allocated",
  "CacheConfig",
  "CacheError",
  "CacheState",
  "Code",
  "Committed",
  "Copies",
  "Forked",
  "Freed",
  "Matched",
  "PageCodes",
  "Pinned",
  "Reset",
  "Stats",
  "Truncated",
  "admit",
  "allocate",
  "cached_pages",
  "check",
  "check_invariants",
  "clear_error",
  "commit",
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
  "reset_prefix_cache",
  "rollout",
  "salt",
  "stats",
  "touch",
  "truncate",
  "unpin",
  "usage",
]
