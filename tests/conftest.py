"""Eight CPU devices, strict JAX, and ringjax with its annotations checked."""

from __future__ import annotations

import atexit
import collections
import gc
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator

# An accelerator on this machine must not change what the tests run on; the
# variable reaches subprocesses, the config below a JAX already imported.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling is what the tests take their time for, and many compile the same
# programs, also in processes of their own. What a worker compiled it reads
# again until it ends. Workers do not share: JAX does not write these files at
# one stroke.
_PROGRAMS = tempfile.mkdtemp(prefix="ringjax-tests-")
atexit.register(shutil.rmtree, _PROGRAMS, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# What would widen or broadcast in silence raises here.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Modules whose functions check their own arguments and say what is wrong: the
# hook would speak first, in words that no user ever sees.
_EDGE = {
  "ringjax.ops.attention.api",
  "ringjax.ops.attention.arguments",
  "ringjax.ops.attention.blockwise",
  "ringjax.ops.attention.call_shape",
  "ringjax.ops.attention.registry",
  "ringjax.ops.attention.run",
  "ringjax.ops.attention.select",
  "ringjax.ops.feedforward",
  "ringjax.ops.loss",
  "ringjax.ops.mask",
  "ringjax.parallel.chips",
  "ringjax.ops.mixers",
  "ringjax.ops.scan",
  "ringjax.ops.sequence",
  "ringjax.ops.shift",
  "ringjax.parallel.layout",
  "ringjax.parallel.mesh",
  "ringjax.parallel.place",
}
_ROOT = pathlib.Path(__file__).parents[1]
_MODULES = [
  ".".join(path.relative_to(_ROOT).with_suffix("").parts)
  for path in sorted((_ROOT / "ringjax").rglob("*.py"))
  if path.name != "__init__.py"
]
# Checks every annotated call in ringjax; it must come before its import.
jaxtyping.install_import_hook(
  [m for m in _MODULES if m not in _EDGE], "beartype.beartype"
)

# Traced programs are millions of objects that stay; looking through them for
# cycles as often as Python does is a tenth of the time.
gc.freeze()
gc.set_threshold(200_000, 50, 100)

# "ci" gives the same examples each time, so that a red run is about the commit.
# For a search: HYPOTHESIS_PROFILE=long, or --hypothesis-profile=long.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile(
  "long", derandomize=False, deadline=None, max_examples=2000, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Mappings of memory that a process may have: 65,530 on Linux, and compiled
# programs take several each. A compiler that gets no more ends the process.
# So few at the end of a file leave the next one room; within a file, whose
# tests share programs, they are kept as long as can be.
_MAPPINGS, _MAPPINGS_WITHIN = 18_000, 45_000
# When they were counted last.
_counted = 0.0


# XLA's older way from a fusion to LLVM, which makes less code of it: half of
# the compiler's time without LLVM's passes. Versions without it ignore this.
# And one module for LLVM instead of one for each thread: a tenth of the rest,
# where all threads are busy.
_QUICK = (
  "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
  "--xla_cpu_parallel_codegen_split_count=1",
)


def pytest_configure(config) -> None:
  """What runs on every commit compiles for a short compilation.

  LLVM's costly passes and XLA's newer code for fusions change no meaning and
  take half of the tests' time, in their subprocesses too; which line of Python
  an operation comes from takes a twentieth. The slow tests, the smoke tests and
  JAX_DISABLE_MOST_OPTIMIZATIONS=0 compile as users do.
  """
  if "not slow" not in config.getoption("markexpr") or "smoke" in (
    config.getoption("markexpr")
  ):
    return
  # A worker finds what the process that began it has set.
  if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    os.environ["JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS"] = "0"
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*flags, *_QUICK]))


# Files that take minutes, the longest first: begun last they would keep one
# worker busy while the others have nothing left. See "seconds by file".
_LONG = (
  "kv/test_kinds.py",
  "kv/test_window.py",
  "ops/attention/test_exact.py",
  "train/test_step.py",
  "ops/attention/test_strategies.py",
  "launch/test_generate.py",
  "infer/test_contract.py",
  "launch/test_train.py",
  "launch/test_train_faults.py",
  "models/test_families.py",
  "infer/test_generate.py",
  "test_mutations.py",
  "nn/test_delta.py",
  "ops/attention/kernels/test_kinds.py",
  "eval/test_eval.py",
  "ops/attention/test_numerics.py",
  "bench/test_inference_bench.py",
)


