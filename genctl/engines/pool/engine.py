"""The engine of `--workers`: rows go to workers, and their results come back as if they were made here.

Where a row's bits do not depend on the rows beside it, a worker has rows in reserve, a few in a call: they join its
batch whenever a place is free. Elsewhere whole groups go out, which are decoded to their end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from genctl import events
from genctl.config.layers import Layer, Resolved
from genctl.decode.threads import from_environment
from genctl.engines.pool.assignments import GroupResult, WorkGroup
from genctl.engines.pool.cluster import RayCluster, is_running, stop_cluster
from genctl.engines.pool.memory import check_memory
from genctl.engines.pool.pool import IN_TURN, Share, WorkerPool
from genctl.engines.pool.work import DecodedGroup, DecodeWork, ScoredGroup, ScoreWork
from genctl.engines.pool.worker import WorkerSetup
from genctl.engines.protocol import ALONE, EngineSetup, Flow, Key, Report, Request, Rows, Skipped, StreamProgress, never
from genctl.errors import ModelError, count
from genctl.models import gc_pause

CALLS = 8  # that bring the rows of a batch: more of them cost the driver more, with fewer a row waits for others of its
HELD = 32  # times as many rows as are decoded at once are on their way or wait for an earlier one

if TYPE_CHECKING:
    from genctl.engines.pool.processes import RayProcesses
    from genctl.engines.protocol import Outcome
    from genctl.engines.scored_text import Options, TextToScore


class PoolEngine:
    """Workers that have loaded a checkpoint. What has to be known of it is asked of the first of them."""

    counts_passes = True
    passes = 0

    def __init__(self) -> None:
        self.pool: WorkerPool | None = None
        self.processes: RayProcesses | None = None  # of the Ray that was started here
        self.prompt_cache: str | None = None
        self.findings: list[str] = []
        self._in_groups = True  # rows are decoded in groups

    def start(self, setup: EngineSetup, address: str | None, workers: int | None) -> None:
        """Start the workers; returns when the first of them has loaded the checkpoint. Raises its errors."""
        runtime = setup.runtime
        self.prompt_cache = runtime.prompt_cache
        gc_pause.resume()  # torch is not imported here

        def setup_of(cluster: RayCluster) -> WorkerSetup:
            if cluster.alone and not cluster.gpus:
                check_memory(cluster.workers, runtime, setup.trust)
            folder = Path(runtime.model)
            return WorkerSetup(
                runtime,
                setup.layers,
                runtime.threads or cluster.threads,
                str(Path.cwd()),
                setup.need_tokenizer,
                **setup.trust,
                allow_plugins=setup.allow_plugins,
                exact=runtime.threads is not None or from_environment() is not None,
                local=str(folder.resolve()) if folder.is_dir() else "",
                alone=cluster.alone,
            )

        self._given = runtime.threads
        if address is None and not is_running():
            from genctl.engines.pool.processes import RayProcesses

            self.processes = RayProcesses()
        gpu = runtime.device in ("auto", "cuda")
        self.pool = WorkerPool(address, workers, gpu, setup_of, self.processes)
        self.pool.open(lambda: None, setup.remark)
        self._limit = "" if self.prompt_cache is None else str(self.pool.ask("reuse_limit"))

    @property
    def _workers(self) -> WorkerPool:
        assert self.pool is not None
        return self.pool

    # -- of the checkpoint ---------------------------------------------------------------------------------------------

    @cached_property
    def name(self) -> str:
        """The checkpoint, as the user named it."""
        return str(self._workers.ask("name"))

    @cached_property
    def has_texts(self) -> bool:
        """Whether there is a tokenizer, so that results have texts."""
        return bool(self._workers.ask("has_texts"))

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """Whether texts answer their prompts; else they continue them."""
        return bool(self._workers.ask("is_encoder_decoder"))

    @property
    def checkpoint_notes(self) -> tuple[str, ...]:
        """Notes for --verbose on the workers and the checkpoint."""
        return (self._about, *self._workers.ask("checkpoint_notes"))

    @property
    def notes(self) -> tuple[str, ...]:
        """The same, and how it runs."""
        return (self._about, *self._workers.ask("notes"))

    @property
    def _about(self) -> str:
        cluster = self._workers.cluster
        each = "each " if cluster.workers > 1 else ""
        share = f"{count(self._given or cluster.threads, 'thread')}{' and a GPU' if cluster.gpus else ''}"
        return f"{count(cluster.workers, 'worker')} {cluster.about}, {each}with {share}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The digests of all checkpoints."""
        return [("digest", ", ".join(self.fingerprints().values()))]

    @property
    def shares(self) -> list[str]:
        """What each worker did."""
        lines = []
        for worker in self._workers.workers:
            done = f"{count(worker.rows, 'row')}, {count(worker.tokens, 'token')}"
            groups = f"{count(worker.groups, 'group')}, " if self._in_groups else ""
            deaths = f", {count(worker.deaths, 'group')} tried again alone" if worker.deaths else ""
            lines.append(f"{worker.name}: {groups}{done}{deaths}")
        return lines

    def reuse_limit(self) -> str:
        """Why a saved prompt may be useless for another prompt."""
        return self._limit

    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of all checkpoints, as a worker reads them."""
        return dict(self._workers.ask("fingerprints"))

    # -- settings ------------------------------------------------------------------------------------------------------

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """The layers, with the checkpoint's own settings beneath them."""
        resolved: Resolved = self._workers.ask("resolve", layers)
        return resolved

    def check(self, resolved: Resolved) -> str:
        """Check once whether the checkpoint can run a job; the name of its strategy."""
        return str(self._workers.ask("check", resolved))

    def check_tokens(self, flag: str, resolved: Resolved) -> None:
        """Every token has a log-probability."""

    def remarks(self, resolved: Resolved) -> list[str]:
        """What everybody should know of the cache of a job."""
        return list(self._workers.ask("remarks", resolved))

    def watched(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """The ids of the tokens that --watch names. Raises UsageError."""
        return tuple(self._workers.ask("watched", tokens))

    def reads_hidden(self, resolved: Resolved) -> bool:
        """Whether a job reads hidden states."""
        return bool(self._workers.ask("reads_hidden", resolved))

    def width(self, resolved: Resolved, default: int) -> int:
        """How many prompts a worker decodes at once."""
        return int(self._workers.ask("width", resolved, default))

    def most_lanes(self, resolved: Resolved, lanes: int) -> int:
        """All of them."""
        return lanes

    def use_threads(self, jobs: Sequence[Resolved], lanes: int, recorded: int | None = None) -> int | None:
        """The number that each worker uses: the recorded one would not be its share of the cores."""
        number: int | None = self._workers.ask("use_threads", jobs, lanes)
        return number

    def alone(self, resolved: Resolved) -> str:
        """As the first worker computes: the others have the same products (`worker.identity_of`)."""
        return str(self._workers.ask("alone", resolved))

    # -- work ----------------------------------------------------------------------------------------------------------

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Give rows to workers, and take their events (`Engine.stream`). Without a span a group has `width` rows."""
        pool, width = self._workers, flow.width
        pool.on_progress = lambda: flow.on_progress(StreamProgress(pool.rows_ahead, pool.tokens, tuple(pool.speeds())))
        self._in_groups = not flow.continuous

        def work(rows: tuple[Request, ...]) -> DecodeWork:
            return DecodeWork(rows, report or Report(), width, flow.ahead, flow.threads)

        share, span = IN_TURN, flow.span or width
        if flow.continuous:
            span = max(width // CALLS, 1)
            # each unfinished call has an unfinished row, so that this many fill the batch, however long some rows are
            share = Share(at_once=width + max(width // 2, 1), held=HELD * width // span, joined=True)
        works = _groups(requests, span, work, whole=not flow.continuous)
        for result in pool.results(works, flow.interrupted, ordered=flow.ordered, share=share):
            for event in self._events(result, flow.on_shortage):
                if flow.interrupted():
                    return
                yield event
            if flow.interrupted() or flow.enough(result.group.last):
                return

    def _events(self, result: GroupResult, on_shortage: Callable[[int, int], object]) -> Iterator[events.Event]:
        """The events of a group, or those of rows whose worker died again and again."""
        decoded: DecodedGroup | None = result.value
        if decoded is not None:
            for width, fewer in decoded.shortages:
                on_shortage(width, fewer)
            yield from decoded.events
        if not result.lost:
            return
        first, last = result.group.first + 1, result.group.last + 1
        rows = f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"
        for request in result.group.work.requests:
            prompt = request.prompt or ""
            yield events.Began(request.id, prompt, "", self.name, request.seed, {}, request.place)
            yield events.Failed(request.id, "worker", f"{result.lost}, each time while it decoded {rows}")

    def score(
        self,
        texts: Iterator[tuple[Key, TextToScore]],
        options: Options,
        *,
        interrupted: Callable[[], str] = never,
    ) -> Iterator[tuple[Key, Outcome]]:
        """The outcome of each text, in order. Raises UsageError or ModelError at once for what it cannot do."""
        self._workers.ask("check_scoring", options)
        return self._scored(texts, options, interrupted)

    def _scored(
        self, texts: Iterator[tuple[Key, TextToScore]], options: Options, interrupted: Callable[[], str]
    ) -> Iterator[tuple[Key, Outcome]]:
        keys: dict[int, list[Key]] = {}  # of groups that are on their way, by their first row

        def groups() -> Iterator[WorkGroup]:
            read = 0
            while group := list(islice(texts, options.chunk)):
                keys[read] = [key for key, _ in group]
                work = ScoreWork(tuple(text for _, text in group), options)
                yield WorkGroup(work, len(group), read, read + len(group) - 1)
                read += len(group)

        for result in self._workers.results(groups(), interrupted):
            scored: ScoredGroup | None = result.value
            lost = ModelError(f"{result.lost}, each time while it scored this text or others of its group")
            lost.code = "worker"
            outcomes: Sequence[Outcome] = [lost] * result.group.rows if scored is None else scored.outcomes
            self.findings = list(dict.fromkeys([*self.findings, *(() if scored is None else scored.findings)]))
            yield from zip(keys.pop(result.group.first), outcomes, strict=True)

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """End the workers, and what Ray has started for them. After a signal nothing may wait."""
        ours = self.processes
        if ours is not None:  # a signal may yet come
            ours.note()
            ours.end_after_us(keep_logs=failed)
        if hurried and (ours is not None or (self.pool is not None and self.pool.cluster.ours)):
            return
        if self.pool is not None:
            self.pool.close()
        if ours is not None:
            stop_cluster()
            ours.end(keep_logs=failed)


def _groups(
    requests: Rows, span: int, work: Callable[[tuple[Request, ...]], DecodeWork], *, whole: bool
) -> Iterator[WorkGroup | None]:
    """The groups of `requests.grouped`; None while the next row is not there.

    Unless groups have to be `whole`, rows that are there do not wait for the others of theirs.
    """
    waiting: list[Request | Skipped] = []

    def group() -> WorkGroup:
        usable = tuple(row for row in waiting if isinstance(row, Request))
        return WorkGroup(work(usable), len(usable), waiting[0].index, waiting[-1].index)

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
    engine = PoolEngine()
    try:
        engine.start(setup, address, workers)
    except BaseException:  # workers must not outlive a start that failed or was interrupted
        hurried = bool(setup.interrupted())
        engine.close(hurried=hurried, failed=not hurried)
        raise
    return engine
