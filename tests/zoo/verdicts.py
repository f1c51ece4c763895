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

# name -> why what it draws cannot be compared
NOT_DRAWN: dict[str, str] = {"causal/reformer": "its forward seeds the generator that generate() draws from"}

# name -> why genctl writes something else, or ends in an error that is none of ours
KNOWN_DIFFERENT: dict[str, str] = {}
