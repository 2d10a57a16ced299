"""A drop-in replacement for the cache manager of EasyDeL eSurge.

`CacheManager` has the methods that eSurge's schedulers call on the manager of
`easydel.inference.esurge.core.manager`. The schedulers only need another
import:

    from jaxkv.host.esurge import CacheManager

In every step, a scheduler gets the same page ids, hits and eviction order.
`tests/host/esurge/test_scheduler.py` runs a scheduler with both managers. All
calls are delegated to `CacheManager.host`, a `jaxkv.host.CacheManager`.

The following differences from eSurge are intended. The list in `jaxkv.host`
applies too.

**Prefixes**

- Windows of at most one page: a hit needs an equal prefix. In eSurge, hashes
  do not cover the tokens before the window, so different prompts can hit and
  equal prefixes can miss.
- Several page sizes: each group hashes its own pages. eSurge uses the
  hashes of the first group's pages for all groups, so that a larger page can
  hit if only the first of its tokens are equal.
- Images: requests with different images do not share pages from the first
  placeholder on, or any page if there is no `placeholder_range`. In eSurge, a
  later turn misses pages of output, whose hashes do not cover images.
- `pixel_values` without `mm_features`: raise `ValueError`. eSurge ignores them.
- `cache_salt`, `lora_request` and `prompt_embeds`: requests that differ in them
  do not share pages. eSurge ignores them.
- A window of one token: the group needs no page for a hit. In eSurge, its last
  page must be cached.
- A preempted request: its output is looked up too. eSurge looks up only pages
  that had hashes before, and raises `IndexError` with a window.
- Page keys depend on a secret of the manager. In eSurge, a new manager replaces
  the global `none_hash`, so that older managers no longer hit their pages.
  eSurge also fails with `PYTHONHASHSEED=random`.
- Groups of three kinds, kinds in any order, and chunks with a draft model are
  accepted. eSurge refuses them.

**Requests**

- `dp_shard_hint` must be None or 0, and `data_parallel_size` None or 1: each
  shard needs a manager. eSurge has one for all shards. Both managers ignore the
  arguments if the number of shards does not divide the number of pages.
- `max_requests` (256 by default) limits the requests that hold pages.
- A request without pages whose `num_computed_tokens` is above 0, after a
  preemption in the step that scheduled it: all its pages are allocated again,
  as in eSurge. With a window, eSurge can raise `IndexError`.
- `cache_pages` with fewer tokens than before: does nothing. eSurge fails.
- `cache_pages` with more tokens than the request has: stops at the last token.
  eSurge fails.
- Groups with states: a request has one page for its state, whatever the
  `page_size`. No group caches pages, because no hit is possible. In eSurge,
  requests longer than a page of states fail, and cached pages are never hit.

**Pages**

- `CachePages` and `PagePool` have page ids. eSurge has objects, with a
  reference count, a hash and neighbors in the free queue. `CacheManager.host`
  has methods for these: `pages.ref_counts`, `pages.keys`, `free_queue`.
- `PagePool` only exists as a part of a manager, and has no methods that look up
  or cache pages. `cached_page_hash_to_page` has only a length.
- The null page has no references. eSurge counts them, even below zero.
- `num_pages` must be at least 2. In eSurge, 1 is enough.
- `free_pages` removes only references that the pool added, else it raises
  `ValueError`. eSurge does not check this.
- `coordinator` and `req_to_page_hashes` are missing.
- `ValueError` or `RuntimeError` replaces the assertions of eSurge.
"""

from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.esurge.manager import EsurgeCacheManager as CacheManager
from jaxkv._src.host.esurge.pool import PagePool

__all__ = ["CacheManager", "CachePages", "PagePool"]
