"""What vLLM's tests of prefix caching check, and which test of ours does.

Answer -> names of their tests; see `tests.reference_behaviours`.
"""

from tests.host.reference_reasons import ALWAYS_COUNTED
from tests.host.reference_reasons import CHECKPOINTS
from tests.host.reference_reasons import CONNECTOR
from tests.host.reference_reasons import EVENT_FIELDS
from tests.host.reference_reasons import FOUND_AGAIN
from tests.host.reference_reasons import KINDS
from tests.host.reference_reasons import LOOKAHEAD
from tests.host.reference_reasons import PARTIAL
from tests.host.reference_reasons import SCHEDULER
from tests.host.reference_reasons import SHARDS
from tests.host.reference_reasons import TIERS

_FULL = "test_manager_traces.py::TestFull::"
_HYBRID = "test_manager_traces.py::TestHybrid::"
_MODEL = "test_reference_manager.py::"
_KINDS = "test_reference_kinds.py::"
_WINDOWS = "test_windows.py::"
_HOST = "test_host.py::"
_STORED = "test_events.py::TestStored::"
_WALK = "test_machine.py::test_machine"
_ERRORS = "test_host_errors.py::"
_REPEAT = f"{_FULL}test_aligned_repeat_computes_its_last_page_again"
_BOUNDARY = f"{_KINDS}TestLookup::test_boundary_page_of_a_window_with_eagle"
_LATEST = f"{_KINDS}TestRetention::test_latest_and_every"
_JUNCTION = f"{_KINDS}TestRetention::test_junction_is_kept"
_EAGLE_STATE = (
  "test_manager_traces.py::TestStates::"
  "test_a_draft_model_finds_the_state_before_the_last_page"
)
_HELD = (
  f"{_MODEL}TestHybrid::"
  "test_hits_of_all_groups_are_held_before_any_page_is_taken"
)

