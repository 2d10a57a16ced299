"""jaxkv: a functional, JAX-native paged key-value cache."""

from jaxkv.cache.admitting import Admitted as Admitted
from jaxkv.cache.admitting import Matched as Matched
from jaxkv.cache.admitting import admit as admit
from jaxkv.cache.admitting import match as match
from jaxkv.cache.allocating import Allocated as Allocated
from jaxkv.cache.allocating import allocate as allocate
from jaxkv.cache.codes import Code as Code
from jaxkv.cache.committing import Committed as Committed
from jaxkv.cache.committing import commit as commit
from jaxkv.cache.config import CacheConfig as CacheConfig
from jaxkv.cache.forgetting import Reset as Reset
from jaxkv.cache.forgetting import new_epoch as new_epoch
from jaxkv.cache.forgetting import reset_prefix_cache as reset_prefix_cache
from jaxkv.cache.forking import Copies as Copies
from jaxkv.cache.forking import Forked as Forked
from jaxkv.cache.forking import fork as fork
from jaxkv.cache.hashing import salt as salt
from jaxkv.cache.invariants import CacheError as CacheError
from jaxkv.cache.invariants import check as check
from jaxkv.cache.invariants import check_invariants as check_invariants
from jaxkv.cache.looking import cached_pages as cached_pages
from jaxkv.cache.looking import free_pages as free_pages
from jaxkv.cache.looking import (
  num_common_prefix_pages as num_common_prefix_pages,
)
from jaxkv.cache.looking import stats as stats
from jaxkv.cache.looking import usage as usage
from jaxkv.cache.pinning import PageCodes as PageCodes
from jaxkv.cache.pinning import Pinned as Pinned
from jaxkv.cache.pinning import evict as evict
from jaxkv.cache.pinning import pin as pin
from jaxkv.cache.pinning import touch as touch
from jaxkv.cache.pinning import unpin as unpin
from jaxkv.cache.releasing import Freed as Freed
from jaxkv.cache.releasing import Truncated as Truncated
from jaxkv.cache.releasing import free as free
from jaxkv.cache.releasing import truncate as truncate
from jaxkv.cache.state import CacheState as CacheState
from jaxkv.cache.state import Stats as Stats
from jaxkv.cache.state import init as init