# Tests that repeat one fact over many parameters: the default run keeps the
# first case of each, the others are marked `long`.
_REPEATED = frozenset(
  (
    "bench/test_bench.py::test_schedule_is_what_the_loops_run",
    "data/test_chat.py::test_attacks",
    "data/test_chat.py::test_messages_make_no_special_token",
    "data/test_recall_tasks.py::test_an_example_fills_a_row_and_weighs_as_much",
    "data/test_tokens.py::test_hostile_files",
    "data/test_tokens.py::test_no_text_makes_a_special_token",
    "data/test_tokens.py::test_pieces_are_the_whole",
    "eval/test_answers.py::test_losses_are_those_of_the_answers",
    "eval/test_eval.py::test_a_sharded_text_gives_the_same",
    "eval/test_eval.py::test_who_is_stopped_has_what_was_found",
    "infer/test_contexts.py::test_codecs_lose_no_more_than_in_one_pass",
    "infer/test_contexts.py::test_generate_answers_behind_contexts",
    "infer/test_contract.py::test_every_way_is_continued_by_the_same_tokens",
    "infer/test_contract.py::test_one_pass_chunks_and_single_tokens",
    "infer/test_contract.py::test_prompts_of_unequal_lengths",
    "infer/test_generate.py::test_a_recurrent_layer_reads_in_order",
    "infer/test_generate.py::test_ways_of_several_shards_on_one",
    "infer/test_keep.py::test_prompts_of_unequal_lengths",
    "infer/test_kvr_threads.py::test_other_kinds_of_caches",
    "infer/test_kvr_threads.py::test_the_last_rank_has_what_one_device_has",
    "infer/test_sampling.py::test_filters_are_the_references",
    "infer/test_sessions.py::test_between_chunks",
    "infer/test_speculate.py::test_no_token_changes",
    "infer/test_verifiers.py::test_the_joint_law_is_the_target_s",
    "kv/test_cache_report.py::test_parts_add_up_to_all_bytes",
    "kv/test_channel_groups.py::test_generate_encodes_by_itself",
    "kv/test_codecs.py::test_decoded_numbers_are_near",
    "kv/test_drafts.py::test_every_node_sees_its_path",
    "kv/test_evicting.py::test_selected_pages_hold_what_matters",
    "kv/test_kept_tokens.py::test_kept_tokens_are_those_of_kvpress",
    "launch/test_generate.py::test_a_wrong_flag_is_one_line",
    "launch/test_notebooks.py::test_the_first_cell_installs_what_is_missing",
    "launch/test_plan.py::test_each_sub_command_has_a_help_page_of_its_own",
    "launch/test_train.py::test_every_config_can_be_built",
    "launch/test_train.py::test_wrong_configs",
    "launch/test_train.py::test_wrong_flags",
    "models/hf/test_folder.py::test_host_memory_holds_a_few_tensors",
    "models/hf/test_save.py::test_two_processes",
    "models/test_checkpoint.py::test_saved_is_what_was_loaded",
    "models/test_checkpoint.py::test_forms_turn_back_into_the_same_bits",
    "models/test_config.py::test_fuzz",
    "models/test_config.py::test_shape_of_a_model_is_that_of_its_tensors",
    "models/test_families.py::test_layers_one_by_one",
    "models/test_more_tokens.py::test_known_tokens_stay_and_new_ones_are_near_their_mean",
    "models/test_more_tokens.py::test_sharded_weights_stay_sharded",
    "models/test_places.py::test_a_shard_s_tokens_are_counted_on",
    "models/test_places.py::test_in_a_shard_map_no_axis_is_guessed",
    "models/test_presets.py::test_number_of_parameters",
    "models/test_published.py::test_fuzz",
    "models/test_small.py::test_recalls",
    "ops/attention/kernels/test_best.py::test_no_kernel_where_xla_would_have_to_cut_it",
    "ops/attention/kernels/test_cudnn.py::test_the_check_for_a_gpu_checks",
    "ops/attention/kernels/test_decode.py::test_beside_axes_of_batch_and_heads",
    "ops/attention/kernels/test_decode.py::test_one_query",
    "ops/attention/kernels/test_decode.py::test_the_partial_is_that_of_the_loops",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_any_number_of_slots",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_half_precision",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_it_equals_the_loops",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_masks_and_scores",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_what_is_not_seen_does_not_matter",
    "ops/attention/kernels/test_decode_pool_tpu.py::test_it_equals_the_loops",
    "ops/attention/kernels/test_decode_pool_tpu.py::test_masks_and_dtypes",
    "ops/attention/kernels/test_flash_tpu.py::test_blockwise_is_met",
    "ops/attention/kernels/test_flash_tpu.py::test_one_device",
    "ops/attention/kernels/test_flash_tpu.py::test_steps",
    "ops/attention/kernels/test_kinds.py::test_a_ring_of_kernels",
    "ops/attention/kernels/test_kinds.py::test_other_calls_of_kernels_only",
    "ops/attention/test_apart.py::test_selection",
    "ops/attention/test_apart.py::test_temperature_and_scale",
    "ops/attention/test_cached.py::test_one_query",
    "ops/attention/test_chain.py::test_sizes",
    "ops/attention/test_dropout.py::test_all_drop_the_same_pairs",
    "ops/attention/test_exact.py::test_batch_and_heads_are_sharded_too",
    "ops/attention/test_exact.py::test_dense_serves_every_feature",
    "ops/attention/test_exact.py::test_gather_serves_every_feature",
    "ops/attention/test_exact.py::test_gradients_taken_inside_shard_map",
    "ops/attention/test_exact.py::test_inside_shard_map",
    "ops/attention/test_exact.py::test_one_device_plays_all_shards",
    "ops/attention/test_exact.py::test_ring_serves_every_feature",
    "ops/attention/test_exact.py::test_ring_sizes",
    "ops/attention/test_exact.py::test_scan_and_remat",
    "ops/attention/test_exact.py::test_sizes_of_other_strategies",
    "ops/attention/test_exact.py::test_tiles_without_a_mask_at_once",
    "ops/attention/test_exact.py::test_ulysses_deals_heads_that_do_not_divide",
    "ops/attention/test_exact.py::test_ulysses_serves_every_feature",
    "ops/attention/test_exact.py::test_unrolling_changes_nothing",
    "ops/attention/test_jax_nn.py::test_groups_and_vmap",
    "ops/attention/test_jax_nn.py::test_masks",
    "ops/attention/test_numerics.py::test_a_key_that_nobody_sees_changes_nothing_in_plain_attention",
    "ops/attention/test_numerics.py::test_a_token_reaches_those_who_see_it_only",
    "ops/attention/test_numerics.py::test_errors_are_small",
    "ops/attention/test_numerics.py::test_errors_of_other_strategies_are_small",
    "ops/attention/test_schedule.py::test_backward_sends_keys_and_sums",
    "ops/attention/test_schedule.py::test_forward_sends_each_block_once",
    "ops/attention/test_schedule.py::test_window_cuts_the_ring",
    "ops/attention/test_shard_map.py::test_a_vmap_s_axis_is_taken_where_it_is_named",
    "ops/attention/test_strategies.py::test_batch_and_heads_are_sharded_too",
    "ops/attention/test_strategies.py::test_every_feature",
    "ops/attention/test_strategies.py::test_halo",
    "ops/attention/test_strategies.py::test_hops_reach_as_far_as_documents",
    "ops/attention/test_strategies.py::test_left_to_jax_s_derivatives",
    "ops/attention/test_strategies.py::test_per_shard",
    "ops/attention/test_strategies.py::test_queries_around_any_ring",
    "ops/attention/test_strategies.py::test_two_axes_carry_the_sequence",
    "ops/attention/test_strategies.py::test_two_ways_around_any_ring",
    "ops/attention/test_wire.py::test_attention_and_its_gradients_are_near",
    "ops/test_conv.py::test_shards",
    "ops/test_delta.py::test_shards_equal_one_device",
    "ops/test_delta.py::test_strong_decay_forgets_exactly",
    "ops/test_loss.py::test_sharded_sequence_and_vocabulary",
    "ops/test_sequence.py::test_conv",
    "ops/test_sequence.py::test_explicit_mesh",
    "ops/test_sequence.py::test_scan",
    "ops/test_sequence.py::test_shift",
    "parallel/test_layout.py::test_a_sharded_array_is_brought_into_order_and_back",
    "parallel/test_layout.py::test_slots_are_filled_and_emptied",
    "parallel/test_peers.py::test_processes_that_die_or_freeze",
    "serve/test_beams.py::test_pages_of_forks_hold_their_texts",
    "serve/test_engine.py::test_codecs_on_a_mesh",
    "serve/test_engine.py::test_families",
    "serve/test_engine.py::test_rows_come_back_from_the_host",
    "serve/test_engine.py::test_rows_read_what_they_share_once",
    "serve/test_engine.py::test_under_a_mesh_of_the_caller",
    "serve/test_row_space.py::test_answers_are_those_of_pages",
    "serve/test_scheduler.py::test_a_thousand_operations",
    "serve/test_scheduler.py::test_planted_bugs_are_caught",
    "serve/test_simulate.py::test_decisions_are_those_of_an_engine",
    "test_mutations.py::test_a_planted_bug_is_found",
    "test_mutations.py::test_the_healthy_code_passes",
    "test_sequence_axis.py::test_the_mesh_of_a_traced_operand_is_taken",
    "train/test_loop.py::test_goes_on_over_a_failed_save",
    "train/test_step.py::test_loss_and_gradients_are_the_plain_model_s",
    "train/test_step.py::test_micro_batches_add_up",
    "train/test_step.py::test_what_is_computed_again_is_the_same",
  )
)
_KEPT_CASES = 1
# Tests of many seconds, of something that quicker ones touch: of the long run.
_WHOLE = frozenset(
  (
    "bench/test_agreement.py::test_simulators_agree_with_an_engine_of_their_cost",
    "bench/test_bench.py::test_a_wrong_result_is_not_timed",
    "bench/test_inference_bench.py::test_a_contestant_that_fails_has_a_reason",
    "bench/test_train_bench.py::test_a_step_that_is_off_is_not_timed_as_devices_grow",
    "bench/test_train_bench.py::test_the_part_of_the_peak_that_a_step_reaches",
    "bench/test_train_bench.py::test_what_was_not_looked_at_is_said",
    "data/test_tokens.py::test_mutants",
    "eval/test_eval.py::test_what_another_run_left_is_not_taken",
    "eval/test_eval.py::test_what_was_read_may_lie_in_a_cache",
    "eval/test_recall_accuracy.py::test_what_a_model_has_learned",
    "infer/test_attention_workers.py::test_any_workers_and_any_assignment",
    "infer/test_attention_workers.py::test_what_is_refused",
    "infer/test_cache.py::test_a_sharded_cache_goes_on",
    "infer/test_chunk_pipeline.py::test_the_last_rank_has_what_one_device_has",
    "infer/test_contexts.py::test_codecs_lose_no_more_than_in_one_pass",
    "infer/test_contexts.py::test_generate_answers_behind_contexts",
    "infer/test_contexts.py::test_one_context_is_read_as_one_text",
    "infer/test_contexts.py::test_parallel_is_one_pass",
    "infer/test_contexts.py::test_recomputing_all_is_one_text",
    "infer/test_contexts.py::test_the_order_of_contexts_does_not_matter",
    "infer/test_contexts.py::test_what_is_refused_before_anything_is_computed",
    "infer/test_draft_models.py::test_the_same_model_by_other_numbers_is_always_right",
    "infer/test_elastic.py::test_four_read_two_answer_then_three",
    "infer/test_elastic.py::test_sampling_with_a_penalty_goes_on_in_another_group",
    "infer/test_integer_model.py::test_heads_and_widths_may_be_sharded",
    "infer/test_kvr.py::test_one_rank_reads_alone",
    "infer/test_kvr_threads.py::test_other_kinds_of_caches",
    "infer/test_kvr_threads.py::test_the_last_rank_encodes_what_came",
    "infer/test_longspec.py::test_a_folder_comes_back_and_is_of_one_target",
    "infer/test_program.py::test_nothing_is_as_long_as_the_prompt_and_as_wide_as_a_feedforward",
    "infer/test_speculate.py::test_a_stop_string_in_a_draft",
    "infer/test_speculate.py::test_drafts_stop_where_they_are_never_right",
    "infer/test_speculate.py::test_names_and_bad_input",
    "infer/test_speculate.py::test_rejected_tokens_leave_nothing",
    "infer/test_speculate.py::test_stops_and_turns",
    "infer/test_speculate.py::test_the_caller_ends_rows",
    "infer/test_speculate.py::test_what_a_session_read_before_is_known",
    "infer/test_tensor_window.py::test_the_parts_of_all_ranks_are_the_model",
    "infer/test_two_processors.py::test_every_order_gives_the_same",
    "infer/test_two_processors.py::test_integers_on_one_and_outliers_on_the_other",
    "infer/test_verifiers.py::test_a_wrong_rule_is_seen",
    "infer/test_verifiers.py::test_match_gives_the_tokens_of_the_sampler_itself",
    "kv/test_allocation.py::test_calibrated_candidates_and_their_file",
    "kv/test_allocation.py::test_the_budget_holds_and_losses_are_measured",
    "kv/test_cache_report.py::test_states_of_recurrent_layers",
    "kv/test_channel_groups.py::test_generate_encodes_by_itself",
    "kv/test_codec_wire.py::test_gradients_pass_the_codes",
    "kv/test_codec_wire.py::test_what_travels_is_what_the_cache_stores",
    "kv/test_codecs.py::test_two_bytes_a_number_are_those_of_a_cache_in_bfloat16",
    "kv/test_drafts.py::test_a_node_is_read_as_a_token_of_its_own",
    "kv/test_drafts.py::test_every_node_sees_its_path",
    "kv/test_evicting.py::test_evicting_one_of_three_rows_that_share_pages_harms_no_other",
    "kv/test_evicting.py::test_exact_tokens_stay_as_they_are",
    "kv/test_evicting.py::test_generate_evicts_by_itself",
    "kv/test_evicting.py::test_heads_say_what_they_chose",
    "kv/test_evicting.py::test_memory_is_returned_for_each_head",
    "kv/test_evicting.py::test_pages_are_names_and_views_merge",
    "kv/test_evicting.py::test_rows_are_independent",
    "kv/test_evicting.py::test_scores_that_lose_a_head_are_refused",
    "kv/test_evicting.py::test_what_is_refused",
    "kv/test_kinds.py::test_unrotated_keys_move_to_other_positions",
    "kv/test_pairs.py::test_the_page_of_pairs_is_what_its_script_prints",
    "kv/test_tiered.py::test_blocks_go_to_caches_of_one_memory_and_back",
    "kv/test_tiered.py::test_generate_moves_blocks_by_itself",
    "kv/test_tiered.py::test_rows_go_back_into_their_blocks",
    "kv/test_tiered.py::test_the_memory_changes_no_bit",
    "launch/test_calibrate.py::test_what_is_refused",
    "launch/test_convert.py::test_the_command",
    "launch/test_convert.py::test_what_needs_float32_keeps_it",
    "launch/test_generate.py::test_a_chat_template_is_used_unless_raw",
    "launch/test_generate.py::test_a_passkey_in_a_long_document",
    "launch/test_generate.py::test_a_terminal_gets_a_bar_and_the_answer_stays_clean",
    "launch/test_generate.py::test_ctrl_c_before_the_answer",
    "launch/test_generate.py::test_every_mesh_and_method_gives_the_same_tokens",
    "launch/test_plan.py::test_each_sub_command_has_a_help_page_of_its_own",
    "launch/test_plan.py::test_elastic_groups_beside_fixed_ones",
    "launch/test_plan.py::test_published_rows_beside_ours",
    "launch/test_plan.py::test_ways_to_serve_the_same_load",
    "launch/test_train.py::test_wrong_configs",
    "launch/test_ways.py::test_the_devices_at_hand_are_measured_and_used",
    "models/hf/test_folder.py::test_host_memory_holds_a_few_tensors",
    "models/hf/test_header.py::test_many_tensors_of_no_size_are_refused",
    "models/hf/test_packings.py::test_codes_become_the_numbers_they_stand_for",
    "models/hf/test_save.py::test_a_kill_leaves_the_old_folder_or_the_new_one",
    "models/hf/test_save.py::test_two_processes",
    "models/test_cepe.py::test_a_folder_comes_back_bit_for_bit",
    "models/test_cepe.py::test_a_zeroed_output_projection_is_the_decoder_bit_for_bit",
    "models/test_cepe.py::test_bytes_of_a_token_of_context",
    "models/test_cepe.py::test_generate_reads_contexts_by_the_encoder",
    "models/test_cepe.py::test_meshes_compute_the_same",
    "models/test_cepe.py::test_rows_have_contexts_of_their_own",
    "models/test_cepe.py::test_rows_of_a_cache_carry_their_contexts",
    "models/test_checkpoint.py::test_a_random_model_is_saved_too",
    "models/test_checkpoint.py::test_onto_a_mesh",
    "models/test_checkpoint.py::test_other_rules",
    "models/test_checkpoint.py::test_parameters_are_named_by_their_axes",
    "models/test_coded_weights.py::test_bytes_and_errors_of_a_trained_model",
    "models/test_coded_weights.py::test_codes_are_the_nearest",
    "models/test_coded_weights.py::test_experts_have_codes_of_their_own",
    "models/test_coded_weights.py::test_few_tokens_and_many_have_one_result",
    "models/test_coded_weights.py::test_what_is_refused",
    "models/test_contents.py::test_devices_read_their_own_codes",
    "models/test_more_tokens.py::test_known_tokens_stay_and_new_ones_are_near_their_mean",
    "models/test_neurons.py::test_a_gated_model_answers_the_same",
    "models/test_placement.py::test_a_single_layer_on_disk_is_let_go_of",
    "models/test_placement.py::test_equals_resident",
    "models/test_places.py::test_a_layout_alone_is_that_of_the_place",
    "models/test_places.py::test_all_of_a_model_s_work_under_an_explicit_mesh",
    "models/test_places.py::test_in_a_shard_map_no_axis_is_guessed",
    "models/test_small.py::test_recalls",
    "nn/test_delta.py::test_documents_and_padding",
    "nn/test_delta.py::test_padded_prompts_go_on",
    "ops/attention/kernels/test_best.py::test_the_check_has_no_part_in_what_is_traced",
    "ops/attention/kernels/test_best.py::test_the_check_tries_every_kind_of_hop",
    "ops/attention/kernels/test_cudnn.py::test_a_ring_is_compiled_for_cuda_without_one",
    "ops/attention/kernels/test_cudnn.py::test_a_ring_of_it_is_right",
    "ops/attention/kernels/test_decode.py::test_it_passes_its_own_check",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_keys_and_values_have_codecs_of_their_own",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_keys_are_rotated_where_they_are_read",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_rotated_keys_in_half_precision",
    "ops/attention/kernels/test_decode_codes_tpu.py::test_several_heads_a_tile",
    "ops/attention/kernels/test_flash_tpu.py::test_a_nan_reaches_those_who_see_it_only",
    "ops/attention/kernels/test_flash_tpu.py::test_blockwise_is_met",
    "ops/attention/kernels/test_flash_tpu.py::test_ring",
    "ops/attention/test_chain.py::test_every_causal_feature",
    "ops/attention/test_dropout.py::test_all_drop_the_same_pairs",
    "ops/attention/test_exact.py::test_a_ring_of_separate_documents",
    "ops/attention/test_exact.py::test_inside_shard_map",
    "ops/attention/test_exact.py::test_one_device_plays_all_shards",
    "ops/attention/test_jax_nn.py::test_no_batch_axis_and_unequal_lengths",
    "ops/attention/test_properties.py::test_reachable_shards_are_those_that_pairs_reach",
    "ops/attention/test_schedule.py::test_program_does_not_grow",
    "ops/attention/test_statistics.py::test_shards_change_nothing",
    "ops/attention/test_statistics.py::test_without_a_batch_and_of_half_precision",
    "ops/attention/test_strategies.py::test_one_program_for_every_packing",
    "ops/attention/test_wire.py::test_errors_do_not_grow_with_hops",
    "ops/attention/test_wire.py::test_others_that_move_keys",
    "ops/attention/test_wire.py::test_own_keys_stay_exact",
    "parallel/test_peers.py::test_processes_that_die_or_freeze",
    "parallel/test_programs.py::test_nothing_is_counted_where_nothing_was_compiled",
    "parallel/test_programs.py::test_programs_go_where_mappings_run_out",
    "plan/test_events.py::test_the_same_in_every_process",
    "plan/test_partition.py::test_balanced_ranks_compute_equally_long",
    "serve/test_beams.py::test_alone_and_in_a_crowd_bit_for_bit",
    "serve/test_beams.py::test_few_hypotheses",
    "serve/test_beams.py::test_one_more_program",
    "serve/test_beams.py::test_searches_of_transformers",
    "serve/test_beams.py::test_stop_texts",
    "serve/test_beams.py::test_whole_sequences_give_the_same",
    "serve/test_cluster_live.py::test_instances_join_leave_and_change_their_roles",
    "serve/test_cluster_simulator.py::test_every_token_is_made_once_in_any_kind_of_cluster",
    "serve/test_conductor.py::test_prediction_calms_the_load_of_decoding",
    "serve/test_engine.py::test_a_thread_of_its_own",
    "serve/test_engine.py::test_an_adapter_for_each_row",
    "serve/test_engine.py::test_answers_that_later_prompts_find",
    "serve/test_engine.py::test_every_slot_gives_the_same_bits",
    "serve/test_engine.py::test_families",
    "serve/test_engine.py::test_rows_come_back_from_the_host",
    "serve/test_engine.py::test_rows_read_what_they_share_once",
    "serve/test_engine.py::test_what_rows_share_is_found_anew_only_when_it_changes",
    "serve/test_engine_drafts.py::test_a_model_that_is_the_target_is_always_right",
    "serve/test_engine_drafts.py::test_a_planted_bug_changes_tokens",
    "serve/test_engine_drafts.py::test_a_stop_within_a_draft_ends_the_row",
    "serve/test_engine_drafts.py::test_alone_and_in_a_crowd",
    "serve/test_engine_drafts.py::test_right_drafts_save_steps_and_wrong_ones_change_nothing",
    "serve/test_engine_drafts.py::test_rows_for_which_a_step_has_no_room_keep_their_drafts",
    "serve/test_engine_drafts.py::test_trees_of_a_block",
    "serve/test_prefix_transfer.py::test_what_does_not_fit_is_refused",
    "serve/test_row_space.py::test_a_row_for_which_the_system_has_no_memory_is_refused",
    "serve/test_row_space.py::test_an_engine_is_resident_by_use",
    "serve/test_row_space.py::test_answers_are_those_of_pages",
    "serve/test_simulate.py::test_a_trace_is_replayed_live_and_simulated",
    "serve/test_simulate.py::test_decisions_are_those_of_an_engine",
    "serve/test_store_engine.py::test_from_the_disk_on_a_mesh",
    "serve/test_store_engine.py::test_same_bits_as_without",
    "serve/test_store_engine.py::test_who_finds_what",
    "store/test_tier_policies.py::test_predicted_reuse_beats_what_does_not_learn",
    "store/test_tiers.py::test_killed_while_writing",
    "train/test_adapt.py::test_gradients_of_adapters",
    "train/test_adapt.py::test_new_tokens_are_trained_beside_adapters",
    "train/test_adapt.py::test_only_adapters_are_trained",
    "train/test_adapt.py::test_rotations_are_stretched",
    "train/test_checkpoint.py::test_a_program_that_ends_without_waiting",
    "train/test_checkpoint.py::test_files_that_cannot_grow",
    "train/test_checkpoint.py::test_killed_at_a_call_of_ours",
    "train/test_checkpoint.py::test_what_was_altered_is_found",
    "train/test_draft_training.py::test_a_loss_depends_on_keys_that_are_as_far_behind_alone",
    "train/test_draft_training.py::test_the_target_has_gradients_of_zero_and_the_block_others",
    "train/test_encoder_training.py::test_fresh_heads_look_up_what_followed_a_token",
    "train/test_encoder_training.py::test_frozen_weights_have_gradients_of_zero_and_no_others",
    "train/test_encoder_training.py::test_recipes_that_cannot_be",
    "train/test_induction.py::test_heads_look_as_far_back_as_they_are_told",
    "train/test_induction.py::test_on_a_mesh_it_is_the_same_and_lies_the_same",
    "train/test_induction.py::test_the_layer_that_sees_all_reads_what_the_one_before_writes",
    "train/test_loop.py::test_ends_at_a_failed_save",
    "train/test_loop.py::test_reports",
    "train/test_recipe.py::test_decay_moves_no_norm",
    "train/test_step.py::test_a_bfloat16_step_keeps_float32_parameters",
    "train/test_step.py::test_padding_alone_has_no_gradient",
    "train/test_step.py::test_whole_rows_need_no_coordinates",
    "train/test_step_program.py::test_a_step_of_the_head_has_a_block_of_each_shard",
    "train/test_step_program.py::test_no_array_is_as_long_as_the_sequence",
  )
)
# Of those that take longest, tests whose parts the long run tries one by one:
# they are of the slow sweeps.
_SWEPT = frozenset(
  (
    "bench/test_bench.py::test_picture_of_other_sizes",
    "bench/test_row_memory.py::test_layouts_have_the_same_answers",
    "bench/test_serving_bench.py::test_live_and_compared",
    "bench/test_speculation_bench.py::test_all_drafters",
    "bench/test_speculation_bench.py::test_behind_a_document",
    "eval/test_context_costs.py::test_parts_cost_more_or_less_by_the_way",
    "eval/test_entropy.py::test_chunks_make_attention_flat",
    "infer/test_integer_model.py::test_a_token_is_read_alone",
    "infer/test_longspec.py::test_kinds_of_caches",
    "infer/test_longspec.py::test_more_families",
    "infer/test_speculate.py::test_heads_keep_what_they_keep_without_drafts",
    "infer/test_speculate.py::test_recurrent_layers_go_back",
    "infer/test_verifiers.py::test_a_million_draws",
    "kv/test_channel_groups.py::test_a_group_is_encoded_once",
    "kv/test_evicting.py::test_a_mesh_of_three_axes_and_one_device_of_it",
    "kv/test_kept_tokens.py::test_kept_tokens_of_a_repetition_are_those_of_kvpress",
    "kv/test_punctuation.py::test_a_mesh_of_three_axes_marks_the_same_tokens",
    "kv/test_punctuation.py::test_marks_go_with_their_rows",
    "kv/test_tiered.py::test_a_mesh_of_three_axes",
    "kv/test_window.py::test_any_split_of_a_text",
    "kv/test_window.py::test_families_answer_as_with_all_tokens",
    "launch/test_calibrate.py::test_integers_multiply_by_ranges_that_were_measured",
    "launch/test_generate.py::test_the_command_without_a_model",
    "launch/test_train.py::test_link_tokens_are_new_ids_of_the_model",
    "launch/test_train_faults.py::test_a_signal_to_one_process_stops_all",
    "models/test_coded_weights.py::test_every_way_gives_the_same",
    "ops/attention/test_exact.py::test_other_strategies_of_separate_documents",
    "serve/test_engine.py::test_any_filters_of_a_request",
    "serve/test_engine_drafts.py::test_drafts_of_a_block_are_those_of_generate",
    "train/test_step.py::test_heads_of_all_kinds",
  )
)
# Of a test's long cases the long run has so many, of equal distance; the others
# are marked `slow`.
_LONG_CASES = 1
# Those whose cases are quick, or that are what a contract rests upon.
_MORE_CASES = {
  "data/test_chat.py::test_attacks": 30,
  "data/test_chat.py::test_messages_make_no_special_token": 10,
  "data/test_tokens.py::test_hostile_files": 30,
  "data/test_tokens.py::test_no_text_makes_a_special_token": 10,
  "data/test_tokens.py::test_pieces_are_the_whole": 60,
  "docs/test_pages.py::test_the_python_of_a_page_runs": 14,
  "infer/test_exactness.py::test_tokens_are_a_function_of_the_row": 6,
  "infer/test_kvr_processes.py::test_baselines_compute_the_same": 4,
  "infer/test_kvr_processes.py::test_bytes_are_counted": 7,
  "infer/test_kvr_processes.py::test_greedy_tokens_are_those_of_one_device": 7,
  "infer/test_kvr_processes.py::test_logits_and_cache_are_right": 7,
  "infer/test_kvr_processes.py::test_wrong_partitions": 4,
  "infer/test_sampling.py::test_filters_are_the_references": 100,
  "kv/test_codecs.py::test_decoded_numbers_are_near": 40,
  "kv/test_kinds.py::test_law": 5,
  "launch/test_generate.py::test_a_wrong_flag_is_one_line": 8,
  "launch/test_train.py::test_wrong_configs": 8,
  "launch/test_train.py::test_wrong_flags": 4,
  "launch/test_notebooks.py::test_runs": 20,
  "models/test_checkpoint.py::test_forms_turn_back_into_the_same_bits": 100,
  "models/test_config.py::test_fuzz": 70,
  "models/test_config.py::test_shape_of_a_model_is_that_of_its_tensors": 100,
  "models/test_presets.py::test_number_of_parameters": 50,
  "models/test_defaults.py::test_a_key_that_is_not_there": 60,
  "models/test_families.py::test_equals_transformers": 12,
  "ops/attention/test_exact.py::test_ring_serves_every_feature": 5,
  "serve/test_scheduler.py::test_a_thousand_operations": 20,
  "serve/test_scheduler.py::test_planted_bugs_are_caught": 10,
  "test_mutations.py::test_a_planted_bug_is_found": 24,
}
# Those of which each long case takes half a minute: all of them are `slow`.
_NO_CASES = (
  "infer/test_rows.py::test_a_row_is_what_it_is_alone",
  "infer/test_rows.py::test_of_a_call_without_a_session",
  "infer/test_speculate.py::test_kinds_of_caches",
  "infer/test_speculate.py::test_more_families",
  "infer/test_speculate.py::test_recurrent_layers_draft",
  "kv/test_evicting.py::test_shards_keep_the_same_tokens",
  "kv/test_pairs.py::test_a_pair_works_or_is_refused",
  "kv/test_punctuation.py::test_heads_keep_what_brute_force_keeps",
  "kv/test_repetition.py::test_several_questions_about_one_context",
  "kv/test_tiered.py::test_the_memory_changes_no_bit",
  "models/test_shared_keys.py::test_rows_of_unequal_lengths_over_shards",
  "serve/test_engine.py::test_calibrated_levels",
  "serve/test_engine.py::test_more_codecs",
  "serve/test_engine.py::test_rows_come_back_from_the_host",
  "serve/test_engine_drafts.py::test_a_block_reads_the_pages_of_rows",
  "serve/test_engine_drafts.py::test_answers_are_those_of_generate",
  "serve/test_engine_drafts.py::test_models_draft_for_rows",
  "serve/test_store_engine.py::test_more_kinds",
)
_MORE_CASES |= dict.fromkeys(_NO_CASES, 0)


