"""Commit: what a choice came to. The one place where tokens are written, rows end and candidates are cut.

Every written token is looked at in order, so a stop inside an accepted draft is found where it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from genctl import events
from genctl.decode.row_tokens import RowTokens
from genctl.decode.types import Choice, FinishedRow, Lane, Rows, Stop, Written

Node = tuple[int, Any]  # a token and the node before it; None at the prompt: forks share what they have in common


@dataclass
class LiveRows:
    """The live rows of a lane with all that belongs to them."""

    rows: Rows
    nodes: list[Node | None]  # R, the new tokens of each row as a linked list
    indices: list[int | None]  # R, which returned sequence each row is, where rows are independent

    @classmethod
    def begin(cls, tokens: Tensor, capacity: int) -> LiveRows:
        """One row after a prompt. tokens int64 [1, T]; `capacity` is how many tokens may follow without a copy."""
        return cls(Rows(RowTokens.begin(tokens, capacity), [0.0], [0.0], tokens.shape[1]), [None], [None])


class Facts:
    """What the host knows of a lane's C candidates, m written tokens each."""

    __slots__ = ("figures", "logprobs", "may_finish", "rows", "tokens", "totals")

    def __init__(
        self,
        rows: list[int],  # C, the scored row that each continues
        tokens: list[list[int]],
        logprobs: list[list[float]],  # the model's own, nats
        totals: list[float] | None = None,  # C, where the search ranks by its own
        may_finish: list[bool] | None = None,
        figures: Sequence[Any] = (),  # of each token: rank, entropy, those of the best and of the watched ids
    ) -> None:
        self.rows, self.tokens, self.logprobs, self.totals = rows, tokens, logprobs, totals
        self.may_finish, self.figures = may_finish, figures

    def split(self, counts: list[int]) -> Iterator[Facts]:
        """Those of each lane, of lanes with so many candidates each whose rows are independent."""
        if len(counts) == 1:
            yield self
            return
        at = 0
        for count in counts:
            part = slice(at, at := at + count)
            yield Facts(
                list(range(count)), self.tokens[part], self.logprobs[part], figures=[one[part] for one in self.figures]
            )

    def words(self, candidate: int, traces: Any = None, watch: Sequence[int] = ()) -> tuple[events.Token, ...]:
        """The tokens of one candidate, with what is known of them. `traces`: [m][C]. `watch`: the watched ids."""
        tokens, logprobs = self.tokens[candidate], self.logprobs[candidate]
        if not self.figures:
            return tuple(map(events.Token, tokens, logprobs))
        made = []
        ranks, entropies, values, ids, *asides = (figure[candidate] for figure in self.figures)
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            top = tuple((best, "", value) for best, value in zip(ids[place], values[place], strict=True))
            trace = traces[place][candidate] if traces else ()
            own = zip(watch, *(aside[place] for aside in asides), strict=True) if asides else ()
            watched = tuple((id, "", value, rank) for id, value, rank in own)
            figures = {"rank": ranks[place], "entropy": entropies[place], "top": top, "trace": trace}
            made.append(events.Token(token, logprob, **figures, watched=watched))
        return tuple(made)


@dataclass
class EndedCandidate:
    """A candidate that ended: after how many of its tokens, and why."""

    candidate: int
    count: int
    stop: Stop


@dataclass
class Decision:
    """Which candidates live on, and which ended with a result."""

    survivors: list[int] = field(default_factory=list)
    ended: list[EndedCandidate] = field(default_factory=list)


