"""A drop-in replacement for the cache manager of EasyDeL eSurge.

`CacheManager` has the methods that eSurge's schedulers call on the manager of
`easydel.inference.esurge.core.manager`, with the same meanings. They run with
the import changed:

    from jaxkv.host.esurge import CacheManager

A scheduler gets the same page ids, hits and order in every step.
`tests/host/esurge/test_scheduler.py` runs it over both managers.
`CacheManager.host`, a `jaxkv.host.CacheManager`, does the work. Every call
takes effect completely or not at all, even if ctrl-C or a signal handler raises
during it.

The differences from eSurge are intended. Those of `jaxkv.host` from its
reference apply here too.

**Prefixes**

- Windows no longer than a page: only equal prefixes hit. In eSurge the hashes
  start over behind the window, so unseen prompts hit and real prefixes miss.
- Several page sizes: each group is hashed by its own pages. eSurge hashes all
  by the first group's, so that pages of the others hit with half their tokens.
- Images separate the pages of their placeholders and all later pages, also of
  output; without a `placeholder_range`, all pages. `pixel_values` without
  `mm_features` are refused. In eSurge images do not separate pages of output,
  and pixels alone separate nothing.
- `cache_salt`, `lora_request` and `prompt_embeds` separate requests. eSurge
  ignores them.
- A window of one token needs no page, so other groups decide. In eSurge its
  last page must be cached.
- Output after a preemption is looked up. eSurge looks up only pages that had
  hashes before; with a window it raises IndexError.
- Page keys depend on a secret, and PYTHONHASHSEED may be "random", with which
  eSurge fails. In eSurge a new manager draws another `none_hash`, so that older
  managers lose their pages.
- Groups of three kinds, kinds in any order, and chunks with a draft model are
  accepted. eSurge refuses them.

**Requests**

- `dp_shard_hint` must be None or 0, `data_parallel_size` None or 1: use one
  manager for each shard. eSurge has one for all shards. Both ignore the
  arguments if the number of shards does not divide the pages.
- `max_requests` (256 by default) limits the requests that hold pages.
- A request without pages may count computed tokens. eSurge's scheduler does
  so if it preempts a request in the step that scheduled it. Here and in eSurge
  all its pages are allocated anew. With a window, eSurge can raise IndexError.
- `cache_pages` with fewer tokens than before changes nothing. eSurge hashes
  pages twice and fails.
- `cache_pages` beyond the request's tokens stops at their end. eSurge fails.
- Groups of states: one page a request, whatever their `page_size`, and no page
  of the model is cached, because no hit is possible. In eSurge a request longer
  than their page fails, and pages get hashes that are never found.

**Pages**

- Pages are ids, in `CachePages` and `PagePool`. In eSurge they are objects with
  a count, a hash and neighbors in the free queue. `CacheManager.host` reads and
  changes these: `pages.ref_counts`, `pages.keys`, `evict_pages`, `free_queue`.
- `PagePool` is always a part of a manager, without the methods that look up and
  cache pages. `cached_page_hash_to_page` has a length and nothing else.
- The null page has no references. eSurge counts them, below zero too.
  `num_pages` is at least 2 here, 1 in eSurge.
- `free_pages` accepts only references that the pool gave (`CacheManager.free`
  returns those of a request), and queues a page that is named twice once.
  eSurge does not check, and counts below zero.
- `coordinator` and `req_to_page_hashes` are absent.
- eSurge's assertions are `ValueError` or `RuntimeError` here.
"""

from jaxkv._src.host.esurge.manager import EsurgeCacheManager as CacheManager
from jaxkv._src.host.esurge.pool import PagePool
from jaxkv._src.host.types import CachePages

__all__ = ["CacheManager", "CachePages", "PagePool"]
