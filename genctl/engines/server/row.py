"""One row on a server: its requests, one after another in a thread, and the events made from the responses."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from genctl import events
from genctl.engines.protocol import Report, Request
from genctl.engines.server import body as bodies
from genctl.engines.server.answer import (
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
from genctl.engines.server.server import Server
from genctl.errors import GenctlError, InputError
from genctl.events import Token
from genctl.io.rows import row_seed
from genctl.params import DEFAULT_NEW_TOKENS

if TYPE_CHECKING:
    from genctl.models.tokenizer_alone import LoneTokenizer

PARTS = 64  # most parts of a stream per token: servers may send single characters
FEWEST = 1024  # parts that any stream may have, however few its tokens
MALFORMED = (400, 422)  # statuses with which servers refuse too many sequences
Update: TypeAlias = "events.Event | GenctlError | None"  # an error ends the run; None: the row is done


@dataclass
class RemoteSequence:
    """One sequence of a row. A new attempt starts with an empty one."""

    tokens: list[Token] = field(default_factory=list)
    thought: str = ""
    end: Ending | None = None
    usage: Usage = field(default_factory=Usage)
    seed: int | None = None  # of its own request, if the row has several requests
    reported: int = 0  # tokens already reported in events

    @property
    def has_text(self) -> bool:
        """Whether anything has been received."""
        return bool(self.tokens or self.thought)

    @property
    def total(self) -> float:
        """The log-probability of the reported tokens; NaN if the server does not list them."""
        is_unlisted = not self.reported and bool(self.thought or self.usage.new)
        return math.nan if is_unlisted else math.fsum(token.logprob for token in self.tokens[: self.reported])


@dataclass
class RemoteRow:
    """A row and the server that computes it.

    `live`: pieces become events as they arrive, not when the row is done. Shown text cannot be taken back, so a live
    response that is cut off is not requested again. `stop` ends the row, for the reason returned by `interrupted`.
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
        runtime = self.request.resolved.runtime
        generation = self.generation = self.request.resolved.generation
        self.chat = runtime.is_chat or self.request.messages is not None
        self.most = generation.max_new_tokens or DEFAULT_NEW_TOKENS  # tokens of each sequence
        self.sequences = [RemoteSequence() for _ in range(generation.num_return_sequences)]
        self.hypotheses: dict[int, events.Hypothesis] = {}
        self.places = dict.fromkeys(range(len(self.sequences)), 0)  # live sequence -> its place in the newest event
        self.steps = self.prompt_tokens = 0
        self.began = self.first = monotonic()
        limits = [one for one in (generation.max_time, runtime.row_timeout) if one is not None]
        self.deadline = self.began + min(limits, default=math.inf)

    def run(self) -> None:
        """Emit the events of the row, then possibly the error that ends the run, and finally None."""
        reason = ""
        try:
            self.emit(self._began())
            try:
                self._complete()
            except TimedOut:
                reason = "time"
            except Disconnected:
                if not any(sequence.has_text for sequence in self.sequences):
                    return
                reason = self.interrupted()
            self._finish(reason)
        except Exception as error:  # a bad response fails only its own row
            failure = row_error(self.server.name, error)
            failed = events.Failed(self.request.id, failure.code, failure.message, failure.hint)
            self.emit(failure if ends_run(failure) else failed)
        finally:
            self.emit(None)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Request all sequences, as many at once as the server returns. Raises the exceptions that `run` catches."""
        server, request, draws = self.server, self.request, self.generation.draws
        fixed, problems = bodies.sampling_fields(request.resolved, server.owner, chat=self.chat)
        if problems:
            raise ServerError(f"{server.name}: {'; '.join(problems)}")
        if self.chat and request.prompt_ids is not None:
            raise InputError("token ids cannot be sent as a chat, because the server applies its own template")
        fixed |= {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
        if "return_token_ids" in bodies.fields_of(server.owner, chat=self.chat):
            fixed["return_token_ids"] = True
        left, width = [*range(len(self.sequences))], server.most_sequences
        while left:
            slots = left[:width]
            seed = row_seed(request.seed, f"sequence {slots[0]}", slots[0])
            own = {"n": len(slots)} if len(slots) > 1 else {}
            own |= {"seed": seed % bodies.SEEDS} if draws else {}
            send = partial(self._send, fixed | own, slots, seed if draws else None)
            try:
                server.client.retry(send, deadline=self.deadline, stop=self.stop)
            except ServerError as error:
                if len(slots) == 1 or error.status not in MALFORMED:
                    raise
                width = len(slots) // 2  # the server refuses that many
                continue
            left = [slot for slot in left if self.sequences[slot].end is None]
            if left:
                width = server.most_sequences = min(server.most_sequences, len(slots) - len({*slots} & {*left}))

    def _send(self, fixed: dict[str, Any], slots: Sequence[int], seed: int | None) -> None:
        """Send a request; repeat it without the features that the server turns out to lack. Raises ServerError."""
        server = self.server
        for slot in slots:
            self.sequences[slot] = RemoteSequence(seed=seed if len(slots) < len(self.sequences) else None)
        requested = [self.sequences[slot] for slot in slots]
        body = {**fixed, **self._prompt()}
        if server.may("logprobs", chat=self.chat):
            body |= bodies.logprob_fields(self.report.top, chat=self.chat)
        path, most = bodies.PATHS[self.chat], max(PARTS * self.most, FEWEST) * len(slots)
        try:
            with closing(server.client.stream(path, body, sequences=len(slots), deadline=self.deadline)) as stream:
                for number, part in enumerate(stream, 1):
                    if number > most:
                        words = f"the stream does not end: it has {number} parts for at most {self.most} tokens"
                        raise ServerError(words)
                    self._take(part, slots)
            ended = [one for one in requested if one.end is not None]
            if not ended or any(one.has_text and one.end is None for one in requested):
                raise ServerError("the answer was cut off before its end", again=True)
        except ServerError as error:
            if all(one.end is not None for one in requested):
                return  # an error after the end of all texts does not matter
            error.again = error.again and not (self.live and any(one.has_text for one in requested))
            if (len(slots) > 1 and error.status in MALFORMED) or not server.lacks(body, error):
                raise
            self._send(fixed, slots, seed)

    def _messages(self) -> list[dict[str, Any]]:
        return bodies.messages_of(self.request.prompt, self.request.messages, self.request.resolved.runtime.system)

    def _prompt(self) -> dict[str, Any]:
        """The messages, or a plain prompt: as ids if there are any and the server accepts them, else as text."""
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

    def _take(self, part: dict[str, Any], slots: Sequence[int]) -> None:
        """Process the next part of the response. Raises ServerError."""
        could_stop = self.generation.stop_strings is not None or self.generation.stop_token_ids is not None
        pieces, usage = pieces_of(part, self.report.top, could_stop=could_stop), usage_of(part)
        if any(piece.choice >= len(slots) for piece in pieces):
            raise ServerError(f"the answer has more than {len(slots)} sequences")
        for piece in pieces:
            sequence = self.sequences[slots[piece.choice]]
            if sequence.end is not None:
                continue
            if not any(one.has_text for one in self.sequences):
                self.first = monotonic()
            sequence.tokens += piece.tokens
            sequence.thought += piece.thought
            sequence.end = piece.end
            if self.live:
                self._grow(slots[piece.choice], piece.tokens, piece.thought)
        if usage is not None:
            self.prompt_tokens = usage.prompt or self.prompt_tokens
            if len(pieces) == 1 or len(slots) == 1:  # llama-server reports the usage of each sequence
                self.sequences[slots[pieces[0].choice if pieces else 0]].usage = usage

    # -- events --------------------------------------------------------------------------------------------------------

    def _began(self) -> events.Began:
        request, generation = self.request, self.generation
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

    def _finish(self, reason: str) -> None:
        """Emit the remaining events. Sequences that have not ended end with `reason`."""
        if not self.live:  # the steps of all sequences, interleaved as if they had been decoded together
            for place in range(max(len(sequence.tokens) for sequence in self.sequences)):
                for slot, sequence in enumerate(self.sequences):
                    self._grow(slot, sequence.tokens[place : place + 1], reason=reason)
        for slot in list(self.places):
            self._grow(slot, reason=reason or "length")
        ordered = tuple(self.hypotheses[slot] for slot in sorted(self.hypotheses))
        seconds, first_token_s = monotonic() - self.first, self.first - self.began
        self.emit(events.Finished(self.request.id, ordered, self.prompt_tokens, seconds, first_token_s))

    def _grow(self, slot: int, tokens: Sequence[Token] = (), thought: str = "", reason: str = "") -> None:
        """Emit a step in which one sequence grows, and ends if nothing more will come."""
        name, sequence, places = self.request.id, self.sequences[slot], self.places
        sequence.reported += len(tokens)
        ends = sequence.reported == len(sequence.tokens) and (sequence.end is not None or bool(reason))
        if slot not in places or not (tokens or thought or ends):
            return
        if not self.steps:
            self.emit(events.Prefilled(name, self.prompt_tokens, self.first - self.began))
        ended: tuple[events.Ended, ...] = ()
        if ends:
            hypothesis = self.hypotheses[slot] = self._hypothesis(slot, reason)
            ended = (events.Ended(name, places[slot], tuple(tokens), hypothesis),)
        left, live = [row for row in places if row != slot or not ends], []
        for row in left:
            written, new = (tuple(tokens), thought) if row == slot else ((), "")
            total = self.sequences[row].total
            live.append(events.Row(name, places[row], written, total, total, row, thought=new))
        self.emit(events.Stepped(name, self.steps, tuple(live), ended))
        self.places = {row: place for place, row in enumerate(left)}
        self.steps += 1

    def _hypothesis(self, slot: int, reason: str) -> events.Hypothesis:
        sequence = self.sequences[slot]
        tokens, total, usage, thought = sequence.tokens, sequence.total, sequence.usage, sequence.thought
        reason, stop, kind = sequence.end or Ending(reason)
        text = "".join(token.text for token in tokens)
        counted = len(tokens) if usage.new is None else usage.new
        # a server may omit EOS; if other counted tokens are missing, the ids are not those of the text
        lacking = counted - len(tokens)
        is_known = bool(tokens) and all(token.id >= 0 for token in tokens) and lacking in (0, int(reason == "eos"))
        bare = len([*takewhile(lambda token: not token.text, tokens)])  # thinking tokens, if they are listed
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
            incomplete="json_schema" if self.generation.json_schema is not None and reason in events.CUT else "",
            thought=(bare or None if usage.thought is None else usage.thought) if thought else None,
            thought_cut=bool(thought) and not text and reason in events.CUT,
            thought_text=thought,
            counted=0 if is_known and not lacking else counted,
            seed=sequence.seed,
        )
