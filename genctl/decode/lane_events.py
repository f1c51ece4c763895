"""The events of a lane, from what its commits decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from genctl import events
from genctl.decode.commit import Decision, Facts, LiveRows
from genctl.decode.types import Choice, FinishedRow, Lane


def stepped(
    lane: Lane,
    step: int,
    live: LiveRows,
    decision: Decision,
    finished: Sequence[FinishedRow],
    choice: Choice,
    facts: Facts,
    traces: Any,
    branches: int,
    drafted: int,
) -> events.Stepped:
    """One step. `live` are the rows after it, `finished` those that it ended; each scored row has `branches` drafts."""
    notes, rows = choice.notes, live.rows
    going = tuple(
        events.Row(
            lane.name,
            facts.rows[candidate] // branches,
            facts.words(candidate, traces, lane.watch),
            rows.logprobs[place],
            rows.totals[place],
            live.indices[place],
            "" if notes is None else notes[candidate],
        )
        for place, candidate in enumerate(decision.survivors)
    )
    ended = tuple(
        events.Ended(
            lane.name,
            facts.rows[end.candidate] // branches,
            facts.words(end.candidate, traces, lane.watch)[: end.count],
            hypothesis(lane, row),
        )
        for end, row in zip(decision.ended, finished, strict=True)
    )
    if branches > 1 or not drafted:  # candidates that a search compares are not counted as drafts
        return events.Stepped(lane.name, step, going, ended)
    # a row may have ended inside the accepted draft
    longest = max([*(len(row.written) for row in going), *(len(row.written) for row in ended)])
    return events.Stepped(lane.name, step, going, ended, drafted, min(choice.accepted, longest))


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
