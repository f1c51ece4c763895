"""A forced prefix: the new text must begin with a given text, in any tokenisation.

Tokens that contradict the rest of the prefix are barred, and so are those after which no tokens can spell the rest. The
last token may extend past the prefix. After it everything is allowed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from genctl.decode.processors import Processor
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.grammar import begins
from genctl.decode.processors.token_bytes import Spelling, spelling
from genctl.errors import UsageError

# The rest of the prefix as shown, and as spelled (including a blank that some decoders strip at the beginning). None if
# a row contradicts it.
_Rest = tuple["bytes | None", "bytes | None"]


@dataclass(eq=False)
class RequiredPrefix:
    """history int64 [R, T], scores f32 [R, V] -> scores with -inf for tokens that contradict the prefix.

    Either the text of the new tokens must begin with `shown`, or their bytes, decoded as if other text preceded them,
    with `spelled`. So a prefix that begins with a blank works even if the decoder strips that blank. Rows past the
    prefix cost constant work.

    Raises UsageError if no tokens spell the prefix, or none do within `room` tokens.
    """

    shown: bytes | None
    spelled: bytes | None
    words: Spelling
    prompt_len: int
    eos: Collection[int] = ()
    room: int | None = None  # maximum number of new tokens
    knob: str = "prefix"
    _steps: dict[bytes, int] = field(default_factory=dict)  # the fewest tokens for a rest; absent if no tokens spell it
    _masks: dict[tuple[_Rest, bool], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for target in filter(None, (self.shown, self.spelled)):
            self._count(target)
        least = min(self._next((self.shown, self.spelled), True).values(), default=None)
        text = (self.shown or self.spelled or b"").decode(errors="replace")
        if least is None:
            raise UsageError(f"{self.knob}: the checkpoint's tokenizer has no tokens for {text!r}")
        if self.room is not None and least + 1 > self.room:
            raise UsageError(f"{self.knob}: {text!r} takes {least + 1} tokens, but only {self.room} may be written")

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        written = history.shape[1] - self.prompt_len
        # every token but the first has at least one byte
        if written < 0 or written > max(len(self.shown or b""), len(self.spelled or b"")):
            return scores
        barred = torch.zeros_like(scores, dtype=torch.bool)
        for place, tokens in enumerate(history[:, self.prompt_len :].tolist()):
            rest = self._rest(tokens)
            if b"" in rest or rest == (None, None):  # past the prefix, or a draft that contradicts it
                continue
            barred[place] = self._mask(rest, not tokens, scores)
        return scores.masked_fill(barred, -torch.inf)

    def _rest(self, tokens: Sequence[int]) -> _Rest:
        rest: _Rest = (self.shown, self.spelled)
        for place, token in enumerate(tokens):
            if b"" in rest:
                break
            if not 0 <= token < len(self.words.pieces):
                return None, None
            rest = self._after(rest, token, place == 0)
        return rest

    def _after(self, rest: _Rest, token: int, first: bool) -> _Rest:
        """The rest of the prefix after one more token."""
        spelled = self.words.pieces[token]
        if not spelled:  # a special token has no text: it cannot be part of the prefix
            return None, None
        return _cut(rest[0], self.words.at_first(token) if first else spelled), _cut(rest[1], spelled)

    def _mask(self, rest: _Rest, first: bool, like: Tensor) -> Tensor:
        """bool [V]: the tokens that contradict the prefix."""
        mask = self._masks.get((rest, first))
        if mask is None:
            allowed = torch.tensor(list(self._next(rest, first)), dtype=torch.long, device=like.device)
            mask = torch.ones(like.shape[1], dtype=torch.bool, device=like.device).index_fill_(0, allowed, False)
            self._masks[rest, first] = mask
        return mask

    def _next(self, rest: _Rest, first: bool) -> dict[int, int]:
        """The ids that may come next, and how many more tokens the prefix takes after each. EOS ids may only end it."""
        counts: dict[int, int] = {}
        for token in {*self._matching(rest[0], first), *self._matching(rest[1], False)}:
            for left in self._after(rest, token, first):
                count = 0 if left == b"" else self._steps.get(left) if left else None
                if count is not None and (count == 0 or token not in self.eos):
                    counts[token] = min(count, counts.get(token, count))
        return counts

    def _matching(self, rest: bytes | None, first: bool) -> Iterator[int]:
        """The ids that match the beginning of the rest, whether or not the vocabulary can spell what follows."""
        if rest is None:
            return
        for end in range(1, min(len(rest), self.words.longest + 1)):
            yield from self.words.spelled(rest[:end], first=first)
        yield from self.words.beginning(rest, first=first)
        if first:
            yield from (token for token, piece in self.words.first.items() if not piece)

    def _count(self, target: bytes) -> None:
        """Compute the fewest tokens for each suffix of `target`, the shortest first."""
        for start in range(len(target) - 1, -1, -1):
            rest = target[start:]
            reaches = next(self.words.beginning(rest), None) is not None  # one token is enough
            least = 0 if reaches else min(self._next((None, rest), False).values(), default=None)
            if least is not None:
                self._steps[rest] = least + 1


def _cut(rest: bytes | None, piece: bytes) -> bytes | None:
    if rest is None:
        return None
    if rest.startswith(piece):
        return rest[len(piece) :]
    return b"" if piece.startswith(rest) else None


def prefix(context: ProcessorContext, value: object = None) -> Processor | None:
    """The processor for the text that token healing removed and for the knob `prefix`; None if both are empty."""
    text = context.generation.prefix or ""
    healed = context.healed
    if not text and not healed:
        return None
    knob = "prefix" if text else "token_healing"
    words = spelling(context.tokenizer, context.vocab_size, knob, begun=context.begun)
    required = (healed + text).encode()
    # removed text must be spelled exactly: it stands between the prompt and the new text
    shown = None if healed else required
    spelled = required if healed or required.startswith(b" ") else None
    start = begins(context)
    return RequiredPrefix(shown, spelled, words, start, context.eos, context.max_length - start, knob)
