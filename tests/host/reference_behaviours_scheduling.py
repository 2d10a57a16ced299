"""What vLLM's tests of schedulers and memory plans check, and our tests.

Answer -> names of their tests; see `tests.reference_behaviours`. Of EasyDeL
eSurge's 46 tests the subjects stand here, a number for how many have it.
"""

from tests.host.reference_reasons import CHECKPOINTS
from tests.host.reference_reasons import CONNECTOR
from tests.host.reference_reasons import ENCODER_OUTPUTS
from tests.host.reference_reasons import KINDS
from tests.host.reference_reasons import LAYOUT
from tests.host.reference_reasons import LOOKAHEAD
from tests.host.reference_reasons import PARTIAL
from tests.host.reference_reasons import PLANNING
from tests.host.reference_reasons import REPLAY
from tests.host.reference_reasons import RUNNER
from tests.host.reference_reasons import SCHEDULER
from tests.host.reference_reasons import SHARDS
from tests.host.reference_reasons import TIERS

_FULL = "test_manager_traces.py::TestFull::"
_HOST = "test_host.py::"
_DEFERRED = f"{_HOST}TestDeferredFree::"
_STATISTICS = f"{_HOST}TestStatistics::"
_CROSS = "test_cross_attention.py::"
_DEFECTS = "test_known_defects.py::TestESurge::"
_CAP = "test_reference_kinds.py::TestRecycling::test_admission_cap"

CHUNK_SPLIT = {
  SCHEDULER: """
    test_partial_checkpoint_resume_stops_at_mamba_block_boundary
    test_disabling_eagle_block_drop_keeps_the_trailing_cache_boundary
    test_fragmented_first_chunk_does_not_poison_mamba_prefix_cache
    test_fragmented_tail_chunk_does_not_poison_mamba_prefix_cache
    test_lookahead_split_caches_partial_tail_boundary
    test_intermediate_chunk_ends_stay_block_aligned
    test_poisoning_is_block_size_independent
    test_unaligned_resume_never_runs_past_its_block""",
  CHECKPOINTS: """
    test_mamba_prefill_checkpoint_valid test_internal_checkpoint_split""",
}

IN_FLIGHT = {
  "fuzz:window fuzz:full_window": "test_swa_free_immediate_when_sync",
  f"{_CAP} fuzz:window_cap": (
    "test_swa_admission_cap_accounts_for_overlapping_batches"
  ),
  f"{_CAP} fuzz:chunk": (
    "test_chunked_local_admission_cap_accounts_for_overlapping_batches"
  ),
  "test_manager_traces.py::TestHybrid::test_windows_wait_for_steps_in_flight": (
    "test_swa_free_waits_for_in_flight_step"
  ),
  "fuzz:chunk": "test_chunked_local_free_waits_for_in_flight_step",
  SCHEDULER: "test_num_in_flight_tokens_accounting",
  CONNECTOR: "test_connector_finish_frees_on_settled_basis",
}

DEFERRED_FREE = {
  f"{_DEFERRED}test_pages_are_held_until_they_are_given_back": """
    test_finish_defers_free_until_inflight_step_done
    test_preempt_defers_free_and_clears_bookkeeping""",
  f"{_DEFERRED}test_room_comes_with_the_pages": (
    "test_allocation_retry_waits_for_fence_then_succeeds"
  ),
  f"{_DEFERRED}test_order_is_that_of_free": (
    "test_multiple_deferred_frees_drain_in_order"
  ),
  SCHEDULER: """
    test_gate_enabled_for_async_consumer test_gate_disabled_without_connector
    test_finish_frees_immediately_when_no_inflight_step test_abort_defers_free
    test_fence_held_across_multiple_inflight_steps
    test_max_tokens_finish_frees_immediately_with_other_inflight
    test_abort_mid_prefill_defers_free
    test_non_async_abort_defers_via_last_sched_seq""",
  PARTIAL: "test_cow_retentions_deferred_until_copy_step_processed",
  CONNECTOR: """
    test_deferred_async_load_registers_after_inflight_step
    test_deferred_async_load_records_hit_sources_when_started
    test_async_load_registers_immediately_without_deferral
    test_abort_deferred_async_load_frees_after_inflight_step""",
}

PREFIX_REPLAY = {
  REPLAY: """
    test_hit_replays_window_without_reallocating
    test_replay_only_chunks_make_progress
    test_async_remote_kv_hit_replays_after_load
    test_remote_kv_hit_is_taken_in_whole_blocks
    test_kv_load_carrying_window_does_not_replay
    test_decode_bench_fill_does_not_replay
    test_hit_no_longer_than_window_is_ignored""",
  f"{_HOST}TestReadings::test_new_pages_of_some_groups": (
    "test_kv_load_zeroing_respects_loaded_groups"
  ),
}

WORKER_SLOTS = {
  SCHEDULER: """
    test_streaming_pause_does_not_over_admit_worker_slot
    test_reset_prefix_cache_priority_does_not_over_admit_worker_slot
    test_reset_prefix_cache_same_step_resume_purges_then_re_adds"""
}

