"""The engine of `--workers`: groups of rows go to the workers of a Ray cluster; results are as if computed here.

A worker has up to two groups in flight, so that it never waits for the driver. Ray restarts a worker that dies. It is
unknown which of its groups killed it, so each is retried once, alone on another worker (with one worker, on that one).
If that worker dies too, the group is lost, and the other groups continue.
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

IN_FLIGHT = 2  # most groups that a worker has at once
HELD = 4  # times the number of workers: most groups in flight, or done and waiting for an earlier one
LOADS = 3  # attempts of a worker to load the checkpoint, if it dies while loading, before the run ends
POLL_S = 0.1  # between two checks for signals


class WorkerDied(ModelError):
    """The worker died during a call, or two workers died with the same group."""

    code = "worker"


@dataclass(eq=False)
class WorkGroup:
    """Rows that one call processes: the call, its state and its results."""

    method: str  # of `Worker`
    arguments: tuple[Any, ...]
    rows: Sequence[Any]  # the requests, or the keys of the texts to score
    last: int = -1  # the index of its last row in the input
    died: WorkerHandle | None = None  # the worker that died with it: the retry runs alone, on another if there is one
    done: bool = False
    results: list[Any] = field(default_factory=list)  # events of its requests, or the outcome of each text
    lost: str = ""  # why there are no results


@dataclass(eq=False)
class WorkerHandle:
    """The driver's view of a worker."""

    number: int  # from 1
    actor: Any
    node: str = ""
    ready: bool = False  # it has loaded the checkpoint, and has not died since
    groups: list[WorkGroup] = field(default_factory=list)  # in flight

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")


def require_ray(flag: str) -> None:
    """Raises UsageError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"{flag} needs Ray, which is not installed", hint=extra("ray"))


class PoolEngine:
    """Workers with a loaded checkpoint, and their groups. The first to load it resolves settings and makes plans."""

    done = WorkDone()  # workers do not report it

    def __init__(self, cluster: RayCluster, setup: EngineSetup) -> None:
        """Start the workers, and return once one has loaded the checkpoint; the others keep loading."""
        import ray

        self._ray, self.cluster = ray, cluster
        folder = Path(setup.runtime.model)
        threads = Threads(setup.runtime.threads).number  # the setting, or the environment variable's
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
        # set retries on the actor, not on its calls: otherwise a call fails while the actor restarts
        actor = ray.remote(max_restarts=-1, max_task_retries=LOADS - 1, num_cpus=1, num_gpus=cluster.gpus)(Worker)
        spread = {} if cluster.alone else {"scheduling_strategy": "SPREAD"}
        numbers = range(1, cluster.workers + 1)
        self.workers = [WorkerHandle(number, actor.options(**spread).remote(each)) for number in numbers]
        # calls in flight by the reference of their result; a call of `open` has no group
        self._calls: dict[Any, tuple[WorkerHandle, WorkGroup | None]] = {
            worker.actor.open.remote(): (worker, None) for worker in self.workers
        }
        self._first: tuple[WorkerHandle, OpenedWorker] | None = None  # the first to load the checkpoint
        self._pending: list[WorkGroup] = []  # groups that were taken and not yet returned, in order
        self._returned: list[WorkGroup] = []  # those of them to retry, because their worker died
        while self._first is None:
            self._wait()
        self.about: About = self._first[1].about

    # -- load ----------------------------------------------------------------------------------------------------------

    def _get(self, ref: Any) -> Any:
        """The result of a call. Raises the call's error, or WorkerDied."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause or error from error
        except self._ray.exceptions.RayError as error:
            raise WorkerDied("a worker died") from error

    def _take_opened(self, worker: WorkerHandle, ref: Any) -> None:
        """Record that a worker has loaded the checkpoint. Raises ModelError if it cannot, or if workers differ."""
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
        """Notes for --verbose on the workers, the checkpoint, and how the first worker runs it."""
        return [self._shared_out, *self.ask("notes")]

    def use_threads(self, rows: int, recorded: int | None = None) -> int | None:
        """The number that each worker uses. `recorded` is ignored: it would not be a worker's share of the cores."""
        number: int | None = self.ask("use_threads", rows)
        return number

    # -- work ----------------------------------------------------------------------------------------------------------

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Let workers decode the rows (`Engine.stream`). Unless continuous, a group has `span` or else `width` rows."""
        span = flow.span or flow.width
        if flow.continuous and flow.width > 1:  # groups do not change results: small ones keep all workers busy
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
        """The events of the rows of a lost group."""
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
        """The outcome of each text, in order. Raises UsageError or ModelError at once for unsupported options."""

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
        """End the workers, and what Ray has started for them. `hurried`: after a signal, do not wait."""
        self.cluster.end(hurried=hurried)

    # -- groups --------------------------------------------------------------------------------------------------------

    def results(
        self, groups: Iterator[WorkGroup | None], interrupted: Callable[[], object], *, ordered: bool = True
    ) -> Iterator[WorkGroup]:
        """Yield each group when it is done, in order if `ordered`. Ends early when `interrupted` returns true.

        `groups` are taken as workers become free; None means that the next one is not available yet. Raises the first
        error of a call, such as that of a worker that cannot load the checkpoint.
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
        """Send groups to workers with room: first retries, each alone, then new groups up to the limit `HELD`. Returns
        whether more groups may come.
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
        """Process the next result, waiting up to POLL_S for it."""
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
        """Store a result. If the worker died, reclaim the group and make the worker load the checkpoint again."""
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
    """The groups of `protocol.grouped`; None while the next row is not available.

    Unless groups must be `whole`, available rows are sent without waiting for the rest of their group.
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
    except BaseException:  # workers must not outlive a failed or interrupted start
        cluster.end(hurried=bool(setup.interrupted()))
        raise
