"""`genctl score` on servers that already run and tell the log-probabilities of a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from genctl.backend.scorer import RemoteScorer
from genctl.batch.rows import InputRow
from genctl.cli.job import WIDTH
from genctl.cli.score_job import ScoreJob
from genctl.cli.table import flag_of
from genctl.errors import GenctlError
from genctl.scoring.scored_text import Scored

UNABLE = ("add_eos", "stride", "window", "target")  # options that need the tokenizer, or an encoder


class ScoreServersJob(ScoreJob):
    """One run of `genctl score` whose texts are sent to servers."""

    def load(self) -> None:
        """Probe the servers."""
        options, session = self.options, self.connect(self.early.runtime, self.early.origins)
        self.settle(session, self.layers)
        self.detail(*session.notes)
        self.name = session.name
        width = session.width(self.early, 1 if self.shown else WIDTH)
        unable = [flag_of(name) for name in UNABLE if getattr(options, name)]
        self.remote = RemoteScorer(session, by=options.by or "mean", top=self.top, width=width, unable=unable)

    def outcomes(self) -> Iterator[tuple[InputRow, list[Scored] | GenctlError]]:
        """The outcome of each text, in input order."""
        return self.remote.score(self._wanted(), self.interrupt)

    def findings(self) -> list[str]:
        """A server tells nothing of what it found."""
        return []
