"""The engine of `--workers`: groups of rows go to workers of a Ray cluster, and results come back as if made here.

A worker has two groups at once, so that it never waits for the driver. Ray restarts a worker that died. Which of its
groups killed it is not known, so each is sent once more, to another worker that has nothing else (with one worker, to
that). If it dies, too, the group is lost, and the others continue.
"""

from __future__ import annotations

import importlib.util
import platform
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from itertools import islice
from pathlib import Path
from typing import Any

from genctl import events, process
from genctl.decode.step_costs import Threads
from genctl.engines.pool.cluster import RayCluster, start_cluster
from genctl.engines.pool.worker import OpenedWorker, Worker, WorkerSetup, own_genctl
from genctl.engines.protocol import (
    ALONE,
    About,
    EngineSetup,
    Flow,
    Key,
    Outcome,
    Report,
    Request,
    Rows,
    ScoringOptions,
    Skipped,
    TextToScore,
    WorkDone,
    never,
)
from genctl.errors import ModelError, UsageError, count, extra

IN_FLIGHT = 2  # groups that a worker has at once
HELD = 4  # times as many groups as workers are on their way or wait for an earlier one
LOADS = 3  # that a worker begins before the run ends, if it dies while it loads
POLL_S = 0.1  # between two looks at signals


class WorkerDied(ModelError):
    """The worker of a call died, or two workers of a group."""

    code = "worker"


@dataclass(eq=False)
class WorkGroup:
    """Rows that are worked on together: what a worker is given, and what became of it."""

    method: str  # of `Worker`
    arguments: tuple[Any, ...]
    rows: Sequence[Any]  # the requests, or the keys of texts that are scored
    last: int = -1  # the index of its last row in the input
    died: WorkerHandle | None = None  # the worker that died with it: it is tried alone, by another if there is one
    done: bool = False
    results: list[Any] = field(default_factory=list)  # events of its requests, or the outcome of each text
    lost: str = ""  # why there are none


@dataclass(eq=False)
class WorkerHandle:
    """A worker, as the driver knows it."""

    number: int  # from 1
    actor: Any
    node: str = ""
    ready: bool = False  # it has loaded the checkpoint, and did not die since
    groups: list[WorkGroup] = field(default_factory=list)  # that it has

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")


