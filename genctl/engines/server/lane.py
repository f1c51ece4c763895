"""One row on its way: the texts of its sequences as they come, and the events that tell of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from genctl import events
from genctl.engines.protocol import Request
from genctl.engines.server.answer import AnswerPiece, Usage, ending_of
from genctl.engines.server.body import incomplete
from genctl.engines.server.failure import RowFailure, Trouble
from genctl.events import Token
from genctl.params import Generation


@dataclass
class RemoteSequence:
    """One sequence of a row."""

    slot: int
    tokens: list[Token] = field(default_factory=list)  # that came in the newest attempt
    shown: list[Token] = field(default_factory=list)  # that events have told of
    total: float = 0.0  # the log-probability of what is shown
    end: AnswerPiece | None = None
    new_tokens: int | None = None  # as the server counts them

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class RemoteLane:
    """A row, its sequences and its events. `live`: each piece is told of at once, not when the row is done.

    What has been told cannot be taken back: where a live answer is cut off, the next one must begin with the same text.
    """

    def __init__(self, request: Request, count: int, *, live: bool) -> None:
        self.name = request.id
        self.generation: Generation = request.resolved.generation
        self.sequences = [RemoteSequence(slot) for slot in range(count)]
        self.over = False  # nobody waits for more
        self._live = live
        self._rows: list[RemoteSequence] | None = None  # that live on, in the order of the newest event
        self._hypotheses: dict[int, events.Hypothesis] = {}
        self._step = -1
        self._prompt_tokens = 0
        self._began = self._first = monotonic()

    def again(self, slots: Sequence[int]) -> None:
        """A new attempt at some sequences begins: what came of them is forgotten."""
        for slot in slots:
            sequence = self.sequences[slot]
            sequence.tokens, sequence.end = [], None

    def take(self, slot: int, piece: AnswerPiece) -> Iterator[events.Event]:
        """Take the next piece of a sequence. Raises Trouble where it contradicts what was told before."""
        sequence = self.sequences[slot]
        if sequence.end is not None:
            return
        if not any(one.tokens for one in self.sequences):
            self._first = monotonic()
        sequence.tokens += piece.tokens
        if piece.finish is not None:
            sequence.end = piece
        if not self._live:
            return
        told = len(sequence.shown)
        for mine, theirs in zip(sequence.shown, sequence.tokens, strict=False):
            if mine.text != theirs.text:
                raise Trouble("the answer was cut off, and the next one does not begin with the text that was shown")
        yield from self._tell(sequence, sequence.tokens[told:])

    def fail(self, message: str) -> Iterator[events.Event]:
        """The row is an error."""
        self.over = True
        yield events.Failed(self.name, RowFailure.code, message)

    def count(self, slots: Sequence[int], usage: Usage | None) -> None:
        """Take note of the tokens that a request took."""
        if usage is not None:
            self._prompt_tokens = usage.prompt or self._prompt_tokens
            if len(slots) == 1:
                self.sequences[slots[0]].new_tokens = usage.new

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.end is not None for sequence in self.sequences)

    def finish(self, reason: str = "") -> Iterator[events.Event]:
        """The events that are still missing. `reason` ends the sequences that have not ended."""
        self.over = True
        if not self._live:
            yield from self._replayed(reason)
        for sequence in list(self._open()):
            yield from self._tell(sequence, (), reason or "length")
        ordered = [self._hypotheses[slot] for slot in sorted(self._hypotheses)]
        now = monotonic()
        yield events.Finished(
            self.name, tuple(ordered), self._prompt_tokens, now - self._first, self._first - self._began
        )

    @property
    def has_text(self) -> bool:
        """Whether anything has come."""
        return any(sequence.tokens for sequence in self.sequences)

    # -- events --------------------------------------------------------------------------------------------------------

    def _replayed(self, reason: str) -> Iterator[events.Event]:
        """All steps of all sequences, side by side, as if they had been decoded together."""
        longest = max((len(sequence.tokens) for sequence in self.sequences), default=0)
        for place in range(longest):
            for sequence in self.sequences:
                if place < len(sequence.tokens):
                    yield from self._tell(sequence, sequence.tokens[place : place + 1], reason)

    def _tell(self, sequence: RemoteSequence, tokens: Sequence[Token], reason: str = "") -> Iterator[events.Event]:
        """A step in which one sequence grows by `tokens`, and ends if nothing more of it comes."""
        before = self._rows
        if before is None:
            yield events.Prefilled(self.name, self._prompt_tokens, self._first - self._began)
            self._rows = list(self.sequences)
        rows = self._open()
        places = {one.slot: 0 if before is None else place for place, one in enumerate(rows)}
        sequence.shown += tokens
        sequence.total = math.fsum((sequence.total, *(token.logprob for token in tokens)))
        all_told = len(sequence.shown) == len(sequence.tokens)
        ends = all_told and (sequence.end is not None or bool(reason))
        if not tokens and not ends:
            return
        live = [one for one in rows if one is not sequence or not ends]
        written = {sequence.slot: tuple(tokens)}
        ended: tuple[events.Ended, ...] = ()
        if ends:
            hypothesis = self._hypothesis(sequence, reason)
            self._hypotheses[sequence.slot] = hypothesis
            ended = (events.Ended(self.name, places[sequence.slot], tuple(tokens), hypothesis),)
        self._step += 1
        self._rows = live
        yield events.Stepped(
            self.name,
            self._step,
            tuple(
                events.Row(self.name, places[one.slot], written.get(one.slot, ()), one.total, one.total, one.slot)
                for one in live
            ),
            ended,
        )

    def _open(self) -> list[RemoteSequence]:
        return self.sequences if self._rows is None else self._rows

    def _hypothesis(self, sequence: RemoteSequence, reason: str) -> events.Hypothesis:
        ids = tuple(token.id for token in sequence.tokens)
        total = sequence.total
        length = sequence.new_tokens if sequence.new_tokens is not None else len(ids)
        words, stop, kind = (
            (reason, "", "")
            if sequence.end is None
            else ending_of(sequence.end, could_stop=could_stop(self.generation))
        )
        text = sequence.text
        cut = incomplete(self.generation, text) if words in events.CUT else ""
        known = bool(ids) and all(id >= 0 for id in ids)
        return events.Hypothesis(
            ids if known else (),
            total,
            total,
            words,
            total / max(length, 1) ** self.generation.length_penalty,
            sequence.slot,
            stop,
            text,
            kind,
            incomplete=cut,
            counted=0 if known else length,
        )


def could_stop(generation: Generation) -> bool:
    """Whether something else than EOS may end a text."""
    return generation.stop_strings is not None or generation.stop_token_ids is not None
