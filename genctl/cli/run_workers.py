"""`genctl run` and `genctl beam` with workers: they decode, and this process reads rows and writes results."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from genctl import events
from genctl.batch.rows import BadRow, InputRow
from genctl.cli import job
from genctl.cli.row_queue import RowQueue
from genctl.cli.run_job import RunJob
from genctl.cli.worker_options import check_workers
from genctl.cli.worker_pool import JobWorkers
from genctl.inspecting.notes import Reuse
from genctl.requests import Request
from genctl.workers.generate_task import DecodedGroup, GenerateFacts, GenerateTask, GenerateWork
from genctl.workers.pool import GroupResult, WorkGroup

PARENTS = ("json", "jsonl")  # formats whose records say which row each token of a beam continued


class RunWorkersJob(RunJob):
    """One run whose rows are decoded by workers. Groups, records, journal and messages are those of `RunJob`."""

    apart = True

    def prepare(self) -> int | None:
        """Settings; whether they can work with workers."""
        status = super().prepare()
        if status is None:
            check_workers(self.options, self.early)
        return status

    def open(self, stack: ExitStack) -> None:
        """Open outputs. They are closed before the workers are, which takes longer."""
        self.workers = JobWorkers(self, stack)
        super().open(stack)

    def load(self) -> None:
        """Start the workers; begin or continue the output."""
        options = self.options
        task = GenerateTask(
            options.strategy,
            options.watch,
            job.WIDTH,
            steps=self.needs_steps,
            parents=options.format in PARENTS,
        )
        opened = self.workers.start(
            task, self.early.runtime, self.layers, need_tokenizer=options.are_texts, waiting=self._waiting
        )
        facts: GenerateFacts = opened.facts
        self.reuse = Reuse(self.early.runtime.prompt_cache)
        self.facts, self.base, self.width = facts, facts.base, facts.width
        self.watched, self.texts, self.encoder_decoder = facts.watched, facts.texts, facts.encoder_decoder
        self.view.load_s = self.load_s
        if self.page is not None:
            self.page.facts.append(("digest", ", ".join(self.fingerprints().values())))
        self.detail(*facts.details)
        self.note(*facts.notes)
        self.span = job.SPAN * self.width if self.width > 1 else 1
        self._begin()

    @property
    def needs_steps(self) -> bool:
        """Whether anybody listens to the steps; else they stay where they were made."""
        options = self.options
        written = options.events or options.report or options.svg
        return bool(written or options.with_tokens or options.tree or options.tree_format)

    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of all checkpoints of the run, as a worker reads them."""
        return self.workers.pool.fingerprints()

    def closing_notes(self) -> None:
        """Print notes on what was found while decoding, and with --verbose what each worker did."""
        self.note(*self.reuse.lines(self.facts.reuse_limit, verbose=self.options.verbose))
        self.workers.say_shares()

    def keep_partial(self) -> None:
        """Leave what the workers have begun; groups that are whole are written."""
        self.output.hurried = True
        self.status()

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _waiting(self) -> None:
        """While workers start: the line that was shown first stays."""

    def _decode(self) -> None:
        """Give groups to workers, and take their results as if they were decoded here."""
        pool = self.workers.pool
        if self.bar is not None:
            pool.on_progress = self._progress
        self.view.begin()
        ordered = not self.options.unordered or self.options.strict
        for result in pool.results(self._groups(), self.interrupt, ordered=ordered):
            self.listen(self._events(result), self.listeners)
            if self.interrupt.status:
                break
            if self.stop_at is not None and result.group.last >= self.stop_at:
                self.output.stop(self.stop_at, self.stopper)
                return
        if self.interrupt.status:
            return
        self.output.end_of_input(self.taken)

    def _groups(self) -> Iterator[WorkGroup | None]:
        """The groups of `RunJob._decode`, read when a worker has room for one; None while the next row is not there."""
        options = self.options
        piped = not options.arguments and options.input in (None, "-") and not options.strict
        waiting: list[InputRow | BadRow] = []
        for row in RowQueue(self.input) if piped else self.input:
            if row is None:
                yield None
                continue
            waiting.append(row)
            if (row.index + 1) % self.span == 0:
                yield self._group(waiting)
                waiting = []
                if self.stop_at is not None or self.interrupt.status:
                    return
        if waiting:
            yield self._group(waiting)

    def _group(self, rows: Sequence[InputRow | BadRow]) -> WorkGroup:
        requests = tuple(self._requests(iter(rows)))
        work = GenerateWork(requests, self._report(), self.width, self.ahead)
        return WorkGroup(work, len(requests), rows[0].index, self.taken - 1)

    def _events(self, result: GroupResult) -> Generator[events.Event, None, None]:
        """The events of a group, until the run is to end."""
        decoded: DecodedGroup | None = result.value
        requests: tuple[Request, ...] = result.group.work.requests
        if result.lost:
            decoded = DecodedGroup(tuple(self._lost(result, requests)))
        for width in () if decoded is None else decoded.shortages:
            self.say_shortage("prompts", self.width, width)
        for event in () if decoded is None else decoded.events:
            if self.interrupt.status:
                return
            yield event

    def _lost(self, result: GroupResult, requests: tuple[Request, ...]) -> Iterator[events.Event]:
        """The events of rows whose worker died again and again."""
        first, last = result.group.first + 1, result.group.last + 1
        rows = f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"
        message = f"{result.lost}, each time while it decoded {rows}"
        for request in requests:
            model = self.base.runtime.model
            yield events.Began(request.id, request.prompt or "", "", model, request.seed, {}, request.place)
            yield events.Failed(request.id, "worker", message)

    def _progress(self) -> None:
        pool: Any = self.workers.pool
        if self.bar is not None:
            speeds = pool.speeds() if self.options.verbose else ()
            with self.interrupt.busy():
                self.bar.work(pool.rows_ahead, pool.tokens, speeds)
