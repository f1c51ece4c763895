"""Small tokenizers of every family that a Detokenizer must follow, trained on the fly. Each is made once."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = [
    "the cat sat on the mat and the dog sat on the log, didn't it? it's 5 o' clock. don't you 've a ' b ' !",
    "once upon a time there was a little girl who had a red ball. she threw it; the dog ran after it...",
    "naïve café, größer, żółw, 你好世界, こんにちは, привет мир, مرحبا, 👩‍👩‍👧 👍🏽",
] * 4
_SPECIAL = ["<unk>", "<s>", "</s>"]


def _wrapped(made: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(_TEXT, trainer)
    made.add_tokens([AddedToken("<a word>", special=False), AddedToken("ł€", special=False)])
    return _wrapped(made)


@cache
def llama() -> PreTrainedTokenizerFast:
    """Llama's kind: BPE with byte fallback, spaces as ▁, the first one stripped."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    special = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator([text for text in _TEXT if text.isascii()], trainer)
    return _wrapped(_bytes_as_ordinary(made))


def _bytes_as_ordinary(made: Tokenizer) -> Tokenizer:
    """Byte tokens are trained as special ones to enter the vocabulary; in real checkpoints they are ordinary."""
    import json

    data = json.loads(made.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


@cache
def prefixed() -> PreTrainedTokenizerFast:
    """RoBERTa's kind: byte-level, and a text gets a space in front."""
    made = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _wrapped(made)


@cache
def llama_first() -> PreTrainedTokenizerFast:
    """Llama's kind with legacy = false: only a text's beginning gets a ▁, not what follows a special token."""
    made = Tokenizer.from_str(llama().backend_tokenizer.to_str())
    made.normalizer = None
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _wrapped(made)


@cache
def added() -> PreTrainedTokenizerFast:
    """Llama's kind with added tokens, special ones and others, that take spaces beside them."""
    made = Tokenizer.from_str(llama().backend_tokenizer.to_str())
    for special in (False, True):
        made.add_tokens(
            [
                AddedToken(f"<{side}{special}>", special=special, lstrip="l" in side, rstrip="r" in side)
                for side in ("l", "r", "lr", "-")
            ]
        )
    made.add_tokens([AddedToken("▁the▁dog", special=False, normalized=False), AddedToken(" x ", special=False)])
    return _wrapped(made)


@cache
def metaspace_first() -> PreTrainedTokenizerFast:
    """Metaspace whose decoder and pre-tokenizer mind the beginning alone."""
    return _metaspace("first")


@cache
def metaspace_never() -> PreTrainedTokenizerFast:
    """Metaspace without a ▁ at the beginning, whose decoder keeps all spaces."""
    return _metaspace("never")


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """T5's kind: Unigram over ▁ pieces."""
    return _metaspace("always")


def _metaspace(scheme: Literal["first", "always", "never"]) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(_TEXT, trainer)
    return _wrapped(made)


@cache
def unigram_bytes() -> PreTrainedTokenizerFast:
    """Unigram with byte fallback (Gemma's and Flan's newer kind)."""
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocabulary += [(piece, -float(n % 7) - 2) for n, piece in enumerate(["▁", "▁the", "a", "▁a", "t", "é", ".", "▁▁"])]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made.add_special_tokens(_SPECIAL)
    return _wrapped(made)


def _word_piece(**options: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=options.pop("decoder_cleanup"))
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=_SPECIAL, show_progress=False)
    made.train_from_iterator(_TEXT, trainer)
    return _wrapped(made, **options)


@cache
def word_piece() -> PreTrainedTokenizerFast:
    """BERT's kind, whose decoder cleans each token."""
    return _word_piece(decoder_cleanup=True)


@cache
def word_piece_cleaned() -> PreTrainedTokenizerFast:
    """BERT's kind as most checkpoints have it: spaces are also cleaned in the text as a whole."""
    return _word_piece(decoder_cleanup=False, clean_up_tokenization_spaces=True)


@cache
def suffixes() -> PreTrainedTokenizerFast:
    """The first BPE kind, with </w> at the ends of words."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=_SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    made.train_from_iterator(_TEXT, trainer)
    return _wrapped(made)


@cache
def undecoded() -> PreTrainedTokenizerFast:
    """A vocabulary without a decoder: tokens joined by spaces."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(_SPECIAL)
    return _wrapped(made)


@cache
def rewritten() -> PreTrainedTokenizerFast:
    """A decoder that rewrites the whole text, so that nothing can be told before the end."""
    made = Tokenizer.from_str(llama().backend_tokenizer.to_str())
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace("t ", "T")])
    return _wrapped(made)


FAMILIES = {
    made.__name__: made
    for made in (
        byte_level,
        prefixed,
        llama,
        llama_first,
        added,
        metaspace,
        metaspace_first,
        metaspace_never,
        unigram_bytes,
        word_piece,
        word_piece_cleaned,
        suffixes,
        undecoded,
        rewritten,
    )
}
