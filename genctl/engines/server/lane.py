"""One row in progress: the texts of its sequences as they come, and the events for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from time import monotonic

from genctl import events
from genctl.engines.protocol import Request
from genctl.engines.server.answer import AnswerPiece, Usage, ending_of
from genctl.engines.server.body import incomplete
from genctl.engines.server.failure import RowFailure, ServerError
from genctl.events import Token


@dataclass
class RemoteSequence:
    """One sequence of a row."""

    slot: int
    tokens: list[Token] = field(default_factory=list)  # that came in the newest attempt
    thought: str = ""
    shown: list[Token] = field(default_factory=list)  # that events have reported
    shown_thought: str = ""
    end: AnswerPiece | None = None
    usage: Usage = field(default_factory=Usage)  # of this sequence
    seed: int | None = None  # of its own request, where a row has several

    @property
    def total(self) -> float:
        """The log-probability of what is shown, as far as the server lists its tokens."""
        is_unlisted = not self.shown and bool(self.thought or self.usage.new)
        return math.nan if is_unlisted else math.fsum(token.logprob for token in self.shown)


class RemoteLane:
    """A row, its sequences and its events. `live`: each piece is reported at once, not when the row is done.

    What has been shown cannot be taken back: where a live answer is cut off, the next one must begin with the same
    text.
    """

    def __init__(self, request: Request, count: int, *, live: bool) -> None:
        self.name, self.generation = request.id, request.resolved.generation
        self.sequences = [RemoteSequence(slot) for slot in range(count)]
        self._live = live
        self._rows: list[RemoteSequence] | None = None  # that live on, in the order of the newest event
        self._hypotheses: dict[int, events.Hypothesis] = {}
        self._step = -1
        self._prompt_tokens = 0
        self._began = self._first = monotonic()

    def again(self, slots: Sequence[int], seed: int) -> None:
        """A new attempt at some sequences begins: what came of them is forgotten."""
        for slot in slots:
            sequence = self.sequences[slot]
            sequence.tokens, sequence.thought, sequence.end = [], "", None
            if len(slots) < len(self.sequences) and self.generation.draws:
                sequence.seed = seed

    def take(self, slot: int, piece: AnswerPiece) -> Iterator[events.Event]:
        """Take the next piece of a sequence. Raises ServerError where it contradicts what was shown before."""
        sequence = self.sequences[slot]
        if sequence.end is not None:
            return
        if not self.has_text:
            self._first = monotonic()
        sequence.tokens += piece.tokens
        sequence.thought += piece.thought
        if piece.finish is not None:
            sequence.end = piece
        if not self._live:
            return
        pairs = zip(sequence.shown, sequence.tokens, strict=False)
        same = all(mine.text == theirs.text for mine, theirs in pairs)
        thoughts = sorted((sequence.shown_thought, sequence.thought), key=len)
        if not (same and thoughts[1].startswith(thoughts[0])):
            raise ServerError("the answer was cut off, and the next one does not begin with the text that was shown")
        new = sequence.tokens[len(sequence.shown) :], sequence.thought[len(sequence.shown_thought) :]
        yield from self._grow(sequence, *new)

    def failed(self, message: str, hint: str = "") -> events.Failed:
        """The row is an error."""
        return events.Failed(self.name, RowFailure.code, message, hint)

    def count(self, slots: Sequence[int], usage: Usage | None) -> None:
        """Take note of the tokens that a request took."""
        if usage is not None:
            self._prompt_tokens = usage.prompt or self._prompt_tokens
            if len(slots) == 1:
                self.sequences[slots[0]].usage = usage

    @property
    def has_text(self) -> bool:
        """Whether anything has come."""
        return any(sequence.tokens or sequence.thought for sequence in self.sequences)

    def finish(self, reason: str = "") -> Iterator[events.Event]:
        """The events that are still missing. `reason` ends the sequences that have not ended."""
        if not self._live:  # all steps of all sequences, side by side, as if they had been decoded together
            for place in range(max((len(sequence.tokens) for sequence in self.sequences), default=0)):
                for sequence in self.sequences:
                    if place < len(sequence.tokens):
                        yield from self._grow(sequence, sequence.tokens[place : place + 1], "", reason)
        for sequence in list(self._open()):
            yield from self._grow(sequence, (), "", reason or "length")
        ordered = [self._hypotheses[slot] for slot in sorted(self._hypotheses)]
        now = monotonic()
        yield events.Finished(
            self.name, tuple(ordered), self._prompt_tokens, now - self._first, self._first - self._began
        )

    # -- events --------------------------------------------------------------------------------------------------------

    def _grow(
        self, sequence: RemoteSequence, tokens: Sequence[Token], thought: str, reason: str = ""
    ) -> Iterator[events.Event]:
        """A step in which one sequence grows, and ends if nothing more of it comes."""
        is_first = self._rows is None
        if is_first:
            yield events.Prefilled(self.name, self._prompt_tokens, self._first - self._began)
        rows = self._open()
        places = {one.slot: 0 if is_first else place for place, one in enumerate(rows)}
        sequence.shown += tokens
        sequence.shown_thought += thought
        is_whole = len(sequence.shown) == len(sequence.tokens)
        ends = is_whole and (sequence.end is not None or bool(reason))
        self._rows = list(rows)
        if not (tokens or thought or ends):
            return
        ended: tuple[events.Ended, ...] = ()
        if ends:
            hypothesis = self._hypotheses[sequence.slot] = self._hypothesis(sequence, reason)
            ended = (events.Ended(self.name, places[sequence.slot], tuple(tokens), hypothesis),)
            self._rows.remove(sequence)
        self._step += 1
        live = []
        for one in self._rows:
            written, new = (tuple(tokens), thought) if one is sequence else ((), "")
            total = one.total
            live.append(events.Row(self.name, places[one.slot], written, total, total, one.slot, thought=new))
        yield events.Stepped(self.name, self._step, tuple(live), ended)

    def _open(self) -> list[RemoteSequence]:
        return self.sequences if self._rows is None else self._rows

    def _hypothesis(self, sequence: RemoteSequence, reason: str) -> events.Hypothesis:
        tokens, total, usage, thought = sequence.tokens, sequence.total, sequence.usage, sequence.thought
        could_stop = self.generation.stop_strings is not None or self.generation.stop_token_ids is not None
        stop, kind = "", ""
        if sequence.end is not None:
            reason, stop, kind = ending_of(sequence.end, could_stop=could_stop)
        text = "".join(token.text for token in tokens)
        # a server may leave out EOS; without the other tokens that it counts, the ids are not those of the text
        lacking = 0 if usage.new is None else usage.new - len(tokens)
        is_known = bool(tokens) and all(token.id >= 0 for token in tokens) and lacking in (0, int(reason == "eos"))
        counted = len(tokens) if usage.new is None else usage.new
        bare = len([*takewhile(lambda token: not token.text, tokens)])  # those of a thought, if they are listed
        listed = not thought or bool(bare)
        return events.Hypothesis(
            tuple(token.id for token in tokens) if is_known else (),
            total,
            total,
            reason,
            total / max(counted if listed else len(tokens), 1) ** self.generation.length_penalty,
            sequence.slot,
            stop,
            text,
            kind,
            incomplete=incomplete(self.generation, text) if reason in events.CUT else "",
            thought=(bare or None if usage.thought is None else usage.thought) if thought else None,
            thought_cut=bool(thought) and not text and reason in events.CUT,
            thought_text=thought,
            counted=0 if is_known and not lacking else counted,
            seed=sequence.seed,
        )
