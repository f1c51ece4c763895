"""Fields of transformers' GenerationConfig that genctl does not support, each with the reason."""

from __future__ import annotations

_EVENTS = "genctl reports events instead of tensors; use --scores, --top-logprobs or --events"

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
