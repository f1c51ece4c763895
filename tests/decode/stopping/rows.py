"""Rows to stop, and tokenizers trained on the fly to read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from genctl.decode.stopping import Stop, Written
from genctl.decode.stopping.build import NamedCriterion, stops_of
from genctl.decode.stopping.row_text import RowText
from genctl.decode.stopping.stops import Marks
from genctl.events import shared_length
from genctl.models.text import Detokenizer

CORPUS = [
    "The cat sat on the mat, and the dog didn't. It's 3.14! Do not stop; stop here.\n\nThe end?",
    "Straße naïve café — “quoted” ünïcödé 日本語の文章です。 終わり。 Привет мир! مرحبا",
    "emoji 🙂🙃 👩‍👩‍👧 flags 🇩🇪 ok\n\tdef f(x):\n    return x  # done",
] * 4
RARE = "ǅ𝄞€ß日🙂"  # not in the alphabet of the byte-fallback tokenizers: written as byte tokens
KINDS = ("bytelevel", "bytefallback", "metaspace", "wordpiece", "wordpiece-cleaned", "suffix")
SPECIAL = ["<pad>", "<s>", "</s>"]


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    backend = _BACKENDS[kind.split("-")[0]]()
    backend.add_special_tokens([AddedToken("<|reserved|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=kind.endswith("cleaned"),
    )


def reader(kind: str) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer(kind).decode(list(ids), skip_special_tokens=True)


def marked(marks: Marks, decode: Callable[[list[int]], str], tokens: Sequence[int]) -> str:
    """The text of tokens with marks, by definition: each where the text with and without what follows is the same."""
    ids, text, parts, done = list(tokens), decode(list(tokens)), [], 0
    for place, token in enumerate(ids):
        if token in marks.ids:
            here = max(shared_length(decode(ids[:place]), text), done)
            parts += [text[done:here], marks.ids[token]]
            done = here
    return "".join([*parts, text[done:]])


def row_text(kind: str, criteria: Sequence[NamedCriterion] = (), keep: bool = False) -> RowText:
    return RowText(Detokenizer(tokenizer(kind)), stops_of(criteria, keep=keep))


def written(tokens: Sequence[int], logprob: float = -1.0, elapsed: float = 0.0, text: RowText | None = None) -> Written:
    """The row `tokens`, just after its last one."""
    made = list(tokens)
    return Written(made[-1], len(made), logprob, lambda n: made[max(0, len(made) - n) :], elapsed, text)


def first_stop(criterion: NamedCriterion, tokens: Sequence[int], kind: str = "bytelevel") -> tuple[int, Stop] | None:
    """After how many tokens the criterion ends the row, and what it says."""
    text = row_text(kind, [criterion])
    for count in range(1, len(tokens) + 1):
        text.push(tokens[count - 1])
        stop = criterion(written(tokens[:count], text=text))
        if stop is not None:
            return count, Stop(*stop)
    return None


def _bytelevel() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def _with_bytes(made: Tokenizer) -> Tokenizer:
    """The same tokenizer with byte tokens for the characters of RARE, which it forgets."""
    data = json.loads(made.to_str())
    vocabulary = data["model"]["vocab"]
    merges = [pair for pair in data["model"]["merges"] if not set("".join(pair)) & set(RARE)]
    kept = [token for token in vocabulary if token in SPECIAL or not set(token) & set(RARE)]
    kept += [f"<0x{byte:02X}>" for byte in range(256)]
    data["model"] |= {
        "vocab": {token: number for number, token in enumerate(kept)},
        "merges": merges,
        "byte_fallback": True,
        "fuse_unk": True,
    }
    return Tokenizer.from_str(json.dumps(data))


def _bytefallback() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=260, special_tokens=SPECIAL, show_progress=False))
    made = _with_bytes(made)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _metaspace() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=260, special_tokens=SPECIAL, show_progress=False))
    made = _with_bytes(made)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def _wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=True)
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIAL, "[UNK]"], show_progress=False)
    )
    return made


def _suffix() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=[*SPECIAL, "[UNK]"], end_of_word_suffix="</w>", show_progress=False
        ),
    )
    return made


_BACKENDS = {
    "bytelevel": _bytelevel,
    "bytefallback": _bytefallback,
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
    "suffix": _suffix,
}
