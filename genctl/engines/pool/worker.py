"""What a worker process does: it loads the checkpoint once, and works on one group of rows after another, or decodes
rows that join a running batch.

`pool` makes a Ray actor of `Worker`; nothing of Ray is imported here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from genctl import events
from genctl.config.layers import Layer
from genctl.decode.threads import set_threads
from genctl.engines.protocol import Flow
from genctl.engines.requests import Report, Request
from genctl.errors import GenctlError, ModelError
from genctl.identity import __version__, sources, versions
from genctl.params import Runtime

if TYPE_CHECKING:
    from genctl.engines.local.session import Session
    from genctl.engines.scored_text import Options, Scored, TextToScore


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker loads, and how."""

    runtime: Runtime
    layers: tuple[Layer, ...]  # of a job that is checked, before the weights are read and on the checkpoint
    threads: int  # at most; less where a step has no work for them
    folder: str  # the driver's working folder: names of files are relative to it
    need_tokenizer: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False
    local: str = ""  # the checkpoint's folder on the driver; "" for one that has another kind of name
    exact: bool = False  # as many threads, whatever the work
    alone: bool = True  # all workers are on the driver's machine


@dataclass(frozen=True)
class OpenedWorker:
    """A worker that has loaded the checkpoint."""

    node: str
    process: int
    identity: dict[str, Any]  # what must be equal for all workers
    genctl: str = ""  # what must be that of the driver


@dataclass(frozen=True)
class FinishedGroup:
    """The result of a group. `tokens` were written since the process began."""

    value: Any
    process: int
    tokens: int


class WorkerProgress:
    """What a worker has done since it began. The task counts here while it works on a group."""

    def __init__(self) -> None:
        self.group = -1
        self.rows = 0  # of that group, finished
        self.tokens = 0  # of all groups


class Work(Protocol):
    """What is done with a group of rows."""

    def perform(self, session: Session, progress: WorkerProgress) -> Any:
        """The result of the group: plain values that can be pickled."""


@dataclass(frozen=True)
class DecodedGroup:
    """The events of a group; the widths that were too much for the memory, each with the one to go on with."""

    events: tuple[events.Event, ...]
    shortages: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class DecodeWork:
    """Requests: a group that is decoded together, or rows that join a running batch."""

    requests: tuple[Request, ...]
    report: Report
    width: int
    ahead: int = 0  # requests read ahead, so that the longest begins first
    threads: int | None = None  # that compute a step; None: as they are

    def perform(self, session: Session, progress: WorkerProgress) -> DecodedGroup:
        """Decode the group to its end. Steps that nobody reads are left out."""
        shortages: list[tuple[int, int]] = []
        stream = self.stream(session, self.requests, progress, shortages)
        return DecodedGroup(tuple(stream), tuple(shortages))

    def stream(
        self,
        session: Session,
        requests: Iterable[Request | None],
        progress: WorkerProgress,
        shortages: list[tuple[int, int]],
    ) -> Iterator[events.Event]:
        """The events of these or other requests, as they occur. `shortages` gets those of `DecodedGroup`."""
        if self.threads is not None:
            set_threads(self.threads)
        flow = Flow(self.width, ahead=self.ahead, on_shortage=lambda width, fewer: shortages.append((width, fewer)))
        counted = _counted(session.stream(requests, self.report, flow), progress)
        wanted = any(request.resolved.runtime.processed_logprobs for request in self.requests)
        return counted if self.report.steps or wanted else without_steps(counted, self.report.parents)


@dataclass(frozen=True)
class ScoredGroup:
    """The outcome of each text, and facts found about the model."""

    outcomes: tuple[list[Scored] | GenctlError, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True)
