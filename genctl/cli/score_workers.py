"""`genctl score` with workers: they score, and this process reads texts and writes records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING

from genctl.batch.rows import InputRow
from genctl.cli.job import WIDTH
from genctl.cli.score_job import SORTED, ScoreJob
from genctl.cli.worker_options import check_workers
from genctl.cli.worker_pool import JobWorkers
from genctl.errors import GenctlError, ModelError
from genctl.workers.pool import WorkGroup
from genctl.workers.score_task import ScoredGroup, ScoreFacts, ScoreTask

if TYPE_CHECKING:
    from genctl.scoring.scored_text import Scored


class ScoreWorkersJob(ScoreJob):
    """One run of `genctl score` whose texts are scored by workers."""

    def prepare(self) -> int | None:
        """Settings; whether they can work with workers."""
        status = super().prepare()
        if status is None:
            check_workers(self.options, self.early)
        return status

    def open(self, stack: ExitStack) -> None:
        """Open the output. It is closed before the workers are, which takes longer."""
        self.workers = JobWorkers(self, stack)
        super().open(stack)

    def load(self) -> None:
        """Start the workers."""
        options = self.options
        task = ScoreTask(
            self.scoring(),
            self.early,
            1 if self.shown else WIDTH,
            {"context": options.context, "target": options.target, "rank": options.rank},
        )
        opened = self.workers.start(task, self.used_runtime(), need_tokenizer=False, waiting=lambda: None)
        facts: ScoreFacts = opened.facts
        self.name, self.width = facts.name, facts.width
        self.found: dict[str, None] = {}
        self.detail(*facts.notes)

    def outcomes(self) -> Iterator[tuple[InputRow, list[Scored] | GenctlError]]:
        """The outcome of each text, in input order."""
        rows: dict[int, list[InputRow]] = {}
        size = self.width if self.shown else SORTED * self.width

        def groups() -> Iterator[WorkGroup]:
            wanted, read = self._wanted(), 0
            while group := list(islice(wanted, size)):
                rows[read] = [row for row, _ in group]
                yield WorkGroup((self.width, tuple(text for _, text in group)), len(group), read, read + len(group) - 1)
                read += len(group)

        for result in self.workers.pool.results(groups(), self.interrupt):
            scored: ScoredGroup | None = result.value
            lost = ModelError(f"{result.lost}, each time while it scored this text or others of its group")
            lost.code = "worker"
            outcomes = [lost] * result.group.rows if scored is None else scored.outcomes
            self.found |= dict.fromkeys(() if scored is None else scored.findings)
            yield from zip(rows.pop(result.group.first), outcomes, strict=True)

    def findings(self) -> list[str]:
        """Facts found about the model."""
        return list(self.found)

    def status(self) -> int:
        """The exit status. Prints the summary, and with --verbose what each worker did."""
        status = super().status()
        self.workers.say_shares()
        return status
