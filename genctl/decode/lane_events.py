"""The events of a lane, from what its commits decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from genctl import events
from genctl.decode.types import FinishedRow, Lane

if TYPE_CHECKING:
    from genctl.decode.commit import Committed, Facts


def words(facts: Facts, candidate: int, watch: Sequence[int] = ()) -> tuple[events.Token, ...]:
    """The tokens of one candidate, with what is known of them. `watch`: the watched ids."""
    tokens, logprobs = facts.tokens[candidate], facts.logprobs[candidate]
    if not facts.figures:
        return tuple(map(events.Token, tokens, logprobs))
    made = []
    ranks, entropies, values, ids, *asides = (figure[candidate] for figure in facts.figures)
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        top = tuple((best, "", value) for best, value in zip(ids[place], values[place], strict=True))
        trace = facts.traces[place][candidate] if facts.traces else ()
        own = zip(watch, *(aside[place] for aside in asides), strict=True) if asides else ()
        watched = tuple((id, "", value, rank) for id, value, rank in own)
        figures = {"rank": ranks[place], "entropy": entropies[place], "top": top, "trace": trace}
        made.append(events.Token(token, logprob, **figures, watched=watched))
    return tuple(made)


def stepped(lane: Lane, step: int, done: Committed, drafted: int, accepted: int) -> events.Stepped:
    """One step, after `drafted` tokens were on trial in each row."""
    event = events.Stepped(lane.name, step, tuple(done.rows), tuple(done.ended))
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