class ScoreWork:
    """Texts that are scored together."""

    texts: tuple[TextToScore, ...]
    options: Options

    def perform(self, session: Session, progress: WorkerProgress) -> ScoredGroup:
        """Score the group."""
        outcomes = []
        options = dataclasses.replace(self.options, chunk=len(self.texts))
        for _, outcome in session.score(enumerate(self.texts), options):
            outcomes.append(outcome)
            progress.rows += 1
            if not isinstance(outcome, GenctlError):
                progress.tokens += sum(scored.count for scored in outcome)
        return ScoredGroup(tuple(outcomes), tuple(session.findings))


def _counted(stream: Iterator[events.Event], progress: WorkerProgress) -> Iterator[events.Event]:
    for event in stream:
        if isinstance(event, events.Stepped):
            progress.tokens += event.new_tokens
        elif isinstance(event, (events.Finished, events.Failed)):
            progress.rows += 1
        yield event


def without_steps(stream: Iterator[events.Event], parents: bool) -> Iterator[events.Event]:
    """The events without steps, which are most of what has to be sent. Their counts of drafts remain, in one step.

    With `parents` the steps of beam searches are kept.
    """
    drafts: dict[str, list[int]] = {}  # of the lanes that are left without steps: tokens tried, and accepted
    for event in stream:
        if isinstance(event, events.Began):
            if not (parents and "beam" in event.strategy):
                drafts[event.lane] = [0, 0]
        elif isinstance(event, events.Stepped) and event.lane in drafts:
            counts = drafts[event.lane]
            counts[0] += event.drafted
            counts[1] += event.accepted
            continue
        elif isinstance(event, (events.Finished, events.Failed)) and (counts := drafts.pop(event.lane, [0, 0]))[0]:
            yield events.Stepped(event.lane, 1, (), (), *counts)
        yield event


@dataclass(eq=False)
class _Call:
    """Rows that came together."""

    work: DecodeWork
    left: int
    events: list[events.Event] = field(default_factory=list)
    result: Future[DecodedGroup] = field(default_factory=Future)


class JoinedRows:
    """A running batch of a session. A thread decodes it until no row is left, and begins again with the next."""

    def __init__(self, session: Session, progress: WorkerProgress) -> None:
        self.session, self.progress = session, progress
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()  # whose rows have not begun
        threading.Thread(target=self._decode, name="joined rows", daemon=True).start()

    def join(self, work: DecodeWork) -> Future[DecodedGroup]:
        """The events of rows that join as places become free."""
        call = _Call(work, len(work.requests))
        self._calls.put(call)
        return call.result

    def _decode(self) -> None:
        while True:
            first, lanes = self._calls.get(), dict[str, _Call]()
            try:
                self._decode_all(first, lanes)
            except BaseException as error:  # every call that has begun raises it
                for call in dict.fromkeys([first, *lanes.values()]):
                    if not call.result.done():
                        call.result.set_exception(error)

    def _decode_all(self, first: _Call, lanes: dict[str, _Call]) -> None:
        """Decode until no row is left, as the first call says: all calls of a run want the same, but for their rows.

        `lanes` gets those that have begun and not ended, each with its call.
        """
        shortages: list[tuple[int, int]] = []

        def requests() -> Iterator[Request | None]:
            call: _Call | None = first
            while call is not None or lanes:
                if call is None:
                    yield None
                else:
                    lanes.update(dict.fromkeys((request.id for request in call.work.requests), call))
                    yield from call.work.requests
                call = None if self._calls.empty() else self._calls.get()

        for event in first.work.stream(self.session, requests(), self.progress, shortages):
            assert not isinstance(event, events.Loading)
            call = lanes[event.lane]
            call.events.append(event)
            if isinstance(event, (events.Finished, events.Failed)):
                del lanes[event.lane]
                call.left -= 1
                if not call.left:
                    call.result.set_result(DecodedGroup(tuple(call.events), tuple(shortages)))
                    shortages.clear()


