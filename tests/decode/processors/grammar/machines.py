"""Grammars over small vocabularies, and everything that can be written under them, by enumeration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from genctl.decode.processors.grammar import Grammar
from genctl.decode.processors.grammar_source import read
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.params import Generation
from tests.tiny import EOS, tokenizer

PROMPT = (7, 8, 9)


def tiny_words(size: int = 300) -> Spelling:
    return spelling(tokenizer(), size, "regex")


def machine(words: Spelling | None = None, eos: Sequence[int] = (EOS,), **knobs: Any) -> Grammar:
    source = read(Generation(**knobs))
    assert source is not None
    return Grammar(source, words or tiny_words(), len(PROMPT), eos)


def allowed(grammar: Grammar, *rows: Sequence[int], size: int | None = None) -> list[set[int]]:
    """For each row (all equally long) the ids that may follow, asked in one call."""
    history = torch.tensor([[*PROMPT, *row] for row in rows])
    before = torch.linspace(-1.0, 1.0, size or len(grammar.words.pieces)).repeat(len(rows), 1)
    after = grammar(history, before.clone())
    kept = after > -torch.inf
    assert torch.equal(after[kept], before[kept])
    return [set(row.nonzero()[:, 0].tolist()) for row in kept]


def written(grammar: Grammar, longest: int, row: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every row of at most `longest` tokens that may end, by trying all that is allowed."""
    ids = allowed(grammar, row)[0]
    if ids & set(grammar.eos):
        yield row
    if len(row) < longest:
        for token in sorted(ids - set(grammar.eos)):
            yield from written(grammar, longest, (*row, token))


def text(words: Spelling, row: Sequence[int]) -> bytes:
    """The bytes of a row of new tokens."""
    return b"".join(words.at_first(token) if place == 0 else words.pieces[token] for place, token in enumerate(row))