PLANS = {
  PLANNING: """
    test_sparse_mla_preserves_physical_row_addressing
    test_is_kv_cache_spec_uniform test_estimate_max_model_len
    test_get_kv_cache_config_one_worker
    test_get_kv_cache_configs_attention_free
    test_packed_groups_glm5_like_hybrid
    test_mixed_page_size_groups_use_spec_compatibility
    test_hidden_state_group_preserves_hybrid_prefix_cache_granularity
    test_mla_draft_prefers_standard_layout_when_pages_can_be_unified
    test_mla_with_incompatible_swa_uses_one_full_allocation_group
    test_auto_fit_max_model_len test_auto_fit_max_model_len_with_hybrid
    test_auto_fit_max_model_len_not_triggered
    test_auto_fit_max_model_len_respects_num_gpu_blocks_override
    test_check_enough_kv_cache_memory_respects_num_gpu_blocks_override
    test_unify_kv_cache_page_size_uses_padding_for_non_divisible_sizes
    test_unify_hybrid_kv_cache_specs test_unify_kv_cache_spec_page_size_mamba
    test_kv_cache_reserves_null_block_for_max_model_len
    test_auto_fit_max_model_len_reserves_null_block
    test_check_enough_kv_cache_memory_reserves_null_block
    test_eagle_groups_are_the_groups_holding_draft_layers
    test_no_eagle_groups_without_eagle_block_drop
    test_warns_only_when_untagged_draft_meets_mamba""",
  LAYOUT: "test_multi_run_layer_compact_strides_place_hoisted_heads",
  SHARDS: """
    test_get_kv_cache_configs_multiple_workers
    test_get_kv_cache_configs_pp_sharding
    test_project_kv_cache_groups_to_worker
    test_hidden_states_with_tp_scales_page_size test_kv_tp_replicas
    test_kv_cache_groups_tp_replicas""",
}

PACKING = {
  LAYOUT: """
    test_packed_alignment_preserves_hot_pages_and_generic_stride
    test_block_alignment_survives_merge_and_rejects_incompatible_specs
    test_roles_land_in_separate_groups test_every_group_fits_one_packed_block
    test_mamba_split_measures_the_block_the_other_groups_already_force
    test_sliding_window_bucket_is_capped_at_the_main_page
    test_bytes_per_block_is_largest_group
    test_layers_within_a_group_are_dense test_allocation_is_layout_invariant
    test_single_group_mixed_pages_follows_layout
    test_layer_outer_pads_only_unaligned_pages
    test_overlaid_groups_alias_and_stay_isolated
    test_layer_compact_layout_rejected_for_overlaid_groups
    test_unresolved_layout_rejected
    test_head_outer_layout_rejected_for_mixed_pages
    test_bound_views_round_trip""",
  SHARDS: "test_replicated_state_gets_its_own_group",
  KINDS: """
    test_scratch_group_survives_computed_block_truncation
    test_prefix_hits_respect_compression_alignment
    test_scratch_ring_does_not_drag_hash_granularity
    test_compressed_attention_hashes_can_be_finer_than_cache_hits
    test_ring_beside_paged_groups_keeps_the_kv_block_as_scheduler_block""",
  REPLAY: "test_non_cacheable_swa_leaves_hits_to_the_paged_group",
}

CONFIG_BUILDER = {
  PLANNING: """
    test_default_hook_returns_default_builder
    test_resolves_hook_selected_builder test_resolves_fresh_instance_per_call
    test_public_interface_declares_two_placement_hooks
    test_model_classmethod_owns_grouping test_model_grouping_is_checked
    test_platform_grouping_is_checked
    test_platform_builder_wins_over_model_declaration
    test_partial_projection_preserves_metadata test_probe_suppresses_override
    test_several_device_allocations_need_declared_pool_bytes""",
  TIERS: "test_model_grouping_rejects_hisparse",
}

KV_SHARING = {
  RUNNER: """
    test_initialize_kv_cache_for_kv_sharing_same_attn_groups
    test_initialize_kv_cache_for_kv_sharing_no_attn_groups"""
}

