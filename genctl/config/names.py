"""Lists of the names of settings, and of their names in other tools."""

from __future__ import annotations

# -- who may set what --------------------------------------------------------------------------------------------------

# Switches that run code from a file: only a flag and the user's own config.toml can set them.
UNSAFE = ("trust_remote_code", "allow_pickle", "allow_plugins")

# Knobs of a run that its rows share, besides those of the model.
OF_RUN = ("batch_size", "prompt_cache", "draft", "draft_corpus")

# knobs that name files -> the rest of the flag, and the alternative in a row
FILES = {
    "json_schema": "FILE, or give the schema itself",
    "grammar": "FILE, or give the grammar itself",
    "assistant_model": "NAME; a row can name a built-in or a Hub checkpoint",
    "amateur_model": "NAME; a row can name a built-in or a Hub checkpoint",
}

# Entries of a generation_config about the file itself, and fields that change no text.
BOOKKEEPING = {
    "transformers_version", "_from_model_config", "_commit_hash", "generation_kwargs", "is_assistant",
    "trust_remote_code", "num_assistant_tokens_schedule",
}  # fmt: skip

# Keys that a downloaded checkpoint may not set: they name other files, checkpoints or code to load.
OUTWARD = {
    **dict.fromkeys(("json_schema", "grammar"), "a file"),
    **dict.fromkeys(("assistant_model", "amateur_model"), "another checkpoint"),
    **dict.fromkeys(("processors", "stopping"), "code"),
}

# -- how knobs of sampling and search work together --------------------------------------------------------------------

# Sampling knobs with another use: contrastive search takes its candidates by top_k.
ALSO_READ_BY = {"top_k": ("penalty_alpha",)}

# Searches that take the most probable continuations unless do_sample is set, as in transformers.
SEARCHES = ("num_beams", "num_beam_groups", "penalty_alpha", "force_words", "force_words_ids")

# -- names in other tools ----------------------------------------------------------------------------------------------

# Names of knobs in other tools.
ALIASES = {
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "max_tokens_to_sample": "max_new_tokens",
    "max_gen_len": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "temp": "temperature",
    "n": "num_return_sequences",
    "num_samples": "num_return_sequences",
    "beams": "num_beams",
    "beam_size": "num_beams",
    "beam_width": "num_beams",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_last_n",
    "stop": "stop_strings",
    "stop_sequences": "stop_strings",
    "stop_words": "stop_strings",
    "logits_bias": "logit_bias",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "sample": "do_sample",
    "sampling": "do_sample",
    "typical": "typical_p",
    "random_seed": "seed",
    "model_name": "model",
    "model_name_or_path": "model",
    "checkpoint": "model",
    "torch_dtype": "dtype",
    "system_prompt": "system",
    "cache": "cache_implementation",
}

# Names of choices in other tools.
CHOICES_ELSEWHERE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

# -- the attributes of transformers' GenerationConfig. In config.json only these are settings: others are the model's --

_FIELDS = """
assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids
begin_suppress_tokens bos_token_id cache_config cache_implementation compile_config constraints
continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers
early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant
length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length
min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id penalty_alpha
prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty
return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature
token_healing top_h top_k top_p typical_p use_cache use_mtp watermarking_config
"""
FIELDS = tuple(_FIELDS.split())

_EVENTS = "genctl reports events instead of tensors; use --scores, --top-logprobs or --events"

# fields that are not supported, each with the reason
REFUSED: dict[str, str] = {
    "output_attentions": "genctl does not return attention maps; use transformers for those",
    "output_hidden_states": "genctl does not return hidden states; use transformers for those",
    "output_scores": _EVENTS,
    "output_logits": _EVENTS,
    "return_dict_in_generate": _EVENTS,
    "use_mtp": "genctl does not use multi-token prediction heads; see the assisted strategies",
    "speculation_type": "names a drafting scheme of transformers' own loop, which genctl does not run",
    "num_assistant_tokens_schedule": "genctl drafts as many tokens as pay; num_assistant_tokens fixes their number",
    "is_assistant": "an internal mark of transformers; name the draft model with assistant_model",
    "assistant_ensemble_weight": "mixes in the assistant's distribution; with genctl the text is the model's own",
    "cache_config": "fields of transformers' cache classes; genctl has its own caches",
    "max_cache_len": "sizes transformers' static caches; genctl's caches grow with the text",
    "compile_config": "genctl chooses torch.compile's options itself; use compile = true",
    "disable_compile": "genctl compiles nothing unless compile = true",
    "continuous_batching_config": "deprecated in transformers; genctl always batches continuously, see batch_size",
    "constraints": "takes Python objects; use force_words or force_words_ids",
    "low_memory": "has no effect in transformers any more; batch_size limits what is computed at once",
    "prefill_chunk_size": "genctl reads a prompt in one pass",
}
