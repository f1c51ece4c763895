"""The engine of `--workers`: rows go to workers, and their results come back as if they were made here.

Where a row's bits do not depend on the rows beside it, a worker has rows in reserve, a few in a call: they join its
batch whenever a place is free. Elsewhere whole groups go out, which are decoded to their end.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any

from genctl import events, process
from genctl.decode.threads import cores, from_environment
from genctl.engines.pool.cluster import RayCluster, is_running, start_cluster
from genctl.engines.pool.pool import HELD, IN_FLIGHT, WorkerPool, WorkGroup
from genctl.engines.pool.worker import DecodedGroup, DecodeWork, ScoredGroup, ScoreWork, WorkerSetup
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
from genctl.errors import GenctlError, ModelError, UsageError, count, extra, size
from genctl.params import Runtime

CALLS = 8  # that bring the rows of a batch: more of them cost the driver more, with fewer a row waits for others of its
ROWS_HELD = 32  # times as many rows as are decoded at once are on their way or wait for an earlier one
PROCESS = 400 << 20  # bytes of a worker besides weights: Python, torch and Ray
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}

# -- what is refused before workers start: more of them than fit -------------------------------------------------------
# Each worker has its own copy of the weights, unless they stay in their files: the native runtime maps weights from
# safetensors files, which all processes share, if it computes in their dtype.


def require_ray(flag: str) -> None:
    """Raises UsageError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"{flag} needs Ray, which is not installed", hint=extra("ray"))


def check_cores(workers: int | None, address: str | None) -> None:
    """Raises UsageError for more workers than there are cores here."""
    number = cores()
    if workers is None or address is not None or is_running() or workers <= number:
        return
    there = f"there {'is' if number == 1 else 'are'} {count(number, 'core')}"
    raise UsageError(f"--workers {workers}: {there}, and each worker takes one", hint=f"--workers {number} fits")


def own_weights(runtime: Runtime, trust: dict[str, bool]) -> int:
    """Bytes of the weights that each process needs for itself; 0 if they are shared, or if their size is not known."""
    from genctl.models import check, gguf, runtime_choice
    from genctl.models.resolve import resolve

    try:
        place = resolve(runtime.model, revision=runtime.revision, offline=True, allow_pickle=trust["allow_pickle"])
        if place.gguf is not None:
            held = gguf.inspect(place.gguf, need_tokenizer=False).weights
            is_unpacked = runtime.dequantize or runtime.runtime == "transformers"
            return 4 * sum(tensor.numel for tensor in held.tensors.values()) if is_unpacked else held.bytes
        checkpoint = check.inspect(place.folder, need_tokenizer=False, **trust)
        native, _ = runtime_choice.plan(runtime, checkpoint, trust_remote_code=trust["trust_remote_code"])
    except (GenctlError, OSError):
        return 0  # not downloaded yet, or unusable: a worker reports the reason
    dtype = runtime_choice.dtype_of(runtime, checkpoint)
    tensors = checkpoint.weights.tensors.values()
    if native is not None and runtime.quantize is None and runtime_choice.is_stored_as(checkpoint, dtype):
        return 0
    if not tensors:
        return checkpoint.weights.bytes
    return int(sum(tensor.numel for tensor in tensors) * _BYTES.get(runtime.quantize or dtype, 2))


def check_memory(workers: int, runtime: Runtime, trust: dict[str, bool]) -> None:
    """Raises UsageError for more workers than memory is free for. Where their size is not known, nothing is checked."""
    import psutil

    weights = own_weights(runtime, trust)
    free = int(psutil.virtual_memory().available)
    fitting = free // (weights + PROCESS)
    if workers > 1 and workers > fitting:
        fits = max(int(fitting), 1)
        raise UsageError(
            f"--workers {workers}: each needs {size(weights + PROCESS)} of memory (weights: {size(weights)}), and "
            f"{size(free)} are free",
            hint=f"--workers {fits} fits" if fitting else "not even one worker is sure to fit",
        )


