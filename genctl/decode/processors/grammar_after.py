"""A grammar that begins within the text, after a mark such as `</think>`.

Before the mark everything may be written but an EOS id. A token that continues behind the mark is barred, so that the
grammar's text begins with a token. Where the budget gets near, the mark is written in time for a text that fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.grammar_rows import Grammar
from genctl.decode.processors.grammar_source import GrammarSource
from genctl.decode.processors.token_bytes import Spelling
from genctl.errors import UsageError, quote


class GrammarAfter:
    """history int64 [R, T], scores f32 [R, V] -> scores, those of rows that have the mark as of `grammar`.

    `mark` are the mark's tokens: one special token, which has no text, or tokens with the text `text`. `room` is the
    most new tokens.
    """

    def __init__(self, grammar: Grammar, words: Spelling, mark: Sequence[int], text: bytes, room: int | None) -> None:
        self.grammar, self.words, self.mark, self.text, self._room = grammar, words, tuple(mark), text, room
        self.source, self.prompt_len, self.eos = grammar.source, grammar.prompt_len, grammar.eos
        self._token = mark[0] if len(mark) == 1 and not words.pieces[mark[0]] else None

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        if history.shape[1] < self.prompt_len:
            return scores
        rows: list[Tensor] = []
        for row, own in zip(history[:, self.prompt_len :].to("cpu", torch.int64), scores, strict=True):
            tokens = row.tolist()
            start = self._start(tokens)
            if start is None:
                rows.append(self._before(tokens, own))
            else:
                room = None if self._room is None else self._room - start
                rows.append(self.grammar.constrained([row[start:].numpy().tobytes()], own[None], room)[0])
        return torch.stack(rows)

    def cut(self, tokens: Sequence[int], before: int) -> bool:
        """Whether a row's new tokens are only the beginning of a text. `before`: tokens of the prompt."""
        new = tokens[max(self.prompt_len - before, 0) :]
        return not self.accepts([token for token in new if token not in self.eos])

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether these new tokens (EOS not among them) are a text with the mark and one of the grammar."""
        start = self._start(tokens)
        return start is not None and self.grammar.accepts(tokens[start:])

    def begins_with(self, tokens: Sequence[int]) -> bool:
        """Whether a text may begin with these tokens."""
        start = self._start(tokens)
        return start is None or self.grammar.begins_with(tokens[start:])

    def _start(self, tokens: Sequence[int]) -> int | None:
        """How many tokens there are up to the mark; None before it."""
        if self._token is not None:
            return tokens.index(self._token) + 1 if self._token in tokens else None
        text = b""
        for place, token in enumerate(tokens):
            text += self._piece(token) if place else self.words.at_first(token)
            if text.endswith(self.text):
                return place + 1
            text = text[-len(self.text) :]
        return None

    def _before(self, tokens: Sequence[int], scores: Tensor) -> Tensor:
        """The scores of a row without the mark."""
        tail = b"" if self._token is not None else b"".join(map(self._piece, tokens[-len(self.text) :]))
        # how much of the mark is written, in bytes: more than one answer where a part repeats itself
        begun = [size for size in range(1, len(self.text)) if tail.endswith(self.text[:size])]
        left = None if self._room is None else self._room - len(tokens) - 1 - self.grammar.least
        if left is not None and left <= len(self.mark):
            only = self._in_time([*begun, 0], left)
            if only:
                kept = torch.tensor(only, device=scores.device)
                return torch.full_like(scores, -torch.inf).index_copy_(0, kept, scores[kept].clamp(min=-1e9))
        barred = [token for token in self.eos if token < len(scores)]
        if self._token is None:
            barred += self._beyond
            for size in begun:
                rest = self.text[size:]
                barred += [token for token in self.words.beginning(rest) if len(self.words.pieces[token]) > len(rest)]
        return scores.index_fill(0, torch.tensor(barred, dtype=torch.long, device=scores.device), -torch.inf)

    def _in_time(self, begun: Sequence[int], left: int) -> list[int]:
        """The ids after which the mark, of which `begun` bytes may be written, is whole within `left` tokens."""
        if self._token is not None:
            return [self._token] if left >= 1 else []
        ids = list[int]()
        for size in begun:
            for end in range(size + 1, len(self.text) + 1):
                if self._needed[end] < left:
                    ids += [token for token in self.words.spelled(self.text[size:end]) if token not in self.eos]
        return ids

    @cached_property
    def _needed(self) -> list[float]:
        """The fewest tokens from each place of the mark to its end."""
        ways = (self.words.fewest(self.text[place:], self.eos) for place in range(len(self.text) + 1))
        return [math.inf if way is None else len(way) for way in ways]

    @cached_property
    def _beyond(self) -> list[int]:
        """The tokens that hold the mark and go on."""
        pieces = enumerate(self.words.pieces)
        return [token for token, piece in pieces if self.text in piece and not piece.endswith(self.text)]

    def _piece(self, token: int) -> bytes:
        return self.words.pieces[token] if 0 <= token < len(self.words.pieces) else b""


def after_mark(
    context: ProcessorContext, source: GrammarSource, words: Spelling, start: int, room: int | None
) -> Grammar | GrammarAfter:
    """The grammar of `grammar_after`; from the beginning if the prompt ends with the mark.

    Raises UsageError for a mark that the tokenizer cannot write, and where no text fits behind it.
    """
    text = str(context.generation.grammar_after)
    backend = context.tokenizer.backend_tokenizer
    token = backend.token_to_id(text)
    known = token is not None and token < len(words.pieces)
    mark = (token,) if known else words.fewest(text.encode(), context.eos)
    if not mark or set(mark) & set(context.eos):
        raise UsageError(f"grammar_after: this tokenizer cannot write {quote(text)}")
    ids = [] if context.encoder_ids is None or context.is_encoder_decoder else context.encoder_ids[0].tolist()
    if backend.decode(ids[-16:], skip_special_tokens=False).rstrip().endswith(text):
        return Grammar(source, words.behind, start, context.eos, room)
    behind = None if room is None else max(room - len(mark), 1)
    return GrammarAfter(Grammar(source, words.behind, start, context.eos, behind), words, mark, text.encode(), room)
