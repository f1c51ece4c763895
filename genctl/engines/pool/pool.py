"""Workers of a Ray cluster: groups of rows go out, their results come back in the order of the groups.

A worker has several groups at once, so that it never waits for the driver. Either it works on one after another, or
their rows join the batch that it decodes: such groups are a few rows, and many are there at once.

Ray restarts a worker that died; its groups go to any worker that has loaded the checkpoint. While a worker has several
groups, it is not known which of them killed it: a group whose workers keep dying is retried alone. If they die again,
the group is lost, and the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from genctl.engines.pool.cluster import RayCluster
from genctl.engines.pool.worker import OpenedWorker, Worker, WorkerSetup, own_genctl
from genctl.engines.protocol import About, StreamProgress
from genctl.errors import ModelError

IN_FLIGHT = 2  # groups that a worker has at once, where their rows do not join one batch
HELD = 4  # times as many groups as workers are then on their way or wait for an earlier one
RETRIES = 2  # of a load, by Ray; and of a group whose workers die: first beside others, and then alone
POLL_S = 0.1  # between two looks at signals
SLOW_S = 60.0  # without a ready worker, until a remark
_LACKING = "No module named 'genctl"  # in Ray's error for a worker that cannot be created


@dataclass(eq=False)
class WorkGroup:
    """Rows that are worked on together: what a worker is given, its rows in the input, and what became of it."""

    work: Any
    rows: int
    first: int
    last: int
    keys: tuple[Any, ...] = ()  # of texts that are scored
    number: int = 0  # in the order of the groups
    deaths: int = 0  # workers that died while they had it
    value: Any = None  # its result
    lost: str = ""  # why there is none

    @property
    def alone(self) -> bool:
        """Whether it is tried without others."""
        return self.deaths > RETRIES


@dataclass(eq=False)
class WorkerHandle:
    """A worker, as the driver knows it."""

    number: int  # from 1
    actor: Any
    node: str = ""
    ready: bool = False  # it has loaded the checkpoint, and did not die since
    dead: bool = False  # it died and cannot be started again
    groups: list[WorkGroup] = field(default_factory=list)  # that it has
    done: int = 0  # groups
    rows: int = 0
    tokens: int = 0
    deaths: int = 0  # with groups that were then tried alone

    def has_room(self, at_once: int) -> bool:
        """Whether it can have another group: none beside one that is tried alone."""
        return self.ready and len(self.groups) < at_once and not any(group.alone for group in self.groups)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"worker {self.number}" + (f" on {self.node}" if self.node else "")


class WorkerPool:
    """Starts workers and gives them groups. Raises UsageError or ModelError."""

    def __init__(self, cluster: RayCluster, setup: WorkerSetup) -> None:
        import ray

        self._ray = ray
        # retries belong to the actor, not to its calls: else a call fails while the actor restarts
        actor = ray.remote(max_restarts=-1, max_task_retries=RETRIES, num_cpus=1, num_gpus=cluster.gpus)
        spread = {} if cluster.alone else {"scheduling_strategy": "SPREAD"}
        self.workers = [
            WorkerHandle(number, actor(Worker).options(**spread).remote(setup))
            for number in range(1, cluster.workers + 1)
        ]
        self._calls: dict[Any, tuple[WorkerHandle, WorkGroup | None]] = {}  # by the result's reference; None: `open`
        for worker in self.workers:
            self._open(worker)
        self._first: tuple[WorkerHandle, OpenedWorker] | None = None  # the first that had loaded the checkpoint
        self._finished: dict[int, WorkGroup] = {}
        self._returned: list[WorkGroup] = []  # their workers died; any may have them
        self._next = 0  # the first group whose result was not given out
        self._taken = 0  # groups that were taken
        self.on_progress: Callable[[], object] | None = None
        self.began = time.monotonic()

    # -- load ----------------------------------------------------------------------------------------------------------

    def open(self, slow: Callable[[str], object]) -> About:
        """Wait until a worker has loaded the checkpoint, and return what is known of it; others follow meanwhile.

        `slow` is called once if it takes long.
        """
        slow_at = time.monotonic() + SLOW_S
        while self._first is None:
            self._wait()
            if time.monotonic() > slow_at:
                slow("no worker is ready yet")
                slow_at = float("inf")
        self.began = time.monotonic()
        return self._first[1].about

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the session of the first worker answers (`Worker.ask`). Raises its errors."""
        assert self._first is not None
        return self._get(self._first[0].actor.ask.remote(name, *arguments))

    def _get(self, ref: Any) -> Any:
        """The result of a call. Raises what the call raised, and _Died."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause or error from error
        except self._ray.exceptions.RayError as error:
            memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
            raise _Died(": no memory is left on its machine" if memory else "") from error

    def _open(self, worker: WorkerHandle) -> None:
        self._calls[worker.actor.open.remote()] = worker, None

    def _take_opened(self, worker: WorkerHandle, ref: Any) -> None:
        """Take a worker in, or do without it if it cannot be started again. Raises ModelError for the last one."""
        died = f"died {RETRIES + 1} times while it loaded the checkpoint"
        few = "the usual reason is memory: fewer --workers need less"
        try:
            opened: OpenedWorker = self._get(ref)
        except _Died as death:
            if _LACKING in str(death.__cause__):
                raise ModelError(
                    f"{worker.name} cannot import genctl, and this is genctl {own_genctl(True)}",
                    hint="genctl has to be installed for the Python of each machine's Ray",
                ) from death
            if not worker.node:
                raise ModelError(f"{worker.name} {died}{death.why}", hint=few) from death
            worker.dead = True
            if all(other.dead for other in self.workers):
                raise ModelError(
                    f"all workers are gone: each {died} again{death.why}",
                    hint=f"{few}; --resume continues",
                ) from death
            return
        self._first = self._first or (worker, opened)
        _check_same(worker, self._first[1], opened)
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
        """Give groups to workers that have room: those whose workers died, first those that are tried alone, and others
        while fewer than `most` are on their way. Returns whether there may be more of them.
        """
        self._returned.sort(key=lambda group: (not group.alone, group.number))
        while True:
            free = [worker for worker in self.workers if worker.has_room(at_once)]
            if (worker := min(free, key=lambda worker: len(worker.groups), default=None)) is None:
                break
            if self._returned:
                if self._returned[0].alone and worker.groups:
                    break  # once a worker has nothing else
                self._give(worker, self._returned.pop(0))
                continue
            if self._taken - self._next >= most:
                break
            try:
                group = next(groups)
            except StopIteration:
                return False
            if group is None:
                break
            group.number, self._taken = self._taken, self._taken + 1
            if group.rows:
                self._give(worker, group)
            else:
                self._finished[group.number] = group
        return True

    def _give(self, worker: WorkerHandle, group: WorkGroup) -> None:
        worker.groups.append(group)
        self._calls[worker.actor.work.options(max_task_retries=0).remote(group.work)] = worker, group

    def _wait(self) -> None:
        """Take in what has arrived, or wait a moment for something."""
        refs = list(self._calls)
        if not refs:
            time.sleep(POLL_S)
            return
        self._ray.wait(refs, num_returns=1, timeout=POLL_S)
        for ref in self._ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
            worker, group = self._calls.pop(ref)
            if group is None:
                self._take_opened(worker, ref)
            else:
                self._take_result(worker, group, ref)
        if self.on_progress is not None:
            self.on_progress()

    def _take_result(self, worker: WorkerHandle, group: WorkGroup, ref: Any) -> None:
        """Take a result, or take the group back from a worker that died, and see whether Ray can start it again."""
        worker.groups.remove(group)
        try:
            group.value = self._get(ref)
        except _Died as died:
            group.deaths += 1
            worker.deaths += group.deaths == RETRIES + 1
            if worker.ready:
                worker.ready = False
                self._open(worker)
            if group.deaths < 2 * (RETRIES + 1):
                self._returned.append(group)
                return
            group.lost = f"workers died {group.deaths} times, {worker.name} last{died.why}"
        else:
            worker.done += 1
            worker.rows += group.rows
            worker.tokens += group.value.tokens
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


def _check_same(worker: WorkerHandle, first: OpenedWorker, opened: OpenedWorker) -> None:
    """Raises ModelError for a worker whose results could differ: from those of this genctl, or of the first worker."""
    theirs = opened.genctl or "another one"
    if theirs != own_genctl("products: " in theirs):
        raise ModelError(
            f"worker {worker.number} on {opened.node} has genctl {theirs}, and this is genctl {own_genctl(True)}: "
            "their results could differ",
            hint="install one genctl on all machines; GENCTL_PRODUCTS names products that all of them have",
        )
    for name, value in first.identity.items():
        if opened.identity[name] != value:
            there = f"on {first.node} and {opened.node}" if first.node != opened.node else "for two workers"
            shown = f": {value} and {opened.identity[name]}" if isinstance(value, str) else ""
            raise ModelError(f"{name}: not the same {there}{shown}, so their results would differ")
