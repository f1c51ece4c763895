"""Commit a choice. Only this module writes tokens, ends rows and cuts candidates: a beam has a fixed number of places
for each group, best first.

Written tokens are checked in order, so a stop inside an accepted draft ends the row at its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from genctl import events
from genctl.decode.row_tokens import newest, tail
from genctl.decode.stopping import Stop, Written
from genctl.decode.stopping.row_text import RowText
from genctl.decode.types import Choice, FinishedRow, Lane, Pruning, Rows


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

    def words(self, candidate: int, lane: Lane, texts: Sequence[str]) -> tuple[events.Token, ...]:
        """The first tokens of one candidate, as many as there are `texts`, with their statistics."""
        tokens, logprobs = self.tokens[candidate], self.logprobs[candidate]
        if not self.figures:
            return tuple(map(events.Token, tokens, logprobs, texts))
        described = []
        piece = _nameless if lane.text is None else lane.text.words.piece
        ranks, entropies, values, ids, *asides = (figure[candidate] for figure in self.figures)
        processed = asides.pop() if lane.processed else [None] * len(tokens)
        for place, (token, logprob, text) in enumerate(zip(tokens, logprobs, texts, strict=False)):
            top = tuple((best, piece(best), value) for best, value in zip(ids[place], values[place], strict=True))
            trace = self.traces[place][candidate] if self.traces else ()
            own = zip(lane.watch, *(aside[place] for aside in asides), strict=True) if asides else ()
            watched = tuple((id, piece(id), value, rank) for id, value, rank in own)
            figures = {"rank": ranks[place], "entropy": entropies[place], "top": top, "trace": trace}
            figures["processed"] = processed[place]
            described.append(events.Token(token, logprob, text, **figures, watched=watched))
        return tuple(described)


def _nameless(token: int) -> str:
    """The name of a token where no text is made."""
    return ""


@dataclass
class Committed:
    """The result of a commit for one lane's candidates."""

    survivors: list[int] = field(default_factory=list)  # those that live on
    parents: list[int] = field(default_factory=list)  # the scored rows that these continue
    rows: list[events.Row] = field(default_factory=list)  # and their records
    texts: list[RowText] = field(default_factory=list)  # and their texts, if the lane makes any
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
        text = live.texts[row].fork() if live.texts else None
        shown, stop, whole = written_to(lane, live, row, tokens, logprobs, text, elapsed, interrupted)
        if stop is None and lives:
            logprob = live.logprobs[row] + sum(logprobs)
            total = logprob if totals is None else totals[place]
            words = facts.words(place, lane, shown)
            note = "" if choice.notes is None else choice.notes[candidate]
            done.survivors.append(candidate)
            done.parents.append(scored)
            done.rows.append(events.Row(lane.name, row, words, logprob, total, index, note))
            if text is not None:
                done.texts.append(text)
            if places is not None:
                places.take(candidate)
        elif stop is not None and counts:  # an end counts only if the beam would have kept the candidate
            count = len(shown)
            result = _result(live, row, tokens[:count], logprobs[:count], index, stop, whole)
            if totals is not None:
                result = replace(result, total=totals[place])
            if pruning is not None:
                groups, tiers = pruning.groups, pruning.tiers
                group, tier = (0 if each is None else each[candidate] for each in (groups, tiers))
                result = replace(result, group=group, tier=tier)
            done.finished.append(result)
            words = facts.words(place, lane, shown)
            done.ended.append(events.Ended(lane.name, row, words, hypothesis(lane, result)))
    return done


def commit_one(
    lane: Lane, live: Rows, facts: Facts, place: int, elapsed: Callable[[], float], interrupted: str
) -> events.Row | tuple[FinishedRow, events.Ended]:
    """`commit` for a lane that has one row and does not search: the row gets the token at `place` in `facts`.

    Returns the row if it lives on; its text and its tokens grow in place, since no other row shares them.
    """
    tokens, logprobs = facts.tokens[place], facts.logprobs[place]
    text = live.texts[0] if live.texts else None
    shown, stop, whole = written_to(lane, live, 0, tokens, logprobs, text, elapsed, interrupted)
    words, index = facts.words(place, lane, shown), live.indices[0] or 0
    if stop is not None:
        result = _result(live, 0, tokens, logprobs, index, stop, whole)
        return result, events.Ended(lane.name, 0, words, hypothesis(lane, result))
    logprob = live.logprobs[0] + logprobs[0]
    row = events.Row(lane.name, 0, words, logprob, logprob, index)
    live.write(row, tokens[0])
    return row


def _result(
    live: Rows, row: int, tokens: list[int], logprobs: list[float], index: int | None, stop: Stop, text: str
) -> FinishedRow:
    """A row that ends after new tokens, as a result."""
    logprob = live.logprobs[row] + sum(logprobs)
    written = (*newest(live.row_tokens.nodes[row], live.written), *tokens)
    return FinishedRow(written, logprob, logprob, stop.reason, index, stop.what, kind=stop.kind, text=text)


def hypothesis(lane: Lane, row: FinishedRow) -> events.Hypothesis:
    """A finished row as a result."""
    score = row.score(lane.strategy.length_penalty)
    return events.Hypothesis(
        row.tokens, row.logprob, row.total, row.reason, score, row.sequence_index, row.stop, row.text, row.kind
    )


def written_to(
    lane: Lane,
    live: Rows,
    row: int,
    tokens: list[int],
    logprobs: list[float],
    text: RowText | None,
    elapsed: Callable[[], float],
    interrupted: str,
) -> tuple[list[str], Stop | None, str]:
    """Add new tokens to the `text` of a row, up to the first that ends the row.

    Returns the text to show for each token that was added, why the row ends (None if it lives on), and the whole text
    of a row that ended.
    """
    shown: list[str] = []
    logprob = live.logprobs[row]
    for count, token in enumerate(tokens, 1):
        logprob += logprobs[count - 1]
        if text is not None:
            text.push(token)
        stop = first_stop(lane, live, row, tokens[:count], logprob, text, elapsed)
        if stop is None and interrupted and count == len(tokens):
            stop = Stop(interrupted)
        if stop is not None:
            last, whole = ("", "") if text is None else text.finish(stop.reason)
            return [*shown, last], stop, whole
        shown.append("" if text is None else text.show())
    return shown, None, ""


def first_stop(
    lane: Lane,
    live: Rows,
    row: int,
    tokens: list[int],
    logprob: float,
    text: RowText | None,
    elapsed: Callable[[], float],
) -> Stop | None:
    """Why a row ends after new `tokens`, which are in its `text`; None if it lives on."""
    token, count = tokens[-1], live.written + len(tokens)
    if token in lane.eos:
        return Stop("eos")
    if lane.criteria:
        last = tail(live.row_tokens.nodes[row], tokens)
        written = Written(token, count, logprob, last, elapsed(), text)
        for criterion in lane.criteria:
            if (stop := criterion(written)) is not None:
                return Stop(*stop)
    if count >= lane.max_new_tokens:
        return Stop("context" if lane.limit else "length", lane.limit)
    return None


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
