"""A drop-in replacement for the cache manager of EasyDeL eSurge.

The classes have the names, methods and meanings of `easydel.inference.esurge`:
`core.manager` (`CacheManager`, `CachePages`), `core.page_pool` (`PagePool`) and
`core.utils` (the others). eSurge's scheduler runs with the import changed:

    from jaxkv.host.esurge import CacheManager

The scheduler gets the same page ids, hits and order in every step.
`tests/host/esurge/test_scheduler.py` runs it over both managers.
`jaxkv.host.CacheManager` does the work. Pages, queue and hashes are views of
that manager's state. Every call takes effect completely or not at all, even if
ctrl-C or a signal handler raises during it.

The differences from eSurge are intended.

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
- Chunks without full attention: a hit needs a page. In eSurge an empty cache
  hits up to the last chunk.
- Chunks that are not a multiple of the page size: every page that the last
  chunk needs is checked. In eSurge one may be missing.
- A window of one token: it needs no page, so other groups decide. In eSurge its
  last page must be cached.
- Output after a preemption is looked up. eSurge looks up only pages that had
  hashes before; with a window it raises IndexError.
- Groups of three kinds, kinds in any order, and chunks with a draft model are
  accepted. eSurge refuses them.

**Requests**

- `dp_shard_hint` must be None or 0, `data_parallel_size` None or 1: use one
  manager for each shard. eSurge has one for all shards. Both ignore the
  arguments if the number of shards does not divide the pages.
- `max_requests` (256 by default) limits the requests that hold pages.
- More tokens than `max_model_len`: `ValueError`. eSurge cuts them off.
- `new_computed_pages` that do not hold the request's tokens: `ValueError`.
  eSurge does not check.
- A request without pages may count computed tokens. eSurge's scheduler does
  so if it preempts a request in the step that scheduled it. Here and in eSurge
  all its pages are allocated anew. With a window, eSurge can raise IndexError.
- `cache_pages` with fewer tokens than before changes nothing. eSurge hashes
  pages twice and fails.
- `cache_pages` beyond the request's tokens stops at their end. eSurge fails.
- Groups of states: one page a request, whatever their `page_size`, and no page
  of the model is hashed, because no hit is possible. In eSurge a request longer
  than their page fails, and pages get hashes that are never found.

**Hashes**

- A manager's hashes are the page keys of its first group: they have 128 bits
  and depend on a secret. `extra_keys` is None, and `token_ids` are masked in
  pages with placeholders. Its pool accepts the hashes in `req_to_page_hashes`
  and `page_hash`. eSurge calls `hash` on tuples, as `hash_request_tokens` does.
- `page_hash`: a page has one while a lookup can find it, and setting it
  publishes the page. eSurge stores it apart from `cached_page_hash_to_page`.
- `req_to_page_hashes` and `cached_page_hash_to_page` are read-only views, whose
  hashes are computed when they are read. In eSurge they are dictionaries, and
  reading the latter adds missing keys.
- `cache_full_pages` uses extra keys also for pages of output, and skips null
  pages. eSurge does neither.
- `NONE_HASH` is fixed at import; PYTHONHASHSEED may be "random". In eSurge each
  new manager draws another `none_hash`, so that older managers lose their
  pages, and "random" fails.

**Pages and queue**

- The null page has no references. eSurge counts them, below zero too.
  `num_pages` is at least 2 here, 1 in eSurge.
- `free_pages` accepts only references that the pool gave (`CacheManager.free`
  returns those of a request), and queues a page that is named twice once.
  eSurge does not check, and counts below zero.
- `append` of a page that is held or queued: refused. eSurge does not check.
- A refused call changes nothing. In eSurge part of it is done.
- `incr_ref` of a queued page takes it out of the queue. In eSurge it stays.
- `ref_cnt`, `prev_free_page` and `next_free_page` of a pool's page are
  read-only. In eSurge they are fields.
- `FreeCachePageQueue(...)` takes only pages without a pool.

**Other**

- `coordinator` has eSurge's attributes, `get_pages`, `remove_skipped_pages` and
  `get_num_common_prefix_pages`, but no managers of single groups.
- eSurge's assertions are `ValueError` or `RuntimeError` here.
"""

from jaxkv._src.host.esurge.hashes import NONE_HASH
from jaxkv._src.host.esurge.hashes import PageHash
from jaxkv._src.host.esurge.hashes import PageHashWithGroupId
from jaxkv._src.host.esurge.hashes import hash_page_tokens
from jaxkv._src.host.esurge.hashes import hash_request_tokens
from jaxkv._src.host.esurge.hashes import init_none_hash
from jaxkv._src.host.esurge.manager import EsurgeCacheManager as CacheManager
from jaxkv._src.host.esurge.pages import CachePage
from jaxkv._src.host.esurge.pages import EsurgeCachePages as CachePages
from jaxkv._src.host.esurge.pool import PagePool
from jaxkv._src.host.esurge.queue import FreeCachePageQueue

__all__ = [
  "NONE_HASH",
  "CacheManager",
  "CachePage",
  "CachePages",
  "FreeCachePageQueue",
  "PageHash",
  "PageHashWithGroupId",
  "PagePool",
  "hash_page_tokens",
  "hash_request_tokens",
  "init_none_hash",
]
