"""What vLLM's tests of hashes, kinds of groups and ages check, and our tests.

Answer -> names of their tests; see `tests.reference_behaviours`.
"""

from tests.host.reference_reasons import ADAPTER_PATHS
from tests.host.reference_reasons import AGES
from tests.host.reference_reasons import CHECKPOINTS
from tests.host.reference_reasons import CONNECTOR
from tests.host.reference_reasons import EMBEDDINGS
from tests.host.reference_reasons import EVENT_FIELDS
from tests.host.reference_reasons import HASHES
from tests.host.reference_reasons import KINDS
from tests.host.reference_reasons import LAYOUT
from tests.host.reference_reasons import LOOKAHEAD
from tests.host.reference_reasons import OBJECTS
from tests.host.reference_reasons import PLANNING
from tests.host.reference_reasons import RATES
from tests.host.reference_reasons import SERVER
from tests.host.reference_reasons import SHARDS

_FULL = "test_manager_traces.py::TestFull::"
_KINDS = "test_reference_kinds.py::"
_CONTENTS = "test_host.py::TestContents::"
_KEYS = "test_host_views.py::TestKeys::"
_POOL = "test_host_views.py::TestPool::"
_STATES = "test_states.py::"
_WINDOWS = "test_windows.py::"
_AGES = "test_residency.py::"
_ADAPTERS = f"{_CONTENTS}test_salts_and_adapters"

CACHE_UTILS = {
  # --- the queue: its order after every move ---------------------------------
  "test_machine.py::test_machine": """
    test_free_kv_cache_block_queue_initialization
    test_free_kv_cache_block_queue_operations
    test_free_kv_cache_block_queue_append_n
    test_free_kv_cache_block_queue_prepend_n
    test_free_kv_cache_block_queue_popleft_n
    test_free_kv_cache_block_queue_popleft_n_drain_and_refill""",
  f"{_POOL}test_it_is_that_of_the_newest_state": (
    "test_free_kv_cache_block_queue_get_all_free_blocks"
  ),
  # --- keys ------------------------------------------------------------------
  f"{_CONTENTS}test_items {_KEYS}test_what_is_not_in_the_tokens": """
    test_generate_block_hash_extra_keys
    test_generate_block_hash_extra_keys_no_mm_inputs
    test_hash_tokens_different_mm_input""",
  f"{_CONTENTS}test_a_salt_reaches_later_pages "
  f"{_KEYS}test_what_is_not_in_the_tokens": (
    "test_generate_block_hash_extra_keys_cache_salt"
  ),
  f"{_ADAPTERS} {_KEYS}test_what_is_not_in_the_tokens": (
    "test_generate_block_hash_extra_keys_lora"
  ),
  f"{_ADAPTERS} {_FULL}test_salt_and_adapter_separate": (
    "test_lora_name_and_cache_salt_block_hashes_do_not_collide"
  ),
  f"{_KEYS}test_page_by_page_is_the_same": "test_hash_block_tokens",
  f"{_KEYS}test_full_pages_have_one_each "
  f"{_KEYS}test_a_key_tells_all_before_it": """
    test_request_block_hasher test_hash_request_tokens_no_mm_inputs""",
  f"{_KEYS}test_tokens_that_come_later_change_none": (
    "test_request_block_hasher_incremental_append_with_multiple_mm_features"
  ),
  LOOKAHEAD: """
    test_lookahead_block_hash_keeps_mm_inputs_for_next_block
    test_num_hash_lookahead_tokens""",
  HASHES: """
    test_none_hash test_none_hash_seed_random_for_non_crypto
    test_none_hash_seed_deterministic_for_crypto
    test_get_none_hash_seed_reports_effective_seed""",
  EMBEDDINGS: """
    test_generate_block_hash_extra_keys_prompt_embeds
    test_generate_block_hash_extra_keys_prompt_embeds_cached
    test_generate_block_hash_extra_keys_different_prompt_embeds
    test_request_block_hasher_with_prompt_embeds
    test_request_with_prompt_embeds_and_mm_inputs""",
  ADAPTER_PATHS: "test_lora_path_change_changes_block_hashes",
  EVENT_FIELDS: "test_to_event_extra_keys_keeps_untagged_event_format",
  # --- room ------------------------------------------------------------------
  f"{_FULL}test_lookahead_pages_are_not_cached "
  "test_host_step.py::TestFull::test_drafts_and_lookahead": (
    "test_allocate_with_lookahead"
  ),
  # --- elsewhere -------------------------------------------------------------
  OBJECTS: """
    test_kv_cache_blocks_selects_requested_groups test_kv_cache_block
    test_kv_cache_block_uses_slots test_resolve_block_hashes_gate
    test_resolve_block_hashes_rejects_mismatched_view test_null_head_len""",
  RATES: """
    test_metrics_empty_distinguishes_no_queries_from_no_hits test_metrics
    test_metrics_empty_stats""",
  CONNECTOR: """
    test_kv_cache_config_selects_only_transferable_groups
    test_kv_cache_config_selects_prefix_cacheable_groups""",
  SHARDS: """
    test_effective_attention_block_size_matches_events
    test_dcp_target_allocates_replicated_draft_independently
    test_dcp_replicated_kpool_tail_keeps_block_interior_layout
    test_full_attention_merge_preserves_replicated_cache_geometry
    test_resolve_dcp_kv_block_size_unwraps_uniform_type_specs""",
  PLANNING: """
    test_draft_layer_tag_is_not_part_of_the_cache_format
    test_uniform_type_spec_block_table_width_matches_layer_spec
    test_merge_kv_cache_spec test_get_max_concurrency_for_kv_cache_config
    test_generate_uniform_type_kv_cache_specs
    test_generate_scheduler_kv_cache_config
    test_get_kv_cache_spec_kind_prefers_specific_attention_subclasses
    test_get_kv_cache_spec_kind_unwraps_uniform_type_specs
    test_get_kv_cache_spec_kind_unknown_for_mixed_uniform_type_specs
    test_get_kv_cache_spec_sliding_window_reads_windowed_specs
    test_get_kv_cache_spec_sliding_window_unwraps_uniform_type_specs
    test_merge_mla_spec test_is_full_attention_spec_unwraps_uniform_type_specs
    test_iter_layer_specs_returns_group_members
    test_wrapped_mamba_group_requires_block_zeroing""",
  LAYOUT: """
    test_unpadded_page_size_includes_per_token_head_scales
    test_page_size_padded_wins""",
  SERVER: "test_hma_not_disabled_when_kv_events_enabled",
}

