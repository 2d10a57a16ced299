"""EasyDeL eSurge's cache manager, over a state on the device.

The classes have the names, methods and meanings of `easydel.inference.esurge`:
its `core.manager` (`CacheManager`, `CachePages`), `core.page_pool` (`PagePool`)
and `core.utils` (the others). Its scheduler runs with the import changed:

    from jaxkv.host.esurge import CacheManager

It then gives the same page ids, hits and order in every step;
`tests/host/esurge/test_scheduler.py` runs the scheduler itself over both.
Underneath is `jaxkv.host.CacheManager`. Pages, queue and hashes are views of
its state: what they tell is read from the device, and what they change is
changed there.

The differences, all on purpose:

**Prefixes**

- a window no longer than a page. Here: hits are those of equal prefixes. There:
  the hashes start over behind the window, so a prompt that nobody had "hits",
  and a real prefix is missed.
- pages of several sizes. Here: each group is hashed by its own pages, whatever
  their sizes. There: by those of the first group, so that pages of others hit
  for half of their tokens.
- images. Here: they tell apart the pages of their placeholders and all behind
  them, also pages of output; without a `placeholder_range`, all pages;
  `pixel_values` without `mm_features` are refused. There: no page of output;
  pixels alone tell nothing apart.
- `cache_salt`, `lora_request`, `prompt_embeds`. Here: tell requests apart.
  There: unknown.
- chunks without full attention beside them. Here: a hit needs a page. There:
  an empty cache "hits" up to the last chunk.
- chunks that are not a multiple of the page size. Here: every page that the
  last chunk needs is checked. There: one of them may be missing.
- a window of one token. Here: needs no page, so other groups decide. There: its
  last page must be cached.
- output that came after a preemption. Here: looked up too. There: only pages
  that had been hashed before; a window then ends in an IndexError.
- groups of three kinds, kinds in any order, chunks with a draft model. Here:
  served. There: refused.

**Requests**

- `dp_shard_hint`, `data_parallel_size`. Here: refused, except None or 0 and
  None or 1; make a manager for each shard. There: one manager for all shards.
  Both: ignored if the pages cannot be divided by the number of shards.
- `max_requests`. Here: so many hold pages at once, 256 unless it is given.
  There: any number.
- more tokens than `max_model_len`. Here: `ValueError`. There: cut off.
- `new_computed_pages`. Here: refused unless they hold the request's tokens.
  There: not checked.
- computed tokens of a request without pages, as its scheduler counts them for
  one that it preempts in the step in which it scheduled it. Both: all pages are
  new, and published as the scheduler says. There, with a window: an IndexError
  if it has moved on.
- `cache_pages` up to fewer tokens than before. Here: changes nothing. There:
  pages are hashed twice, an error.
- `cache_pages` past the known tokens. Here: up to them. There: an error.
- groups of states. Here: one page a request, whatever their `page_size`; beside
  them no page is hashed, since none could be found. There: a request longer
  than their page is an error; pages are hashed, and none is found.

**Hashes**

- of a manager. Here: 128 bits from a secret, made on the device; `extra_keys`
  is None, and `token_ids` of pages with placeholders are masked. Its pool knows
  the hashes in `req_to_page_hashes` and `page_hash`. There: `hash` of tuples,
  as of `hash_request_tokens`.
- `page_hash`. Here: a page has one while it can be found by it; setting it
  publishes the page. There: set apart from `cached_page_hash_to_page`.
- `req_to_page_hashes`, `cached_page_hash_to_page`. Here: views, read-only.
  There: dictionaries; reading the latter at a new key adds it.
- `cache_full_pages`. Here: extra keys also for pages of output; passes over
  null pages. There: neither.
- `NONE_HASH`. Here: one value, from the start; PYTHONHASHSEED may be "random".
  There: `none_hash`, which each new manager draws anew, so that older ones find
  their pages no more; "random" is an error.

**Pages and queue**

- the null page. Here: has no references. There: they are counted, and go below
  zero. `num_pages` is at least 2 here, 1 there.
- references. Here: the pool takes back those that it gave; those of a request
  go with `CacheManager.free`; more than there are is refused; a page that is
  named twice in `free_pages` is queued once. There: not checked; below zero.
- `append` of a page that is held or queued. Here: refused. There: not checked.
- a call that is refused. Here: changes nothing. There: is done in part.
- `incr_ref` of a queued page. Here: it leaves the queue. There: stays.
- `ref_cnt`, `prev_free_page`, `next_free_page` of a pool's page. Here:
  read-only. There: fields.
- pages of `FreeCachePageQueue(...)`. Here: have no pool. There: any.

**Elsewhere**

- `coordinator`. Here: has its attributes, `get_pages`, `remove_skipped_pages`
  and `get_num_common_prefix_pages`. There: also managers of single groups.
- what is asserted there raises `ValueError` or `RuntimeError` here.
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
