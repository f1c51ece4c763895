"""Build tokenizers as transformers' tokenizer classes do (transformers 5, `models/*/tokenization_*.py`).

Vocabulary, merges and post-processor come from tokenizer.json; the class sets all other parts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genctl.models.tokenizer_files import UnsupportedTokenizer

QWEN2 = (
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

    def token(self, name: str) -> str:
        """The text of a special token."""
        return str(self.settings.get(name))

    @property
    def vocabulary(self) -> Any:
        """token -> id for BPE, (token, score) for Unigram."""
        vocabulary = self.file["model"]["vocab"]
        return vocabulary if isinstance(vocabulary, dict) else [(str(token), score) for token, score in vocabulary]

    @property
    def merges(self) -> Any:
        """Pairs of tokens, by priority."""
        merges = self.file["model"].get("merges") or []
        return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]

    @property
    def charsmap(self) -> Any:
        """SentencePiece's normalizer, or None if the file has none."""
        normalizer = self.file.get("normalizer")
        if not isinstance(normalizer, dict):
            return None
        steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
        maps = (step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled")
        text = next(maps, None)
        return None if text is None else normalizers.Precompiled(base64.b64decode(text))


def post_processor(file: dict[str, Any]) -> Any:
    """The post-processor of tokenizer.json, or None."""
    if file.get("post_processor") is None:
        return None
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**empty, "post_processor": file["post_processor"]})).post_processor


def _nothing(backend: Tokenizer, fields: Fields, special: dict[str, Any]) -> None:
    """The default of `Recipe.finish`."""


@dataclass(frozen=True)
class Recipe:
    """How one class builds its tokenizer: its parts, its default special tokens, and the last step."""

    parts: Callable[[Fields], Tokenizer]
    tokens: dict[str, str | None]
    finish: Callable[[Tokenizer, Fields, dict[str, Any]], None] = _nothing
    model: str = "BPE"
    extra: Callable[[Fields], None] = field(default=lambda fields: None)  # sets extra_special_tokens


def _byte_level_bpe(fields: Fields) -> Tokenizer:
    model = models.BPE(
        vocab=fields.vocabulary,
        merges=fields.merges,
        dropout=None,
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2(fields: Fields) -> Tokenizer:
    tokenizer = _byte_level_bpe(fields)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=fields.flag("add_prefix_space", False))
    return tokenizer


def _codegen(fields: Fields) -> Tokenizer:
    tokenizer = _gpt2(fields)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, use_regex=True, trim_offsets=False)
    return tokenizer


def _gpt_neox(fields: Fields) -> Tokenizer:
    tokenizer = _byte_level_bpe(fields)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=fields.flag("add_prefix_space", False), trim_offsets=fields.flag("trim_offsets", True)
    )
    return tokenizer


def _qwen2(fields: Fields) -> Tokenizer:
    tokenizer = _byte_level_bpe(fields)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=fields.flag("add_prefix_space", False), use_regex=False),
        ]
    )
    return tokenizer


def _cohere(fields: Fields) -> Tokenizer:
    space = fields.flag("add_prefix_space", False)
    tokenizer = _byte_level_bpe(fields)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=space)]
    )
    return tokenizer


def _llama(fields: Fields) -> Tokenizer:
    space = fields.flag("add_prefix_space", True)
    first = "always" if fields.flag("legacy", False) else "first"
    tokenizer = Tokenizer(
        models.BPE(vocab=fields.vocabulary, merges=fields.merges, fuse_unk=True, byte_fallback=True, dropout=None)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=first if space else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if space else steps)
    return tokenizer


def _gemma(fields: Fields) -> Tokenizer:
    model = models.BPE(
        vocab=fields.vocabulary,
        merges=fields.merges,
        fuse_unk=True,
        unk_token=fields.token("unk_token"),
        dropout=None,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def _t5(fields: Fields) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram(fields.vocabulary, unk_id=2, byte_fallback=False))
    if (charsmap := fields.charsmap) is not None:
        tokenizer.normalizer = charsmap
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    return tokenizer


