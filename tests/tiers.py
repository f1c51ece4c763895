"""The two tiers of tests, and which files come first.

Every day: what `scripts/test` and CI run, six minutes on two cores. Each claim is made once: each mode, processor, kind
of cache and command; of a product of forms, sizes and families enough cells that each of them comes up.
Every night: `scripts/test --everything`, which a release runs too. It adds what is long by nature (tests marked
`night`: kills by the dozen, ranks, every architecture of transformers) and the other cells of the products below.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# file -> test -> which of its cells run every day: each so-manieth in the order of their definition (a prime number, so
# that every value of each parameter comes up), or those whose parameters match a pattern; 0 for none.
WIDE: dict[str, dict[str, int | tuple[str, ...]]] = {
    "cli/test_blank_before_text.py": {
        "test_a_tree_has_the_same_text": 3,
        "test_records_pieces_streams_and_echoes_have_one_text": 11,
        "test_searches_and_samples_have_the_same_text": 3,
        "test_the_text_after_ids_of_any_kind": 3,
        "test_the_text_of_an_encoder_decoder_begins_from_nothing": 3,
    },
    "cli/test_completion.py": {
        "test_bash_completes": 17,
    },
    "cli/test_doubled_bos.py": {
        "test_a_doubled_bos_gets_a_note_with_advice": 3,
    },
    "cli/test_failed_and_interrupted.py": {
        "test_the_status_is_that_of_the_signal": 3,
    },
    "cli/test_help.py": {
        "test_no_line_is_too_long_and_no_word_is_cut": 5,
    },
    "cli/test_interrupts.py": {
        "test_a_background_job_without_a_terminal_is_not_interrupted": 0,
        "test_a_model_that_does_not_come_back_costs_no_row": 0,
        "test_a_reader_that_does_not_read_on_keeps_nobody_waiting": 0,
        "test_a_signal_at_any_line_of_the_first_imports_ends_with_its_status": 0,
        "test_a_stopped_process_gives_the_cursor_back_and_goes_on": 0,
        "test_every_command_says_that_it_was_interrupted": 3,
        "test_one_that_reads_a_terminal_is_interrupted": 0,
        "test_with_resume_running_rows_are_left_to_the_next_run": 0,
    },
    "cli/test_libraries_hushed.py": {
        "test_a_model_without_its_fast_kernels_runs_in_silence": 0,
    },
    "cli/test_overwriting.py": {
        "test_the_old_file_stays_until_the_new_one_is_whole": 11,
    },
    "cli/test_process.py": {
        "test_a_real_terminal_shows_text_as_it_streams": 0,
        "test_rows_of_a_slow_pipe_are_decoded_when_they_come": 5,
        "test_strict_ends_at_a_row_of_a_slow_pipe_that_fails": 0,
    },
    "cli/test_resume.py": {
        "test_what_is_asked_otherwise_is_told": 3,
    },
    "cli/test_secrets.py": {
        "test_no_command_shows_the_password_of_a_setting": 3,
    },
    "cli/test_shortfall.py": {
        "test_fewer_sequences_than_asked_for_are_said": 3,
    },
    "cli/test_signal_moments.py": {
        "test_a_signal_at_four_moments_of_a_run": 0,
    },
    "cli/test_standard_streams.py": {
        "test_a_file_does_not_become_a_stream_that_was_closed": 0,
        "test_a_hangup_writes_what_there_is_and_nohup_is_heeded": 0,
    },
    "cli/test_strategy.py": {
        "test_every_name_runs_as_what_it_is_called": 3,
    },
    "cli/test_token_ids.py": {
        "test_what_is_shown_are_ids": 3,
    },
    "cli/test_torture.py": {
        "test_kills_and_write_faults_lose_nothing": 0,
    },
    "cli/test_watch.py": {
        "test_watched_numbers_are_those_of_transformers_logits": 5,
    },
    "commands/chat/test_cut_off.py": {
        "test_both_go_on_with_a_file_that_explore_has_opened": 11,
    },
    "commands/chat/test_file_trouble.py": {
        "test_a_full_disk_is_one_error": 3,
        "test_a_signal_in_the_middle_of_an_answer_loses_no_token": 3,
    },
    "commands/chat/test_growth.py": {
        "test_a_chat_is_opened": 3,
        "test_what_a_chat_does_with_all_it_has": 5,
    },
    "commands/chat/test_script.py": {
        "test_a_prefill_is_read_as_the_template_has_it_in_the_next_turn": 3,
        "test_answers_equal_those_of_run": 3,
    },
    "commands/chat/test_terminal.py": {
        "test_the_second_ctrl_c_of_a_stuck_pass_says_where_the_chat_is_saved": 0,
    },
    "commands/compare/test_screens.py": {
        "test_texts_stream_side_by_side_or_in_a_stack": 3,
    },
    "commands/explore/test_screen.py": {
        "test_a_setting_that_cannot_be_used_is_one_line_and_changes_nothing": 3,
    },
    "commands/explore/test_terminal.py": {
        "test_a_failure_of_the_screen_restores_the_terminal_and_shows_no_traceback": 0,
        "test_a_killed_screen_opens_again_and_finishes_its_command": 0,
        "test_a_signal_restores_the_terminal": 2,
    },
    "commands/explore/test_work.py": {
        "test_only_rows_in_view_are_drawn": 0,
    },
    "commands/inspect/test_measured.py": {
        "test_a_native_cache_is_told_as_that_of_transformers": 3,
    },
    "commands/inspect/test_plan_measured.py": {
        "test_a_batch_of_beams": 5,
        "test_beams_of_one_prompt": 5,
        "test_one_row": 17,
        "test_samples_in_bfloat16": 5,
        "test_weights_equal_those_loaded": 11,
        "test_what_is_reserved_for_texts_shorter_and_longer_than_a_window": 11,
    },
    "commands/inspect/test_plan_weights.py": {
        "test_planned_weights_are_those_that_are_held": 5,
        "test_planned_weights_of_experts_are_those_that_are_held": 3,
    },
    "commands/inspect/test_runtimes.py": {
        "test_a_changed_number_is_seen": 2,
    },
    "commands/inspect/test_saved.py": {
        "test_a_saved_prompt_gives_the_same_tokens": 17,
        "test_every_form_of_cache_writes_the_same_tokens_as_none": 17,
    },
    "commands/parity/test_golden.py": {
        "test_bounds_hold_the_kl_of_both_sides": 0,
        "test_quantised_weights_of_either_runtime_are_drift_beside_a_recording": 7,
    },
    "commands/parity/test_parity_command.py": {
        "test_a_terminal_shows_the_text_that_differs_most": 0,
        "test_an_interrupted_run_leaves_no_half_file": 0,
        "test_beyond_a_limit_the_status_is_4": 3,
        "test_sides_are_told_apart_in_a_narrow_table": 0,
        "test_the_figures_of_a_third_side_are_those_that_it_has_as_the_second": 0,
    },
    "commands/score/test_losses.py": {
        "test_alone_or_padded_among_others_a_text_has_the_loss_of_the_model": 3,
    },
    "decode/cache/test_shared.py": {
        "test_rows_of_one_prompt_get_the_same_tokens_shared_and_copied": 7,
        "test_transformers_models_keep_a_copy_for_each_row": 5,
    },
    "decode/processors/grammar/test_closings.py": {
        "test_from_the_least_budget_on_every_text_is_whole": 5,
        "test_whatever_the_tokenizer": 5,
    },
    "decode/processors/grammar/test_grammar_budget.py": {
        "test_every_mode_writes_whole_json_in_every_budget_that_is_enough": 7,
        "test_the_same_over_a_vocabulary_of_words": 3,
        "test_whatever_is_drawn_the_text_is_whole_at_the_end": 11,
    },
    "decode/processors/prefix/test_prefix.py": {
        "test_exactly_the_rows_that_spell_it_can_be_written": 3,
    },
    "decode/processors/test_filters.py": {
        "test_large_rows_keep_what_transformers_keeps": 5,
        "test_small_rows_keep_what_transformers_keeps": 7,
    },
    "decode/processors/test_new_samplers.py": {
        "test_new_processors_change_nothing_at_their_neutral_setting": 3,
        "test_new_processors_keep_the_laws": 3,
    },
    "decode/processors/test_processors_parity.py": {
        "test_combinations_write_the_tokens_of_generate": 17,
        "test_scores_and_order_are_those_of_transformers_list": 3,
    },
    "decode/stopping/test_stop_special.py": {
        "test_any_row_ends_where_its_text_with_the_named_tokens_first_holds_a_stop": 3,
        "test_rows_of_a_batch_end_at_the_token_and_show_the_text_before_it": 7,
    },
    "decode/stopping/test_stop_strings.py": {
        "test_a_row_ends_with_the_first_token_whose_text_holds_a_stop_string": 7,
        "test_a_stop_string_is_found_late_in_a_long_row_at_every_distance": 3,
    },
    "decode/stopping/test_stop_tail.py": {
        "test_the_end_is_that_of_the_whole_and_long_enough": 7,
    },
    "decode/test_choose.py": {
        "test_lanes_that_choose_together_write_what_each_writes_alone": 3,
    },
    "decode/test_compiled.py": {
        "test_compiled_steps_write_the_same_tokens": 0,
        "test_every_architecture_reads_a_cache_of_fixed_size": 3,
    },
    "decode/test_contract.py": {
        "test_a_fault_is_refused_by_every_way_in": 7,
        "test_an_encoder_decoder_is_refused": 3,
        "test_rounding_is_no_fault": 5,
    },
    "decode/test_cut_windows.py": {
        "test_beams_and_texts_without_a_cache_too": 11,
        "test_rows_that_are_read_again_go_on_as_before": 3,
        "test_texts_are_those_of_generate_alone_together_and_drafted": 7,
    },
    "decode/test_guidance.py": {
        "test_guided_greedy_text_equals_generate": 5,
    },
    "decode/test_length_rope.py": {
        "test_a_text_that_outgrows_its_bound_is_what_generate_writes": 11,
        "test_beams_that_outgrow_the_bound_are_those_of_generate": 7,
        "test_drafts_across_the_bound_write_what_greedy_writes": 5,
        "test_neighbours_of_other_lengths_change_nothing": 7,
        "test_rows_that_are_read_again_go_on_as_before": 5,
        "test_without_a_cache_too": 7,
    },
    "decode/test_parity.py": {
        "test_a_place_that_becomes_free_is_taken_without_changing_anybody": 3,
        "test_a_sampled_row_does_not_change_with_its_neighbours": 7,
        "test_greedy_equals_generate_alone_and_in_a_batch": 7,
        "test_seeded_sampling_equals_generate_after_manual_seed": 7,
        "test_several_eos_ids_end_a_row_and_nothing_follows": 3,
        "test_several_rows_of_one_prompt_without_a_cache": 7,
    },
    "decode/test_several_tokens.py": {
        "test_a_note_says_that_a_cache_changes_the_text": 3,
        "test_drafts_write_greedy_text_where_it_matters_how_a_text_is_cut": 7,
        "test_every_token_of_a_pass_has_logits_where_input_preparation_would_keep_the_last": 2,
        "test_nemotron_h_drafts_where_none_of_its_layers_keeps_a_state": 2,
    },
    "decode/test_shortage.py": {
        "test_lanes_step_back_and_go_on_with_the_same_tokens": 3,
    },
    "decode/test_threads.py": {
        "test_two_models_in_two_threads_do_not_meet": 3,
    },
    "decode/test_transfer.py": {
        "test_another_device_writes_the_same": 3,
    },
    "engines/ranks/test_ends.py": {
        "test_a_stopped_rank_ends_the_other_after_the_time_limit": 0,
        "test_ranks_end_with_their_launcher": 0,
    },
    "engines/ranks/test_fsdp.py": {
        "test_a_rank_that_is_killed_ends_the_other_with_a_message": 0,
        "test_two_ranks_write_what_one_process_writes": 0,
    },
    "engines/ranks/test_tensor_parallel.py": {
        "test_torchrun_writes_what_one_process_writes": 0,
    },
    "engines/server/test_hostile_server.py": {
        "test_a_charset_changes_nothing": 3,
        "test_a_pause_that_is_too_long_or_is_none_costs_no_time": 3,
        "test_an_answer_of_another_make_is_the_error_of_its_row": 3,
        "test_odd_fields_cost_no_row": 3,
        "test_the_time_of_a_row_is_kept_wherever_a_server_drips": 3,
    },
    "hostile/test_documents.py": {
        "test_what_is_no_document_is_refused_in_a_line": 5,
        "test_what_never_ends_is_refused_in_bounded_memory": 5,
    },
    "lm_eval/test_lm_eval.py": {
        "test_a_gguf_file_has_the_numbers_of_hf": 0,
        "test_arguments_mean_what_they_mean_in_hf": 3,
        "test_conversations_have_the_numbers_of_hf": 2,
        "test_every_sample_has_the_numbers_of_hf_at_any_batch_size": 7,
        "test_rounded_weights_and_gguf_at_any_batch_size": 0,
        "test_the_commands_of_the_guide": 0,
    },
    "models/test_adapter.py": {
        "test_embeddings_heads_and_biases_give_the_logits_of_peft": 7,
        "test_sizes_that_the_tensors_do_not_have_are_refused": 3,
    },
    "models/test_builtin_chat.py": {
        "test_the_template_gives_back_the_tokens_that_were_written": 3,
    },
    "models/test_config_rope.py": {
        "test_an_angle_that_cannot_be_computed_is_one_line": 5,
    },
    "models/test_damaged.py": {
        "test_a_damaged_checkpoint_is_refused_with_one_line": 5,
    },
    "models/test_detokenizer.py": {
        "test_a_fork_goes_its_own_way": 3,
        "test_pieces_of_any_ids_add_up_to_decode": 3,
        "test_pieces_of_any_text_add_up_to_decode": 3,
        "test_special_tokens_are_told_when_asked_for": 3,
        "test_what_was_told_stays_a_beginning_whatever_follows": 3,
    },
    "models/test_dtype.py": {
        "test_without_a_word_in_config_json_mixed_types_are_read_as_transformers_reads_them": 3,
    },
    "models/test_generation_settings.py": {
        "test_a_decoder_without_generation_config_takes_the_settings_in_config_json": 5,
        "test_an_encoder_decoder_without_generation_config_takes_the_settings_in_config_json": 11,
        "test_both_runtimes_and_transformers_have_the_same_special_ids": 5,
    },
    "models/test_gguf.py": {
        "test_every_end_token_of_a_gguf_file_ends_a_text": 11,
    },
    "models/test_gguf_damaged.py": {
        "test_a_file_that_lies_is_refused_with_one_line": 5,
    },
    "models/test_load.py": {
        "test_every_architecture_loads_as_it_was_saved": 3,
        "test_tiny_models_have_clear_winners_and_varied_text": 5,
    },
    "models/test_offload.py": {
        "test_a_checkpoint_larger_than_its_memory_runs_within_it": 0,
    },
    "models/test_packed_layers.py": {
        "test_every_architecture_computes_nearly_the_same_in_int8": 3,
        "test_every_architecture_computes_the_same_packed": 7,
    },
    "models/test_text_after_prompt.py": {
        "test_new_tokens_add_what_decode_adds_after_any_ids": 3,
        "test_new_tokens_add_what_decode_adds_after_any_text": 3,
        "test_tokens_that_were_cut_from_the_prompt_are_not_told_again": 3,
        "test_what_was_told_after_a_prompt_stays_a_beginning": 3,
    },
    "models/test_tokenizer_classes.py": {
        "test_a_class_and_its_fields": 5,
        "test_the_class_depends_on_the_model_type_too": 7,
    },
    "models/test_unused_tensors.py": {
        "test_what_nobody_misses": 5,
    },
    "native/test_bfloat16_products.py": {
        "test_a_weight_that_is_not_finite_spoils_its_output_alone": 5,
        "test_sums_of_integers_are_rounded_once": 5,
    },
    "native/test_blocks.py": {
        "test_a_row_has_the_same_bits_in_any_company": 5,
        "test_bits_are_those_of_every_instruction_set": 3,
        "test_products_are_those_of_float64": 5,
    },
    "native/test_build.py": {
        "test_dot_products_of_avxvnni_need_no_avx512": 0,
    },
    "native/test_flipped_fields.py": {
        "test_a_changed_field_is_refused_or_computed": 17,
    },
    "native/test_generate.py": {
        "test_beams_and_forms_of_cache": 7,
        "test_greedy_alone_and_together": 11,
    },
    "native/test_graphs.py": {
        "test_a_step_gives_the_logits_of_the_ordinary_one": 3,
    },
    "native/test_linear.py": {
        "test_every_form_computes_nearly_the_plain_product": 5,
    },
    "native/test_memory.py": {
        "test_a_run_holds_each_weight_once": 3,
    },
    "native/test_own_functions.py": {
        "test_a_native_pass_calls_no_function_of_torch_that_rounds": 11,
    },
    "native/test_parity.py": {
        "test_a_padded_batch_has_the_logits_of_each_row_alone": 7,
        "test_hidden_states_are_those_of_transformers": 5,
        "test_prompt_and_steps_have_the_logits_of_transformers": 7,
        "test_so_it_has_without_the_compiled_library": 5,
        "test_without_a_cache_a_text_has_the_same_logits": 5,
    },
    "native/test_products.py": {
        "test_a_prompt_that_no_cache_holds_keeps_the_bits": 3,
        "test_a_row_has_the_same_bits_in_any_company": 23,
        "test_bits_are_those_of_every_instruction_set": 5,
        "test_few_rows_of_many_inputs_keep_the_bits": 17,
        "test_many_rows_and_threads_keep_the_bits": 11,
        "test_numbers_that_are_not_finite_stay_in_their_row": 5,
        "test_outputs_in_runs_have_the_bits_of_outputs_side_by_side": 11,
        "test_outputs_that_are_turned_keep_the_bits": 5,
        "test_products_are_those_of_float64": 5,
        "test_products_of_one_call_have_the_bits_of_calls_of_their_own": 5,
    },
    "native/test_real_configs.py": {
        "test_auto_is_native_and_logits_and_texts_are_those_of_transformers": 11,
    },
    "native/test_same_bits.py": {
        "test_a_query_has_the_bits_it_has_alone": 5,
        "test_a_row_has_its_bits_in_any_batch_and_with_any_threads": 7,
        "test_other_types_have_their_bits_in_any_batch": 3,
    },
    "native/test_seq2seq_generate.py": {
        "test_a_lane_that_joins_later_is_padded": 3,
        "test_beams_alone_and_together": 7,
        "test_contrastive_search_reads_hidden_states": 3,
        "test_forms_of_cache": 3,
        "test_greedy_alone_and_together": 7,
    },
    "native/test_seq2seq_parity.py": {
        "test_a_source_has_the_states_of_transformers": 5,
        "test_hidden_states_are_those_of_transformers": 5,
        "test_padded_rows_have_the_logits_of_each_row_alone": 3,
        "test_padded_rows_with_the_products_of_torch": 7,
        "test_prompt_and_steps_have_the_logits_of_transformers": 7,
    },
    "native/test_seq2seq_spec.py": {
        "test_every_variation_is_known": 5,
        "test_what_a_file_holds_of_the_embeddings": 5,
    },
    "native/test_spec.py": {
        "test_every_variation_is_known": 5,
    },
    "native/test_steps.py": {
        "test_every_encoder_decoder_has_the_bits_of_its_decoder": 23,
        "test_every_family_has_the_bits_of_its_decoder": 7,
        "test_every_type_of_weights_has_the_bits_of_the_decoder": 3,
        "test_every_variation_of_a_family_has_the_bits_of_its_decoder": 11,
        "test_very_long_passes_and_other_forms_of_a_cache_are_left_to_the_decoder": 0,
    },
    "pages/test_page.py": {
        "test_nothing_that_a_model_or_a_prompt_says_becomes_markup": 5,
        "test_ten_thousand_tokens_with_eight_beams_are_under_two_megabytes_and_the_page_says_what_is_left_out": 0,
    },
    "parity/test_fault.py": {
        "test_the_first_sublayer_that_parts_is_found": 11,
    },
    "parity/test_fault_across.py": {
        "test_a_fault_is_found_in_its_layer_across_runtimes": 17,
        "test_no_layer_is_named_where_only_sums_differ": 17,
    },
    "parity/test_measure.py": {
        "test_native_ways_of_running_read_the_same_bits": 5,
    },
    "parity/test_verdict.py": {
        "test_a_fault_in_a_quantised_side_is_a_defect_on_a_short_text": 11,
        "test_a_fault_in_a_rounded_side_is_a_defect": 11,
        "test_a_harmless_change_is_a_tie": 11,
        "test_a_planted_fault_is_a_defect": 11,
        "test_a_planted_fault_is_a_defect_in_other_families": 5,
        "test_another_attention_and_a_batch_of_transformers_are_ties": 3,
        "test_int8_weights_of_transformers_classes_are_drift_beside_native_weights": 5,
        "test_int8_weights_of_transformers_classes_are_drift_on_either_side": 11,
        "test_quantised_weights_are_drift_beside_transformers_classes": 2,
        "test_quantised_weights_are_drift_on_short_texts": 5,
        "test_rounded_weights_are_drift": 5,
    },
    "strategies/assisted/test_amateur.py": {
        "test_greedy_text_is_that_of_the_formula": 3,
    },
    "strategies/assisted/test_assisted_greedy.py": {
        "test_greedy_text_is_that_of_plain_greedy_decoding": 3,
        "test_token_ids_are_those_of_generate_with_an_assistant": 3,
    },
    "strategies/assisted/test_dola.py": {
        "test_token_ids_are_those_of_transformers_4": 11,
    },
    "strategies/assisted/test_draft_length.py": {
        "test_greedy_text_is_that_of_plain_greedy_decoding": 11,
    },
    "strategies/assisted/test_exact_distribution.py": {
        "test_draws_follow_the_models_processed_distribution": 3,
    },
    "strategies/assisted/test_unfit_architectures.py": {
        "test_what_cannot_be_read_is_refused_in_a_sentence": 5,
    },
    "strategies/test_beam_parity.py": {
        "test_a_criterion_ends_a_beam_as_an_eos_does": 3,
        "test_beams_alone_in_a_batch_and_in_a_narrow_one": 7,
        "test_every_length_penalty_and_early_stopping": 5,
        "test_processors_see_log_probabilities": 3,
        "test_seeded_beam_sampling_equals_generate_after_manual_seed": 7,
        "test_where_filters_leave_too_few_candidates_the_real_rows_of_generate_are_returned": 2,
    },
    "strategies/test_brute_force.py": {
        "test_a_beam_as_wide_as_the_space_finds_the_optimum_and_ranks_everything": 3,
        "test_a_wide_constrained_beam_finds_the_best_text_that_keeps_its_promises": 11,
        "test_every_result_of_a_narrow_constrained_beam_keeps_its_promises": 5,
    },
    "strategies/test_hypothesis_scores.py": {
        "test_the_score_of_a_hypothesis_is_that_of_its_text": 7,
    },
    "strategies/test_sample_draw.py": {
        "test_draws_are_those_of_torch_multinomial": 3,
    },
    "terminal/test_beam.py": {
        "test_the_screen_is_never_exceeded_and_nothing_is_left_of_what_moved": 5,
    },
    "terminal/test_growth.py": {
        "test_what_shows_a_recording": 5,
    },
    "terminal/test_run_view.py": {
        "test_nothing_is_lost_however_small_the_terminal": 5,
    },
    "terminal/test_word_wrap.py": {
        "test_no_word_is_cut_however_the_text_is_divided_into_tokens": 3,
    },
    "test_bench.py": {
        "test_a_side_is_pinned_to_its_cores_whatever_it_inherits": 0,
        "test_commands_write_the_same_tokens_and_say_when_the_first_came": 0,
    },
    "test_children.py": {
        "test_the_compiler_runs_nothing_of_the_working_directory": 0,
    },
    "test_independence.py": {
        "test_a_prompt_alone_in_a_batch_and_in_another_order": 7,
    },
    "tree/test_branches.py": {
        "test_the_scores_after_every_node_are_those_of_its_text_alone": 7,
        "test_the_tokens_are_those_of_a_run_with_the_same_ids": 7,
    },
    "tree/test_expanding.py": {
        "test_they_are_those_of_an_enumeration": 3,
    },
    "tree/test_growth.py": {
        "test_as_many_commands_as_there_are_tokens": 7,
        "test_the_token_under_the_cursor_is_found_without_a_walk": 0,
        "test_what_shows_a_tree": 11,
    },
    "tree/test_journal.py": {
        "test_a_command_that_was_killed_is_finished_with_equal_bytes": 3,
        "test_a_kill_at_each_line_of_a_command_ends_with_equal_bytes": 3,
        "test_a_killed_process_loses_one_token_at_most": 0,
    },
    "tree/test_valid.py": {
        "test_a_command_says_so_in_a_line_and_a_hint": 2,
    },
    "zoo/test_zoo.py": {
        "test_one_of_each_kind_writes_what_generate_writes": 5,
    },
}

# What depends on the version of transformers: goldens, architectures in both runtimes, processors and searches against
# `generate()`, loading, tokenizers. `scripts/test --oldest` runs these files with the oldest version.
OLDEST = (
    "test_compat.py",
    "test_independence.py",
    "cli/test_run.py",
    "cli/test_beam.py",
    "decode/cache",
    "decode/processors",
    "decode/test_compiled.py",
    "decode/test_length_rope.py",
    "decode/test_parity.py",
    "engines/local",
    "models",
    "native/test_flipped_fields.py",
    "native/test_generate.py",
    "native/test_parity.py",
    "native/test_real_configs.py",
    "native/test_seq2seq_generate.py",
    "native/test_seq2seq_parity.py",
    "strategies",
)

# The files that take longest, in this order: they come first, so that no worker is left alone with one at the end.
SLOWEST = (
    "parity/test_verdict.py",
    "native/test_flipped_fields.py",
    "lm_eval/test_lm_eval.py",
    "native/test_steps.py",
    "parity/test_fault_across.py",
    "engines/server/test_hostile_server.py",
    "engines/ranks/test_ends.py",
    "commands/chat/test_terminal.py",
    "engines/ranks/test_fsdp.py",
    "commands/explore/test_screen.py",
    "commands/parity/test_parity_command.py",
    "commands/inspect/test_plan_measured.py",
    "hostile/test_checkpoints.py",
    "cli/test_interrupts.py",
    "decode/test_parity.py",
    "native/test_parity.py",
    "strategies/test_beam_parity.py",
    "native/test_generate.py",
    "cli/test_resume.py",
    "cli/test_process.py",
    "decode/processors/test_processors_parity.py",
    "zoo/test_zoo.py",
    "tree/test_grammars.py",
    "cli/test_standard_streams.py",
    "native/test_products.py",
    "test_readme.py",
    "native/test_same_bits.py",
    "cli/test_torture.py",
    "models/test_runtime.py",
    "engines/ranks/test_tensor_parallel.py",
    "commands/parity/test_golden.py",
    "commands/explore/test_terminal.py",
    "decode/processors/grammar/test_grammar_budget.py",
    "models/test_offload.py",
    "parity/test_fault.py",
    "commands/inspect/test_saved.py",
    "commands/inspect/test_plan.py",
    "decode/test_length_rope.py",
    "test_bench.py",
    "commands/parity/test_pytest_plugin.py",
    "decode/test_several_tokens.py",
    "models/test_generation_settings.py",
    "cli/test_first_sign.py",
    "commands/inspect/test_inspect_command.py",
    "test_house.py",
    "terminal/test_screens.py",
    "test_independence.py",
    "decode/test_compiled.py",
    "cli/test_presets_run.py",
    "engines/server/test_remote_run.py",
    "native/test_seq2seq_generate.py",
    "decode/processors/test_filters.py",
    "commands/compare/test_compare.py",
    "native/test_real_configs.py",
    "commands/chat/test_script.py",
    "engines/server/test_failures.py",
    "strategies/test_brute_force.py",
)


def name_of(path: Path) -> str:
    """The name of a file of tests in these tables."""
    return path.relative_to(ROOT).as_posix()


def rank(path: Path) -> int:
    """The place of a file among the slowest; the others are behind them."""
    name = name_of(path)
    return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)


def is_everyday(path: Path, name: str, cell: int) -> bool:
    """Whether a test of the file `path` runs every day: `name` with its parameters, cell number `cell` of its test."""
    test, _, parameters = name.removesuffix("]").partition("[")
    stays = WIDE.get(name_of(path), {}).get(test)
    if stays is None:
        return True
    if isinstance(stays, int):
        return stays > 0 and cell % stays == 0
    return any(fnmatchcase(parameters, pattern) for pattern in stays)
