"""Build tokenizers as transformers' tokenizer classes do (transformers 5, `models/*/tokenization_*.py`).

Vocabulary, merges and post-processor come from tokenizer.json; the class sets all other parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genctl.models.tokenizer_files import UnsupportedTokenizer

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass
class Fields:
    """The input of a recipe: the settings of tokenizer_config.json and the files beside it, and tokenizer.json."""

    settings: dict[str, Any]  # tokens as str or AddedToken
    file: dict[str, Any]

    def flag(self, name: str, default: bool) -> bool:
        """A boolean setting; null counts as the default."""
        value = self.settings.get(name)
        if value is not None and not isinstance(value, bool):
            raise UnsupportedTokenizer(f"{name} = {value!r:.40} is neither true nor false")
        return default if value is None else value

    def bpe(self, **options: Any) -> Tokenizer:
        """A tokenizer with the vocabulary and the merges of the file, and nothing else."""
        merges = self.file["model"].get("merges") or []
        pairs: list[Any] = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
        return Tokenizer(models.BPE(vocab=self.file["model"]["vocab"], merges=pairs, dropout=None, **options))


def post_processor(file: dict[str, Any]) -> Any:
    """The post-processor of tokenizer.json, or None."""
    if file.get("post_processor") is None:
        return None
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**empty, "post_processor": file["post_processor"]})).post_processor


def alone() -> Any:
    """A post-processor that adds no token."""
    return processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def _byte_level(fields: Fields, *, composed: bool = True, split: str = "", trims: bool = False) -> Tokenizer:
    tokenizer = fields.bpe(continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    tokenizer.decoder = decoders.ByteLevel()
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = last = pre_tokenizers.ByteLevel(
        add_prefix_space=fields.flag("add_prefix_space", False),
        trim_offsets=fields.flag("trim_offsets", True) if trims else True,
        use_regex=not split,
    )
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), last])
    return tokenizer


def _llama(fields: Fields) -> Tokenizer:
    space = fields.flag("add_prefix_space", True)
    first = "always" if fields.flag("legacy", False) else "first"
    tokenizer = fields.bpe(fuse_unk=True, byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=first if space else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if space else steps)
    return tokenizer


def _gemma(fields: Fields) -> Tokenizer:
    tokenizer = fields.bpe(fuse_unk=True, unk_token=str(fields.settings.get("unk_token")), byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


class Recipe(NamedTuple):
    """How one class builds its tokenizer, and its default special tokens."""

    parts: Callable[[Fields], Tokenizer]
    tokens: dict[str, str | None]


def _recipe(parts: Callable[[Fields], Tokenizer], **tokens: str | None) -> Recipe:
    return Recipe(parts, {f"{name}_token": token for name, token in tokens.items()})


_END = "<|endoftext|>"
RECIPES: dict[str, Recipe] = {
    "GPT2Tokenizer": _recipe(partial(_byte_level, composed=False), unk=_END, bos=_END, eos=_END, pad=None),
    "GPTNeoXTokenizer": _recipe(partial(_byte_level, trims=True), unk=_END, bos=_END, eos=_END, pad="<|padding|>"),
    "Qwen2Tokenizer": _recipe(partial(_byte_level, split=_QWEN2), unk=_END, bos=None, eos=_END, pad=_END),
    "LlamaTokenizer": _recipe(_llama, bos="<s>", eos="</s>", unk="<unk>"),
    "GemmaTokenizer": _recipe(_gemma, unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>"),
}
