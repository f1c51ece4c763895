"""One row on a server: its requests, one after another in a thread, and the events that they become."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from genctl import events
from genctl.config.layers import Resolved
from genctl.engines.protocol import Report, Request
from genctl.engines.server.answer import AnswerPiece, Usage, pieces_of, usage_of
from genctl.engines.server.body import SEEDS, messages_of, path_of, sampling_fields
from genctl.engines.server.failure import Disconnected, RowFailure, ServerError, TimedOut, one_line, retry
from genctl.engines.server.lane import RemoteLane
from genctl.engines.server.server import Server, logprob_fields
from genctl.errors import BackendError, GenctlError, InputError
from genctl.io.rows import row_seed
from genctl.params import DEFAULT_NEW_TOKENS

if TYPE_CHECKING:
    from genctl.models.tokenizer_alone import LoneTokenizer

PARTS = 64  # of a stream for each token, at most: servers may send single characters
FEWEST = 1024  # parts that any stream may have
Update: TypeAlias = "events.Event | BackendError | None"  # None: the row is done
Emit: TypeAlias = Callable[[Update], object]


@dataclass
class StopSignal:
    """Whether rows have to end, and why."""

    event: threading.Event = field(default_factory=threading.Event)
    reason: str = ""


class RemoteRow:
    """A row and the server that computes it."""

    def __init__(
        self, request: Request, server: Server, report: Report, tokenizer: LoneTokenizer | None, *, live: bool
    ) -> None:
        self.request, self.server, self._report, self._tokenizer = request, server, report, tokenizer
        generation, runtime = request.resolved.generation, request.resolved.runtime
        self.chat = runtime.is_chat or request.messages is not None
        self.count = generation.num_return_sequences
        self.most = generation.max_new_tokens or DEFAULT_NEW_TOKENS  # tokens of each sequence
        limits = [one for one in (generation.max_time, runtime.row_timeout) if one is not None]
        self.deadline = time.monotonic() + min(limits) if limits else math.inf
        self.lane = RemoteLane(request, self.count, live=live)

    def run(self, emit: Emit, stop: StopSignal) -> None:
        """Emit the events of the row. The last update is None; before it may be the error that ends the run."""
        lane, name = self.lane, self.server.name
        try:
            for event in self._events(emit, stop):
                emit(event)
        except Exception as error:  # whatever a server sends may cost its row, never the others
            emit(lane.failed(f"{name}: unexpected {type(error).__name__}: {one_line(str(error))}"))
        finally:
            emit(None)

    def _events(self, emit: Emit, stop: StopSignal) -> Iterator[Update]:
        """The first event and the last ones; those between are emitted while the answer comes."""
        lane, server = self.lane, self.server
        yield self._began()
        try:
            self._complete(emit, stop)
        except TimedOut:
            yield from lane.finish("time")
        except Disconnected:
            yield from lane.finish(stop.reason) if lane.has_text else ()
        except ServerError as error:
            failed = lane.failed(f"{server.name}: {error.message}", error.hint)
            yield server.error(error, plain=not self.chat) if error.fatal else failed
        except BackendError as error:
            yield error
        except GenctlError as error:
            yield events.Failed(lane.name, error.code, error.message, error.hint)
        else:
            yield from lane.finish()

    def _began(self) -> events.Began:
        request, resolved = self.request, self.request.resolved
        generation = resolved.generation
        settings: dict[str, Any] = {
            "num_return_sequences": self.count,
            "length_penalty": generation.length_penalty,
            "backend": self.server.name,
        } | ({"structure": generation.structure} if generation.structure else {})
        prompt = request.prompt or "\n".join(message.get("content") or "" for message in request.messages or ())
        messages = messages_of(request.prompt, request.messages, resolved.runtime.system)
        shown = events.conversation(messages) if self.chat else ""
        kind, seed = ("sample", request.seed) if generation.draws else ("greedy", None)
        return events.Began(
            request.id, prompt, kind, self.server.model, seed, settings, request.place, shown=shown, run=request.run,
            prompt_ids=request.prompt_ids or (),
        )  # fmt: skip

    # -- requests ------------------------------------------------------------------------------------------------------

    def _complete(self, emit: Emit, stop: StopSignal) -> None:
        """Request all sequences: as many at once as the server gives. Raises what `run` catches."""
        server, lane = self.server, self.lane
        fields = server.fields(chat=self.chat)
        chosen, problems = fields_of_row(server, self.request.resolved, chat=self.chat)
        if problems:
            raise RowFailure(f"{server.name}: " + "; ".join(problems))
        if self.chat and self.request.prompt_ids is not None:
            raise InputError("token ids cannot be sent as a chat: the server makes the ids of its own template")
        fixed: dict[str, Any] = {"model": server.model, **chosen, "stream": True}
        fixed |= {"stream_options": {"include_usage": True}} if "stream_options" in fields else {}
        fixed |= {"return_token_ids": True} if "return_token_ids" in fields else {}
        left, size = [*range(self.count)], server.most_sequences if "n" in fields else 1
        while left:
            slots = left[:size]
            seed = row_seed(self.request.seed, f"sequence {slots[0]}", slots[0])
            own = {"n": len(slots)} if len(slots) > 1 else {}
            own |= {"seed": seed % SEEDS} if "seed" in fields and lane.generation.draws else {}
            send = partial(self._send, {**fixed, **own}, slots, seed, emit, stop)
            try:
                pause = partial(server.client.pause, stop=stop.event)
                answer = retry(send, pause, seed=seed, deadline=self.deadline)
            except ServerError as error:
                if len(slots) == 1 or error.status not in (400, 422):
                    raise
                size = server.fewer_sequences(len(slots))
                continue
            ended = [slots[choice] for choice in sorted(answer.ended)]
            size = min(size, len(ended)) if len(ended) < len(slots) else size
            if "n" in own and len(left) > size:
                server.most_sequences = min(server.most_sequences, size)
            left = [slot for slot in left if slot not in ended]

    def _send(self, fixed: dict[str, Any], slots: Sequence[int], seed: int, emit: Emit, stop: StopSignal) -> _Answer:
        """Send a request once, or again without what the server turns out to be unable to do. Raises ServerError."""
        server, lane = self.server, self.lane
        lane.again(slots, seed)
        answer = _Answer(len(slots), self.most)
        body = {**fixed, **self._prompt()}
        if server.may("logprobs", chat=self.chat):
            body |= logprob_fields(self._report.top, chat=self.chat)

        def take(part: dict[str, Any]) -> bool:
            if stop.event.is_set():
                raise Disconnected
            doubts: set[str] = set()
            for piece in answer.pieces(part, self._report.top, doubts):
                for event in lane.take(slots[piece.choice], piece):
                    emit(event)
            for doubt in sorted(doubts):
                server.client.note(doubt)
            return len(answer.ended) == len(slots)

        try:
            path = path_of(chat=self.chat)
            server.client.stream(path, body, take, sequences=len(slots), deadline=self.deadline)
        except ServerError as error:
            if stop.event.is_set():  # its connection was shut
                raise Disconnected from None
            if (len(slots) == 1 or error.status not in (400, 422)) and server.learn(body, error):
                return self._send(fixed, slots, seed, emit, stop)
            raise
        answer.check(server.client.note)
        lane.count(slots, answer.usage)
        for choice, usage in answer.counts.items():
            lane.count(slots[choice : choice + 1], usage)
        return answer

    def _prompt(self) -> dict[str, Any]:
        """The messages, or a plain prompt: as ids where there are any and the server takes them, else as text."""
        request, tokenizer, takes_ids = self.request, self._tokenizer, self.server.may("ids")
        if self.chat:
            return {"messages": messages_of(request.prompt, request.messages, request.resolved.runtime.system)}
        if request.prompt_ids is None:
            text = request.prompt or ""
            return {"prompt": tokenizer.ids(text) if tokenizer is not None and takes_ids else text}
        if takes_ids:
            return {"prompt": list(request.prompt_ids)}
        if tokenizer is None:
            raise InputError(f"{self.server.name} takes no token ids as a prompt; --tokenizer makes a text of them")
        return {"prompt": tokenizer.text(request.prompt_ids)}


def fields_of_row(server: Server, resolved: Resolved, *, chat: bool) -> tuple[dict[str, Any], list[str]]:
    """The fields of a row's settings, and what the server cannot do."""
    return sampling_fields(resolved, server.fields(chat=chat), chat=chat, kind=server.kind)


