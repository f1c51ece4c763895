"""Workers of a Ray cluster: groups of rows go out, their results come back in the order of the groups.

A worker has several groups at once, so that it never waits for the driver. Either it works on one after another, or
their rows join the batch that it decodes: such groups are a few rows, and many are there at once.

Ray starts a worker that died again, and gives it the groups that it had, one after another. Those whose rows join a
batch go to any worker. A group cannot be blamed for a death while others are there too: a group with which workers
died again and again is tried alone. If the worker dies then, too, and can be started again, the group is lost, and
the others go on. The groups of a worker that cannot be started again go to the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from genctl.engines.pool.assignments import Assignment, GroupResult, WorkerHandle, WorkGroup
from genctl.engines.pool.cluster import RayCluster, start_cluster, stop_cluster
from genctl.engines.pool.worker import FinishedGroup, OpenedWorker, Worker, WorkerSetup, own_genctl
from genctl.errors import GenctlError, ModelError

if TYPE_CHECKING:
    from genctl.engines.pool.processes import RayProcesses

IN_FLIGHT = 2  # groups that a worker has at once
HELD = 4  # times as many groups as workers are on their way or wait for an earlier one
RETRIES = 2  # of a group, by Ray, when its worker dies
POLL_S = 0.1  # between two looks at signals
REPORT_S = 0.5  # between two reports of a worker's progress
MOST_CALLS = 1000  # that wait for their rows in a worker at once
_LACKING = "No module named 'genctl"  # in what Ray says of a worker that could not be made
SLOW_S = 60.0  # without all workers, until somebody is told


@dataclass(frozen=True)
class Share:
    """How many groups are on their way, and what a worker does with several."""

    at_once: int = IN_FLIGHT  # groups that a worker has
    held: int = HELD  # times as many as workers are on their way or wait for an earlier one
    joined: bool = False  # their rows join one batch; else one group follows the other


IN_TURN = Share()


class WorkerPool:
    """Starts workers and gives them groups. Raises UsageError or ModelError."""

    def __init__(
        self,
        address: str | None,
        workers: int | None,
        gpu: bool,
        setup: Callable[[RayCluster], WorkerSetup],
        processes: RayProcesses | None = None,
    ) -> None:
        self.cluster = start_cluster(address, workers, gpu=gpu, processes=processes)
        import ray

        self._ray = ray
        # retries are said of the actor, not of its calls: else a call fails while the actor is started again
        actor = ray.remote(
            max_restarts=-1,
            max_task_retries=RETRIES,
            num_cpus=1,
            num_gpus=self.cluster.gpus,
            concurrency_groups={"report": 1, "rows": MOST_CALLS},
        )
        spread = {} if self.cluster.alone else {"scheduling_strategy": "SPREAD"}
        made = setup(self.cluster)
        self.workers = [
            WorkerHandle(number, actor(Worker).options(**spread).remote(made))
            for number in range(1, self.cluster.workers + 1)
        ]
        self._opening: dict[Any, WorkerHandle] = {}
        for worker in self.workers:
            self._open(worker)
        self._first: tuple[WorkerHandle, OpenedWorker] | None = None  # the first that had loaded the checkpoint
        self._reports: dict[Any, WorkerHandle] = {}
        self._finished: dict[int, GroupResult] = {}
        self._share = IN_TURN
        self._returned: list[Assignment] = []  # their workers died; any may have them
        self._next = 0  # the first group whose result was not given out
        self._given = 0  # groups that were taken
        self.on_progress: Callable[[], object] | None = None
        self.began = time.monotonic()

    # -- load ----------------------------------------------------------------------------------------------------------

    def open(self, waiting: Callable[[], object], slow: Callable[[str], object]) -> OpenedWorker:
        """Wait until a worker has loaded the checkpoint; the others may follow while it works.

        `waiting` is called now and then, `slow` once if it takes long.
        """
        began = time.monotonic()
        while self._first is None:
            waiting()
            self._wait()
            if time.monotonic() - began > SLOW_S:
                slow("no worker is ready yet")
                began = float("inf")
        self.began = time.monotonic()
        return self._first[1]

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the session of the first worker answers (`Worker.ask`). Raises its errors."""
        assert self._first is not None
        answer = self._ray.get(self._first[0].actor.ask.remote(name, *arguments))
        if isinstance(answer, GenctlError):
            raise answer
        return answer

    def _open(self, worker: WorkerHandle) -> None:
        worker.ready = False
        self._opening[worker.actor.open.remote()] = worker

    def _take_opened(self, ref: Any, worker: WorkerHandle) -> None:
        try:
            opened = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause or error from error
        except self._ray.exceptions.RayError as error:
            if worker.node:
                self._give_up(worker, self._why(error))
                return
            if _LACKING in str(error):
                raise ModelError(
                    f"{worker.name} cannot import genctl, and this is genctl {own_genctl(True)}",
                    hint="genctl has to be installed for the Python of each machine's Ray",
                ) from error
            raise ModelError(
                f"{worker.name} died {RETRIES + 1} times while it loaded the checkpoint{self._why(error)}",
                hint="the usual reason is memory: fewer --workers need less",
            ) from error
        if isinstance(opened, GenctlError):
            raise opened
        assert isinstance(opened, OpenedWorker)
        _check_genctl(worker, opened)
        self._first = self._first or (worker, opened)
        _check_same(self._first[1], opened)
        worker.ready, worker.node, worker.process = True, opened.node, opened.process
        worker.reported = 0
        for suspect in [suspect for suspect in worker.suspects if suspect.alone]:
            worker.suspects.remove(suspect)
            lost = f"{worker.name} died {RETRIES + 1} times{suspect.why}"
            self._finished[suspect.number] = GroupResult(suspect.group, None, worker.number, lost)

    def _give_up(self, worker: WorkerHandle, why: str) -> None:
        """Give the groups of a worker that cannot be started again to the others. Raises ModelError without others."""
        worker.gone = True
        others = [other for other in self.workers if not other.gone]
        if not others:
            raise ModelError(
                f"all workers are gone: each died {RETRIES + 1} times while it loaded the checkpoint again{why}",
                hint="the usual reason is memory: fewer --workers need less, and --resume goes on with what is written",
            )
        while worker.suspects:
            suspect = worker.suspects.popleft()
            other = min(others, key=lambda other: len(other.suspects))
            other.suspects.append(replace(suspect, alone=False))

    # -- work ----------------------------------------------------------------------------------------------------------

    def results(
        self,
        groups: Iterator[WorkGroup | None],
        interrupted: Callable[[], object],
        *,
        ordered: bool = True,
        share: Share = IN_TURN,
    ) -> Iterator[GroupResult]:
        """The result of each group, in order, unless not `ordered`. Ends early when `interrupted` returns true.

        `groups` are taken as workers become free; None says that the next one is not there yet. Raises the first error
        of a worker that cannot load the checkpoint.
        """
        self._share = share
        more = True
        while not interrupted():
            self._retry()
            self._redistribute()
            more = more and self._assign(groups)
            for number in sorted(self._finished):
                if ordered and number != self._next:
                    break
                result = self._finished.pop(number)
                self._next += 1
                yield result
                if interrupted():
                    return
            if not (more or self._finished or self._unfinished()):
                return
            if self._next not in self._finished:
                self._wait()

    def _unfinished(self) -> int:
        given = sum(len(worker.assignments) + len(worker.suspects) for worker in self.workers)
        return given + len(self._returned)

    def _retry(self) -> None:
        """Try groups with which a worker died alone."""
        for worker in self.workers:
            if worker.ready and worker.suspects and not worker.assignments:
                self._give(worker, replace(worker.suspects.popleft(), alone=True))

    def _redistribute(self) -> None:
        """Give groups whose workers died to workers that have room."""
        while self._returned and (worker := self._free()) is not None:
            first = min(self._returned, key=lambda assignment: assignment.number)
            self._returned.remove(first)
            self._give(worker, first)

    def _assign(self, groups: Iterator[WorkGroup | None]) -> bool:
        """Give groups to workers that have room. Returns whether there may be more groups."""
        while True:
            worker = self._free()
            if worker is None or self._unfinished() + len(self._finished) >= self._share.held * len(self.workers):
                return True
            try:
                group = next(groups)
            except StopIteration:
                return False
            if group is None:
                return True
            number, self._given = self._given, self._given + 1
            if not group.rows:
                self._finished[number] = GroupResult(group, None, 0)
            else:
                self._give(worker, Assignment(number, group, alone=False))

    def _free(self) -> WorkerHandle | None:
        """The worker with the fewest groups, if there is room for another."""
        free = [worker for worker in self.workers if self._has_room(worker)]
        return min(free, key=lambda worker: len(worker.assignments)) if free else None

    def _has_room(self, worker: WorkerHandle) -> bool:
        """Whether it may have another group: none beside one that is tried alone, or that is to be."""
        alone = any(assignment.alone for assignment in worker.assignments.values())
        full = len(worker.assignments) >= self._share.at_once
        return worker.ready and not (alone or full or worker.suspects)

    def _give(self, worker: WorkerHandle, assignment: Assignment) -> None:
        call = worker.actor.work
        if self._share.joined and not assignment.alone:
            call = worker.actor.join.options(concurrency_group="rows", max_task_retries=0)
        worker.assignments[call.remote(assignment.number, assignment.group.work)] = assignment

    def _wait(self) -> None:
        """Take in what has arrived, or wait a moment for something."""
        self._ask()
        working = {ref: worker for worker in self.workers for ref in worker.assignments}
        refs = [*self._opening, *working, *self._reports]
        if not refs:
            time.sleep(POLL_S)
            return
        arrived, _ = self._ray.wait(refs, num_returns=1, timeout=POLL_S)
        more, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in dict.fromkeys([*arrived, *more]):
            if ref in self._opening:
                self._take_opened(ref, self._opening.pop(ref))
            elif ref in self._reports:
                self._take_report(ref, self._reports.pop(ref))
            else:
                self._take_result(ref, working[ref])
        if self.on_progress is not None:
            self.on_progress()

    def _take_result(self, ref: Any, worker: WorkerHandle) -> None:
        assignment = worker.assignments.pop(ref)
        try:
            finished = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause or error from error
        except self._ray.exceptions.RayError as error:
            self._died_with(worker, assignment, self._why(error))
            if worker.gone:
                self._give_up(worker, self._why(error))
            elif worker.ready:
                self._open(worker)  # whether it can be started again
            return
        if isinstance(finished, GenctlError):
            raise finished
        assert isinstance(finished, FinishedGroup)
        worker.groups += 1
        worker.rows += assignment.group.rows
        worker.count(finished.process, finished.tokens)
        worker.current = (-1, 0)
        self._finished[assignment.number] = GroupResult(assignment.group, finished.value, worker.number)

    def _died_with(self, worker: WorkerHandle, assignment: Assignment, why: str) -> None:
        """Take a group back from a worker that died: for any worker, or, if Ray or others tried again, to try alone."""
        assignment = replace(assignment, deaths=assignment.deaths + 1, why=why)
        if self._share.joined and not assignment.alone and assignment.deaths <= RETRIES:
            self._returned.append(assignment)
        else:
            worker.deaths += 1
            worker.suspects.append(assignment)

    # -- progress ------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask each worker for a report, where somebody wants to know."""
        now = time.monotonic()
        for worker in self.workers if self.on_progress is not None else ():
            if worker.assignments and now - worker.asked >= REPORT_S and worker not in self._reports.values():
                worker.asked = now
                self._reports[worker.actor.report.options(concurrency_group="report", max_task_retries=0).remote()] = (
                    worker
                )

    def _take_report(self, ref: Any, worker: WorkerHandle) -> None:
        try:
            process, group, rows, tokens = self._ray.get(ref)
        except self._ray.exceptions.RayError:  # it died: its groups tell
            return
        worker.count(process, tokens)
        worker.current = group, rows

    @property
    def rows_ahead(self) -> int:
        """Rows that are finished and were not given out."""
        rows = sum(result.group.rows for result in self._finished.values())
        for worker in self.workers:
            number, done = worker.current
            rows += done if any(each.number == number for each in worker.assignments.values()) else 0
        return rows

    @property
    def tokens(self) -> int:
        """Tokens written by all workers."""
        return sum(worker.tokens for worker in self.workers)

    def speeds(self) -> list[float]:
        """Tokens a second of each worker since the work began."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        return [worker.tokens / seconds for worker in self.workers]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers, and Ray if it was started here."""
        for worker in self.workers:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(worker.actor)
        if self.cluster.ours:
            stop_cluster()

    def _why(self, error: Exception) -> str:
        """What Ray knows of the death of a worker."""
        return ": no memory is left on its machine" if isinstance(error, self._ray.exceptions.OutOfMemoryError) else ""


def _check_genctl(worker: WorkerHandle, opened: OpenedWorker) -> None:
    """Raises ModelError for a worker with another genctl than this one, since it could compute other results."""
    theirs = getattr(opened, "genctl", "") or "another one"
    if theirs == own_genctl("products: " in theirs):
        return
    raise ModelError(
        f"worker {worker.number} on {opened.node} has genctl {theirs}, and this is genctl {own_genctl(True)}: their "
        "results could differ",
        hint="install one genctl on all machines; GENCTL_PRODUCTS names products that all of them have",
    )


def _check_same(first: OpenedWorker, other: OpenedWorker) -> None:
    """Raises ModelError where the results of two workers would differ."""
    for name, value in first.identity.items():
        if other.identity[name] != value:
            there = f"on {first.node} and {other.node}" if first.node != other.node else "for two workers"
            shown = f": {value} and {other.identity[name]}" if isinstance(value, str) else ""
            raise ModelError(f"{name}: not the same {there}{shown}, so their results would differ")
