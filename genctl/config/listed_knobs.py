"""What the lists [[processors]] and [[stopping]] may name, each with its knobs and in its default order."""
# ruff: noqa: SIM905 — a long list of names reads best as one text

from __future__ import annotations

# What [[processors]] may name, in the order in which processors are applied by default, each with its knobs: the first
# one turns it on. `decode.processors.build` says why this order.
PROCESSORS: dict[str, tuple[str, ...]] = {
    name: (name,)
    for name in (
        "guidance_scale sequence_bias logit_bias encoder_repetition_penalty repetition_penalty presence_penalty "
        "frequency_penalty dry no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids bad_words min_length "
        "min_new_tokens forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
        "suppress_tokens begin_suppress_tokens json_schema regex grammar prefix top_n_sigma temperature dynatemp top_h "
        "top_k top_p min_p typical_p epsilon_cutoff eta_cutoff xtc mirostat watermarking_config renormalize_logits"
    ).split()
} | {
    "dry": ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers"),
    "dynatemp": ("dynatemp_range", "dynatemp_exponent", "temperature"),
    "xtc": ("xtc_probability", "xtc_threshold"),
    "mirostat": ("mirostat_tau", "mirostat_eta"),
}

# What [[stopping]] may name, in the order in which criteria are called by default, each with the keys that it takes.
CRITERIA: dict[str, tuple[str, ...]] = {
    "max_time": ("max_time",),
    "stop_strings": ("stop_strings",),
    "stop_token_ids": ("stop_token_ids",),
    "stop_regex": ("stop_regex",),
    "stop_mean_logprob": ("stop_mean_logprob", "min_tokens"),
    "stop_repeat_ngram": ("stop_repeat_ngram", "stop_repeat_times"),
}
