"""Tests of the reference systems, and where their behaviours are tested here.

For each file of theirs: how many tests it has, and answer -> their names. An
answer is one or more places separated by blanks, a test of ours as
"file::Class::test" or a configuration of `tests.fuzz_setups` as "fuzz:name", or
one of `tests.reference_reasons` why there is none. A configuration is compared
with the model in `tests.reference_manager` after every operation, in
`test_conformance.py` and by `python -m tests.fuzz`.

vLLM 0.33.0 has 424 tests that concern a cache. Its 43 others, about pages in
the memory of the host, have names that begin with test_hisparse; none applies.
"""

from tests.host import reference_behaviours_kinds as kinds
from tests.host import reference_behaviours_prefix as prefix
from tests.host import reference_behaviours_scheduling as scheduling

VLLM = {
  "test_prefix_caching.py": (87, prefix.PREFIX_CACHING),
  "test_kv_cache_utils.py": (65, kinds.CACHE_UTILS),
  "test_single_type_kv_cache_manager.py": (21, kinds.SINGLE_TYPE),
  "test_kv_cache_metrics.py": (16, kinds.METRICS),
  "prefix_cache/test_partial_prefix_cache_primitives.py": (
    11,
    prefix.PARTIAL_PRIMITIVES,
  ),
  "prefix_cache/test_partial_prefix_cache_hits.py": (51, prefix.PARTIAL_HITS),
  "prefix_cache/test_mamba_eagle_resume_checkpoint.py": (
    7,
    prefix.RESUME_CHECKPOINT,
  ),
  "test_mamba_align_chunk_split.py": (10, scheduling.CHUNK_SPLIT),
  "test_swa_inflight_window_free.py": (7, scheduling.IN_FLIGHT),
  "test_deferred_block_free.py": (17, scheduling.DEFERRED_FREE),
  "test_prefix_replay.py": (8, scheduling.PREFIX_REPLAY),
  "test_worker_slot_overflow.py": (3, scheduling.WORKER_SLOTS),
  "test_kv_cache_planning.py": (31, scheduling.PLANS),
  "test_contiguous_kv_packing.py": (23, scheduling.PACKING),
  "test_kv_cache_config_builder.py": (12, scheduling.CONFIG_BUILDER),
  "test_kv_sharing.py": (2, scheduling.KV_SHARING),
  "test_scheduler.py": (41, scheduling.SCHEDULERS),
  "test_async_scheduler.py": (12, scheduling.ASYNC_SCHEDULERS),
}
