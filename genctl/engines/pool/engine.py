"""The engine of `--workers`: rows go to workers, and their results come back as if they were made here.

Where a row's bits do not depend on the rows beside it, a worker has rows in reserve, a few in a call: they join its
batch whenever a place is free. Elsewhere whole groups go out, which are decoded to their end.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from genctl import events, process
from genctl.decode.threads import from_environment
from genctl.engines.pool.cluster import RayCluster, start_cluster
from genctl.engines.pool.pool import HELD, IN_FLIGHT, WorkerPool, WorkGroup
from genctl.engines.pool.worker import DecodeWork, ScoreWork, WorkerSetup
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

CALLS = 8  # that bring the rows of a batch: more of them cost the driver more, with fewer a row waits for others of its
ROWS_HELD = 32  # times as many rows as are decoded at once are on their way or wait for an earlier one


def require_ray(flag: str) -> None:
    """Raises UsageError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"{flag} needs Ray, which is not installed", hint=extra("ray"))


def _by_first_worker(name: str) -> Any:
    """A method of `Engine` that the session of the first worker performs."""

    def method(engine: PoolEngine, *arguments: Any) -> Any:
        return engine.pool.ask(name, *arguments)

    return method


class PoolEngine:
    """Workers that have loaded a checkpoint. The first of them answers questions about it."""

    about = About("")  # what the first worker knows of its checkpoint

    def __init__(self, cluster: RayCluster, setup: EngineSetup) -> None:
        """Start the workers."""
        self.cluster = cluster
        runtime, folder = setup.runtime, Path(setup.runtime.model)
        given = from_environment()
        exact = runtime.threads or (given[0] if given else None)
        each = WorkerSetup(
            runtime,
            setup.layers,
            exact or cluster.threads,
            str(Path.cwd()),
            {"need_tokenizer": setup.need_tokenizer, "allow_plugins": setup.allow_plugins, **setup.trust},
            exact=exact is not None,
            local=str(folder.resolve()) if folder.is_dir() else "",
        )
        share = f"{count(each.threads, 'thread')}{' and a GPU' if cluster.gpus else ''}"
        self._shared_out = f"{count(cluster.workers, 'worker')} {cluster.about}, each with {share}"
        self.pool = WorkerPool(cluster, each)

    # -- the checkpoint and its settings -------------------------------------------------------------------------------

    resolve = _by_first_worker("resolve")
    plan = _by_first_worker("plan")  # the others have the same products (`worker.identity_of`)
    watched = _by_first_worker("watched")
    width = _by_first_worker("width")
    fingerprints = _by_first_worker("fingerprints")

    def notes(self) -> list[str]:
        """Notes for --verbose on the workers, on the checkpoint, and how the first of them runs it."""
        return [self._shared_out, *self.pool.ask("notes")]

    @property
    def done(self) -> WorkDone:
        """What each worker did."""
        lines = []
        for worker in self.pool.workers:
            deaths = f", {count(worker.deaths, 'group')} tried again alone" if worker.deaths else ""
            done = f"{count(worker.rows, 'row')}, {count(worker.tokens, 'token')}"
            lines.append(f"{worker.name}: {done}{deaths}")
        return WorkDone(shares=tuple(lines))

    def use_threads(self, rows: int, recorded: int | None = None) -> int | None:
        """The number that each worker uses: the recorded one would not be its share of the cores."""
        number: int | None = self.pool.ask("use_threads", rows)
        return number

    # -- work ----------------------------------------------------------------------------------------------------------

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Give rows to workers, and take their events (`Engine.stream`). Without a span a group has `width` rows."""
        pool, width = self.pool, flow.width
        pool.on_progress = lambda: flow.on_progress(pool.progress())

        def work(rows: tuple[Request, ...]) -> DecodeWork:
            return DecodeWork(rows, report or Report(), width, flow.ahead, flow.threads, flow.continuous)

        at_once, held, span = IN_FLIGHT, HELD, flow.span or width
        if flow.continuous:
            span = max(width // CALLS, 1)
            # each unfinished call has an unfinished row, so that this many fill the batch, however long some rows are
            at_once, held = width + max(width // 2, 1), ROWS_HELD * width // span
        works = _groups(requests, span, work, whole=not flow.continuous)
        for group in pool.results(works, flow.interrupted, ordered=flow.ordered, at_once=at_once, held=held):
            for event in self._lost_rows(group) if group.lost else group.result.results:
                if flow.interrupted():
                    return
                yield event
            if flow.enough(group.last):
                return

    def _lost_rows(self, group: WorkGroup) -> Iterator[events.Event]:
        """The events of rows whose workers died."""
        for request in group.work.requests:
            prompt = request.prompt or ""
            yield events.Began(request.id, prompt, "", self.about.name, request.seed, {}, request.place)
            yield events.Failed(request.id, "worker", group.lost)

    def score(
        self,
        texts: Iterator[tuple[Key, TextToScore]],
        options: ScoringOptions,
        *,
        interrupted: Callable[[], str] = never,
    ) -> Iterator[tuple[Key, Outcome]]:
        """The outcome of each text, in order. Raises UsageError or ModelError at once for what it cannot do."""
        self.pool.ask("check_scoring", options)
        return self._scored(texts, options, interrupted)

    def _scored(
        self, texts: Iterator[tuple[Key, TextToScore]], options: ScoringOptions, interrupted: Callable[[], str]
    ) -> Iterator[tuple[Key, Outcome]]:
        def groups() -> Iterator[WorkGroup]:
            while chunk := list(islice(texts, options.chunk)):
                keys, items = zip(*chunk, strict=True)
                yield WorkGroup(ScoreWork(items, options), len(chunk), keys=keys)

        for group in self.pool.results(groups(), interrupted):
            lost = ModelError(group.lost)
            lost.code = "worker"
            yield from zip(group.keys, [lost] * group.rows if group.lost else group.result.results, strict=True)

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """End the workers, and what Ray has started for them. After a signal nothing may wait."""
        if not self.cluster.ours:
            self.pool.close()
        else:
            self.cluster.end(hurried=hurried)


def _groups(
    requests: Rows, span: int, work: Callable[[tuple[Request, ...]], DecodeWork], *, whole: bool
) -> Iterator[WorkGroup | None]:
    """The groups of `requests.grouped`; None while the next row is not there.

    Unless groups have to be `whole`, rows that are there do not wait for the others of theirs.
    """
    waiting: list[Request | Skipped] = []

    def group() -> WorkGroup:
        usable = tuple(row for row in waiting if isinstance(row, Request))
        return WorkGroup(work(usable), len(usable), waiting[-1].index)

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
    engine = PoolEngine(start_cluster(address, workers, gpu=setup.runtime.device in ("auto", "cuda")), setup)
    try:
        engine.about = engine.pool.open()
    except BaseException:  # workers must not outlive a start that failed or was interrupted
        engine.close(hurried=bool(setup.interrupted()))
        raise
    return engine
