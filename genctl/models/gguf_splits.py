"""How llama.cpp splits a text before the merges of a BPE, for each value of `tokenizer.ggml.pre`.

The table is that of llama.cpp b11434 (`llama_vocab::impl::load` and `llm_tokenizer_bpe` in src/llama-vocab.cpp, the
splitters in src/unicode.cpp). Expressions apply one after another, each to the pieces that the one before left; a
piece is a match, or what lies between two. llama.cpp does not tell the cases of \\p{Lu} and \\p{Ll} apart. Its Unicode
is 15.1; the tokenizers library has 16 and so knows 5,000 characters more.
"""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """The rules of a pre-tokenizer."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # where the file does not say
    by_bytes: bool = True  # bytes are spelled as letters; else as in SentencePiece: ▁ is a space, <0x0A> a byte


_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORD, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# White space of jais-2: as many of 512, 256 ... and 1 as fit.
_HALVES = r"\s*[\r\n]+|" + "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s"
_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_CODE = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
# Digits by three from the right; what is before them stays with the first three.
_THREES = r"\P{N}*+(?:\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\z)"
_HAN = r"\x{3400}-\x{4dbf}\x{4e00}-\x{9fff}\x{f900}-\x{faff}\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{2f800}-\x{2fa1f}"
_CASED = (  # letters of alphabets with two cases, as deepseek-llm lists them
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = "一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ"
_CJK = r"[一-龥ࠀ-一가-퟿&&\S]+"  # spaces of any kind are none of it
_PUNCTUATION = "!-/:-~！-／：-～‘-‟\u3000-。"


def _joined(words: str, digits: str, marks: str = _MARKS, spaces: str = _SPACES, short: str = _SHORT) -> str:
    return "|".join(filter(None, (short, words, digits, marks, spaces)))


def _cased(letters: str, ends: str, digits: str) -> str:
    """Words of capitals and small letters, of which only those of ASCII differ."""
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
