"""A drop-in for the `KVCacheManager` of vLLM v1 (0.33).

vLLM's scheduler runs over it unchanged:

```python
import vllm.v1.core.sched.scheduler as scheduler
from jaxkv.host.vllm import KVCacheManager

scheduler.KVCacheManager = KVCacheManager
```

The block ids, hits, free order and events are vLLM's; `tests/host/vllm` runs
vLLM's scheduler over both. vLLM itself is not imported: its configs, specs and
requests are read by attribute, and a spec is known by the name of its class.
A `KVCacheBlock` is a pool and a number and reads the newest state when asked.

`jaxkv.host` is the manager underneath, with a `step` for all running requests
in one call. Here every call is for one request, as in vLLM, and takes longer
than in Python: this module is for schedulers that are not to be changed.

It differs from vLLM on purpose in these points:

Refused, with a `ValueError` that names the option:

- `num_hash_lookahead_tokens` (set `disable_lookahead_block_hashes` where a
  draft model is used), `num_prefill_lookahead` of 2 and more, `dcp_world_size`,
  `pcp_world_size`, `metrics_collector`.
- `is_eagle_group` of some groups only, with `use_eagle=True`.
- A `hash_block_size` below the block size of a `MambaSpec`, with which hits end
  inside a block. So `take_kv_cache_block_copies` and
  `finalize_partial_tail_offloads` have nothing to give, and
  `enable_mamba_shared_prefix_checkpoint` has no effect.
- A `scheduler_block_size` that is not the least common multiple of all block
  sizes, with caching.
- `RSWASpec`, `CircularBufferSpec`, `EncoderOnlyAttentionSpec`, HiSparse; a
  window with `extra_retained_tokens` or `bounded_replay`; a `MambaSpec` with
  `num_prefill_checkpoint_blocks` or, in mode "none", with blocks shorter than
  `max_model_len`; a model without a group.
- `CrossAttentionSpec` with `enable_caching=True`. There: `cache_blocks` raises.

What is cached and found:

- a prompt that ends inside a block of a full group with larger blocks. Here:
  the block is cached when it is full. There: also under a key of its own, which
  changes the order of free blocks.
- a prefix that needs no block, as with a window of 1, or a chunked group alone.
  Here: no hit. There: a "hit" in an empty cache.
- `block_hashes` of requests. Here: names for events, connectors and
  `block_hash`; what hits is decided by tokens, salt, adapter and items. Without
  them a block is called by its key in the cache. There: they are the keys.
- `lora_int_id`. Here: adapters with different ones share no block. There: only
  name and path count.
- `max_cache_hit_length` with a draft model. Here: tokens behind it are not
  looked at, so the hit can be one block shorter.
- `get_computed_blocks_for_connector`. Here: the hit of all groups. There: the
  full groups' hit, even where the states of a `MambaSpec` end earlier.

What is allocated:

- external tokens of a `MambaSpec` that are there at once. Here: the block of
  the state that arrives counts, so the answer is None where it would break a
  reservation or find no block. There: it is not counted; a reserved block is
  taken, or the call raises `ValueError` after it has changed the pool.
- `new_computed_blocks`. Here: refused unless they hold the request's tokens.
  There: not checked.
- `num_computed_tokens` of a request without blocks. Here: `ValueError`, as for
  a request longer than `max_model_len`. There: not checked. New tokens behind
  `max_model_len` are cut off in both; here also for states.
- `cache_blocks` of a request without blocks. Here: `KeyError`. There: nothing.
- `max_requests`. Here: as many requests hold blocks at once; for one more
  `allocate_slots` gives None. There: no such number.
- `free_blocks` and `touch`. Here: `ValueError` for a reference that none of
  `touch`, `get_new_blocks` and `pop_blocks_for_free` took, and for a block that
  is neither in use nor cached. There: not checked.

What is told:

- events. Here: classes of this module, with vLLM's fields and `type`, which
  vLLM's encoder writes too. There: msgspec structs.
- `get_num_common_prefix_blocks` with `policy="classic"`. Here: the rule of vLLM
  0.19, blocks that all requests hold. Otherwise 0, as in 0.33.
- `coordinator.get_num_blocks_to_allocate`. Here: for requests that hold blocks,
  without new hits; `ValueError` otherwise. There: for all.
- `block_pool` and `coordinator`. Here: what schedulers and connectors use.
  There: also how a manager works inside, such as `cache_full_blocks`, the links
  of the free queue, and a class for each kind of group.
- `PrefixCacheStats`. Here: without `hits_by_source`.
"""

from jaxkv._src.host.types import PrefixCacheStats
from jaxkv._src.host.vllm.block_pool import BlockPool
from jaxkv._src.host.vllm.blocks import KVCacheBlock
from jaxkv._src.host.vllm.blocks import KVCacheBlocks
from jaxkv._src.host.vllm.events import AllBlocksCleared
from jaxkv._src.host.vllm.events import BlockRemoved
from jaxkv._src.host.vllm.events import BlockStored
from jaxkv._src.host.vllm.events import KVCacheEvent
from jaxkv._src.host.vllm.manager import KVCacheManager

__all__ = [
  "AllBlocksCleared",
  "BlockPool",
  "BlockRemoved",
  "BlockStored",
  "KVCacheBlock",
  "KVCacheBlocks",
  "KVCacheEvent",
  "KVCacheManager",
  "PrefixCacheStats",
]
