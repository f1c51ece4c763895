"""Scoring in a worker: texts in, their scores out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genctl.config.layers import Layer, Resolved
from genctl.errors import GenctlError

if TYPE_CHECKING:
    from genctl.scoring.scored_text import Scored, TextToScore
    from genctl.scoring.scorer import Options, Scorer
    from genctl.session import Session
    from genctl.workers.worker import WorkerProgress


@dataclass(frozen=True)
class ScoreFacts:
    """What the driver must know of the checkpoint."""

    name: str
    width: int  # texts in a pass
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ScoredGroup:
    """The outcome of each text, and facts found about the model."""

    outcomes: tuple[list[Scored] | GenctlError, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True)
class ScoreTask:
    """Score texts. `check` are the flags that must make sense with the checkpoint."""

    options: Options
    settings: Resolved
    width: int  # unless the settings say another
    check: dict[str, Any]

    def open(self, session: Session, layers: tuple[Layer, ...]) -> ScoreFacts:
        """Check the flags on the checkpoint."""
        width = session.width(self.settings, self.width)
        self._scorer(session, width).check(**self.check)
        return ScoreFacts(session.loaded.name, width, session.loaded.notes)

    def perform(
        self, session: Session, work: tuple[int, tuple[TextToScore, ...]], progress: WorkerProgress
    ) -> ScoredGroup:
        """Score a group: how many texts a pass has, and the texts."""
        width, texts = work
        scorer = self._scorer(session, width, len(texts))
        outcomes = []
        for _, outcome in scorer.score(enumerate(texts)):
            outcomes.append(outcome)
            progress.rows += 1
            if not isinstance(outcome, GenctlError):
                progress.tokens += sum(one.count for one in outcome)
        return ScoredGroup(tuple(outcomes), tuple(scorer.findings))

    def _scorer(self, session: Session, width: int, chunk: int = 1) -> Scorer:
        from genctl.scoring.scorer import Scorer

        return Scorer(session, dataclasses.replace(self.options, batch_size=width, chunk=chunk))