@dataclass
class _Answer:
    """One attempt at an answer: checks its parts."""

    count: int  # sequences that were requested
    most: int  # tokens of each
    usage: Usage | None = None
    counts: dict[int, Usage] = field(default_factory=dict)  # of single choices, as llama-server reports them
    lengths: dict[int, int] = field(default_factory=dict)  # choice -> tokens so far, where they are listed
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    parts: int = 0
    cut: bool = False  # it had more tokens than were requested

    def pieces(self, part: dict[str, Any], top: int, doubts: set[str]) -> list[AnswerPiece]:
        """The pieces of a part, of sequences that have not ended. Raises ServerError."""
        self.parts += 1
        if self.parts > max(PARTS * self.most, FEWEST) * self.count:
            raise ServerError(f"the stream does not end: it has {self.parts} parts for at most {self.most} tokens")
        every, found = pieces_of(part, top, doubts), []
        for piece in every:
            if piece.choice >= self.count:
                raise ServerError(f"the answer has more than {self.count} sequences")
            if piece.choice in self.ended:
                continue
            self.begun.add(piece.choice)
            found.append(self._within(piece))
            if found[-1].finish is not None:
                self.ended.add(piece.choice)
        if usage := usage_of(part, doubts):
            if self.count > 1 and len(every) == 1:
                self.counts[every[0].choice] = usage
            else:
                self.usage = usage
        return found

    def _within(self, piece: AnswerPiece) -> AnswerPiece:
        """The piece without tokens beyond max_tokens, where the server lists its tokens."""
        if not piece.counted:
            return piece
        before = self.lengths.get(piece.choice, 0)
        kept, more = piece.tokens[: self.most - before], piece.tokens[self.most - before :]
        self.lengths[piece.choice] = before + len(kept)
        if not any(token.text for token in more):  # the end, which some servers list as a token
            return replace(piece, tokens=kept)
        self.cut = True
        return replace(piece, tokens=kept, finish="length", stop=None)

    def check(self, note: Callable[[str], object]) -> None:
        """Note what the answer has too much of. Raises ServerError where it is cut off, or nothing is there."""
        if not self.ended or self.begun - self.ended:
            raise ServerError("the answer was cut off before its end", again=True)
        if self.cut:
            note(f"a text has more than max_tokens = {self.most} tokens and is cut")
        usage, most = self.usage, self.most * self.count
        if usage is not None and usage.new is not None and usage.new > most:
            if len(self.lengths) == self.count:  # a text that was cut here has as many tokens as were kept
                self.usage = replace(usage, new=sum(self.lengths.values()))
            else:
                note(f"it counts {usage.new} tokens for a request of at most {most}")
