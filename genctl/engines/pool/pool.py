"""Workers of a Ray cluster: groups of rows go out, their results come back in the order of the groups.

A worker has several groups at once, so that it never waits for the driver. Either it works on one after another, or
their rows join the batch that it decodes: such groups are a few rows, and many are there at once.

Ray restarts a worker that died. Which of its groups killed it is not known, so each is sent once more, to another
worker that has nothing else (with one worker, to that). If it dies, too, the group is lost, and the others continue.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from genctl.engines.pool.cluster import RayCluster
from genctl.engines.pool.worker import GroupResult, OpenedWorker, Worker, WorkerSetup, own_genctl
from genctl.engines.protocol import About, StreamProgress
from genctl.errors import ModelError

IN_FLIGHT = 2  # groups that a worker has at once, where their rows do not join one batch
HELD = 4  # times as many groups as workers are then on their way or wait for an earlier one
LOADS = 3  # that a worker begins before the run ends, if it dies while it loads
POLL_S = 0.1  # between two looks at signals


@dataclass(eq=False)
class WorkGroup:
    """Rows that are worked on together: what a worker is given, and what became of it."""

    work: Any
    rows: int
    last: int = -1  # the index of its last row in the input
    keys: tuple[Any, ...] = ()  # of texts that are scored
    number: int = 0  # in the order of the groups
    died: WorkerHandle | None = None  # the worker that died with it: it is tried alone, by another if there is one
    result: GroupResult = field(default_factory=GroupResult)
    lost: str = ""  # why there is none


@dataclass(eq=False)
class WorkerHandle:
    """A worker, as the driver knows it."""

    number: int  # from 1
    actor: Any
    node: str = ""
    ready: bool = False  # it has loaded the checkpoint, and did not die since
    groups: list[WorkGroup] = field(default_factory=list)  # that it has
    rows: int = 0
    tokens: int = 0
    deaths: int = 0  # groups that were then tried alone

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")


class WorkerPool:
    """Starts workers and gives them groups. Raises UsageError or ModelError."""

    def __init__(self, cluster: RayCluster, setup: WorkerSetup) -> None:
        import ray

        self._ray = ray
        # retries belong to the actor, not to its calls: else a call fails while the actor restarts
        actor = ray.remote(max_restarts=-1, max_task_retries=LOADS - 1, num_cpus=1, num_gpus=cluster.gpus)(Worker)
        spread = {} if cluster.alone else {"scheduling_strategy": "SPREAD"}
        numbers = range(1, cluster.workers + 1)
        self.workers = [WorkerHandle(number, actor.options(**spread).remote(setup)) for number in numbers]
        self._calls: dict[Any, tuple[WorkerHandle, WorkGroup | None]] = {}  # by the result's reference; None: `open`
        for worker in self.workers:
            self._open(worker)
        self._first: tuple[WorkerHandle, OpenedWorker] | None = None  # the first that had loaded the checkpoint
        self._finished: dict[int, WorkGroup] = {}
        self._returned: list[WorkGroup] = []  # their workers died
        self._next = 0  # the first group whose result was not given out
        self._taken = 0  # groups that were taken
        self.on_progress: Callable[[], object] | None = None
        self.began = time.monotonic()

    # -- load ----------------------------------------------------------------------------------------------------------

    def open(self) -> About:
        """Wait until a worker has loaded the checkpoint, and return its facts. Others follow meanwhile."""
        while self._first is None:
            self._wait()
        self.began = time.monotonic()
        return self._first[1].about

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the first worker's session (`Worker.ask`). Raises its errors."""
        assert self._first is not None
        return self._get(self._first[0].actor.ask.remote(name, *arguments))

    def _get(self, ref: Any) -> Any:
        """The result of a call. Raises what the call raised, and _Died."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause or error from error
        except self._ray.exceptions.RayError as error:
            why = str(error).strip().rpartition("\n")[2]
            if isinstance(error, self._ray.exceptions.OutOfMemoryError):
                why = "no memory is left on its machine"
            raise _Died(f": {why}" if "memory" in why or "No module" in why else "") from error

    def _open(self, worker: WorkerHandle) -> None:
        self._calls[worker.actor.open.remote()] = worker, None

    def _take_opened(self, worker: WorkerHandle, ref: Any) -> None:
        """Record that a worker has loaded the checkpoint. Raises ModelError if it cannot."""
        try:
            opened: OpenedWorker = self._get(ref)
        except _Died as death:
            raise ModelError(
                f"{worker.name} died {LOADS} times while it loaded the checkpoint{death.why}",
                hint="genctl has to be installed on every machine, and fewer --workers need less memory",
            ) from death
        self._first = self._first or (worker, opened)
        first = self._first[1]
        ours = own_genctl("products: " in opened.identity["genctl"])
        for node, identity in ((platform.node(), {"genctl": ours}), (first.node, first.identity)):
            for name, value in identity.items():
                if (other := opened.identity[name]) != value:
                    shown = f": {value} and {other}" if isinstance(value, str) else ""
                    raise ModelError(
                        f"{name}: not the same on {node} and {opened.node}{shown}, so their results would differ",
                        hint="GENCTL_PRODUCTS names products that all machines have" if "products" in shown else "",
                    )
        worker.ready, worker.node = True, opened.node

    # -- work ----------------------------------------------------------------------------------------------------------

    def results(
        self,
        groups: Iterator[WorkGroup | None],
        interrupted: Callable[[], object],
        *,
        ordered: bool = True,
        at_once: int = IN_FLIGHT,
        held: int = HELD,
    ) -> Iterator[WorkGroup]:
        """The result of each group, in order, unless not `ordered`. Ends early when `interrupted` returns true.

        `groups` are taken as workers become free; None says that the next one is not there yet. A worker has `at_once`,
        and `held` times as many as workers are on their way or wait for an earlier one. Raises the first error of a
        worker that cannot load the checkpoint.
        """
        more = True
        while not interrupted():
            more = self._give_out(groups, at_once, held * len(self.workers)) and more
            for number in sorted(self._finished):
                if ordered and number != self._next:
                    break
                self._next += 1
                yield self._finished.pop(number)
                if interrupted():
                    return
            if not more and self._next == self._taken:
                return
            self._wait()

    def _give_out(self, groups: Iterator[WorkGroup | None], at_once: int, most: int) -> bool:
        """Give groups to workers that have room: first those that are tried alone, then others while fewer than `most`
        are on their way. Returns whether there may be more of them.
        """

        def has_room(worker: WorkerHandle) -> bool:
            return worker.ready and len(worker.groups) < at_once and not any(group.died for group in worker.groups)

        while free := list(filter(has_room, self.workers)):
            if self._returned:
                group = self._returned[0]
                idle = [one for one in free if not one.groups and (one is not group.died or len(self.workers) == 1)]
                if not idle:
                    break
                worker = idle[0]
                del self._returned[0]
            else:
                worker = min(free, key=lambda worker: len(worker.groups))
                if self._taken - self._next >= most:
                    break
                try:
                    taken = next(groups)
                except StopIteration:
                    return False
                if taken is None:
                    break
                group = taken
                group.number, self._taken = self._taken, self._taken + 1
                if not group.rows:
                    self._finished[group.number] = group
                    continue
            worker.groups.append(group)
            self._calls[worker.actor.work.options(max_task_retries=0).remote(group.work)] = worker, group
        return True

    def _wait(self) -> None:
        """Take in what has arrived, or wait a moment for something."""
        if not self._calls:
            time.sleep(POLL_S)
            return
        self._ray.wait(list(self._calls), num_returns=1, timeout=POLL_S)
        for ref in self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0]:
            worker, group = self._calls.pop(ref)
            if group is None:
                self._take_opened(worker, ref)
            else:
                self._take_result(worker, group, ref)
        if self.on_progress is not None:
            self.on_progress()

    def _take_result(self, worker: WorkerHandle, group: WorkGroup, ref: Any) -> None:
        """Take a result, or take the group back from a worker that died, and let that one load the checkpoint again."""
        worker.groups.remove(group)
        try:
            group.result = self._get(ref)
        except _Died as died:
            if worker.ready:
                worker.ready = False
                self._open(worker)
            if group.died is None:
                group.died = worker
                worker.deaths += 1
                self._returned.append(group)
                return
            group.lost = (
                f"workers died 2 times, {worker.name} last{died.why}, each time with this row or others of its group"
            )
        else:
            worker.rows += group.rows
            worker.tokens += group.result.tokens
        self._finished[group.number] = group

    def progress(self) -> StreamProgress:
        """The groups that are done so far; of rows, those whose results were not given out."""
        rows, tokens = sum(group.rows for group in self._finished.values()), [worker.tokens for worker in self.workers]
        seconds = max(time.monotonic() - self.began, 1e-9)
        return StreamProgress(rows, sum(tokens), tuple(number / seconds for number in tokens))

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(worker.actor)


class _Died(ModelError):
    """The worker of a call died. `why`, if that is known."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a worker died{why}")
        self.why = why
