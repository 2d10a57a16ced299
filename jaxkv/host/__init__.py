"""A cache manager for schedulers written in Python.

`CacheManager` has the methods of vLLM's `KVCacheManager` and of eSurge's
`CacheManager`, and returns the same page ids, hits and eviction order. It is
plain Python: nothing is compiled, and no device is initialized. `step`
allocates for all running requests in one call. A request is any object with
`request_id`, `token_ids` and `num_computed_tokens`; the manager never writes to
it. `Request` lists the optional attributes, such as salts and adapters, that
keep requests from sharing pages.

`manager.state` is the same cache as a `jaxkv.CacheState`, a value for jitted
loops. The loop allocates, commits, forks and frees with the verbs of `jaxkv`.
Then `manager.take` continues from the state that it returns. The manager
computes the page keys of the device only for this, and for events.

With `CacheManager(host_pages=)`, cached pages that are evicted move to host
memory, as with `CacheConfig.host_pages`. In each step, before the model runs,
the engine makes the moves that `take_moves` returns with `jaxkv.kv.move`. A hit
can have pages in host memory; `allocate_slots` moves them to the device, and
each costs a free page. Read `state` after the moves are made.

Every call takes effect completely or not at all, even if ctrl-C or a signal
handler raises during it: only the return value may be lost, and `get_page_ids`
returns the pages. Threads may share a manager; its calls run one at a time.

The model reads and writes a request's pages through one `jaxkv.kv.View` per
group. The null page replaces pages behind a window and pads the rows of a
batch. `notebooks/03_a_scheduler_in_python` has an example.

`CacheManager.pages` gives access to single pages, for engines that hold
references to them, and calls `PageListener`s when pages enter or leave the
prefix cache. They do not hear of moves to host memory, nor of `take`.

`jaxkv.host.vllm` and `jaxkv.host.esurge` wrap the manager in the classes of
vLLM and eSurge, for schedulers that must not be changed. Each lists its
differences from the original.

`tests/host/test_conformance.py` compares the manager with a model of vLLM and
eSurge, called the reference below. The differences are intended:

- Several kinds of groups, `policy="classic"`: every full group is cut to the
  hit. The reference cuts only the first, so it computes tokens into pages that
  other requests hold.
- Draft model and several page sizes, classic: hits are aligned as in the
  current policy. The reference finds prefixes whose window pages are gone.
- Chunks that are not a multiple of the page size: every page that the last
  chunk of a prefix needs is checked. The reference may skip one.
- Prefixes that need no page, as with a window of 1: no hit. The reference
  reports a hit in an empty cache for a chunked group alone.
- A prompt that ends inside a page: the page is cached when it is full. The
  reference also caches it earlier under another key, in full groups of larger
  pages, which changes the order of free pages.
- External tokens, classic: all groups hold their hits before any allocates. The
  reference goes group by group, so one can take a page that a later group
  found.
- A cached state that the state of external tokens replaces: needs no free page.
  vLLM 0.33 counts one, and may refuse the request.
- `evict_pages` of a running request's state page: the page stays evicted. vLLM
  0.33 publishes it again.
- `step`: all requests free pages behind windows, then all allocate, then all
  publish. The reference serves one request after the other, as `allocate_slots`
  does.
- `free_pages` after `pop_pages_for_free`: the order of `free`. The reference
  reverses the groups.
- `CrossAttention` with `enable_caching=True`: refused. The reference disables
  caching.
- Ages of evicted pages (`track_residency`): of all pages, counted in pages that
  got a key since. The reference samples pages and measures seconds.
- `take_new_page_ids`: includes the pages of groups with states. The reference
  has only those of attention groups.
- Data-parallel engines: one manager for each shard. The reference has one for
  all shards.
- Arguments whose order differs between the systems are keywords.
- `shared_prefix_boundary`: an attribute of the `CachePages` found, or of the
  request. The reference returns it third in a tuple.
- Page keys depend on a random secret of each manager (`key`), in place of a
  fixed or random seed. Both cover adapters, images and embeddings.
- Images and embeddings in pages of fewer than 4 tokens (the greatest common
  divisor of all page sizes): requests share pages only if all of them are
  equal, since such a page has too few bits to mark them. The reference shares
  the pages before the first difference.
- `new_computed_pages` that do not hold the request's tokens, and computed
  tokens of a request without pages: `ValueError`. The reference does not check.
- More tokens than `max_model_len`: `ValueError`. The reference cuts them off.
- A token that is not a 32-bit integer: `ValueError` with caching, when it is
  looked up or admitted, or when its page is full.
"""

from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.pages import Pages
from jaxkv._src.host.request import MultimodalItem
from jaxkv._src.host.request import Request
from jaxkv._src.host.types import CachePages
from jaxkv._src.host.types import PoppedPages
from jaxkv._src.host.types import PrefixCacheStats

__all__ = [
  "CacheManager",
  "CachePages",
  "MultimodalItem",
  "PageListener",
  "Pages",
  "PoppedPages",
  "PrefixCacheStats",
  "Request",
]
