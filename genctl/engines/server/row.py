"""One row on a server: its requests, one after another in a thread, and the events that they become."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from genctl import events
from genctl.engines.protocol import Report, Request
from genctl.engines.server.body import SEEDS, logprob_fields, messages_of, path_of
from genctl.engines.server.failure import Disconnected, RowFailure, ServerError, TimedOut, one_line, retry
from genctl.engines.server.lane import RemoteLane
from genctl.engines.server.server import Server
from genctl.errors import BackendError, GenctlError, InputError
from genctl.io.rows import row_seed

if TYPE_CHECKING:
    from genctl.models.tokenizer_alone import LoneTokenizer

MALFORMED = (400, 422)  # statuses with which servers refuse more sequences than they give
Update: TypeAlias = "events.Event | BackendError | None"  # None: the row is done
Emit: TypeAlias = Callable[[Update], object]


@dataclass
class StopSignal:
    """Whether rows have to end, and why."""

    event: threading.Event = field(default_factory=threading.Event)
    reason: str = ""


@dataclass
class RemoteRow:
    """A row and the server that computes it. `live`: its pieces become events as they come."""

    request: Request
    server: Server
    report: Report
    tokenizer: LoneTokenizer | None
    live: bool
    emit: Emit
    stop: StopSignal

    def __post_init__(self) -> None:
        generation, runtime = self.request.resolved.generation, self.request.resolved.runtime
        self.chat = runtime.is_chat or self.request.messages is not None
        limits = [one for one in (generation.max_time, runtime.row_timeout) if one is not None]
        self.deadline = time.monotonic() + min(limits) if limits else math.inf
        self.lane = RemoteLane(self.request, live=self.live)

    def run(self) -> None:
        """Emit the events of the row. The last update is None; before it may be the error that ends the run."""
        try:
            self.emit(self._began())
            for event in self._ending():
                self.emit(event)
        except Exception as error:  # whatever a server sends may cost its row, never the others
            words = f"{self.server.name}: unexpected {type(error).__name__}: {one_line(str(error))}"
            self.emit(self.lane.failed(words))
        finally:
            self.emit(None)

    def _ending(self) -> Iterator[Update]:
        """The last events; those before are emitted while the answer comes."""
        lane, server = self.lane, self.server
        try:
            self._complete()
        except TimedOut:
            yield from lane.finish("time")
        except Disconnected:
            yield from lane.finish(self.stop.reason) if lane.has_text else ()
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
        fields = server.fields(chat=self.chat)
        chosen, problems = server.sampling_fields(request.resolved, chat=self.chat)
        if problems:
            raise RowFailure(f"{server.name}: " + "; ".join(problems))
        if self.chat and request.prompt_ids is not None:
            raise InputError("token ids cannot be sent as a chat: the server makes the ids of its own template")
        fixed: dict[str, Any] = {"model": server.model, **chosen, "stream": True}
        fixed |= {"stream_options": {"include_usage": True}} if "stream_options" in fields else {}
        fixed |= {"return_token_ids": True} if "return_token_ids" in fields else {}
        left, size = [*range(len(self.lane.sequences))], server.most_sequences if "n" in fields else 1
        while left:
            slots = left[:size]
            seed = row_seed(request.seed, f"sequence {slots[0]}", slots[0])
            own = {"n": len(slots)} if len(slots) > 1 else {}
            own |= {"seed": seed % SEEDS} if "seed" in fields and request.resolved.generation.draws else {}
            send, pause = (
                partial(self._send, {**fixed, **own}, slots, seed),
                partial(server.client.pause, stop=self.stop.event),
            )
            try:
                retry(send, pause, seed=seed, deadline=self.deadline)
            except ServerError as error:
                if len(slots) == 1 or error.status not in MALFORMED:
                    raise
                size = server.fewer_sequences(len(slots))
                continue
            ended = self.lane.ended
            size = min(size, len(ended)) if len(ended) < len(slots) else size
            if "n" in own and len(left) > size:
                server.most_sequences = min(server.most_sequences, size)
            left = [slot for slot in left if slot not in ended]

    def _send(self, fixed: dict[str, Any], slots: Sequence[int], seed: int) -> None:
        """Send a request once, or again without what the server turns out to be unable to do. Raises ServerError."""
        server, lane, top = self.server, self.lane, self.report.top
        lane.attempt(slots, seed)
        body = {**fixed, **self._prompt()}
        if server.may("logprobs", chat=self.chat):
            body |= logprob_fields(top, chat=self.chat)

        def take(part: dict[str, Any]) -> bool:
            if self.stop.event.is_set():
                raise Disconnected
            doubts: set[str] = set()
            for event in lane.take(part, top, doubts):
                self.emit(event)
            for doubt in sorted(doubts):
                server.client.note(doubt)
            return len(lane.ended) == len(slots)

        try:
            path = path_of(chat=self.chat)
            server.client.stream(path, body, take, sequences=len(slots), deadline=self.deadline)
        except ServerError as error:
            if self.stop.event.is_set():  # its connection was shut
                raise Disconnected from None
            if (len(slots) > 1 and error.status in MALFORMED) or not server.learn(body, error):
                raise
            self._send(fixed, slots, seed)
        else:
            lane.check(server.client.note)

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
