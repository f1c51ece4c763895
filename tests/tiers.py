"""The everyday tier: one architecture for each kind of cache, each command once, and the checks of all files.

Each file has patterns for the names of its everyday tests, parameters included; without a pattern all of its tests are
everyday ones. Caches: growing (llama, gpt2), sliding window (mistral, gemma2), recurrent (mamba), encoder-decoder (t5),
8-bit, static.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

_CACHES = ("*[[]llama*", "*[[]mistral*", "*[[]mamba*", "*[[]t5*", "*-llama*", "*-mistral*", "*-mamba*", "*-t5*")

EVERYDAY: dict[str, tuple[str, ...]] = {
    # all files
    "test_house.py": ("test_a_room_*", "test_importing_*", "*[[]arguments0*"),
    "test_structure.py": (),
    "test_docs.py": (),
    "test_compat.py": (),
    # every kind of cache against generate()
    "decode/test_parity.py": _CACHES,
    "decode/test_loop.py": (),
    "decode/test_choose.py": (),
    "native/test_parity.py": ("*[[]llama[]-]*", "*[[]gpt2[]-]*", "*[[]mistral[]-]*", "*[[]gemma2[]-]*"),
    "native/test_generate.py": ("*[[]llama[]]", "*[[]mistral[]]"),
    "native/test_seq2seq_parity.py": ("*[[]t5[]-]*",),
    "native/test_seq2seq_generate.py": ("*[[]t5[]]", "*[[]t5-*"),
    "native/test_linear.py": ("test_*int8*", "test_rows_*"),
    "native/test_spec.py": (),
    "commands/inspect/test_static.py": ("*[[]llama[]]", "test_rows_*"),
    "decode/cache/test_layers.py": (),
    "models/test_packed_layers.py": ("*int8[[]llama[]]", "test_int8_weights_*", "test_rows_do_not_depend_*"),
    "test_independence.py": ("*llama*", "*t5*"),
    # searches, processors, stops, grammars
    "strategies/test_brute_force.py": (),
    "strategies/test_beam_parity.py": _CACHES,
    "strategies/test_choose.py": (),
    "strategies/assisted/test_assisted_greedy.py": _CACHES,
    "decode/processors/test_build.py": (),
    "decode/processors/test_filters.py": (),
    "decode/stopping/test_stop_strings.py": (),
    "decode/stopping/test_stop_build.py": (),
    "decode/processors/grammar/test_grammar_decoding.py": (),
    "decode/processors/grammar/test_grammar_sources.py": (),
    "decode/processors/prefix/test_prefix.py": (),
    # settings, checkpoints, rows
    "config/test_precedence.py": (),
    "config/test_all_at_once.py": (),
    "config/test_presets_command.py": (),
    "models/test_load.py": _CACHES,
    "io/test_batch_records.py": (),
    "io/test_batch_readers.py": (),
    "io/test_batch_writers.py": (),
    "hostile/test_checkpoints.py": ("test_the_same_folder_*", "test_nothing_in_a_folder_*"),
    # two sides side by side
    "parity/test_statistics.py": (),
    "parity/test_verdict.py": ("*-gpt2-native[]]", "*llama-another order*", "*[[]llama-int8[]]"),
    # each command
    "commands/explore/test_explore.py": ("test_a_row_*", "test_a_script_*", "test_a_saved_*"),
    "tree/test_properties.py": ("test_the_file_*", "test_undo_*"),
    "tree/test_branches.py": _CACHES,
    "tree/test_expanding.py": ("*[[]*-llama[]]",),
    "cli/test_run.py": (),
    "cli/test_beam.py": ("test_a_pipe_*", "test_the_n_best_*"),
    "cli/test_replay.py": ("test_a_pipe_*",),
    "cli/test_help.py": (),
    "commands/chat/test_script.py": ("*[[]chatml-*", "test_text_*", "test_a_row_*"),
    "commands/chat/test_saved.py": (),
    "commands/chat/test_words.py": (),
    "commands/chat/test_terminal.py": ("*[[]80[]]", "test_ctrl_c_*", "test_a_dumb_*"),
    "cli/test_table.py": (),
    "commands/compare/test_compare.py": ("test_five_strategies_*", "test_records_are_*"),
    "commands/inspect/test_inspect_command.py": (
        "test_json_is_*",
        "test_a_saved_prompt_serves_the_commands*",
        "test_every_form_*",
    ),
    "commands/explore/test_flow.py": (),
    "commands/explore/test_worker.py": (),
    "commands/explore/test_screen.py": ("test_space_*", "test_enter_takes_*", "test_s_changes_*", "test_u_undoes_*"),
    "lm_eval/test_lm_eval.py": (
        "test_arguments_that_cannot_*",
        "test_arguments_mean_*max_length*",
        "test_conversations_*",
    ),
    "commands/score/test_score_command.py": ("test_a_record_*", "test_a_target_*"),
    "commands/parity/test_sides.py": (),
    "commands/parity/test_parity_command.py": ("test_equal_sides_*", "test_what_cannot_be_*", "test_tsv_*"),
    "commands/parity/test_golden.py": ("test_the_same_side_*", "test_changed_weights_*", "test_a_damaged_*"),
    "commands/parity/test_pytest_plugin.py": ("test_a_missing_*", "test_the_plugin_*"),
    "engines/server/test_remote_run.py": ("test_a_record_*", "test_every_knob_*", "test_no_torch_*"),
    "engines/server/test_failures.py": ("test_what_fails_at_first_*",),
    "engines/server/test_batch_files.py": ("test_a_row_is_*", "test_results_are_*"),
    "engines/pool/test_failures.py": ("test_what_does_not_fit_*", "test_without_ray_*", "test_cores_*"),
    "pages/test_page.py": ("test_nothing_*", "test_the_policy_*", "test_equal_*"),
    "pages/test_report_command.py": ("test_a_run_is_*", "test_a_recording_makes_*"),
    "terminal/test_run_view.py": (),
    "terminal/test_beam.py": (),
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


def rank(path: Path) -> int:
    """The place of a file (relative to tests/) among the slowest; the others are behind them."""
    return SLOWEST.index(path.as_posix()) if path.as_posix() in SLOWEST else len(SLOWEST)


def patterns(path: Path) -> tuple[str, ...] | None:
    """Which tests of a file (relative to tests/) are everyday ones; none where the file has none."""
    return EVERYDAY.get(path.as_posix())


def is_everyday(path: Path, name: str) -> bool:
    """Whether the test `name`, with its parameters, of the file `path` runs every day."""
    found = patterns(path)
    return found is not None and (not found or any(fnmatchcase(name, pattern) for pattern in found))
