"""The tokenizer of a GGUF file, by the rules of llama.cpp (b11434, src/llama-vocab.cpp), on the tokenizers library.

Four of its kinds (`tokenizer.ggml.model`) are read, the others are refused by name: `gpt2` and `gemma4` are a BPE whose
merges the file lists, `llama` is SentencePiece's BPE, whose scores imply the merges, and `t5` a Unigram vocabulary.
Other files in its folder are ignored.

A BPE splits a text before its merges, in its own way for each value of `tokenizer.ggml.pre` (`SPLITS`, from
`llama_vocab::impl::load` and `llm_tokenizer_bpe`, and the splitters in src/unicode.cpp). Expressions apply one after
another, each to the pieces of the one before; a piece is a match, or the text between two. llama.cpp does not
distinguish \\p{Lu} and \\p{Ll}. Its Unicode is 15.1; the tokenizers library has 16 and so knows 5,000 more
characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genctl.errors import ModelError
from genctl.models import gguf
from genctl.models.gguf import END_TEXTS, Header
from genctl.models.tokenizer import PlainTokenizer
from genctl.models.tokenizer_limits import check_charsmap
from genctl.models.weights import shown


class Split(NamedTuple):
    """The rules of a pre-tokenizer."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is not split
    add_bos: bool = False  # if the file does not say
    by_bytes: bool = True  # bytes are spelled as letters; else as in SentencePiece: ▁ is a space, <0x0A> a byte


