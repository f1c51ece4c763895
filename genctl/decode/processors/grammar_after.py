"""A grammar that begins within the text, after a mark such as `</think>`.

Before the mark everything may be written but an EOS id. A token that goes on behind the mark is barred, so that the
grammar's text begins with a token. Where the budget gets near, the mark is written in time for a text that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.token_bytes import Spelling
from genctl.errors import UsageError, quote


class OneGrammar(Protocol):
    """What a `Grammar` can do."""

    source: Any

    @property
    def first(self) -> tuple[int, ...] | None: ...
    def __call__(self, history: Tensor, scores: Tensor) -> Tensor: ...
    def accepts(self, tokens: Sequence[int]) -> bool: ...
    def begins_with(self, tokens: Sequence[int]) -> bool: ...


Make: TypeAlias = Callable[[int, "int | None"], OneGrammar]


class GrammarAfter:
    """history int64 [R, T], scores f32 [R, V] -> scores, those of rows that have the mark as of `Grammar`.

    `make` builds the grammar that begins after so many new tokens, with room for so many. `mark` are the mark's tokens,
    and `token` says that it is one special token, which has no text. `room` is the most new tokens.
    """

    def __init__(
        self,
        make: Make,
        words: Spelling,
        prompt_len: int,
        eos: Sequence[int],
        mark: Sequence[int],
        text: bytes,
        room: int | None,
    ) -> None:
        self._make, self.words, self.prompt_len, self.eos = make, words, prompt_len, tuple(eos)
        self.mark, self.text, self._room = tuple(mark), text, room
        self._token = mark[0] if len(mark) == 1 and not words.pieces[mark[0]] else None
        self._made: dict[int, OneGrammar] = {}
        self.source = make(0, None).source
        self._needed = self._least()

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        if history.shape[1] < self.prompt_len:
            return scores
        rows: list[Tensor] = []
        for row, own in zip(history, scores, strict=True):
            tokens = row[self.prompt_len :].tolist()
            start = self._start(tokens)
            if start is None:
                rows.append(self._before(tokens, own))
            else:
                rows.append(self._at(start)(row[None], own[None])[0])
        return torch.stack(rows)

    def cut(self, tokens: Sequence[int], before: int) -> bool:
        """Whether a row's new tokens are only the beginning of a text. `before`: tokens of the prompt."""
        return not self.accepts(
            [token for token in tokens[max(self.prompt_len - before, 0) :] if token not in self.eos]
        )

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether these new tokens (EOS not among them) are a text with the mark and one of the grammar."""
        start = self._start(tokens)
        return start is not None and self._at(start).accepts(tokens[start:])

    def begins_with(self, tokens: Sequence[int]) -> bool:
        """Whether a text may begin with these tokens."""
        start = self._start(tokens)
        return start is None or self._at(start).begins_with(tokens[start:])

    def _at(self, start: int) -> OneGrammar:
        """The grammar that begins after `start` new tokens."""
        if start not in self._made:
            try:
                self._made[start] = self._make(start, None if self._room is None else self._room - start)
            except UsageError:  # the budget is too small for a text
                self._made[start] = self._make(start, None)
        return self._made[start]

    def _least(self) -> int:
        """The tokens that the mark and a shortest text need, as far as one is known."""
        if self._room is None:
            return 0
        closing = self._make(0, max(self._room, 1)).first if self._room > len(self.mark) else None
        return len(self.mark) + 1 + len(closing or ())

    def _start(self, tokens: Sequence[int]) -> int | None:
        """How many tokens there are up to the mark; None before it."""
        if self._token is not None:
            return next((place + 1 for place, token in enumerate(tokens) if token == self._token), None)
        text = b""
        for place, token in enumerate(tokens):
            text += self.words.at_first(token) if not place else self._piece(token)
            if text.endswith(self.text):
                return place + 1
            text = text[-len(self.text) :]
        return None

    def _before(self, tokens: Sequence[int], scores: Tensor) -> Tensor:
        """The scores of a row without the mark."""
        if self._room is not None and len(tokens) + self._needed >= self._room:
            done = max(
                (n for n in range(len(self.mark)) if tuple(tokens[len(tokens) - n :]) == self.mark[:n]), default=0
            )
            only = torch.full_like(scores, -torch.inf)
            only[self.mark[done]] = scores[self.mark[done]].clamp(min=-1e9)
            return only
        barred = [token for token in self.eos if token < len(scores)]
        if self._token is None:
            barred += self._beyond
            tail = b"".join(self._piece(token) for token in tokens[-len(self.text) :])[-len(self.text) :]
            for size in range(1, len(self.text)):
                if tail.endswith(self.text[:size]):
                    rest = self.text[size:]
                    barred += [
                        token for token in self.words.beginning(rest) if len(self.words.pieces[token]) > len(rest)
                    ]
        return scores.index_fill(0, torch.tensor(barred, dtype=torch.long, device=scores.device), -torch.inf)

    @cached_property
    def _beyond(self) -> list[int]:
        """The tokens that hold the mark and go on."""
        return [
            token
            for token, piece in enumerate(self.words.pieces)
            if self.text in piece and not piece.endswith(self.text)
        ]

    def _piece(self, token: int) -> bytes:
        return self.words.pieces[token] if 0 <= token < len(self.words.pieces) else b""


def after_mark(
    context: ProcessorContext, words: Spelling, start: int, room: int | None, make: Make
) -> OneGrammar | GrammarAfter:
    """The grammar of `grammar_after`; from the beginning if the prompt ends with the mark.

    Raises UsageError for a mark that the tokenizer cannot write.
    """
    text = str(context.generation.grammar_after)
    backend = context.tokenizer.backend_tokenizer
    token = backend.token_to_id(text)
    mark = [token] if token is not None and token < len(words.pieces) else written_in(words, text.encode(), context.eos)
    if not mark or set(mark) & set(context.eos):
        raise UsageError(f"grammar_after: this tokenizer cannot write {quote(text)}")
    ids = [] if context.encoder_ids is None or context.is_encoder_decoder else context.encoder_ids[0].tolist()
    if backend.decode(ids[-16:], skip_special_tokens=False).rstrip().endswith(text):
        return make(0, room)
    return GrammarAfter(make, words, start, context.eos, mark, text.encode(), room)


def written_in(words: Spelling, text: bytes, eos: Collection[int]) -> list[int]:
    """Tokens with this text, the longest first; none if there are none."""
    tokens: list[int] = []
    while text:
        for size in range(min(len(text), words.longest), 0, -1):
            found = [token for token in words.spelled(text[:size]) if token not in eos]
            if found:
                tokens.append(found[0])
                text = text[size:]
                break
        else:
            return []
    return tokens
