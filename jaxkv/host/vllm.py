"""A drop-in replacement for the `KVCacheManager` of vLLM v1 (0.33).

vLLM's scheduler can use it unchanged:

```python
import vllm.v1.core.sched.scheduler as scheduler
from jaxkv.host.vllm import KVCacheManager

scheduler.KVCacheManager = KVCacheManager
```

It returns vLLM's block ids, hits, eviction order and events; `tests/host/vllm`
runs vLLM's scheduler with both managers. The module does not import vLLM: it
reads configs, specs and requests by attribute, and recognizes a spec by the
names of its class and bases. It is plain Python and initializes no device. Each
call takes effect completely or not at all, even if Ctrl-C interrupts it.

The following differences from vLLM are intended. The list in `jaxkv.host`
applies too. These options and specs raise `ValueError`:

- `num_hash_lookahead_tokens` above 0 (set `disable_lookahead_block_hashes` with
  a draft model); `num_prefill_lookahead`, `dcp_world_size` or `pcp_world_size`
  above 1.
- `is_eagle_group` in only some groups, with `use_eagle=True`.
- `hash_block_size` below the block size of a `MambaSpec`, with caching. In
  vLLM, hits can then end inside a block. Because this is impossible here,
  `take_kv_cache_block_copies` and `finalize_partial_tail_offloads` return empty
  lists, and `enable_mamba_shared_prefix_checkpoint` has no effect.
- `scheduler_block_size` other than the least common multiple of all block
  sizes, with caching.
- `RSWASpec`, `CircularBufferSpec`, `EncoderOnlyAttentionSpec`, HiSparse specs;
  windows with `extra_retained_tokens` or `bounded_replay`; a `MambaSpec` with
  `num_prefill_checkpoint_blocks` or, in a mode other than "align", with caching
  or with blocks shorter than `max_model_len`; a model without groups.
- `CrossAttentionSpec` with `enable_caching=True`, for which vLLM's
  `cache_blocks` raises.

Lookup:

- `block_hashes` of requests identify blocks in events and for connectors. With
  caching, each full block must have one. Hits depend on tokens, salt, adapter,
  images and embeddings instead. In vLLM, hits depend on the hashes.
- `lora_int_id`: adapters with different ids share no block. vLLM compares only
  name and path.
- `get_computed_blocks_for_connector`: returns the hit of all groups. vLLM can
  return a longer hit of full attention if a `MambaSpec` has no state there.

Allocation:

- External tokens with a `MambaSpec`, loaded synchronously: their state needs a
  block, so `allocate_slots` returns None if only reserved blocks are free. vLLM
  does not count this block. It takes a reserved block, or raises `ValueError`
  after it has changed the pool.
- A request longer than `max_model_len`: its lookup raises `ValueError`. In
  `allocate_slots`, tokens beyond the limit get no block in any group. In vLLM,
  they can get blocks for states.
- `cache_blocks` of a request without blocks: raises `KeyError`. vLLM does
  nothing.
- `max_requests` limits the requests that hold blocks. `allocate_slots` returns
  None for further requests.
- `free_blocks` of a reference that is not from `touch`, `get_new_blocks` or
  `pop_blocks_for_free`: raises `ValueError`. vLLM does not check this.

Offload memory: `KVCacheManager` has no `offload_pages`, because vLLM's
scheduler does not call `take_moves`. `jaxkv.host.CacheManager(offload_pages=)`
differs from vLLM's offloading connector as follows:

- A cached block is in one of the memories, with one LRU order for both. vLLM's
  connector copies blocks that stay on the device, and orders them separately.
- A block moves when it is evicted or hit, before the model runs in that step.
  vLLM's connector loads blocks asynchronously, so a request waits some steps.
- One lookup covers both memories. In vLLM, the connector's blocks are external
  tokens, after the hit on the device.
- All groups, including states and windows, can have blocks in offload memory.

Reports:

- Events are dataclasses with vLLM's fields and a `type`, not msgspec structs.
  vLLM's encoder accepts them, but they are not hashable.
- `coordinator.get_num_blocks_to_allocate` with blocks in `new_computed_blocks`:
  raises `ValueError`.
- `block_pool` and `coordinator` have the methods that schedulers and connectors
  call. They lack `cache_full_blocks`, `contain`, the links of the free queue,
  and a class for each kind of group.
- `PrefixCacheStats` has no `hits_by_source`. Each count replaces
  `prefix_cache_stats` by a new object.
"""

from jaxkv._src.host.telemetry import PrefixCacheStats
from jaxkv._src.host.vllm.block_pool import KVCacheBlocks
from jaxkv._src.host.vllm.events import AllBlocksCleared
from jaxkv._src.host.vllm.events import BlockRemoved
from jaxkv._src.host.vllm.events import BlockStored
from jaxkv._src.host.vllm.manager import KVCacheManager

__all__ = [
  "AllBlocksCleared",
  "BlockRemoved",
  "BlockStored",
  "KVCacheBlocks",
  "KVCacheManager",
  "PrefixCacheStats",
]
