"""A drop-in replacement for the `KVCacheManager` of vLLM v1 (0.33).

vLLM's scheduler runs over it unchanged:

```python
import vllm.v1.core.sched.scheduler as scheduler
from jaxkv.host.vllm import KVCacheManager

scheduler.KVCacheManager = KVCacheManager
```

It returns vLLM's block ids, hits, free order and events; `tests/host/vllm` runs
vLLM's scheduler over both. It does not import vLLM: it reads configs, specs and
requests by attribute, and recognizes a spec by the name of its class. A
`KVCacheBlock` holds a pool and an id, and reads all else from the newest state.
It is plain Python and initializes no device. A call that is interrupted, as by
ctrl-C, has either happened or changed nothing.

The differences from vLLM are intended. Those of `jaxkv.host` from its reference
apply here too. These options raise a `ValueError` that names them:

- `num_hash_lookahead_tokens` (set `disable_lookahead_block_hashes` with a draft
  model), `num_prefill_lookahead` above 1, `dcp_world_size`, `pcp_world_size`.
- `is_eagle_group` in only some groups, with `use_eagle=True`.
- `hash_block_size` below the block size of a `MambaSpec`, with which hits end
  inside a block. So `take_kv_cache_block_copies` and
  `finalize_partial_tail_offloads` return nothing, and
  `enable_mamba_shared_prefix_checkpoint` has no effect.
- `scheduler_block_size` other than the least common multiple of all block
  sizes, with caching.
- `RSWASpec`, `CircularBufferSpec`, `EncoderOnlyAttentionSpec`, HiSparse;
  windows with `extra_retained_tokens` or `bounded_replay`; a `MambaSpec` with
  `num_prefill_checkpoint_blocks` or, in mode "none", with blocks shorter than
  `max_model_len`; a model without groups.
- `CrossAttentionSpec` with `enable_caching=True`, for which vLLM's
  `cache_blocks` raises.

Lookup:

- `block_hashes` of requests only name blocks in events, connectors and
  `block_hash`; with caching there must be one for each full block. Hits depend
  on tokens, salt, adapter and items. In vLLM the hashes are the keys.
- `lora_int_id`: adapters with different ids share no block. vLLM compares only
  name and path.
- `get_computed_blocks_for_connector`: the hit of all groups. vLLM returns that
  of the full groups, even if the states of a `MambaSpec` end earlier.

Allocation:

- External tokens of a `MambaSpec` that are available at once: the block of
  their state is counted, so `allocate_slots` returns None if that block is
  reserved or not free. vLLM takes a reserved block, or raises `ValueError`
  after it has changed the pool.
- A request longer than `max_model_len`: `ValueError`. Both cut off new tokens
  beyond it; here also for states.
- `cache_blocks` of a request without blocks: `KeyError`. vLLM does nothing.
- `max_requests` limits the requests that hold blocks; for another one
  `allocate_slots` returns None.
- `free_blocks` of a reference that was not taken by `touch`, `get_new_blocks`
  or `pop_blocks_for_free`: `ValueError`. vLLM does not check.

Host memory: `KVCacheManager` has no `host_pages`, because vLLM's scheduler
makes no moves. `jaxkv.host.CacheManager(host_pages=)` differs from vLLM's
offloading connector as follows:

- Each content is in one memory, and both have one LRU order. vLLM's connector
  copies blocks that stay cached on the device, and orders them separately.
- A block moves when it is evicted or hit, before the model of the same step
  runs. vLLM's connector loads blocks asynchronously, and the request waits for
  them for some steps.
- A hit is one lookup over both memories. In vLLM the blocks of the connector
  are external tokens after those of the device.
- All groups, states and windows included, can have blocks in host memory.

Reports:

- Events are classes of this module with vLLM's fields and `type`, in place of
  msgspec structs. vLLM's encoder accepts them. They are not hashable.
- `coordinator.get_num_blocks_to_allocate`: only for requests that hold blocks,
  without new hits; else `ValueError`.
- `block_pool` and `coordinator` have what schedulers and connectors use, but
  not a manager's internals: `cache_full_blocks`, `contain`, the links of the
  free queue, a class for each kind of group.
- `PrefixCacheStats` has no `hits_by_source`.
"""

from jaxkv._src.host.types import PrefixCacheStats
from jaxkv._src.host.vllm.block_pool import BlockPool
from jaxkv._src.host.vllm.block_pool import KVCacheBlock
from jaxkv._src.host.vllm.block_pool import KVCacheBlocks
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
