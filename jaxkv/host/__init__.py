"""A cache manager for schedulers written in Python.

`CacheManager` has the methods of vLLM's `KVCacheManager` and of eSurge's
`CacheManager`, and returns the same page ids, hits and eviction order. It is
plain Python: nothing is compiled, and no device is initialized. `step`
allocates for all running requests in one call. A request is any object with
`request_id`, `token_ids` and `num_computed_tokens`; the manager never writes to
it. `Request` lists the optional attributes, such as salts and adapters, that
keep requests from sharing pages.

`manager.state` is the same cache as a `jaxkv.CacheState`, for jitted loops. The
loop allocates, commits, forks and frees with the verbs of `jaxkv`, and
`manager.take` continues from the state that the loop returns. The manager
computes the page keys of `jaxkv` only for these states, and for events.

With `CacheManager(host_pages=)`, cached pages that are evicted move to host
memory, as with `CacheConfig.host_pages`. In each step, before the model runs,
the engine performs the moves from `take_moves` with `jaxkv.kv.move`. If a hit
has pages in host memory, `allocate_slots` moves them to the device, and each
takes a free page. Read `state` only after the moves are performed.

Every call takes effect completely or not at all, even if Ctrl-C or a signal
handler raises an exception during the call. Then the return value may be lost,
but `get_page_ids` returns the pages. Threads may share a manager, whose calls
run one at a time.

The model reads and writes a request's pages through one `jaxkv.kv.View` per
group. The null page replaces pages outside a window and pads the rows of a
batch. `notebooks/03_a_scheduler_in_python` has an example.

`CacheManager.pages` gives access to single pages, for engines that hold
references to them. It calls `PageListener`s when pages enter or leave the
prefix cache, but not for moves to host memory, nor for `take`.

`jaxkv.host.vllm` and `jaxkv.host.esurge` wrap the manager in the classes of
vLLM and eSurge, for schedulers that must not be changed. Each module lists the
differences from the original classes.

`tests/host/test_conformance.py` compares the manager with a model of vLLM and
eSurge, called the reference below. The differences are intended:

- Several kinds of groups, `policy="classic"`: the manager cuts every full group
  to the length of the hit. The reference cuts only the first, and then computes
  tokens into pages that other requests hold.
- Draft model and several page sizes, classic: the manager aligns hits as in the
  current policy. The reference finds prefixes whose window pages are evicted.
- Chunks that are not a multiple of the page size: the manager checks every page
  that the last chunk of a prefix needs. The reference may skip one.
- Prefixes that need no page, as with a window of 1: the manager finds no hit.
  The reference reports a hit in an empty cache if the only group is chunked.
- A prompt that ends inside a page: the manager caches the page when it is full.
  In full groups of larger pages, the reference also caches the page earlier,
  under another key, which changes the order of free pages.
- External tokens, classic: all groups hold their hits before any allocates. In
  the reference, a group can take a page that a later group has hit.
- A cached state that the state of external tokens replaces: the manager counts
  no free page for it. vLLM 0.33 counts one, and may refuse the request.
- `evict_pages` of a running request's state page: the page stays evicted. vLLM
  0.33 publishes it again.
- `step`: all requests free pages outside windows, then all allocate, then all
  publish. The reference serves one request after the other, as `allocate_slots`
  does.
- `free_pages` after `pop_pages_for_free`: pages are freed in the order of
  `free`. The reference reverses the groups.
- `CrossAttention` with `enable_caching=True`: raises an error. The reference
  disables caching.
- Ages of evicted pages (`track_residency`): the manager has the ages of all
  pages, as the number of pages that got a key since. The reference has those of
  a sample of pages, in seconds.
- `take_new_page_ids`: includes the pages of groups with states. The reference
  has only pages of attention groups.
- Data-parallel engines: one manager for each shard. The reference has one for
  all shards.
- Arguments whose order differs between vLLM and eSurge are keywords.
- `shared_prefix_boundary`: an attribute of the `CachePages` found, or of the
  request. In the reference, it is the third element of a returned tuple.
- Page keys depend on a random secret of each manager (`key`). Those of the
  reference depend on a fixed or random seed. Both depend on adapters, images
  and embeddings.
- Images and embeddings, if the greatest common divisor of all page sizes is
  below 4 tokens: requests share pages only if all their images and embeddings
  are equal, because a smaller page has too few bits to mark them. The reference
  shares the pages before the first difference.
- `new_computed_pages` that do not hold the request's tokens, and computed
  tokens of a request without pages: raise `ValueError`. The reference does not
  check them.
- More tokens than `max_model_len`: raise `ValueError`. The reference truncates.
- A token that is not a 32-bit integer: raises `ValueError` with caching, when
  it is looked up or admitted, or when its page is full.
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
