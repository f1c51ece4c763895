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
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.config.layers import Layer
from genctl.decode.threads import set_threads
from genctl.engines.protocol import About, Flow, Report, Request
from genctl.errors import ModelError
from genctl.identity import __version__, sources, versions
from genctl.params import Runtime

if TYPE_CHECKING:
    from genctl.engines.protocol import ScoringOptions, TextToScore
    from genctl.engines.session import Session


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker loads, and how."""

    runtime: Runtime
    layers: tuple[Layer, ...]  # of a job that is checked, before the weights are read and on the checkpoint
    threads: int  # at most; less where a step has no work for them
    folder: str  # the driver's working folder: names of files are relative to it
    options: dict[str, Any] = field(default_factory=dict)  # of `Session.load`
    local: str = ""  # the checkpoint's folder on the driver; "" for one that has another kind of name
    exact: bool = False  # as many threads, whatever the work


@dataclass(frozen=True)
class OpenedWorker:
    """A worker that has loaded the checkpoint."""

    node: str
    identity: dict[str, Any]  # what must be equal for all workers; `genctl` for the driver, too
    about: About


@dataclass(frozen=True)
class DecodeWork:
    """Requests: a group that is decoded together, or rows that join a running batch."""

    requests: tuple[Request, ...]
    report: Report
    width: int
    ahead: int = 0  # requests read ahead, so that the longest begins first
    threads: int | None = None  # that compute a step; None: as they are
    joined: bool = False  # requests that come later may join


@dataclass(frozen=True)
class ScoreWork:
    """Texts that are scored together."""

    texts: tuple[TextToScore, ...]
    options: ScoringOptions


@dataclass
class GroupResult:
    """The result of a group: events of its requests, or the outcome of each text."""

    results: list[Any] = field(default_factory=list)
    tokens: int = 0  # that were written or scored


@dataclass(eq=False)
class _Call:
    """Work that waits for its result."""

    work: DecodeWork | ScoreWork
    made: GroupResult = field(default_factory=GroupResult)  # so far
    result: Future[GroupResult] = field(default_factory=Future)


class WorkQueue:
    """Work for a session. A thread does one after the other; requests may join those that it decodes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()  # that have not begun
        threading.Thread(target=self._perform, name="work", daemon=True).start()

    def put(self, work: DecodeWork | ScoreWork) -> Future[GroupResult]:
        """The result of the work, once it is done."""
        call = _Call(work)
        self._calls.put(call)
        return call.result

    def _perform(self) -> None:
        while True:
            first, lanes = self._calls.get(), dict[str, _Call]()
            try:
                if isinstance(first.work, ScoreWork):
                    options = dataclasses.replace(first.work.options, chunk=len(first.work.texts))
                    outcomes = [outcome for _, outcome in self.session.score(enumerate(first.work.texts), options)]
                    tokens = sum(one.count for scored in outcomes if isinstance(scored, list) for one in scored)
                    first.result.set_result(GroupResult(outcomes, tokens))
                else:
                    self._decode(first, first.work, lanes)
            except BaseException as error:  # all work that has begun raises it
                for call in dict.fromkeys([first, *lanes.values()]):
                    if not call.result.done():
                        call.result.set_exception(error)

    def _decode(self, first: _Call, work: DecodeWork, lanes: dict[str, _Call]) -> None:
        """Decode until no row is left. All calls of a run differ only in their rows, so the first has the settings.

        `lanes` gets those that have begun and not ended, each with its call. Steps that nobody reads, which are most of
        what would have to be sent, are left out, but for their counts of drafts.
        """
        if work.threads is not None:
            set_threads(work.threads)
        report, whole = work.report, set[str]()  # lanes whose steps are read
        steps = report.steps or any(row.resolved.runtime.processed_logprobs for row in work.requests)
        flow = Flow(work.width, ahead=work.ahead)
        for event in self.session.stream(self._requests(first, work, lanes), report, flow):
            assert not isinstance(event, events.Loading)
            call = lanes[event.lane]
            if isinstance(event, events.Began) and (steps or (report.parents and "beam" in event.strategy)):
                whole.add(event.lane)
            elif isinstance(event, events.Stepped):
                call.made.tokens += event.new_tokens
                if event.lane not in whole:
                    if not event.drafted:
                        continue
                    event = events.Stepped(event.lane, 1, (), (), event.drafted, event.accepted)
            call.made.results.append(event)
            if isinstance(event, (events.Finished, events.Failed)):
                del lanes[event.lane]
                if call not in lanes.values():
                    call.result.set_result(call.made)

    def _requests(self, first: _Call, work: DecodeWork, lanes: dict[str, _Call]) -> Iterator[Request | None]:
        """The requests of a call, and of others that may join; None while there are none."""
        call: _Call | None = first
        while call is not None or lanes:
            if call is None:
                yield None
            else:
                assert isinstance(call.work, DecodeWork)
                lanes.update(dict.fromkeys((request.id for request in call.work.requests), call))
                yield from call.work.requests
            if not work.joined:
                return
            call = None if self._calls.empty() else self._calls.get()


class Worker:
    """A process that works on groups. After a restart it loads the checkpoint again at its first call."""

    def __init__(self, setup: WorkerSetup) -> None:
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)  # torch, which is not imported yet, reads it
        if Path(setup.folder).is_dir():
            os.chdir(setup.folder)
        self.setup = setup

    def open(self) -> OpenedWorker:
        """Load the checkpoint, if that is not done yet."""
        return self._loaded[0]

    async def work(self, work: DecodeWork | ScoreWork) -> GroupResult:
        """Work on a group."""
        return await asyncio.wrap_future(self._loaded[1].put(work))

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the session's method `name` returns."""
        return getattr(self._loaded[1].session, name)(*arguments)

    @cached_property  # calls take turns: Ray runs them all in the loop of coroutines
    def _loaded(self) -> tuple[OpenedWorker, WorkQueue]:
        setup = self.setup
        if setup.local and not Path(setup.local).is_dir():
            there = f"there is no {setup.local} on {platform.node()}"
            raise ModelError(f"{setup.runtime.model} is a local folder, and {there}")
        from genctl.decode.threads import Threads
        from genctl.engines.session import Session

        threads = Threads(setup.threads if setup.exact else None, share=setup.threads)
        session = Session.load(setup.runtime, layers=setup.layers, threads=threads, **setup.options)
        if setup.layers:
            session.plan(session.resolve(setup.layers))
        checkpoint = session.loaded.checkpoint
        files = [] if checkpoint is None else checkpoint.weights.files
        identity = {  # what decides the results and can be compared at once
            **versions("torch", "transformers", "tokenizers"),
            "genctl": own_genctl(computes=session.forward.device.type == "cpu"),
            "config.json": None if checkpoint is None else checkpoint.config,
            "weight files": {path.name: path.stat().st_size for path in files},
            "device": session.forward.device.type,
            "runtime": session.forward.kind,
            "products": session.products,
        }
        return OpenedWorker(platform.node(), identity, session.about), WorkQueue(session)


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