def _pegasus(fields: Fields) -> Tokenizer:
    vocabulary = fields.vocabulary
    unknown = (fields.token("unk_token"), 0.0)
    if unknown not in vocabulary[1:]:
        raise UnsupportedTokenizer("its vocabulary lacks the unknown token")
    tokenizer = Tokenizer(models.Unigram(vocab=vocabulary, unk_id=vocabulary.index(unknown, 1)))
    first = fields.charsmap or normalizers.Replace(Regex(r"\n"), " ")
    tokenizer.normalizer = normalizers.Sequence([first, normalizers.Replace(Regex(r" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    return tokenizer


def _count(fields: Fields, name: str, default: int) -> int:
    value = fields.settings.get(name, default)
    if type(value) is not int:
        raise UnsupportedTokenizer(f"{name} = {value!r:.40} is no whole number")
    return value


def _t5_extra(fields: Fields) -> None:
    count, listed = _count(fields, "extra_ids", 100), fields.settings.pop("additional_special_tokens", None)
    extra = [f"<extra_id_{n}>" for n in range(count)]
    own = [token for token in listed or () if "<extra_id_" in str(token)]
    if own and count > 0 and count != len(own):
        raise UnsupportedTokenizer("extra_ids and additional_special_tokens contradict each other")
    fields.settings.setdefault("extra_special_tokens", listed if own else [*(listed or ()), *extra])


def _pegasus_extra(fields: Fields) -> None:
    mask = fields.settings.pop("mask_token_sent", "<mask_1>")
    listed = fields.settings.pop("additional_special_tokens", None)
    own = listed is not None and mask in listed
    extra = [] if own or mask is None else [mask]
    extra += [f"<unk_{n}>" for n in range(2, _count(fields, "offset", 103))]
    fields.settings.setdefault("extra_special_tokens", extra)


def _qwen2_end(backend: Tokenizer, fields: Fields, special: dict[str, Any]) -> None:
    extra = fields.settings.get("extra_special_tokens") or []
    names = dict.fromkeys([*map(str, special.values()), *map(str, extra)])
    backend.add_tokens([AddedToken(token, special=True) for token in names])


def _cohere_end(backend: Tokenizer, fields: Fields, special: dict[str, Any]) -> None:
    """Add the special tokens again, as its class does: a token of the file that is named as one becomes special."""
    tokens = [token for token in (*special.values(), *(fields.settings.get("extra_special_tokens") or ())) if token]
    backend.add_special_tokens(
        [token if isinstance(token, AddedToken) else AddedToken(token, normalized=False) for token in tokens]
    )


def _gpt_neox_end(backend: Tokenizer, fields: Fields, special: dict[str, Any]) -> None:
    backend.post_processor = alone()


def _t5_end(backend: Tokenizer, fields: Fields, special: dict[str, Any]) -> None:
    end = backend.token_to_id(str(special["eos_token"])) if "eos_token" in special else None
    if end is None:
        raise UnsupportedTokenizer("it has no end token")
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", end)]
    )


def _pegasus_end(backend: Tokenizer, fields: Fields, special: dict[str, Any]) -> None:
    end = fields.token("eos_token")
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, backend.token_to_id(end))]
    )


def _roberta_end(backend: Tokenizer, fields: Fields, special: dict[str, Any]) -> None:
    if "sep_token" not in special or "cls_token" not in special:
        raise UnsupportedTokenizer("it has no tokens for the beginning and the end")
    ends: list[Any] = [
        (str(special[key]), backend.token_to_id(str(special[key]))) for key in ("sep_token", "cls_token")
    ]
    backend.post_processor = processors.RobertaProcessing(
        ends[0], ends[1], fields.flag("trim_offsets", True), fields.flag("add_prefix_space", False)
    )


def alone() -> Any:
    """A post-processor that adds no token."""
    return processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def _special_tokens(**tokens: str | None) -> dict[str, str | None]:
    return {f"{name}_token": token for name, token in tokens.items()}


_END = "<|endoftext|>"
_COMMON = _special_tokens(bos="<s>", eos="</s>", unk="<unk>")

RECIPES: dict[str, Recipe] = {
    "GPT2Tokenizer": Recipe(_gpt2, _special_tokens(unk=_END, bos=_END, eos=_END, pad=None)),
    "CodeGenTokenizer": Recipe(_codegen, _special_tokens(unk=_END, bos=_END, eos=_END, pad=None)),
    "GPTNeoXTokenizer": Recipe(
        _gpt_neox, _special_tokens(unk=_END, bos=_END, eos=_END, pad="<|padding|>"), _gpt_neox_end
    ),
    "Qwen2Tokenizer": Recipe(_qwen2, _special_tokens(unk=_END, bos=None, eos=_END, pad=_END), _qwen2_end),
    "CohereTokenizer": Recipe(
        _cohere,
        _special_tokens(
            unk="<UNK>",
            bos="<BOS_TOKEN>",
            eos="<|END_OF_TURN_TOKEN|>",
            pad="<PAD>",
            cls="<CLS>",
            sep="<SEP>",
            mask="<MASK_TOKEN>",
        ),
        _cohere_end,
    ),
    "LlamaTokenizer": Recipe(_llama, _COMMON),
    "GemmaTokenizer": Recipe(
        _gemma, _special_tokens(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>")
    ),
    "RobertaTokenizer": Recipe(
        _gpt2, {**_COMMON, **_special_tokens(sep="</s>", cls="<s>", pad="<pad>", mask="<mask>")}, _roberta_end
    ),
    "T5Tokenizer": Recipe(_t5, _special_tokens(eos="</s>", unk="<unk>", pad="<pad>"), _t5_end, "Unigram", _t5_extra),
    "PegasusTokenizer": Recipe(
        _pegasus,
        _special_tokens(pad="<pad>", eos="</s>", unk="<unk>", mask="<mask_2>"),
        _pegasus_end,
        "Unigram",
        _pegasus_extra,
    ),
}