class Worker:
    """A process that works on groups. After a restart it loads the checkpoint again at its first call."""

    def __init__(self, setup: WorkerSetup) -> None:
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)  # torch, which is not imported yet, reads it
        if Path(setup.folder).is_dir():
            os.chdir(setup.folder)
        self.setup = setup
        self.progress = WorkerProgress()
        self.opened: tuple[Session, OpenedWorker] | None = None
        self.joined: JoinedRows | None = None
        self._loading = threading.Lock()

    def open(self) -> OpenedWorker:
        """Load the checkpoint, if that is not done yet."""
        with self._placed():
            return self._open()[1]

    def work(self, number: int, work: Work) -> FinishedGroup:
        """Work on the group `number`."""
        with self._placed():
            session, _ = self._open()
            self.progress.rows, self.progress.group = 0, number
            return self._finished(work.perform(session, self.progress))

    async def join(self, number: int, work: DecodeWork) -> FinishedGroup:
        """Decode rows beside those of other calls that are awaited."""
        with self._placed():
            session, _ = self._open()
            self.joined = self.joined or JoinedRows(session, self.progress)
            return self._finished(await asyncio.wrap_future(self.joined.join(work)))

    def report(self) -> tuple[int, int, int, int]:
        """The process, the group that it works on, how many rows of it are done, and the tokens of all groups."""
        progress = self.progress
        return os.getpid(), progress.group, progress.rows, progress.tokens

    def ask(self, name: str, *arguments: Any) -> Any:
        """The attribute `name` of the session, or the result of the method of that name."""
        with self._placed():
            session, _ = self._open()
            value = getattr(session, name)
            return value(*arguments) if callable(value) else value

    def _finished(self, value: Any) -> FinishedGroup:
        return FinishedGroup(value, os.getpid(), self.progress.tokens)

    def _open(self) -> tuple[Session, OpenedWorker]:
        with self._loading:
            if self.opened is None:
                self.opened = self._load()
            return self.opened

    def _load(self) -> tuple[Session, OpenedWorker]:
        setup = self.setup
        if setup.local and not Path(setup.local).is_dir():
            raise ModelError(f"{setup.runtime.model} is a local folder, and there is no {setup.local}")
        from genctl.decode.threads import Threads
        from genctl.engines.local.session import Session

        threads = Threads(setup.threads if setup.exact else None, share=setup.threads)
        session = Session.load(
            setup.runtime,
            allow_pickle=setup.allow_pickle,
            trust_remote_code=setup.trust_remote_code,
            allow_plugins=setup.allow_plugins,
            layers=setup.layers,
            need_tokenizer=setup.need_tokenizer,
            threads=threads,
        )
        if setup.layers:
            session.check(session.resolve(setup.layers))
        computes = session.forward.device.type == "cpu"
        return session, OpenedWorker(platform.node(), os.getpid(), identity_of(session), own_genctl(computes))

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Errors name the node, where there are several."""
        try:
            yield
        except GenctlError as error:
            if not self.setup.alone:
                error.message = f"{error.message} (on node {platform.node()})"
                error.args = (error.message,)
            raise


@cache
def own_genctl(computes: bool) -> str:
    """This process's genctl: the version, a digest of its sources, and the products that this CPU `computes` with.

    Raises UsageError where GENCTL_PRODUCTS names others than are there.
    """
    products = ""
    if computes:
        from genctl.kernels.variant import choice

        products = f", products: {choice()[0] or 'torch'}"
    return f"{__version__} (sources {sources()}{products})"


def identity_of(session: Session) -> dict[str, Any]:
    """What decides the results and can be compared at once: versions, the config, the sizes of the weight files."""
    checkpoint = session.loaded.checkpoint
    files = [] if checkpoint is None else checkpoint.weights.files
    sizes = {path.name: path.stat().st_size for path in files}
    return {
        **versions("torch", "transformers", "tokenizers"),
        "config.json": None if checkpoint is None else checkpoint.config,
        "weight files": sizes,
        "device": session.forward.device.type,
        "runtime": session.forward.kind,
        "products": session.products,
    }