PREFIX_CACHING = {
  # --- pages and their order -------------------------------------------------
  f"{_FULL}test_prefill": "test_prefill",
  f"{_HYBRID}test_prefill {_HYBRID}test_eviction": "test_prefill_hybrid_model",
  "fuzz:full_two_windows fuzz:two_full_window fuzz:full_window_state": (
    "test_prefill_hybrid_model_combinations"
  ),
  f"{_FULL}test_decode": "test_decode",
  f"{_FULL}test_evict": "test_evict",
  f"{_MODEL}TestFull::test_reused_page_has_no_key fuzz:full": (
    "test_hash_block_correct_reuse"
  ),
  f"{_MODEL}TestFull::test_computed_pages_are_not_evicted fuzz:full": (
    "test_computed_blocks_not_evicted"
  ),
  f"{_MODEL}TestFull::test_caching_off fuzz:full_off": (
    "test_basic_prefix_caching_disabled"
  ),
  f"{_FULL}test_prefill_in_chunks {_FULL}test_decode": "test_cache_blocks",
  f"{_STORED}test_pages_name_their_parents": """
    test_cache_blocks_multi_group test_block_stored_event_group_idx
    test_block_stored_event_group_idx_multiple_groups""",
  f"{_FULL}test_hits_in_the_queue_are_not_room": (
    "test_prefill_not_enough_free_blocks_with_computed_blocks"
  ),
  f"{_FULL}test_reset_keeps_the_order": "test_reset_prefix_cache",
  f"{_REPEAT} {_ERRORS}test_evicting_what_is_not_cached": (
    "test_maybe_evict_cached_block"
  ),
  "test_host_views.py::TestPool::test_pages_are_found_by_their_keys": (
    "test_block_lookup_cache_single_block_per_key"
  ),
  "test_host_views.py::TestPool::test_of_equal_pages_the_oldest_that_is_left": (
    "test_block_lookup_cache_multi_blocks_per_key"
  ),
  f"{_HELD} fuzz:full_window_external": """
    test_cache_hit_local_and_external
    test_cache_hit_local_and_external_two_groups_preempt_and_reallocate""",
  f"{_HELD} fuzz:three_external": """
    test_cache_hit_local_and_external_three_groups
    test_cache_hit_local_and_external_three_groups_preempt_and_reallocate""",
  f"{_WINDOWS}TestHybrid::test_unhashed_pages_are_used_first": (
    "test_swa_free_split_keeps_cached_tail_ahead_of_scratch"
  ),
  f"{_HOST}TestPages::test_pages_that_were_not_cached_by_group": (
    "test_get_unhashed_block_ids_all_groups"
  ),
  # --- what a page is found by -----------------------------------------------
  f"{_HOST}TestContents::test_prompt_logprobs_are_cached_for_others "
  f"{_FULL}test_salt_and_adapter_separate": "test_prefill_plp",
  f"{_HOST}TestContents::test_two_items_are_told_apart_behind_a_common_page": (
    "test_mm_prefix_caching"
  ),
  f"{_FULL}test_salt_and_adapter_separate": "test_cache_key_salting",
  LOOKAHEAD: """
    test_kv_events_reconstruct_lookahead_block_hashes
    test_lookahead_checkpoint_has_available_hash
    test_hybrid_mamba_retention_lookahead_keeps_last_prompt_boundary""",
  PARTIAL: """
    test_eagle_hybrid_mamba_hits_partial_prompt_boundary
    test_mamba_partial_hit_requires_matching_lookahead_tokens""",
  # --- room ------------------------------------------------------------------
  f"{_KINDS}TestRecycling::test_admission_cap fuzz:full_window_cap": (
    "test_can_fit_full_sequence_swa_cap_admits_long_prompt"
  ),
  "fuzz:full_watermark fuzz:full_window_watermark": (
    "test_full_sequence_admission_reserves_device_blocks_for_immediate_chunk"
  ),
  f"{_FULL}test_whole_sequence_must_fit fuzz:full_window_cap": (
    "test_can_fit_full_sequence_full_attention_still_gates_oversized"
  ),
  # --- a draft model ---------------------------------------------------------
  f"{_MODEL}TestHybrid::test_eagle fuzz:full_window_eagle": (
    "test_prefill_hybrid_model_eagle"
  ),
  "fuzz:full_window_eagle fuzz:full_state_eagle": (
    "test_prefill_hybrid_model_combinations_eagle"
  ),
  f"{_MODEL}TestFull::test_eagle_drops_a_page fuzz:full_eagle": (
    "test_eagle_identical_prompt_hit"
  ),
  f"{_WINDOWS}TestDraftModel::test_a_window_needs_the_page_behind "
  "fuzz:window_eagle": "test_eagle_with_sliding_window",
  f"{_WINDOWS}TestDraftModel::test_the_page_behind_is_published": (
    "test_eagle_swa_alignment_caches_extra_block"
  ),
  f"{_BOUNDARY} fuzz:full_window_sizes_eagle": (
    "test_eagle_swa_boundary_caches_post_boundary_block"
  ),
  # Of its setups draft_windows has the same window twice.
  _WALK: "test_eagle_grouped_swa_siblings_use_same_cache_mask",
  # --- several page sizes ----------------------------------------------------
  f"{_MODEL}TestHybrid::test_page_sizes fuzz:full_window_sizes": (
    "test_different_block_size"
  ),
  f"{_WINDOWS}TestHybrid::test_hits_end_where_all_groups_end_a_page": (
    "test_hybrid_cache_blocks_swa_tail_window_only"
  ),
  f"{_WINDOWS}TestHybrid::test_what_waits_is_published_by_the_next_commit": (
    "test_hybrid_cache_blocks_clamped_to_lcm"
  ),
  # --- retention -------------------------------------------------------------
  f"{_LATEST} fuzz:full_window_kept": (
    "test_hybrid_local_kv_retention_interval_aligns_in_manager"
  ),
  f"{_ERRORS}test_options": """
    test_hybrid_local_kv_retention_interval_rejects_invalid
    test_positive_retention_rejects_full_attention""",
  f"{_ERRORS}test_no_retention_is_no_error_of_full_attention": (
    "test_zero_retention_is_ignored_for_full_attention"
  ),
  "fuzz:window_kept fuzz:full_window_kept": (
    "test_hybrid_local_kv_retention_interval_survives_recycling"
  ),
  "fuzz:full_window_latest fuzz:three_latest": (
    "test_hybrid_local_kv_retention_latest_only_reuses_replay_boundary"
  ),
  "fuzz:window_kept_eagle fuzz:full_window_kept_eagle": (
    "test_hybrid_local_kv_retention_mtp_reuses_latest_boundary"
  ),
  f"{_EAGLE_STATE} fuzz:full_state_kept_eagle": (
    "test_hybrid_mamba_retention_mtp_resend_of_aligned_prompt"
  ),
  f"{_LATEST} fuzz:window_kept": """
    test_pure_swa_retention_interval_caches_sparse_tails
    test_swa_reachable_block_mask_final_partial_segment""",
  f"{_LATEST} fuzz:window_latest": "test_pure_swa_retention_latest_only",
  f"{_LATEST} fuzz:window": "test_pure_swa_dense_retention_caches_all",
  f"{_JUNCTION} fuzz:full_window_latest": """
    test_swa_reachable_block_mask_pins_shared_prefix
    test_swa_shared_prefix_reuse_under_zero_retention""",
  f"{_KINDS}TestRetention::test_states fuzz:state_kept": (
    "test_mamba_reachable_block_mask_sparsifies_retention"
  ),
  f"{_KINDS}TestRetention::test_junction_of_states_is_kept "
  "fuzz:full_state_latest": """
    test_mamba_reachable_block_mask_pins_shared_prefix
    test_mamba_shared_prefix_reuse_under_zero_retention""",
  # --- states ----------------------------------------------------------------
  f"{_KINDS}TestState::test_table fuzz:full_state": (
    "test_prefill_hybrid_model_mamba_align"
  ),
  f"{_HYBRID}test_junction fuzz:full_state": (
    "test_hybrid_cache_mamba_align_shared_prefix_detection"
  ),
  "fuzz:full_state_drafts fuzz:state_drafts": (
    "test_hybrid_model_mamba_align_with_dynamic_draft_tokens"
  ),
  f"{_KINDS}TestState::test_same_step_hit_waits fuzz:state": (
    "test_mamba_align_siblings_hit_committed_boundary_in_one_step"
  ),
  # --- events and statistics -------------------------------------------------
  f"{_HOST}TestReadings::test_events "
  "test_events.py::test_replaying_tells_what_is_cached": """
    test_kv_cache_events test_block_removed_event_group_idx""",
  f"{_STORED}test_the_parent_of_an_earlier_call_is_known "
  "test_known_defects.py::TestVllm::test_no_event_without_a_page": (
    "test_null_parent_block_hash"
  ),
  EVENT_FIELDS: """
    test_kv_cache_events_with_lora test_block_stored_event_session_id
    test_session_id_does_not_affect_prefix_cache_identity
    test_block_stored_event_group_idx_out_of_bounds""",
  FOUND_AGAIN: """
    test_emit_cached_block_events test_emit_cached_block_events_disabled
    test_emit_cached_block_events_zero_cached""",
  ALWAYS_COUNTED: "test_prefix_cache_stats_disabled",
  # --- elsewhere -------------------------------------------------------------
  CONNECTOR: """
    test_connector_completes_partial_prefix_without_importing_missing_host_kv
    test_mamba_boundary_handoffs_do_not_pin_obsolete_blocks
    test_swa_reachable_block_mask_sub_block_alignment_is_dense""",
  TIERS: """
    test_nixl_hisparse_full_block_import_keeps_a_writable_tail
    test_host_receive_completion_without_spill_metadata
    test_can_fit_full_sequence_hisparse_caps_resident_pages
    test_device_eviction_keeps_host_prefix""",
  SHARDS: """
    test_prefix_cache_hit_uses_per_group_dcp_geometry
    test_swa_reachable_block_mask_with_dcp_scaling
    test_mamba_reachable_block_mask_ignores_dcp
    test_mamba_reachable_block_mask_large_dcp_stays_sparse""",
}