# -- the engine --------------------------------------------------------------------------------------------------------


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
        self._findings: list[str] = []
        self._in_groups = True  # rows are decoded in groups
        runtime, folder = setup.runtime, Path(setup.runtime.model)
        if cluster.alone and not cluster.gpus:
            check_memory(cluster.workers, runtime, setup.trust)
        each = WorkerSetup(
            runtime,
            setup.layers,
            runtime.threads or cluster.threads,
            str(Path.cwd()),
            {"need_tokenizer": setup.need_tokenizer, "allow_plugins": setup.allow_plugins, **setup.trust},
            exact=runtime.threads is not None or from_environment() is not None,
            local=str(folder.resolve()) if folder.is_dir() else "",
            alone=cluster.alone,
        )
        share = f"{count(each.threads, 'thread')}{' and a GPU' if cluster.gpus else ''}"
        own = f"{'each ' if cluster.workers > 1 else ''}with {share}"
        self._shared_out = f"{count(cluster.workers, 'worker')} {cluster.about}, {own}"
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
        """What was found out about the model, and what each worker did."""
        lines = []
        for worker in self.pool.workers:
            done = f"{count(worker.rows, 'row')}, {count(worker.tokens, 'token')}"
            groups = f"{count(worker.done, 'group')}, " if self._in_groups else ""
            deaths = f", {count(worker.deaths, 'group')} tried again alone" if worker.deaths else ""
            lines.append(f"{worker.name}: {groups}{done}{deaths}")
        return WorkDone(findings=tuple(self._findings), shares=tuple(lines))

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
        self._in_groups = not flow.continuous

        def work(rows: tuple[Request, ...]) -> DecodeWork:
            return DecodeWork(rows, report or Report(), width, flow.ahead, flow.threads, flow.continuous)

        at_once, held, span = IN_FLIGHT, HELD, flow.span or width
        if flow.continuous:
            span = max(width // CALLS, 1)
            # each unfinished call has an unfinished row, so that this many fill the batch, however long some rows are
            at_once, held = width + max(width // 2, 1), ROWS_HELD * width // span
        works = _groups(requests, span, work, whole=not flow.continuous)
        for group in pool.results(works, flow.interrupted, ordered=flow.ordered, at_once=at_once, held=held):
            for event in self._events(group, flow.on_shortage):
                if flow.interrupted():
                    return
                yield event
            if flow.enough(group.last):
                return

    def _events(self, group: WorkGroup, on_shortage: Callable[[int, int], object]) -> Iterator[events.Event]:
        """The events of a group, or those of rows whose worker died again and again."""
        decoded: DecodedGroup | None = group.value
        if decoded is not None:
            for width, fewer in decoded.shortages:
                on_shortage(width, fewer)
            yield from decoded.events
        if not group.lost:
            return
        first, last = group.first + 1, group.last + 1
        rows = f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"
        for request in group.work.requests:
            prompt = request.prompt or ""
            yield events.Began(request.id, prompt, "", self.about.name, request.seed, {}, request.place)
            yield events.Failed(request.id, "worker", f"{group.lost}, each time while they decoded {rows}")

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
            for first in count_from(0, options.chunk):
                if not (chunk := list(islice(texts, options.chunk))):
                    return
                keys, items = zip(*chunk, strict=True)
                yield WorkGroup(ScoreWork(items, options), len(chunk), first, first + len(chunk) - 1, keys)

        for group in self.pool.results(groups(), interrupted):
            scored: ScoredGroup | None = group.value
            lost = ModelError(f"{group.lost}, each time while they scored this text or others of its group")
            lost.code = "worker"
            outcomes: Sequence[Outcome] = [lost] * group.rows if scored is None else scored.outcomes
            self._findings = list(dict.fromkeys([*self._findings, *(() if scored is None else scored.findings)]))
            yield from zip(group.keys, outcomes, strict=True)

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """End the workers, and what Ray has started for them. After a signal nothing may wait."""
        if not self.cluster.ours:
            self.pool.close()
        elif not hurried:  # else they end after this process
            self.cluster.end(keep_logs=failed)


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
    process.resume_collector()  # torch is not imported here
    cluster, engine = start_cluster(address, workers, gpu=setup.runtime.device in ("auto", "cuda")), None
    try:
        engine = PoolEngine(cluster, setup)
        engine.about = engine.pool.open(setup.remark)  # by the first that has loaded the checkpoint
    except BaseException:  # workers must not outlive a start that failed or was interrupted
        hurried = bool(setup.interrupted())
        if engine is not None:
            engine.close(hurried=hurried, failed=not hurried)
        elif cluster.ours and not hurried:
            cluster.end(keep_logs=True)
        raise
    return engine