SINGLE_TYPE = {
  # --- lookup ----------------------------------------------------------------
  f"{_KINDS}TestLookup::test_chunk fuzz:chunk": (
    "test_chunked_local_attention_possible_cached_prefix"
  ),
  f"{_KINDS}TestLookup::test_window fuzz:window": (
    "test_sliding_window_possible_cached_prefix"
  ),
  "test_reference_manager.py::TestHybrid::test_page_sizes "
  "fuzz:window_full_sizes": (
    "test_sliding_window_cache_hit_with_finer_hash_alignment"
  ),
  # --- what is left behind ---------------------------------------------------
  f"{_KINDS}TestRecycling::test_null_pages fuzz:chunk": (
    "test_chunked_local_attention_remove_skipped_blocks"
  ),
  f"{_WINDOWS}TestRecycle::test_a_window_moves_on fuzz:window": (
    "test_sliding_window_remove_skipped_blocks"
  ),
  f"{_STATES}test_null_pages_are_not_given_back "
  "test_known_defects.py::TestESurge::test_an_empty_pool_is_not_used": (
    "test_pop_blocks_for_free_trims_null_head"
  ),
  # --- how much is needed ----------------------------------------------------
  f"{_KINDS}TestRecycling::test_need": """
    test_get_num_blocks_to_allocate
    test_chunked_local_attention_get_num_blocks_to_allocate""",
  f"{_FULL}test_hits_in_the_queue_are_not_room": (
    "test_evictable_cached_blocks_not_double_allocated"
  ),
  "fuzz:window_cap fuzz:full_window_cap": (
    "test_predictor_matches_allocator_blocks_calculation_with_admission_cap"
  ),
  "fuzz:window_external fuzz:full_window_external": (
    "test_external_computed_blocks_do_not_corrupt_free_pool"
  ),
  # --- states ----------------------------------------------------------------
  f"{_STATES}test_scratch_pages_are_no_room_for_tokens "
  f"{_STATES}TestFork::test_pages_ahead_are_not_shared": (
    "test_mamba_speculative_block_relocation_requires_exclusive_ownership"
  ),
  f"{_KINDS}TestState::test_table fuzz:state_drafts": (
    "test_mamba_retirement_crosses_null_gaps"
  ),
  f"{_STATES}TestColumns::test_only_the_running_state_and_scratch_have_pages "
  "fuzz:state": "test_mamba_retirement_bounds_prefill_states",
  CHECKPOINTS: """
    test_mamba_checkpoint_admission_matches_allocation
    test_mamba_checkpoint_hash_maps_only_to_checkpoint_block""",
  # --- pages to be zeroed ----------------------------------------------------
  "test_new_pages.py::test_pages_of_every_kind_are_told": """
    test_sliding_window_records_new_blocks_for_zeroing
    test_chunked_local_attention_records_new_blocks_for_zeroing""",
  KINDS: """
    test_circular_buffer_allocates_one_block_for_the_request_lifetime
    test_external_kpool_tail_zeroing
    test_rswa_remove_skipped_blocks_gap_range""",
}

METRICS = {
  f"{_AGES}test_ages_of_evicted_pages": """
    test_lifetime test_idle_time test_evict test_evict_no_accesses""",
  f"{_AGES}test_a_manager_tells_them_once": """
    test_reset test_kv_cache_metrics_collector_smoke""",
  AGES: """
    test_init test_access_tracking test_ring_buffer_wraps_at_4 test_reuse_gaps
    test_ring_wrap_only_gives_3_gaps test_sample_rate_validation test_sampling
    test_alloc test_access test_huge_time_jump""",
}