def require_ray(flag: str) -> None:
    """Raises UsageError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"{flag} needs Ray, which is not installed", hint=extra("ray"))


class PoolEngine:
    """Workers that have loaded a checkpoint, and their groups. The first of them answers questions about it."""

    done = WorkDone()  # workers do not report it

    def __init__(self, cluster: RayCluster, setup: EngineSetup) -> None:
        """Start the workers, and wait until one has loaded the checkpoint. The others follow meanwhile."""
        import ray

        self._ray, self.cluster = ray, cluster
        folder = Path(setup.runtime.model)
        threads = Threads(setup.runtime.threads).number  # the setting, or that of an environment variable
        options = {"need_tokenizer": setup.need_tokenizer, "allow_plugins": setup.allow_plugins, **setup.trust}
        each = WorkerSetup(
            setup.runtime,
            setup.layers,
            threads or cluster.threads,
            str(Path.cwd()),
            {**options, "threads": Threads(threads, share=cluster.threads)},
            local=str(folder.resolve()) if folder.is_dir() else "",
        )
        share = f"{count(each.threads, 'thread')}{' and a GPU' if cluster.gpus else ''}"
        self._shared_out = f"{count(cluster.workers, 'worker')} {cluster.about}, each with {share}"
        # retries belong to the actor, not to its calls: else a call fails while the actor restarts
        actor = ray.remote(max_restarts=-1, max_task_retries=LOADS - 1, num_cpus=1, num_gpus=cluster.gpus)(Worker)
        spread = {} if cluster.alone else {"scheduling_strategy": "SPREAD"}
        numbers = range(1, cluster.workers + 1)
        self.workers = [WorkerHandle(number, actor.options(**spread).remote(each)) for number in numbers]
        # by the result's reference; None: `open`
        self._calls: dict[Any, tuple[WorkerHandle, WorkGroup | None]] = {
            worker.actor.open.remote(): (worker, None) for worker in self.workers
        }
        self._first: tuple[WorkerHandle, OpenedWorker] | None = None  # the first that had loaded the checkpoint
        self._pending: list[WorkGroup] = []  # that were taken and whose results were not given out, in order
        self._returned: list[WorkGroup] = []  # of these, those whose workers died
        while self._first is None:
            self._wait()
        self.about: About = self._first[1].about

    # -- load ----------------------------------------------------------------------------------------------------------

    def _get(self, ref: Any) -> Any:
        """The result of a call. Raises what the call raised, and WorkerDied."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause or error from error
        except self._ray.exceptions.RayError as error:
            raise WorkerDied("a worker died") from error

    def _take_opened(self, worker: WorkerHandle, ref: Any) -> None:
        """Record that a worker has loaded the checkpoint. Raises ModelError if it cannot."""
        try:
            opened: OpenedWorker = self._get(ref)
        except WorkerDied as death:
            hint = "genctl has to be installed on every machine, and fewer --workers need less memory"
            raise ModelError(f"{worker.name} died {LOADS} times while it loaded the checkpoint", hint=hint) from death
        if self._first is not None:
            node, expected = self._first[1].node, self._first[1].identity
        else:
            computes = "products: " in opened.identity["genctl"]
            node, expected = platform.node(), {**opened.identity, "genctl": own_genctl(computes=computes)}
        for name, ours in expected.items():
            if (theirs := opened.identity[name]) == ours:
                continue
            values = f": {ours} and {theirs}" if isinstance(ours, str) else ""
            message = f"{name}: not the same on {node} and {opened.node}{values}, so their results would differ"
            hint = "GENCTL_PRODUCTS names products that all machines have" if "products" in values else ""
            raise ModelError(message, hint=hint)
        self._first = self._first or (worker, opened)
        worker.ready, worker.node = True, opened.node

    # -- the checkpoint and its settings -------------------------------------------------------------------------------

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the first worker's session (`Worker.ask`). Raises its errors."""
        assert self._first is not None
        return self._get(self._first[0].actor.ask.remote(name, *arguments))

    resolve: Any = partialmethod(ask, "resolve")
    plan: Any = partialmethod(ask, "plan")
    watched: Any = partialmethod(ask, "watched")
    width: Any = partialmethod(ask, "width")
    fingerprints: Any = partialmethod(ask, "fingerprints")

    def notes(self) -> list[str]:
        """Notes for --verbose on the workers, on the checkpoint, and how the first of them runs it."""
        return [self._shared_out, *self.ask("notes")]

    def use_threads(self, rows: int, recorded: int | None = None) -> int | None:
        """The number that each worker uses: the recorded one would not be its share of the cores."""
        number: int | None = self.ask("use_threads", rows)
        return number

    # -- work ----------------------------------------------------------------------------------------------------------

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Give rows to workers, and take their events (`Engine.stream`). Without a span a group has `width` rows."""
        span = flow.span or flow.width
        if flow.continuous and flow.width > 1:  # a row is the same in any group: small ones keep all workers busy
            span = 2 * flow.width
        settings = report or Report(), flow.width, flow.ahead, flow.threads
        groups = _groups(requests, span, settings, whole=not flow.continuous)
        for group in self.results(groups, flow.interrupted, ordered=flow.ordered):
            for event in self._lost_rows(group) if group.lost else group.results:
                if flow.interrupted():
                    return
                yield event
            if flow.enough(group.last):
                return

    def _lost_rows(self, group: WorkGroup) -> Iterator[events.Event]:
        """The events of rows whose workers died."""
        for request in group.rows:
            prompt = request.prompt or ""
            yield events.Began(request.id, prompt, "", self.about.name, request.seed, {}, request.place)
            yield events.Failed(request.id, WorkerDied.code, group.lost)

    def score(
        self,
        texts: Iterator[tuple[Key, TextToScore]],
        options: ScoringOptions,
        *,
        interrupted: Callable[[], str] = never,
    ) -> Iterator[tuple[Key, Outcome]]:
        """The outcome of each text, in order. Raises UsageError or ModelError at once for what it cannot do."""

        def groups() -> Iterator[WorkGroup]:
            while chunk := list(islice(texts, options.chunk)):
                keys, items = zip(*chunk, strict=True)
                yield WorkGroup("score", (items, options), keys)

        def scored() -> Iterator[tuple[Key, Outcome]]:
            for group in self.results(groups(), interrupted):
                outcomes = [WorkerDied(group.lost)] * len(group.rows) if group.lost else group.results
                yield from zip(group.rows, outcomes, strict=True)

        self.ask("check_scoring", options)
        return scored()

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """End the workers, and what Ray has started for them. After a signal nothing may wait."""
        self.cluster.end(hurried=hurried)

    # -- groups --------------------------------------------------------------------------------------------------------

    def results(
        self, groups: Iterator[WorkGroup | None], interrupted: Callable[[], object], *, ordered: bool = True
    ) -> Iterator[WorkGroup]:
        """The result of each group, in order, unless not `ordered`. Ends early when `interrupted` returns true.

        `groups` are taken as workers become free; None says that the next one is not there yet. Raises the first error
        of a worker that cannot load the checkpoint.
        """
        more = True
        while not interrupted():
            more = self._give_out(groups) and more
            for group in list(self._pending):
                if group.done:
                    self._pending.remove(group)
                    yield group
                    if interrupted():
                        return
                elif ordered:
                    break
            if not more and not self._pending:
                return
            self._wait()

    def _give_out(self, groups: Iterator[WorkGroup | None]) -> bool:
        """Give groups to workers that have room: first those that are tried alone, then others, while few are on their
        way. Returns whether there may be more of them.
        """
        while True:
            again = self._returned[0] if self._returned else None
            most = IN_FLIGHT if again is None else 1
            free = [one for one in self.workers if one.ready and len(one.groups) < most]
            free = [one for one in free if not any(group.died for group in one.groups)]
            if again is not None and len(self.workers) > 1:
                free = [one for one in free if one is not again.died]
            if not free or (again is None and len(self._pending) >= HELD * len(self.workers)):
                return True
            try:
                group = self._returned.pop(0) if again is not None else next(groups)
            except StopIteration:
                return False
            if group is None:
                return True
            if again is None:
                self._pending.append(group)
            if not group.rows:
                group.done = True
                continue
            worker = min(free, key=lambda worker: len(worker.groups))
            worker.groups.append(group)
            method = getattr(worker.actor, group.method).options(max_task_retries=0)
            self._calls[method.remote(*group.arguments)] = worker, group

    def _wait(self) -> None:
        """Take in the next result, or wait a moment for one."""
        if not self._calls:
            time.sleep(POLL_S)
            return
        for ref in self._ray.wait(list(self._calls), num_returns=1, timeout=POLL_S)[0]:
            worker, group = self._calls.pop(ref)
            if group is None:
                self._take_opened(worker, ref)
            else:
                self._take_result(worker, group, ref)

    def _take_result(self, worker: WorkerHandle, group: WorkGroup, ref: Any) -> None:
        """Take a result, or take the group back from a worker that died, and let that one load the checkpoint again."""
        worker.groups.remove(group)
        try:
            group.results = self._get(ref)
        except WorkerDied:
            if worker.ready:
                worker.ready = False
                self._calls[worker.actor.open.remote()] = worker, None
            if group.died is None:
                group.died = worker
                self._returned.append(group)
                return
            group.lost = f"workers died 2 times, {worker.name} last, each time with this row or others of its group"
        group.done = True


def _groups(requests: Rows, span: int, settings: tuple[Any, ...], *, whole: bool) -> Iterator[WorkGroup | None]:
    """The groups of `requests.grouped`; None while the next row is not there.

    Unless groups have to be `whole`, rows that are there do not wait for the others of theirs.
    """
    waiting: list[Request | Skipped] = []

    def group() -> WorkGroup:
        usable = tuple(row for row in waiting if isinstance(row, Request))
        return WorkGroup("decode", (usable, *settings), usable, waiting[-1].index)

    for row in requests:
        if row is not None:
            waiting.append(row)
        if waiting and ((waiting[-1].index + 1) % span == 0 or (row is None and not whole)):
            yield group()
            waiting = []
        elif row is None:
            yield None
    if waiting:
        yield group()


def load_pool(setup: EngineSetup, *, address: str | None, workers: int | None) -> PoolEngine:
    """Start workers here, or in the cluster at `address`. Raises UsageError or ModelError."""
    process.resume_collector()  # torch is not imported here
    cluster = start_cluster(address, workers, gpu=setup.runtime.device in ("auto", "cuda"))
    try:
        return PoolEngine(cluster, setup)
    except BaseException:  # workers must not outlive a start that failed or was interrupted
        cluster.end(hurried=bool(setup.interrupted()))
        raise