@pytest.hookimpl(tryfirst=True)
@pytest.fixture
def real_model():
  """The file of a fetched model by its name; else the test is skipped.

  For tests that are marked `real`.
  """
  from ringjax import fetched_models

  def path(name: str) -> pathlib.Path:
    model = fetched_models.MODELS[name]
    if not model.path.is_file():
      pytest.skip(f"needs {name}; fetch it: {model.command}")
    return model.path

  return path


def _leave_out_real(config, items) -> None:
  """Takes tests of real models away, unless -m asks for them by name."""
  asked = re.sub(r"not\s+real\b", "", config.getoption("markexpr"))
  if re.search(r"\breal\b", asked):
    return
  left = [item for item in items if item.get_closest_marker("real")]
  if left:
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("real")]


def pytest_collection_modifyitems(config, items) -> None:
  """Marks the repeated cases, and begins with the files that take longest."""
  _leave_out_real(config, items)
  cases = collections.Counter()
  long = collections.defaultdict(list)
  for item in items:
    path = item.path.relative_to(_ROOT / "tests").as_posix()
    name = f"{path}::{item.originalname}"
    if name in _SWEPT:
      item.add_marker("slow")
    if item.get_closest_marker("slow"):
      continue
    cases[name] += 1
    # The smoke tests are a run of their own, which is whole.
    repeated = name in _REPEATED and cases[name] > _KEPT_CASES
    if repeated or name in _WHOLE:
      item.add_marker("long")
    if item.get_closest_marker("long"):
      long[name].append(item)
  for name, every in long.items():
    most, count = _MORE_CASES.get(name, _LONG_CASES), len(every)
    for n, item in enumerate(every):
      if n * most // count == (n + 1) * most // count:
        item.add_marker("slow")
  places = {_ROOT / "tests" / name: i for i, name in enumerate(_LONG)}
  items.sort(key=lambda item: places.get(item.path, len(_LONG)))