PARTIAL_PRIMITIVES = {
  "test_host_views.py::TestKeys::"
  "test_a_larger_page_goes_on_where_small_ones_do": (
    "test_boundary_hashes_reuse_fine_grained_chain"
  ),
  PARTIAL: """
    test_cache_partial_block_kv_cache_events
    test_cache_partial_block_event_keeps_every_mm_feature
    test_partial_block_replacement_emits_remove_then_store_events
    test_later_request_hits_cached_partial_tail
    test_cache_partial_block_uses_fine_grained_boundary_hash
    test_cache_partial_block_requires_hash_boundary
    test_cache_partial_block_duplicate_checks_all_blocks_for_hash
    test_reset_prefix_cache_clears_partial_entry_metadata
    test_evict_cached_block_removes_full_hash_and_partial_entry
    test_partial_block_promotes_to_direct_full_block_hash""",
}

PARTIAL_HITS = {
  PARTIAL: """
    test_hybrid_mamba_align_partial_hash_hit
    test_eagle_group_registers_unaligned_tail_under_partial_hash_hits
    test_hybrid_mamba_partial_tail_owner_uses_cow_on_continue
    test_hash_aligned_query_end_uses_regular_partial_tail
    test_external_mamba_hit_same_block_uses_running_cow_on_continue
    test_hybrid_mamba_partial_tail_owner_continue_preserves_later_hit
    test_hybrid_mamba_moved_partial_entry_defers_same_step_hit
    test_hybrid_full_attention_partial_hash_hit_uses_cow
    test_hybrid_partial_hit_cow_target_starts_uncached
    test_hybrid_partial_hash_truncates_full_attention_hit_length
    test_cow_retained_blocks_returned_for_release
    test_free_cow_retained_blocks_defers_until_copy_step_processed
    test_full_attention_eagle_drops_one_hash_unit
    test_hybrid_partial_hit_with_eagle_stays_within_group_blocks
    test_mamba_partial_tail_hits_below_eagle_proof_boundary
    test_hybrid_sliding_window_group_disables_partial_hash_hits
    test_resolved_cache_hit_alignment_matches_coordinator""",
  CHECKPOINTS: """
    test_partial_hit_then_internal_checkpoint_uses_distinct_mamba_blocks
    test_internal_checkpoint_uses_partial_hash_lifecycle
    test_internal_checkpoint_publication_respects_retention
    test_transient_checkpoint_evicts_retained_boundary_hash
    test_prompt_end_checkpoint_survives_block_aligned_cache_count
    test_intermediate_chunk_checkpoint_reserved_only_under_dense_retention
    test_eagle_block_aligned_checkpoint_replaces_newer_hash
    test_prompt_end_checkpoint_survives_sparse_retention_with_coarse_hash
    test_checkpoint_reservation_matches_worker""",
  f"{_EAGLE_STATE} fuzz:full_state_eagle": (
    "test_mamba_coarse_checkpoint_retained_below_eagle_proof_boundary"
  ),
  SCHEDULER: """
    test_mamba_align_split_partial_tail_schedule
    test_mamba_align_split_when_block_exceeds_scheduling_budget
    test_mamba_align_split_when_block_exceeds_long_prefill_threshold
    test_mamba_align_split_stops_below_eagle_proof_boundary""",
  CONNECTOR: """
    test_connector_without_divergent_hit_support_uses_common_lookup
    test_capable_connector_uses_divergent_partial_hit_lookup
    test_boundary_state_offloads_returns_cow_target
    test_finished_partial_tail_uses_table_source_once
    test_connector_finish_registers_partial_tail_before_cleanup
    test_boundary_state_offload_dropped_when_request_freed_before_drain
    test_boundary_state_offloads_block_aligned_prompt
    test_truncate_computed_blocks_preserves_sparse_prefix_positions
    test_truncate_computed_blocks_allows_short_mamba_group_only
    test_retention_snapshots_handed_off_with_exact_block_ids
    test_snapshot_handoff_dense_default_retention
    test_boundary_state_offer_includes_more_mamba_groups_than_two
    test_boundary_states_offered_past_prompt_for_resumed_prefill""",
  KINDS: """
    test_opted_out_scratch_group_keeps_partial_hash_hits
    test_kpool_tail_supports_128_token_partial_hash_hits""",
  SHARDS: """
    test_dcp_fine_hit_retention_uses_hash_alignment
    test_hybrid_partial_hash_hit_uses_cow_under_dcp
    test_dcp_partial_hit_resumes_on_replicated_mamba_snapshot
    test_dcp_joint_hit_is_bounded_by_replicated_mamba_snapshots
    test_dcp_partial_hit_with_eagle_rewinds_one_hash_unit""",
}

RESUME_CHECKPOINT = {
  CHECKPOINTS: """
    test_sibling_resumes_from_the_observed_junction
    test_sibling_resumes_below_the_block_grid_when_the_prefix_ends_early
    test_scheduler_never_stops_where_the_manager_refuses
    test_a_junction_past_the_prompt_falls_back_and_registers_nothing
    test_enabling_never_reduces_reuse test_disabled_by_default""",
  PARTIAL: "test_mamba_prefix_cache_drops_hash_block",
}