_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORD, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# White space of jais-2: as many of 512, 256 ... and 1 as fit.
_HALVES = r"\s*[\r\n]+|" + "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s"
_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_CODE = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
# Digits in threes from the right; the text before them stays with the first three.
_THREES = r"\P{N}*+(?:\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\z)"
_HAN = r"\x{3400}-\x{4dbf}\x{4e00}-\x{9fff}\x{f900}-\x{faff}\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{2f800}-\x{2fa1f}"
_CASED = (  # letters of alphabets with two cases, as deepseek-llm lists them
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = "一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ"
_CJK = r"[一-龥ࠀ-一가-퟿&&\S]+"  # without spaces of any kind
_PUNCTUATION = "!-/:-~！-／：-～‘-‟\u3000-。"


def _joined(words: str, digits: str, marks: str = _MARKS, spaces: str = _SPACES, short: str = _SHORT) -> str:
    return "|".join(filter(None, (short, words, digits, marks, spaces)))


def _cased(letters: str, ends: str, digits: str) -> str:
    """Words of capital and small letters, which differ only in ASCII."""
    capital, small, before = rf"[{letters}&&[^a-z]]", rf"[{letters}&&[^A-Z]]", r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{capital}*{small}+{ends}|{before}{capital}+{small}*{ends}"
    return _joined(words, digits, _PATHS, short="")


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3, _QWEN2 = _joined(_WORD, r"\p{N}{1,3}"), _joined(_WORD, r"\p{N}")
_QWEN35 = _joined(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANA, rf"{_CODE}[\r\n]*|{_SPACES}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_MARKED = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_SHORT}?"
_LINES = (r"[^\n]+|\n+",)
_ROWS = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code"
    " roberta-bpe mpt olmo jais trillion granite-docling exaone4": Split((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Split((r"\p{N}", _GPT2)),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Split((_LLAMA3,), True, True),
    "glm4 glm5": Split((_LLAMA3,), True),
    "dbrx smaug-bpe chatglm-bpe": Split((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2"
    " llada-moe": Split((_QWEN2,)),
    "qwen35": Split((_QWEN35,)),
    "ufakzeka": Split((_joined(_WORD, r"\p{N}", short=""),)),
    "laguna": Split((*_LINES, _QWEN2)),
    "minicpm5": Split((r"\p{N}{1,3}", _joined(_WORD, r"\p{N}+")), True),
    "seed-coder": Split((_joined(_WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "exaone-moe": Split(
        (_joined(r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]?"),)
    ),
    "jais-2": Split((_joined(_WORD, r"\p{N}{1,3}", spaces=_HALVES),)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split(_DEEPSEEK3),
    "spark2_5": Split((*_DEEPSEEK3[:2], rf"{_CODE}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "afmoe": Split((_THREES, f"[{_ASIAN}]+", _DEEPSEEK3[2])),
    "deepseek-llm": Split(
        (r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_PUNCTUATION}&&\S]+", r"(?<!\s)\s+\z", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "poro-chat bloom gpt3-finnish": Split((_BLOOM,)),
    "viking": Split((_BLOOM, r"\p{N}")),
    "tekken": Split((_cased(r"\p{L}", "", r"\p{N}"),), True, True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Split((_cased(r"\p{L}", f"{_SHORT}?", r"\p{N}{1,3}"),)),
    "granite-embed-multi-97m": Split((_cased(r"\p{L}\p{M}", f"{_SHORT}?", r"\p{N}{1,3}"),), True),
    "tiny_aya cohere2moe": Split((_THREES, _joined(_MARKED, r"\p{N}{1,3}", _PATHS, short=""))),
    "youtu": Split((_YOUTU, _joined(_MARKED, r"\p{N}", _PATHS, short="")), True),
    "kimi-k2": Split(
        (f"[{_HAN}]+|" + _joined(rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_SHORT}?", r"\p{N}{1,3}", short=""),)
    ),
    "superbpe": Split((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")),
    "chameleon": Split(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        add_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": Split(_LINES, add_bos=True, by_bytes=False),
    "sarvam-moe": Split(_LINES, by_bytes=False),
}
SPLITS = {name: split for names, split in _ROWS.items() for name in names.split()}

_KEY = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER = range(1, 5)  # token types
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_FALCON = 11  # the id of Falcon's EOS, which llama.cpp takes as BOS and EOS of a BPE that names none
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_DEFAULTS: dict[Any, dict[str, int]] = {  # ids of special tokens that no key gives
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


def plain(path: Path) -> PlainTokenizer:
    """The tokenizer of a GGUF file. Raises ModelError if it is damaged or of an unknown kind."""
    return _Vocabulary(shown(path.name), gguf.read(path)).tokenizer(path.parent)


class _Vocabulary:
    def __init__(self, name: str, header: Header) -> None:
        self.name, self.metadata = name, header.metadata
        self.kind = self.metadata.get(f"{_KEY}.model")
        if self.kind not in _DEFAULTS:
            raise self.refused(f"model is {self.kind!r:.60}; known are {', '.join(_DEFAULTS)}")
        texts = (token.partition("\0")[0] for token in header.tokens)  # llama.cpp reads C strings
        self.tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(texts)]
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for id, token in enumerate(self.tokens) if self.ids[token] != id)
            raise self.refused(f"tokens holds {shown(twice, 40)} twice")
        for key in ("token_type", "scores"):
            if 0 < (count := len(self._list(key))) < len(self.tokens):
                raise self.refused(f"{key} has {count:,} items for {len(self.tokens):,} tokens")
        self.types = self._types()

    def _list(self, key: str) -> list[Any]:
        """A list in the file, with an item for each token or merge; [] if it is missing."""
        return list(self.metadata.get(f"{_KEY}.{key}", ()))

    def _types(self) -> list[int]:
        """The type of each token; llama.cpp overrides some types of the file."""
        types = self._list("token_type")[: len(self.tokens)] or [_NORMAL] * len(self.tokens)
        inner = gguf.inner_ends(self.ids)
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
            raise self.refused("tokens has indistinguishable entries")
        special = {name: self._special(key) for key, name in _NAMES.items()}
        before = self._around(
            "bos", special["bos_token"], split is SPLITS["gemma4"] or self._flag("add_bos_token", split.add_bos)
        )
        after = self._around("eos", special["eos_token"], self._flag("add_eos_token", self.kind == "t5"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *after], special_tokens=[(token, self.ids[token]) for token in (*before, *after)]
        )
        template = self.metadata.get("tokenizer.chat_template")
        names = {name: self.tokens[id] for name, id in special.items() if id is not None}
        literal = {id: token for id, token in enumerate(self.tokens) if self.types[id] == _USER and not token.isascii()}
        literal = literal if split.by_bytes else {}
        return PlainTokenizer(backend, names, template=template, place=str(folder), literal=literal)

    def _special(self, key: str) -> int | None:
        """The id of a special token; an id beyond the vocabulary does not count."""
        named = (self.metadata.get(f"{_KEY}.{key}_token_id"), _DEFAULTS[self.kind].get(key))
        return next((id for id in named if type(id) is int and 0 <= id < len(self.tokens)), None)

    def _around(self, key: str, id: int | None, added: bool) -> list[str]:
        """The special token that is put before or after each text, if one is `added`."""
        if added and id is None and self.kind == "gpt2" and len(self.tokens) > _FALCON:
            id = _FALCON
        if added and id is None:
            raise self.refused(f"add_{key}_token is true, and {key}_token_id names no token")
        return [self.tokens[id]] if added and id is not None else []

    def _flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(f"{_KEY}.{key}", default))

    def _byte_level(self, split: Split) -> Tokenizer:
        backend = Tokenizer(models.BPE(vocab=self.ids, merges=self._listed_merges(), ignore_merges=split.ignore_merges))
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*_splits(split), last])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self, split: Split) -> Tokenizer:
        """A vocabulary with ▁ for spaces: of a BPE, or of SentencePiece, where scores replace merges."""
        scored = self.kind == "llama"
        prefix = scored and self._flag("add_space_prefix", True)
        unknown = self._special("unknown") if scored else None
        model = models.BPE(
            vocab=self.ids,
            merges=[] if scored else self._listed_merges(),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=scored,
        )
        backend = Tokenizer(model)
        backend.normalizer = normalizers.Sequence(
            [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
        )
        steps: list[Any] = _splits(split)
        if scored:
            if not any("▁" in token.lstrip("▁") for token in self.tokens):  # then no token spans two words
                steps = [pre_tokenizers.Split(Regex("▁+[^▁]*"), "isolated")]
            scores = self._list("scores") or [0.0] * len(self.tokens)
            steps.append(pre_tokenizers.PreTokenizer.custom(ScoredMerges(dict(zip(self.tokens, scores, strict=False)))))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*decoding, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
        return backend

    def _unigram(self) -> Tokenizer:
        unknown, charsmap = self._special("unknown"), bytes(each & 0xFF for each in self._list("precompiled_charsmap"))
        if unknown is None:
            raise self.refused("unknown_token_id names no token")
        check_charsmap(self.name, charsmap)
        backend = Tokenizer(models.Unigram(list(zip(self.tokens, self._list("scores"), strict=False)), unknown, False))
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
        """The merges of the file; of duplicates the first counts."""
        places = ((merge, merge.find(" ", 1)) for merge in self._list("merges"))
        pairs = dict.fromkeys((merge[:at], merge[at + 1 :]) for merge, at in places if at > 0)
        ids = self.ids
        return [pair for pair in pairs if pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids]

    def _add_tokens(self, backend: Tokenizer) -> None:
        """Add the tokens that are never split in a text. Those of Phi-3 include the white space after them."""
        name = str(self.metadata.get("general.name")).lower()
        strips = "phi-3" in name or "phi3" in name
        for types, add in (((_UNKNOWN, _CONTROL), backend.add_special_tokens), ((_USER,), backend.add_tokens)):
            found = [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]
            add([AddedToken(token, normalized=False, rstrip=strips and token not in _UNSTRIPPED) for token in found])

    def refused(self, why: str) -> ModelError:
        return ModelError(f"{self.name}: {_KEY}.{why}")


def _splits(split: Split) -> list[Any]:
    return [pre_tokenizers.Split(Regex(expression), "isolated") for expression in split.expressions]


class ScoredMerges:
    """A pre-tokenizer that splits a text into tokens like llama.cpp's `llm_tokenizer_spm_session`.

    Two neighbours merge if they form a token: the best score first, on a tie the leftmost.
    """

    def __init__(self, scores: dict[str, float]) -> None:
        self.scores = scores
        self.word_ends = lru_cache(1 << 14)(self._ends)  # most words recur

    def pre_tokenize(self, text: Any) -> None:
        """Called by the library, with a `tokenizers.PreTokenizedString`."""
        text.split(self._split)

    def _split(self, _: int, part: Any) -> list[Any]:
        text = str(part)
        return self._parts(part, self.word_ends(text) if len(text) < 64 else self._ends(text), 0)

    def _parts(self, part: Any, ends: Sequence[int], begin: int) -> list[Any]:
        """Cut a part at `ends`, by halves: a cut takes time in proportion to the part."""
        if len(ends) == 1:
            return [part]
        half = len(ends) // 2
        at, last = ends[half - 1] - begin, ends[-1] - begin
        left, right = self._parts(part[0:at], ends[:half], begin), self._parts(part[at:last], ends[half:], begin + at)
        return left + right

    def _ends(self, text: str) -> Sequence[int]:
        """Where the tokens of a text end."""
        scores, size = self.scores, len(text)
        queue: list[tuple[float, int, int, int]] = []
        ends, before = list(range(1, size + 1)), list(range(-1, size - 1))  # for the piece that begins at a position

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < size and (score := scores.get(text[left : ends[right]])) is not None:
                heappush(queue, (-score, left, right, ends[right]))

        for right in range(1, size):
            offer(right - 1, right)
        while queue:
            _, left, right, end = heappop(queue)
            if ends[left] == right and ends[right] == end:  # both pieces are unchanged
                ends[left], ends[right] = end, 0
                if end < size:
                    before[end] = left
                offer(before[left], left)
                offer(left, end)
        places, at = [], 0
        while at < size:
            places.append(at := ends[at])
        return places