def decide(
    lane: Lane,
    live: LiveRows,
    choice: Choice,
    facts: Facts,
    branches: int,
    elapsed: Callable[[], float],
    interrupted: str,
) -> Decision:
    """Who survives, and what ended: candidates in order, as many of each group as its width."""
    decision = Decision()
    pruning, totals = choice.pruning, facts.totals
    width = None if pruning is None else pruning.width
    groups = None if pruning is None else pruning.groups
    going: dict[int, int] = {}  # candidates of each group that live on
    seen: dict[int, int] = {}
    for candidate, scored in enumerate(facts.rows):
        if totals is not None and not totals[candidate] > -math.inf:
            continue  # impossible
        group = 0 if groups is None else groups[candidate]
        place = seen.get(group, 0)
        seen[group] = place + 1
        full = width is not None and going.get(group, 0) == width
        counts = width is None or (place < width if facts.may_finish is None else facts.may_finish[candidate])
        if full and (facts.may_finish is None or not counts):
            continue
        ended = _ended(lane, live, scored // branches, facts, candidate, elapsed, interrupted)
        if ended is not None:
            if counts:  # an end that the beam would not have kept is not a result
                decision.ended.append(ended)
        elif not full:
            decision.survivors.append(candidate)
            going[group] = going.get(group, 0) + 1
    return decision


def _ended(
    lane: Lane, live: LiveRows, row: int, facts: Facts, candidate: int, elapsed: Callable[[], float], interrupted: str
) -> EndedCandidate | None:
    tokens, logprobs = facts.tokens[candidate], facts.logprobs[candidate]
    before, logprob, node = live.rows.written, live.rows.logprobs[row], live.nodes[row]
    for place, token in enumerate(tokens):
        logprob += logprobs[place]
        count = before + place + 1
        stop = None
        if token in lane.eos:
            stop = Stop("eos")
        elif lane.criteria:
            stop = _stop(lane, Written(token, count, logprob, _tail(node, tokens[: place + 1]), elapsed()))
        if stop is None and count >= lane.max_new_tokens:
            stop = Stop("length", lane.limit)
        if stop is None and interrupted and place == len(tokens) - 1:
            stop = Stop(interrupted)
        if stop is not None:
            return EndedCandidate(candidate, place + 1, stop)
    return None


def _stop(lane: Lane, written: Written) -> Stop | None:
    for criterion in lane.criteria:
        stop = criterion(written)
        if stop is not None:
            return Stop(*stop)
    return None


def _tail(node: Node | None, newest: list[int]) -> Callable[[int], list[int]]:
    def tail(wanted: int) -> list[int]:
        found = newest[max(0, len(newest) - wanted) :]
        at, older = node, list[int]()
        while at is not None and len(found) + len(older) < wanted:
            older.append(at[0])
            at = at[1]
        return [*reversed(older), *found]

    return tail


def survived(
    live: LiveRows, facts: Facts, written: Tensor, survivors: list[int], branches: int, independent: bool
) -> LiveRows:
    """The survivors with what was written, int64 [C, m] of all candidates."""
    parents = [facts.rows[candidate] // branches for candidate in survivors]
    nodes: list[Node | None] = []
    logprobs, totals, indices = [], [], []
    for candidate, row in zip(survivors, parents, strict=True):
        node = live.nodes[row]
        for token in facts.tokens[candidate]:
            node = (token, node)
        nodes.append(node)
        logprob = live.rows.logprobs[row] + sum(facts.logprobs[candidate])
        logprobs.append(logprob)
        totals.append(logprob if facts.totals is None else facts.totals[candidate])
        indices.append(sequence_index(live, row, candidate) if independent else None)
    text = live.rows.text.continued(parents, written, survivors)
    return LiveRows(Rows(text, logprobs, totals, live.rows.prompt_len), nodes, indices)


def sequence_index(live: LiveRows, row: int, candidate: int) -> int:
    """Which returned sequence a candidate of independent rows is: the first choice counts them."""
    index = live.indices[row]
    return candidate if index is None else index


def finished_row(
    live: LiveRows, choice: Choice, facts: Facts, ended: EndedCandidate, branches: int, independent: bool
) -> FinishedRow:
    """What an ended candidate became."""
    candidate, pruning, stop = ended.candidate, choice.pruning, ended.stop
    row = facts.rows[candidate] // branches
    logprob = live.rows.logprobs[row] + sum(facts.logprobs[candidate][: ended.count])
    return FinishedRow(
        (*history(live.nodes[row]), *facts.tokens[candidate][: ended.count]),
        logprob,
        logprob if facts.totals is None else facts.totals[candidate],
        stop.reason,
        sequence_index(live, row, candidate) if independent else None,
        stop.what,
        0 if pruning is None or pruning.groups is None else pruning.groups[candidate],
        0 if pruning is None or pruning.tiers is None else pruning.tiers[candidate],
        stop.kind,
    )


def retain(ended: Sequence[FinishedRow], width: int | None, length_penalty: float) -> list[FinishedRow]:
    """The results worth keeping: the best `width` of each group, by tier and score; all where `width` is None."""
    if width is None:
        return list(ended)
    kept: list[FinishedRow] = []
    count: Counter[int] = Counter()
    for row in sorted(ended, key=lambda row: (-row.tier, -row.score(length_penalty))):
        if count[row.group] < width:
            count[row.group] += 1
            kept.append(row)
    return kept


def history(node: Node | None) -> tuple[int, ...]:
    """The tokens that lead to a node, oldest first."""
    tokens = []
    while node is not None:
        token, node = node
        tokens.append(token)
    return tuple(reversed(tokens))
