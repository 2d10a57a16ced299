"""A cache manager for schedulers in Python, over a state on the device.

`CacheManager` has the methods of vLLM's `KVCacheManager` and of eSurge's
`CacheManager`. It gives the same page ids, hits and eviction order. `step`
makes room for one token of every running request in one call. Any object with
`request_id`, `token_ids` and `num_computed_tokens` is a request; none is
written to. What tells requests apart in the reference systems does so here, see
`Request`.

A call happened or it did not, also if ctrl-C or a signal handler's exception
interrupts it: only its answer may be lost, and `get_page_ids` tells. (While jax
compiles, an interrupt may leave jax's own caches broken: warm up first.)
Threads may share a manager; one call runs at a time.

The model reads and writes a request's pages through a `jaxkv.kv.View` for each
group. The null page replaces pages behind a window, and pads the rows of a
batch to one width. `notebooks/03_a_scheduler_in_python` has an example.

`jaxkv.host.vllm` and `jaxkv.host.esurge` have the classes of vLLM and eSurge
over this manager, for schedulers that are not to be changed. Each lists where
it differs from its original.

`tests/host/test_conformance.py` runs the manager beside a model of the
reference systems. It differs from them on purpose in these points:

- hybrid, `policy="classic"`. Here: all full groups are cut to the hit. There:
  only the first kind is cut, so tokens are computed into pages that others
  hold.
- classic, draft model, pages of several sizes. Here: aligned as in the current
  policy. There: finds prefixes whose window pages are gone.
- external tokens, classic. Here: all groups hold their hits before any takes a
  page. There: group by group: one group can take a page that a later group has
  found.
- a cached state behind which external tokens end, so that theirs replaces it.
  Here: needs no free page. There: counts as required (vLLM 0.33), so a request
  may be refused that is admitted here.
- `evict_pages` of the state page of a running request. Here: not cached again.
  There: vLLM 0.33 publishes it again.
- chunks that are not a multiple of the page size. Here: checks every page that
  the last chunk of a prefix needs. There: a shorter prefix may need a page that
  was not checked.
- a prefix that needs no page, as with a window of 1. Here: no hit. There: a
  chunked group alone "hits" in an empty cache.
- a prompt that ends inside a page. Here: the last page is cached when it is
  full. There: also cached under its own key, in full groups of larger
  pages.
- `step`. Here: all requests give back pages behind their windows, then all take
  pages, then all publish. There: one request after the other, as
  `allocate_slots` here.
- `free_pages` after `pop_pages_for_free`. Here: the order of `free`. There:
  groups in reverse order.
- `CrossAttention`. Here: refused with `enable_caching=True`. There: caching is
  switched off.
- ages of evicted pages. Here: for all pages (with `track_residency`), counted
  in pages published meanwhile. There: for a sample, in seconds.
- `take_new_page_ids`. Here: includes pages of groups with states. There:
  attention groups only.
- shards of data-parallel engines. Here: one manager for each shard. There: one
  manager for all shards.
- arguments. Here: those that come in another order there are keywords. There:
  by position too.
- `shared_prefix_boundary`. Here: an attribute of the `CachePages` found, and of
  the request if it has one. There: the third of a tuple, or of the request.
- page keys. Here: a random secret of each manager (`key`). There: a fixed or a
  random seed; adapters, images and embeddings are part of the keys in both.
- images and embeddings in pages of fewer than 4 tokens (the greatest common
  divisor of all page sizes). Here: requests share pages only if these are all
  equal, since a page's tokens have too few bits to tell them apart. There: the
  pages before the first difference are shared.
- `new_computed_pages`. Here: refused unless they hold the request's tokens.
  There: not checked.
- more tokens than `max_model_len`. Here: `ValueError`. There: cut off.
- computed tokens of a request without pages. Here: `ValueError`. There: not
  checked.
"""

from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.request import MultimodalItem
from jaxkv._src.host.request import Request
from jaxkv._src.host.types import CachePages
from jaxkv._src.host.types import PoppedPages
from jaxkv._src.host.types import PrefixCacheStats

__all__ = [
  "CacheManager",
  "CachePages",
  "MultimodalItem",
  "PoppedPages",
  "PrefixCacheStats",
  "Request",
]
