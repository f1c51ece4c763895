"""One row on a server: its requests, one after another in a thread, and the events that their answers become."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from genctl import events
from genctl.engines.protocol import Report, Request
from genctl.engines.server.answer import (
    AnswerPiece,
    Disconnected,
    Ending,
    ServerError,
    TimedOut,
    Usage,
    ends_run,
    pieces_of,
    row_error,
    usage_of,
)
from genctl.engines.server.body import (
    SEEDS,
    fields_of,
    incomplete,
    logprob_fields,
    messages_of,
    path_of,
    sampling_fields,
)
from genctl.engines.server.server import Server
from genctl.errors import GenctlError, InputError
from genctl.events import Token
from genctl.io.rows import row_seed
from genctl.params import DEFAULT_NEW_TOKENS

if TYPE_CHECKING:
    from genctl.models.tokenizer_alone import LoneTokenizer

PARTS = 64  # of a stream for each token, at most: servers may send single characters
FEWEST = 1024  # parts that any stream may have
MALFORMED = (400, 422)  # statuses with which servers refuse more sequences than they give
Update: TypeAlias = "events.Event | GenctlError | None"  # an error ends the run; None: the row is done


@dataclass
class RemoteSequence:
    """One sequence of a row. A new attempt starts from nothing."""

    tokens: list[Token] = field(default_factory=list)  # of this attempt
    thought: str = ""
    end: Ending | None = None
    usage: Usage = field(default_factory=Usage)
    seed: int | None = None  # of its own request, where a row has several
    reported: int = 0  # tokens that events have

    @property
    def total(self) -> float:
        """The log-probability of what is reported, as far as the server lists its tokens."""
        is_unlisted = not self.reported and bool(self.thought or self.usage.new)
        return math.nan if is_unlisted else math.fsum(token.logprob for token in self.tokens[: self.reported])


class RemoteLane:
    """A row, its sequences and its events. `live`: each piece is reported at once, not when the row is done.

    What has been shown cannot be taken back: a live answer that is cut off is not requested again.
    """

    def __init__(self, request: Request, *, live: bool) -> None:
        self.name, self.generation = request.id, request.resolved.generation
        self.sequences = [RemoteSequence() for _ in range(self.generation.num_return_sequences)]
        self.most = self.generation.max_new_tokens or DEFAULT_NEW_TOKENS  # tokens of each sequence
        self._live = live
        self._slots: Sequence[int] = ()  # the sequences of this attempt
        self.ended: list[int] = []  # those of them that are there
        self._parts = 0  # of its answer
        self._rows: list[int] | None = None  # slots that live on, in the order of the newest event
        self._hypotheses: dict[int, events.Hypothesis] = {}
        self._step = -1
        self._prompt_tokens = 0
        self._began = self._first = monotonic()

    # -- answers -------------------------------------------------------------------------------------------------------

    def attempt(self, slots: Sequence[int], seed: int) -> None:
        """Begin an attempt at some sequences."""
        self._slots, self.ended, self._parts = slots, [], 0
        own = seed if len(slots) < len(self.sequences) and self.generation.draws else None
        for slot in slots:
            self.sequences[slot] = RemoteSequence(seed=own)

    @property
    def has_text(self) -> bool:
        """Whether anything has come."""
        return any(sequence.tokens or sequence.thought for sequence in self.sequences)

    def take(self, part: Mapping[str, Any], top: int) -> Iterator[events.Event]:
        """Take the next part of the answer. Raises ServerError."""
        self._parts += 1
        if self._parts > max(PARTS * self.most, FEWEST) * len(self._slots):
            raise ServerError(f"the stream does not end: it has {self._parts} parts for at most {self.most} tokens")
        could_stop = self.generation.stop_strings is not None or self.generation.stop_token_ids is not None
        pieces, usage = pieces_of(part, top, could_stop=could_stop), usage_of(part)
        if any(piece.choice >= len(self._slots) for piece in pieces):
            raise ServerError(f"the answer has more than {len(self._slots)} sequences")
        for piece in pieces:
            yield from self._take_piece(self._slots[piece.choice], piece)
        if usage is not None:
            self._prompt_tokens = usage.prompt or self._prompt_tokens
            if len(pieces) == 1 or len(self._slots) == 1:  # llama-server counts each sequence alone
                self.sequences[self._slots[pieces[0].choice if pieces else 0]].usage = usage

    def _take_piece(self, slot: int, piece: AnswerPiece) -> Iterator[events.Event]:
        sequence = self.sequences[slot]
        if sequence.end is not None:
            return
        if not self.has_text:
            self._first = monotonic()
        sequence.tokens += piece.tokens
        sequence.thought += piece.thought
        sequence.end = piece.end
        self.ended += [slot] if piece.end is not None else []
        if self._live:
            yield from self._grow(slot, piece.tokens, piece.thought)

    def _open_texts(self) -> bool:
        """Whether sequences of this attempt have begun and not ended."""
        open_slots = [self.sequences[slot] for slot in self._slots if slot not in self.ended]
        return any(one.tokens or one.thought for one in open_slots)

    @property
    def is_shown(self) -> bool:
        """Whether somebody has seen a part of this attempt."""
        return self._live and (bool(self.ended) or self._open_texts())

    def check(self) -> None:
        """End an attempt. Raises ServerError where its answer is cut off."""
        if not self.ended or self._open_texts():
            raise ServerError("the answer was cut off before its end", again=not self.is_shown)

    # -- events --------------------------------------------------------------------------------------------------------

    def finish(self, reason: str = "") -> Iterator[events.Event]:
        """The events that are still missing. `reason` ends the sequences that have not ended."""
        if not self._live:  # all steps of all sequences, side by side, as if they had been decoded together
            for place in range(max((len(sequence.tokens) for sequence in self.sequences), default=0)):
                for slot, sequence in enumerate(self.sequences):
                    if place < len(sequence.tokens):
                        yield from self._grow(slot, sequence.tokens[place : place + 1], "", reason)
        for slot in self._open():
            yield from self._grow(slot, (), "", reason or "length")
        ordered = tuple(self._hypotheses[slot] for slot in sorted(self._hypotheses))
        decoding_s, prefill_s = monotonic() - self._first, self._first - self._began
        yield events.Finished(self.name, ordered, self._prompt_tokens, decoding_s, prefill_s)

    def _open(self) -> list[int]:
        return [*range(len(self.sequences))] if self._rows is None else list(self._rows)

    def _grow(self, slot: int, tokens: Sequence[Token], thought: str, reason: str = "") -> Iterator[events.Event]:
        """A step in which one sequence grows, and ends if nothing more of it comes."""
        rows, sequence = self._open(), self.sequences[slot]
        places = {row: place if self._rows is not None else 0 for place, row in enumerate(rows)}
        if self._rows is None:
            yield events.Prefilled(self.name, self._prompt_tokens, self._first - self._began)
        sequence.reported += len(tokens)
        is_whole = sequence.reported == len(sequence.tokens)
        ends = is_whole and (sequence.end is not None or bool(reason))
        self._rows = rows
        if not (tokens or thought or ends):
            return
        ended: tuple[events.Ended, ...] = ()
        if ends:
            hypothesis = self._hypotheses[slot] = self._hypothesis(slot, reason)
            ended = (events.Ended(self.name, places[slot], tuple(tokens), hypothesis),)
            rows.remove(slot)
        self._step += 1
        live = []
        for row in rows:
            written, new = (tuple(tokens), thought) if row == slot else ((), "")
            total = self.sequences[row].total
            live.append(events.Row(self.name, places[row], written, total, total, row, thought=new))
        yield events.Stepped(self.name, self._step, tuple(live), ended)

    def _hypothesis(self, slot: int, reason: str) -> events.Hypothesis:
        sequence = self.sequences[slot]
        tokens, total, usage, thought = sequence.tokens, sequence.total, sequence.usage, sequence.thought
        reason, stop, kind = sequence.end or Ending(reason)
        text = "".join(token.text for token in tokens)
        counted = len(tokens) if usage.new is None else usage.new
        # a server may leave out EOS; without the other tokens that it counts, the ids are not those of the text
        lacking = counted - len(tokens)
        is_known = bool(tokens) and all(token.id >= 0 for token in tokens) and lacking in (0, int(reason == "eos"))
        bare = len([*takewhile(lambda token: not token.text, tokens)])  # those of a thought, if they are listed
        listed = not thought or bool(bare)
        return events.Hypothesis(
            tuple(token.id for token in tokens) if is_known else (),
            total,
            total,
            reason,
            total / max(counted if listed else len(tokens), 1) ** self.generation.length_penalty,
            slot,
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


@dataclass
class RemoteRow:
    """A row and the server that computes it. `live`: its pieces become events as they come.

    `stop` ends it, for the reason that `interrupted` gives.
    """

    request: Request
    server: Server
    report: Report
    tokenizer: LoneTokenizer | None
    live: bool
    emit: Callable[[Update], object]
    stop: threading.Event
    interrupted: Callable[[], str]

    def __post_init__(self) -> None:
        generation, runtime = self.request.resolved.generation, self.request.resolved.runtime
        self.chat = runtime.is_chat or self.request.messages is not None
        limits = [one for one in (generation.max_time, runtime.row_timeout) if one is not None]
        self.deadline = monotonic() + min(limits) if limits else math.inf
        self.lane = RemoteLane(self.request, live=self.live)

    def run(self) -> None:
        """Emit the events of the row. The last update is None; before it may be the error that ends the run."""
        lane = self.lane
        try:
            self.emit(self._began())
            last: Iterable[events.Event] = ()
            try:
                self._complete()
                last = lane.finish()
            except TimedOut:
                last = lane.finish("time")
            except Disconnected:
                last = lane.finish(self.interrupted()) if lane.has_text else ()
            for event in last:
                self.emit(event)
        except Exception as error:  # whatever a server sends may cost its row, never the others
            failure = row_error(self.server.name, error)
            failed = events.Failed(lane.name, failure.code, failure.message, failure.hint)
            self.emit(failure if ends_run(failure) else failed)
        finally:
            self.emit(None)

    def _began(self) -> events.Began:
        request, generation = self.request, self.request.resolved.generation
        settings: dict[str, Any] = {
            "num_return_sequences": generation.num_return_sequences,
            "length_penalty": generation.length_penalty,
            "backend": self.server.name,
        } | ({"structure": generation.structure} if generation.structure else {})
        prompt = request.prompt or "\n".join(message.get("content") or "" for message in request.messages or ())
        shown = events.conversation(self._messages()) if self.chat else ""
        kind, seed = ("sample", request.seed) if generation.draws else ("greedy", None)
        return events.Began(
            request.id, prompt, kind, self.server.model, seed, settings, request.place, shown=shown, run=request.run,
            prompt_ids=request.prompt_ids or (),
        )  # fmt: skip

    # -- requests ------------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Request all sequences: as many at once as the server gives. Raises what `run` catches."""
        server, request = self.server, self.request
        chosen, problems = sampling_fields(request.resolved, server.owner, chat=self.chat)
        if problems:
            raise ServerError(f"{server.name}: {'; '.join(problems)}")
        if self.chat and request.prompt_ids is not None:
            raise InputError("token ids cannot be sent as a chat, because the server applies its own template")
        fixed = {"model": server.model, **chosen, "stream": True, "stream_options": {"include_usage": True}}
        if "return_token_ids" in fields_of(server.owner, chat=self.chat):
            fixed["return_token_ids"] = True
        left = [*range(len(self.lane.sequences))]
        while left:
            slots = left[: server.most_sequences]
            while True:  # half of them if the server refuses so many
                seed = row_seed(request.seed, f"sequence {slots[0]}", slots[0])
                own = {"n": len(slots)} if len(slots) > 1 else {}
                own |= {"seed": seed % SEEDS} if request.resolved.generation.draws else {}
                send = partial(self._send, {**fixed, **own}, slots, seed)
                try:
                    server.client.retry(send, deadline=self.deadline, stop=self.stop)
                    break
                except ServerError as error:
                    if len(slots) == 1 or error.status not in MALFORMED:
                        raise
                    slots = slots[: len(slots) // 2]
            ended = self.lane.ended
            left = [slot for slot in left if slot not in ended]
            if left:
                server.most_sequences = min(server.most_sequences, len(ended))

    def _send(self, fixed: dict[str, Any], slots: Sequence[int], seed: int) -> None:
        """Send a request once, or again without what the server cannot do. Raises ServerError."""
        server, lane, top = self.server, self.lane, self.report.top
        lane.attempt(slots, seed)
        body = {**fixed, **self._prompt()}
        if server.may("logprobs", chat=self.chat):
            body |= logprob_fields(top, chat=self.chat)

        def ended() -> bool:
            return len(lane.ended) == len(slots)

        path = path_of(chat=self.chat)
        stream = server.client.stream(path, body, sequences=len(slots), deadline=self.deadline)
        try:
            with closing(stream):
                for part in stream:
                    if self.stop.is_set():
                        raise Disconnected
                    for event in lane.take(part, top):
                        self.emit(event)
        except ServerError as error:
            if self.stop.is_set():  # its connection was shut
                raise Disconnected from None
            if ended():
                return  # whatever is wrong behind the last text
            error.again = error.again and not lane.is_shown
            if (len(slots) > 1 and error.status in MALFORMED) or not server.lacks(body, error):
                raise
            self._send(fixed, slots, seed)
        else:
            lane.check()

    def _messages(self) -> list[dict[str, Any]]:
        return messages_of(self.request.prompt, self.request.messages, self.request.resolved.runtime.system)

    def _prompt(self) -> dict[str, Any]:
        """The messages, or a plain prompt: as ids where there are any and the server takes them, else as text."""
        request, tokenizer, takes_ids = self.request, self.tokenizer, self.server.may("ids")
        if self.chat:
            return {"messages": self._messages()}
        if request.prompt_ids is None:
            text = request.prompt or ""
            return {"prompt": tokenizer.ids(text) if tokenizer is not None and takes_ids else text}
        if takes_ids:
            return {"prompt": list(request.prompt_ids)}
        if tokenizer is None:
            raise InputError(f"{self.server.name} takes no token ids as a prompt; --tokenizer makes a text of them")
        return {"prompt": tokenizer.text(request.prompt_ids)}