SCHEDULERS = {
  f"{_FULL}test_refused_drafts_are_published_when_they_are_computed "
  "fuzz:full_drafts": "test_finished_spec_request_caches_completed_blocks",
  f"{_STATISTICS}test_refused_and_unread_requests_are_not_counted": (
    "test_prefix_cache_query_not_inflated_by_connector_defer"
  ),
  f"{_STATISTICS}test_a_refused_request_is_counted_when_it_is_admitted": """
    test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request""",
  f"{_STATISTICS}test_preempted_requests_are_counted_apart": (
    "test_preemption_re_records_prefix_cache_query"
  ),
  f"{_STATISTICS}test_nothing_is_counted_where_nothing_is_cached": (
    "test_prefix_cache_stats_not_recorded_when_caching_disabled"
  ),
  f"{_FULL}test_reset_keeps_the_order": "test_scheduler_reset_prefix_cache",
  f"{_HOST}TestRequests::test_names_come_back": "test_memory_leak",
  f"{_FULL}test_room_for_others": (
    "test_async_load_reservation_prevents_wedge_e2e"
  ),
  f"{_CROSS}TestManager::test_a_transcription fuzz:full_cross": """
    test_variable_length_cross_attn_block_allocation
    test_cross_attn_blocks_not_over_allocated
    test_cross_attn_blocks_not_under_allocated""",
  f"{_CROSS}TestVerbs::test_a_sequence_may_have_none fuzz:full_cross": (
    "test_cross_attn_zero_blocks_without_encoder_inputs"
  ),
  LOOKAHEAD: "test_scheduler_publishes_lookahead_blocks_at_allocation",
  SCHEDULER: """
    test_prefix_hit_is_capped_at_retained_auxiliary_outputs
    test_pooling_chunked_prefill_can_finish_at_max_model_len
    test_async_output_does_not_cache_inflight_tokens
    test_long_prefill_threshold_ignored_when_alone
    test_preempt_during_execution test_preemption_processes_stale_aux_output
    test_priority_scheduling_preemption
    test_priority_scheduling_no_preemption_when_space_available
    test_priority_scheduling_preemption_victim_selection
    test_priority_scheduling_equal_priority_preemption
    test_priority_scheduling_preemption_and_resumption_when_out_of_kv""",
  RUNNER: """
    test_kv_cache_release_after_keep_pause_preserves_requests
    test_kv_cache_release_rejects_nonresident_memory
    test_cpu_encoder_input_updates_preserve_shm_handles""",
  CONNECTOR: """
    test_kv_connector_honors_skip_reading_prefix_cache
    test_external_prefix_cache_metrics test_kv_connector_unable_to_allocate
    test_kv_connector_handles_preemption
    test_remote_kv_promotion_drains_before_grammar_prefix
    test_hybrid_per_group_hit_divergence_with_connector
    test_hybrid_divergent_hit_fallback_is_capped_at_retained_auxiliary_outputs
    test_hybrid_fa_deeper_hit_respects_connector_lookup_policy""",
  ENCODER_OUTPUTS: """
    test_ec_connector_unable_to_allocate
    test_priority_scheduling_ec_connector_preemption_and_resumption
    test_encoder_cache_retained_across_preemption_and_resume
    test_encoder_cache_recomputed_when_evicted_during_preemption
    test_ec_connector_waits_for_embeddings_in_prefix_replay""",
  TIERS: "test_pending_hisparse_reclamation_defers_preemption",
}

ASYNC_SCHEDULERS = {
  f"{_FULL}test_prefill {_FULL}test_common_pages": (
    "test_prefix_caching_for_prefill_dedup"
  ),
  f"{_DEFECTS}test_what_was_never_a_prefix_is_no_hit "
  f"{_HOST}TestContents::test_items_of_the_output_go_on": (
    "test_prefix_caching_for_multi_turn"
  ),
  SCHEDULER: """
    test_stop_by_max_tokens test_no_spec_decode_padding_up_to_max_model_len
    test_abort test_abort_request_when_structured_output_fsm_cannot_advance
    test_kv_pressure_preemption_with_inflight_output
    test_reset_prefix_cache_with_inflight_output_under_kv_pressure
    test_resumable_request_handoff""",
  CONNECTOR: """
    test_connector_metadata_precedes_async_placeholder_advance
    test_requires_kv_delivery_defaults_to_producer_role
    test_kv_pressure_preempt_mid_handoff""",
}

# By file: how many tests it has, and answer -> subjects.
ESURGE = {
  "test_cache_manager_allocation_rollback.py": (
    1,
    {
      f"{_DEFECTS}test_a_failed_allocation_takes_nothing": (
        "a failed allocation gives hits back",
      ),
    },
  ),
  "test_dp_page_sharding.py": (
    5,
    {
      SHARDS: (
        "pages divide among shards, or are not divided",
        "which page is whose",
        "the first shard has the null page",
      ),
      "test_host_errors.py::test_a_manager_is_one_shard": (
        "an allocation stays in its shard",
      ),
    },
  ),
  "test_scheduler_dp_shard_fallback.py": (
    3,
    {SHARDS: ("hints only where slots divide among shards",)},
  ),
  "test_scheduler_starvation.py": (
    4,
    {SCHEDULER: ("long prompts are served beside many short ones",)},
  ),
  "test_scheduler_comprehensive.py": (
    33,
    {
      f"{_FULL}test_decode": ("prefill, then decode",),
      f"{_FULL}test_prefill_in_chunks": ("prompts in chunks",),
      f"{_FULL}test_preempted_request_finds_its_pages": (
        "preemption when pages run out",
      ),
      f"{_FULL}test_reset_keeps_the_order": (
        "a reset says whether it was done",
      ),
      f"{_HOST}TestRequests::test_names_come_back": (
        "aborted and finished requests give everything back",
      ),
      SCHEDULER: (
        "batches, budgets, caps and margins",
        "ends by length or token",
        "most sequences at once, priorities, counts",
      ),
      RUNNER: ("buckets of sizes",),
    },
  ),
}
