"""A cache manager for schedulers written in Python.

`CacheManager` has the methods of vLLM's `KVCacheManager` and of eSurge's
`CacheManager`, and returns the same page ids, hits and eviction order. It is
plain Python: nothing is compiled, and only `key` and `state` need a device.
`step` allocates for all running requests in one call. A request is any object
with `request_id`, `token_ids` and `num_computed_tokens`; the manager never
writes to it. `Request` lists the optional attributes. Some of them, such as
salts and adapters, keep requests from sharing pages.

`manager.state` is a copy of the cache as a `jaxkv.CacheState`, for jitted
loops. The loop allocates, commits, forks and frees with the verbs of `jaxkv`,
and `manager.take` continues from the state that the loop returns. All groups of
a manager share one pool of pages, as in vLLM and eSurge.

Two kinds of layer groups exist here only, and `manager.state` refuses them:
`CrossAttention`, whose pages hold the tokens of an encoder, and
`SpeculativeRecurrent`, which has scratch pages for the states after draft
tokens. Only the manager reports events (`take_events`), pages to be zeroed
(`take_new_page_ids`) and the ages of evicted pages
(`make_prefix_cache_stats`).

With `CacheManager(offload_pages=)`, cached pages that are evicted move to host
memory, as with `CacheConfig.offload_pages`. If a hit has offloaded pages,
`allocate_slots` assigns a free device page to each of them. In each step,
before the model runs, the engine must perform the moves from `take_moves` with
`jaxkv.kv.move`. Read `state` only after all moves are performed.

Every call takes effect completely or not at all, even if Ctrl-C or a signal
handler raises an exception during the call. If an interrupted call took effect,
its return value is lost, but `get_page_ids` returns the request's pages.
Threads may share a manager; their calls run one at a time.

The model reads and writes a request's pages through one `jaxkv.kv.View` per
group. The null page replaces pages outside a window and pads the rows of a
batch. `notebooks/03_a_scheduler_in_python` has an example.

`CacheManager.pages` gives access to single pages, for engines that hold
references to them. `pages.add_listener` adds a listener, which is called when
pages enter or leave the prefix cache. Moves between device and offload memory,
and `CacheManager.take`, do not call it.

`jaxkv.host.vllm` and `jaxkv.host.esurge` wrap the manager in the classes of
vLLM and eSurge, for schedulers that must not be changed. Each module lists the
differences from the original classes.

`tests/host/test_conformance.py` compares the manager with a reference model of
vLLM and eSurge. The following differences are intended:

- Several kinds of groups, `policy="classic"`: the manager cuts the pages of
  every full-attention group to the length of the hit. The reference cuts only
  those of the first, so a request can write to shared pages of the others.
- Draft model and several page sizes, `policy="classic"`: the manager aligns
  hits as with "current". The reference finds prefixes whose window pages were
  evicted.
- Chunks that are not a multiple of the page size: the manager checks every page
  that the last chunk of a prefix needs. The reference may skip one.
- Prefixes for which no group needs a page, as with a window of 1: the manager
  finds no hit. The reference finds one if the only group is chunked, even in an
  empty cache.
- A prompt that ends inside a page: the manager caches the page when it is full.
  In full-attention groups with larger pages than other groups, the reference
  also caches the partial page, which changes the order of free pages.
- External tokens, `policy="classic"`: all groups add references to their hits
  before any group allocates. In the reference, a group can evict a page that
  another group has hit.
- External tokens after a hit that ends with a state: the state of the external
  tokens replaces the hit's state, so the manager does not count a page for the
  latter. vLLM 0.33 counts this page, and may refuse the request.
- `evict_pages` of a running request's state page: the page stays evicted. vLLM
  0.33 publishes it again.
- `step`: all requests free pages outside windows, then all allocate, then all
  publish. The reference serves one request after the other.
- `CrossAttention` with `enable_caching=True`: raises `ValueError`. The
  reference disables caching.
- Ages of evicted pages (`track_residency`): an age is the number of pages that
  got a key since. The reference samples pages, and measures seconds.
- `take_new_page_ids`: includes the pages of groups with states. The reference
  has only pages of attention groups.
- Data-parallel engines: each shard needs a manager. The reference has one for
  all shards.
- Arguments whose order differs between vLLM and eSurge are keyword-only.
- `shared_prefix_boundary`: an attribute of the `CachePages` that a lookup
  returns. In the reference, it is the third element of a tuple.
- Page keys depend on a secret of each manager, which is random unless `key` is
  given. Those of the reference depend on a fixed or random seed.
- Images and embeddings, if the greatest common divisor of all page sizes is
  below 4 tokens: requests share pages only if all their images and embeddings
  are equal, because the tokens of a page have too few bits to mark them. The
  reference shares the pages before the first difference.
- `new_computed_pages` that do not hold the request's tokens, and computed
  tokens of a request without pages: raise `ValueError`. The reference does not
  check them.
- More tokens than `max_model_len`: raise `ValueError`. The reference truncates.
- A token that is not a 32-bit integer: with caching, raises `ValueError` when
  the manager hashes the token.
"""

from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.groups import CrossAttention
from jaxkv._src.host.groups import SpeculativeRecurrent
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.page_references import Pages
from jaxkv._src.host.request import MultimodalItem
from jaxkv._src.host.request import Request
from jaxkv._src.host.telemetry import Cleared
from jaxkv._src.host.telemetry import Drained
from jaxkv._src.host.telemetry import PrefixCacheStats
from jaxkv._src.host.telemetry import Removed
from jaxkv._src.host.telemetry import Stored

__all__ = [
  "CacheManager",
  "CachePages",
  "Cleared",
  "CrossAttention",
  "Drained",
  "MultimodalItem",
  "Pages",
  "PrefixCacheStats",
  "Removed",
  "Request",
  "SpeculativeRecurrent",
  "Stored",
]
