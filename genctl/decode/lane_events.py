"""The events of a lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from genctl import events
from genctl.decode.types import FinishedRow, Lane


def stepped(
    lane: Lane, step: int, rows: Sequence[events.Row], ended: Sequence[events.Ended], drafted: int, accepted: int
) -> events.Stepped:
    """One step: the rows that live on and those that ended. Each row had `drafted` tokens on trial."""
    event = events.Stepped(lane.name, step, tuple(rows), tuple(ended))
    if not drafted:
        return event
    # a row may have ended inside the accepted draft
    longest = max(len(row.written) for row in event.children)
    return replace(event, drafted=drafted, accepted=min(accepted, longest))


def hypothesis(lane: Lane, row: FinishedRow) -> events.Hypothesis:
    """A finished row as a result."""
    score = row.score(lane.strategy.length_penalty)
    return events.Hypothesis(
        row.tokens, row.logprob, row.total, row.reason, score, row.sequence_index, row.stop, kind=row.kind
    )


def finished(
    lane: Lane, rows: Iterable[FinishedRow], seconds: float, first_token_s: float, passes: int
) -> events.Finished:
    """The results of a lane: by sequence, tier and score, as many as it returns."""
    penalty = lane.strategy.length_penalty
    best = sorted(rows, key=lambda row: (row.sequence_index or 0, -row.tier, -row.score(penalty)))
    prompt = len(lane.source) if lane.source is not None else len(lane.tokens)
    results = tuple(hypothesis(lane, row) for row in best[: lane.returned])
    return events.Finished(lane.name, results, prompt, seconds, first_token_s, passes)
