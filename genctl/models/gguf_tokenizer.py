"""The tokenizer of a GGUF file, by the rules of llama.cpp (b11434, src/llama-vocab.cpp), on the tokenizers library.

Four of its kinds (`tokenizer.ggml.model`) are read, the others are refused by name: `gpt2` and `gemma4` are a BPE whose
merges the file lists, `llama` is SentencePiece's BPE, whose scores imply the merges, and `t5` a Unigram vocabulary.
Files beside it change nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genctl.errors import ModelError
from genctl.models import gguf_header, sizes
from genctl.models.gguf_header import END_TEXTS, Header
from genctl.models.gguf_splits import SPLITS, Split
from genctl.models.tokenizer import PlainTokenizer
from genctl.models.tokenizer_files import check_charsmap
from genctl.models.weights import shown

_KEY = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER = range(1, 5)  # types of tokens
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_FALCON = 11  # the id of its end, which llama.cpp puts before a text where a BPE names no other
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_DEFAULTS: dict[Any, dict[str, int]] = {  # ids of special tokens without a key
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {},
    "gemma4": {},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
_FILLS = """
    <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> <|fim_suffix|>
    <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle>
    <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
_CONTROL_TEXTS = END_TEXTS.union(_FILLS.split())  # control tokens, whatever type the file gives them
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # user-defined ones, likewise (gpt-oss)
_MOST_LETTERS = 1 << 26  # of all ways to part the tokens of a vocabulary in two; Gemma's have 11 million


def plain(path: Path) -> PlainTokenizer:
    """The tokenizer of a GGUF file. Raises ModelError for one that is damaged or of an unknown kind."""
    return _Reader(shown(path.name), gguf_header.read(path, vocabulary=True)).tokenizer(path.parent)