_left_out = {"long": 0}


def pytest_deselected(items) -> None:
  """Counts the long tests that the run leaves out."""
  _left_out["long"] += sum(
    item.get_closest_marker("long") is not None
    and item.get_closest_marker("slow") is None
    for item in items
  )


def pytest_sessionfinish(session) -> None:
  """A worker tells the process that began it what it left out."""
  if hasattr(session.config, "workeroutput"):
    session.config.workeroutput["long"] = _left_out["long"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
  """Every worker collects all tests, so each leaves out the same ones."""
  output = getattr(node, "workeroutput", {})
  _left_out["long"] = max(_left_out["long"], output.get("long", 0))


@pytest.fixture(scope="module", autouse=True)
def _programs_are_let_go() -> Iterator[None]:
  """Forgets compiled programs between files, once there are very many."""
  yield
  _let_go(_MAPPINGS)


@pytest.fixture(autouse=True)
def _programs_are_let_go_within() -> Iterator[None]:
  """Forgets them between tests, before the compiler ends the process.

  To count mappings takes longer than many tests; in two seconds a compiler
  makes few of them.
  """
  global _counted
  yield
  if time.monotonic() - _counted > 2:
    _let_go(_MAPPINGS_WITHIN)
    _counted = time.monotonic()


def _let_go(most: int) -> None:
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > most:
    jax.clear_caches()
    gc.collect()


def pytest_terminal_summary(terminalreporter) -> None:
  """What did not run, and where the time went, by file.

  The files say what to cut when the whole takes too long.
  """
  if _left_out["long"]:
    terminalreporter.write_line(
      f"{_left_out['long']} long tests were left out; run them with: "
      'python -m pytest -n 3 -q -m "long and not slow"'
    )
  skipped = terminalreporter.stats.get("skipped", [])
  compiled = sum("aot" in getattr(report, "keywords", ()) for report in skipped)
  if compiled:
    terminalreporter.write_line(
      f"{compiled} tests that compile for TPU did not run: pip install -e "
      "'.[aot]' (Linux on x86-64)"
    )
  seconds = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      if hasattr(report, "duration"):
        seconds[report.nodeid.split("::")[0]] += report.duration
  if sum(seconds.values()) < 300:
    return
  terminalreporter.write_sep("=", "seconds by file")
  for path, spent in seconds.most_common(40):
    terminalreporter.write_line(f"{spent:7.0f} {path}")


@pytest.fixture
def x64() -> Iterator[None]:
  """64-bit types in one test, for float64 references inside JAX."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def unchecked() -> Iterator[None]:
  """ringjax as its users have it, without the checks of the import hook.

  For tests of what ringjax itself says to a wrong argument; elsewhere the
  hook would speak first.
  """
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
