"""What is not simply equal: refused with a sentence, or not right yet."""

from __future__ import annotations

_NO_HEAD = r"^\w+ has no language-model head, so it cannot generate text"

# name -> a pattern that the sentence matches
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        [
            "causal/dots3_note",
            "causal/emu3",
            "causal/llama4",
            "causal/mllama",
            "causal/qwen3_5",
            "causal/qwen3_5_moe",
            "causal/qwen4_exp",
            "seq2seq/audioflamingo3",
            "seq2seq/glmasr",
            "seq2seq/granite_speech",
            "seq2seq/granite_speech_plus",
            "seq2seq/nemo_speechlm",
            "seq2seq/qwen2_audio",
            "seq2seq/qwen3_asr",
            "seq2seq/vibevoice_asr",
            "seq2seq/voxtral",
        ],
        _NO_HEAD,
    ),
    "seq2seq/musicflamingo": r"^config.json says max_position_embeddings = 1200\.0",
}

_TOGETHER = "together with other prompts: positions come from the cache's length, or padding is not masked"
_STATE = "several rows: a state in the cache, or in the module, is not selected with its row"
_FED = "a step is fed one token, and its forward takes no cache of transformers' kind"
_ROUTER = "the encoder's output lacks router_logits"

# name -> why genctl writes something else, or ends in an error that is none of ours. To be emptied.
KNOWN_DIFFERENT: dict[str, str] = {
    "causal/bart": _TOGETHER,
    "causal/bigbird_pegasus": _TOGETHER,
    "causal/blenderbot": _TOGETHER,
    "causal/blenderbot-small": _TOGETHER,
    "causal/blt": "its config names no layers to make a cache for",
    "causal/cpmant": "the bias of positions is made for all tokens, but a step is fed one",
    "causal/deepseek_v4": _STATE,
    "causal/git": _TOGETHER,
    "causal/marian": _TOGETHER,
    "causal/mbart": _TOGETHER,
    "causal/moss_transcribe_diarize": _TOGETHER,
    "causal/mvp": _TOGETHER,
    "causal/openai-gpt": _FED,
    "causal/pegasus": _TOGETHER,
    "causal/phi3+longrope": "past the original context other factors hold, and all keys must be made anew",
    "causal/phi4_multimodal+longrope": "as phi3+longrope",
    "causal/plbart": _TOGETHER,
    "causal/prophetnet": _TOGETHER,
    "causal/qwen4_exp_text": _STATE,
    "causal/recurrent_gemma": _STATE,
    "causal/reformer": "it wants a cache of its own and a mask",
    "causal/roformer": _TOGETHER,
    "causal/rwkv": _STATE,
    "causal/trocr": _TOGETHER,
    "causal/whisper": _TOGETHER,
    "causal/xlm": _FED,
    "causal/xlnet": _TOGETHER,
    "seq2seq/moss_transcribe_diarize": _TOGETHER,
    "seq2seq/nllb-moe": _ROUTER,
    "seq2seq/switch_transformers": _ROUTER,
    "seq2seq/t5gemma": "windows of the decoder are laid upon the cross-attention cache",
    "seq2seq/t5gemma2": "windows of the decoder are laid upon the cross-attention cache",
}
