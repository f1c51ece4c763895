"""The attributes of transformers' GenerationConfig, and those that genctl does not support.

Of config.json these alone are settings: others are the model's.
"""

from __future__ import annotations

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