class _Reader:
    def __init__(self, name: str, header: Header) -> None:
        self.name, self.metadata, self.lists = name, header.metadata, header.vocabulary
        self.kind = self.metadata.get(f"{_KEY}.model")
        if self.kind not in _DEFAULTS:
            raise self.refused(f"model is {self.kind!r:.60}; known are {', '.join(_DEFAULTS)}")
        texts = (token.partition("\0")[0] for token in self.lists.tokens)  # llama.cpp reads C strings
        self.tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(texts)]
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for id, token in enumerate(self.tokens) if self.ids[token] != id)
            raise self.refused(f"tokens holds {shown(twice, 40)} twice")
        for key, values in (("token_type", self.lists.types), ("scores", self.lists.scores)):
            if values and len(values) < len(self.tokens):
                raise self.refused(f"{key} has {len(values):,} items for {len(self.tokens):,} tokens")
        self.types = self._types()
        self.scores = self.lists.scores or [0.0] * len(self.tokens)

    def _types(self) -> list[int]:
        """The type of each token; llama.cpp knows some better than the file."""
        types = list(self.lists.types) or [_NORMAL] * len(self.tokens)
        inner = gguf_header.inner_ends(self.ids)
        known = dict.fromkeys(_CONTROL_TEXTS, _CONTROL) | dict.fromkeys(_SHOWN_TEXTS, _USER)
        known |= {text: _USER if text == "<|end|>" else _NORMAL for text in inner}
        for text, kind in known.items():
            if text in self.ids:
                types[self.ids[text]] = kind
        return types

    def tokenizer(self, folder: Path) -> PlainTokenizer:
        pre = "gemma4" if self.kind == "gemma4" else self.metadata.get(f"{_KEY}.pre") or "default"
        split = Split((), add_bos=self.kind == "llama", by_bytes=False)
        if self.kind in ("gpt2", "gemma4"):
            if pre not in SPLITS:
                raise self.refused(f"pre is {pre!r:.60}, which genctl does not know")
            split = SPLITS[pre]
        if self.kind == "t5":
            backend = self._unigram()
        else:
            backend = self._byte_level(split) if split.by_bytes else self._sentencepiece(split)
        self._add_tokens(backend)
        if backend.get_vocab_size(with_added_tokens=True) != len(self.tokens):
            raise self.refused("tokens holds tokens that cannot be told apart")
        special = {name: self._special(key) for key, name in _NAMES.items()}
        before = self._around(
            "bos", special["bos_token"], pre == "gemma4" or self._flag("add_bos_token", split.add_bos)
        )
        after = self._around("eos", special["eos_token"], self._flag("add_eos_token", self.kind == "t5"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *after], special_tokens=[(token, self.ids[token]) for token in (*before, *after)]
        )
        template = self.metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise ModelError(f"{self.name}: tokenizer.chat_template is no text")
        names = {name: self.tokens[id] for name, id in special.items() if id is not None}
        literal = {
            id: token
            for id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=False))
            if kind == _USER and split.by_bytes and not token.isascii()
        }
        return PlainTokenizer(backend, names, template=template, place=str(folder), literal=literal)

    def _special(self, key: str) -> int | None:
        """The id of a special token; one beyond the vocabulary does not count."""
        named = (self.metadata.get(f"{_KEY}.{key}_token_id"), _DEFAULTS[self.kind].get(key))
        return next((id for id in named if type(id) is int and 0 <= id < len(self.tokens)), None)

    def _around(self, key: str, id: int | None, added: bool) -> list[str]:
        """The special token that each text gets, if one is `added`."""
        if id is None and self.kind == "gpt2" and len(self.tokens) > _FALCON:
            id = _FALCON
        if added and id is None:
            raise self.refused(f"add_{key}_token is true, and {key}_token_id names no token")
        return [self.tokens[id]] if added and id is not None else []

    def _flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{_KEY}.{key}", default)
        if not isinstance(value, bool):
            raise self.refused(f"{key} is {value!r:.40}, neither true nor false")
        return value

    def _byte_level(self, split: Split) -> Tokenizer:
        backend = Tokenizer(models.BPE(vocab=self.ids, merges=self._listed_merges(), ignore_merges=split.ignore_merges))
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*_splits(split), last])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self, split: Split) -> Tokenizer:
        """A vocabulary with ▁ for spaces: that of a BPE, or SentencePiece's with the merges that its scores imply."""
        scored = self.kind == "llama"
        prefix = scored and self._flag("add_space_prefix", True)
        unknown = self._special("unknown") if scored else None
        model = models.BPE(
            vocab=self.ids,
            merges=self._implied_merges() if scored else self._listed_merges(),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = Tokenizer(model)
        backend.normalizer = normalizers.Sequence(
            [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
        )
        if split.expressions:
            backend.pre_tokenizer = pre_tokenizers.Sequence(_splits(split))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
        return backend

    def _unigram(self) -> Tokenizer:
        unknown, charsmap = self._special("unknown"), bytes(value & 0xFF for value in self.lists.charsmap)
        if unknown is None:
            raise self.refused("unknown_token_id names no token")
        check_charsmap(self.name, charsmap)
        backend = Tokenizer(models.Unigram(list(zip(self.tokens, self.scores, strict=False)), unknown, False))
        steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
        prefix, merged = self._flag("add_space_prefix", False), self._flag("remove_extra_whitespaces", False)
        if merged:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
        steps += [normalizers.Replace(Regex(r"\A(?= *[^ ])"), "▁")] if prefix or merged else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        ends = [decoders.Strip(" ", 1, 0)] if prefix or merged else []
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), *ends])
        return backend

    def _listed_merges(self) -> list[tuple[str, str]]:
        """The pairs of the file; where one is there twice, its first place counts."""
        pairs = []
        for merge in self.lists.merges:
            at = merge.find(" ", 1)
            left, right = merge[:at], merge[at + 1 :]
            if at > 0 and left in self.ids and right in self.ids and left + right in self.ids:
                pairs.append((left, right))
        return list(dict.fromkeys(pairs))

    def _implied_merges(self) -> list[tuple[str, str]]:
        """All pairs of tokens that make a token, those of the best score first."""
        letters = sum(len(token) ** 2 for token in self.tokens)
        if letters > _MOST_LETTERS:
            raise self.refused(f"tokens imply merges of {letters:,} letters, and at most {_MOST_LETTERS:,} are read")
        pairs, tokens, ids = [], self.tokens, self.ids
        for id in sorted(range(len(tokens)), key=lambda id: -self.scores[id]):
            token = tokens[id]
            for at in range(len(token) - 1, 0, -1):
                left, right = ids.get(token[:at]), ids.get(token[at:])
                if left is not None and right is not None:
                    pairs.append((tokens[left], tokens[right]))
            sizes.check_vocabulary(self.name, merges=len(pairs))
        return pairs

    def _add_tokens(self, backend: Tokenizer) -> None:
        """Add the tokens that texts hold whole. Those of Phi-3 take the white space behind them along."""
        name = str(self.metadata.get("general.name")).lower()
        strips = "phi-3" in name or "phi3" in name
        for types, add in (((_UNKNOWN, _CONTROL), backend.add_special_tokens), ((_USER,), backend.add_tokens)):
            found = [token for token, kind in zip(self.tokens, self.types, strict=False) if kind in types]
            add([AddedToken(token, normalized=False, rstrip=strips and token not in _UNSTRIPPED) for token in found])

    def refused(self, why: str) -> ModelError:
        return ModelError(f"{self.name}: {_KEY}.{why}")


def _splits(split: Split) -> list[Any]:
    return [pre_tokenizers.Split(Regex(expression), "isolated") for expression in split.expressions]
