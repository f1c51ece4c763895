"""Rows to stop, and tokenizers to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from genctl.decode.stopping import Stop, Written
from genctl.decode.stopping.build import NamedCriterion, stops_of
from genctl.decode.stopping.row_text import RowText
from genctl.decode.stopping.stops import Marks
from genctl.events import shared_length
from genctl.models.text import Detokenizer
from tests.models.tokenizers_made import byte_level, llama, suffixes, unigram_bytes, word_piece, word_piece_cleaned

RARE = "ǅ𝄞€ß日🙂"  # written as byte tokens by the byte-fallback tokenizers
MADE = {
    "bytelevel": byte_level,
    "bytefallback": llama,
    "metaspace": unigram_bytes,
    "wordpiece": word_piece,
    "wordpiece-cleaned": word_piece_cleaned,
    "suffix": suffixes,
}
KINDS = tuple(MADE)


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(MADE[kind]().backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|reserved|>", "<pad>")])
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
    """After how many tokens the criterion ends the row, and its result."""
    text = row_text(kind, [criterion])
    for count in range(1, len(tokens) + 1):
        text.push(tokens[count - 1])
        stop = criterion(written(tokens[:count], text=text))
        if stop is not None:
            return count, Stop(*stop)
    return None
