"""Commit a choice. Only this module writes tokens, ends rows and cuts candidates: a beam has a fixed number of places
for each group, best first.

Written tokens are checked in order, so a stop inside an accepted draft ends the row at its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl import events
from genctl.decode.row_tokens import newest, tail
from genctl.decode.types import Choice, FinishedRow, Lane, Pruning, Rows, Stop, Written


@dataclass
class Facts:
    """The numbers of C candidates on the host, m written tokens each, of one lane or of several in turn."""

    rows: list[int]  # C, the scored row that each continues
    tokens: list[list[int]]
    logprobs: list[list[float]]  # the model's own, nats
    totals: list[float] | None = None  # C, if the search ranks by totals of its own
    may_finish: list[bool] | None = None
    figures: Sequence[Any] = ()  # statistics of each token if requested: rank, entropy, best ids, watched ids
    traces: Any = ()  # [m][C], the effect of each processor, if requested

    def words(self, candidate: int, lane: Lane) -> tuple[events.Token, ...]:
        """The tokens of one candidate with their statistics."""
        tokens, logprobs = self.tokens[candidate], self.logprobs[candidate]
        if not self.figures:
            return tuple(map(events.Token, tokens, logprobs))
        described = []
        ranks, entropies, values, ids, *asides = (figure[candidate] for figure in self.figures)
        processed = asides.pop() if lane.processed else [None] * len(tokens)
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            top = tuple((best, "", value) for best, value in zip(ids[place], values[place], strict=True))
            trace = self.traces[place][candidate] if self.traces else ()
            own = zip(lane.watch, *(aside[place] for aside in asides), strict=True) if asides else ()
            watched = tuple((id, "", value, rank) for id, value, rank in own)
            figures = {"rank": ranks[place], "entropy": entropies[place], "top": top, "trace": trace}
            figures["processed"] = processed[place]
            described.append(events.Token(token, logprob, **figures, watched=watched))
        return tuple(described)


@dataclass
class Committed:
    """The result of a commit for one lane's candidates."""

    survivors: list[int] = field(default_factory=list)  # those that live on
    parents: list[int] = field(default_factory=list)  # the scored rows that these continue
    rows: list[events.Row] = field(default_factory=list)  # and their records
    finished: list[FinishedRow] = field(default_factory=list)
    ended: list[events.Ended] = field(default_factory=list)  # the same as `finished`


def commit(
    lane: Lane,
    live: Rows,
    choice: Choice,
    facts: Facts,
    own_places: range,
    branches: int,
    elapsed: Callable[[], float],
    interrupted: str,
) -> Committed:
    """Decide for each candidate in order whether it lives on or ends with a result.

    `own_places` are the lane's candidates in `facts`; each live row has `branches` scored rows.
    """
    done = Committed()
    independent, totals, pruning = lane.strategy.traits.independent, facts.totals, choice.pruning
    places = None if pruning is None else Places(pruning, facts.may_finish)
    lives = counts = True
    for place in own_places:
        if totals is not None and not totals[place] > -math.inf:
            continue  # impossible
        candidate, scored = place - own_places.start, facts.rows[place] - own_places.start
        if places is not None:
            lives, counts = places.of(candidate)
        if not (lives or counts):
            continue
        row, tokens, logprobs = scored // branches, facts.tokens[place], facts.logprobs[place]
        index = live.indices[row]
        if independent and index is None:
            index = candidate  # the first choice counts the returned sequences
        end = first_stop(lane, live, row, tokens, logprobs, elapsed, interrupted)
        if end is None and lives:
            logprob = live.logprobs[row] + sum(logprobs)
            total = logprob if totals is None else totals[place]
            words = facts.words(place, lane)
            note = "" if choice.notes is None else choice.notes[candidate]
            done.survivors.append(candidate)
            done.parents.append(scored)
            done.rows.append(events.Row(lane.name, row, words, logprob, total, index, note))
            if places is not None:
                places.take(candidate)
        elif end is not None and counts:  # an end counts only if the beam would have kept the candidate
            count, stop = end
            logprob = live.logprobs[row] + sum(logprobs[:count])
            result = FinishedRow(
                (*newest(live.text.nodes[row], live.written), *tokens[:count]),
                logprob,
                logprob if totals is None else totals[place],
                stop.reason,
                index,
                stop.what,
                0 if pruning is None or pruning.groups is None else pruning.groups[candidate],
                0 if pruning is None or pruning.tiers is None else pruning.tiers[candidate],
                stop.kind,
            )
            words = facts.words(place, lane)[:count]
            done.finished.append(result)
            done.ended.append(events.Ended(lane.name, row, words, hypothesis(lane, result)))
    return done


def hypothesis(lane: Lane, row: FinishedRow) -> events.Hypothesis:
    """A finished row as a result."""
    score = row.score(lane.strategy.length_penalty)
    return events.Hypothesis(
        row.tokens, row.logprob, row.total, row.reason, score, row.sequence_index, row.stop, kind=row.kind
    )


def first_stop(
    lane: Lane,
    live: Rows,
    row: int,
    tokens: list[int],
    logprobs: list[float],
    elapsed: Callable[[], float],
    interrupted: str,
) -> tuple[int, Stop] | None:
    """The number of new tokens after which a row ends, and the reason; None if it lives on."""
    before, logprob = live.written, live.logprobs[row]
    for count, token in enumerate(tokens, 1):
        logprob += logprobs[count - 1]
        if token in lane.eos:
            return count, Stop("eos")
        if lane.criteria:
            last = tail(live.text.nodes[row], tokens[:count])
            written = Written(token, before + count, logprob, last, elapsed())
            for criterion in lane.criteria:
                if (stop := criterion(written)) is not None:
                    return count, Stop(*stop)
        if before + count >= lane.max_new_tokens:
            return count, Stop("context" if lane.limit else "length", lane.limit)
    return (len(tokens), Stop(interrupted)) if interrupted and tokens else None


class Places:
    """The places of a beam. Candidates take them in order."""

    def __init__(self, pruning: Pruning, may_finish: Sequence[bool] | None) -> None:
        self.width, self.groups, self.may_finish = pruning.width, pruning.groups, may_finish
        self.seen: Counter[int] = Counter()  # candidates of each group
        self.taken: Counter[int] = Counter()  # candidates of each group that live on

    def of(self, candidate: int) -> tuple[bool, bool]:
        """Whether there is a place for a candidate if it lives on, and whether its end would be a result."""
        group = self._group(candidate)
        lives, among_best = self.taken[group] < self.width, self.seen[group] < self.width
        self.seen[group] += 1
        return lives, lives and among_best if self.may_finish is None else self.may_finish[candidate]

    def take(self, candidate: int) -> None:
        """Give the candidate a place: it lives on."""
        self.taken[self._group(candidate)] += 1

    def _group(self, candidate: int) -> int:
        return 0 if self.groups is None else self.groups[candidate]


def retain(ended: Sequence[FinishedRow], pruning: Pruning | None, length_penalty: float) -> list[FinishedRow]:
    """The results to keep: the best `width` of each group, by tier and score; all without pruning."""
    if pruning is None:
        return list(ended)
    results: list[FinishedRow] = []
    count: Counter[int] = Counter()
    for row in sorted(ended, key=lambda row: (-row.tier, -row.score(length_penalty))):
        if count[row.group] < pruning.width:
            count[row.group] += 1
            results.append(row)
    return results
