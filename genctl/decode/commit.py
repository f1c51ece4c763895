"""Commit a choice: write its tokens, end rows, and prune the candidates of a beam. Only this module does any of these.

A beam keeps a fixed number of rows in each group, best first. New tokens are checked in order, so a stop inside an
accepted draft ends the row there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from genctl import events
from genctl.decode.lane import LaneState
from genctl.decode.row_tokens import newest, tail
from genctl.decode.stopping import Stop, Written
from genctl.decode.stopping.row_text import RowText
from genctl.decode.transfer import to_device
from genctl.decode.types import Choice, FinishedRow, Lane, Pruning
from genctl.errors import ModelError


@dataclass
class Facts:
    """The numbers of C candidates on the host, m new tokens each, of one lane or of several, one after another."""

    rows: list[int]  # C, the scored row that each continues
    tokens: list[list[int]]
    logprobs: list[list[float]]  # the model's own, nats
    best: list[list[float]] | None = None  # [D+1][N], the largest processed score of each row, if it must be checked
    totals: list[float] | None = None  # C, if the search ranks by its own totals
    may_finish: list[bool] | None = None
    # Statistics of each token, if requested
    ranks: list[list[int]] | None = None
    entropies: Sequence[list[float]] = ()
    top_ids: Sequence[list[list[int]]] = ()
    top_logprobs: Sequence[list[list[float]]] = ()
    watched_logprobs: Sequence[list[list[float]]] = ()
    watched_ranks: Sequence[list[list[int]]] = ()
    processed: list[list[float]] | None = None
    traces: Sequence[Sequence[tuple[events.Trace, ...]]] = ()  # [m][C], the effect of each processor, if requested

    def words(self, candidate: int, lane: Lane, texts: Sequence[str]) -> tuple[events.Token, ...]:
        """The first tokens of one candidate, one for each of `texts`, with their statistics."""
        tokens, logprobs = self.tokens[candidate], self.logprobs[candidate]
        if self.ranks is None:
            return tuple(map(events.Token, tokens, logprobs, texts))
        described = []
        piece: Callable[[int], str] = (lambda token: "") if lane.text is None else lane.text.words.piece
        for place, (token, logprob, text) in enumerate(zip(tokens, logprobs, texts, strict=False)):
            best = zip(self.top_ids[candidate][place], self.top_logprobs[candidate][place], strict=True)
            watched: tuple[Any, ...] = ()
            if self.watched_logprobs:
                figures = self.watched_logprobs[candidate][place], self.watched_ranks[candidate][place]
                watched = tuple(zip(lane.watch, map(piece, lane.watch), *figures, strict=True))
            more: dict[str, Any] = {
                "rank": self.ranks[candidate][place],
                "entropy": self.entropies[candidate][place],
                "top": tuple((id, piece(id), value) for id, value in best),
                "trace": self.traces[place][candidate] if self.traces else (),
                "processed": None if self.processed is None else self.processed[candidate][place],
            }
            described.append(events.Token(token, logprob, text, **more, watched=watched))
        return tuple(described)


@dataclass
class Committed:
    """The candidates of one lane that live on, and those that ended."""

    survivors: list[int] = field(default_factory=list)  # the candidates that live on
    parents: list[int] = field(default_factory=list)  # the scored rows that they continue
    rows: list[events.Row] = field(default_factory=list)  # their records
    texts: list[RowText] = field(default_factory=list)  # their texts, if the lane has text
    finished: list[FinishedRow] = field(default_factory=list)
    ended: list[events.Ended] = field(default_factory=list)  # the records of `finished`


def commit(
    state: LaneState, choice: Choice, facts: Facts, places: range, interrupted: str
) -> Iterator[events.Stepped | events.Finished]:
    """Commit a choice: Stepped, then Finished when the lane is done. `places`: the lane's candidates in `facts`.

    Raises ModelError if every continuation is impossible and there is no result.
    """
    lane, before = state.lane, state.live
    branches, drafted = (1, 0) if state.draft is None else state.draft.shape[1:]  # drafts of a row, tokens of each
    if facts.totals and not max(facts.totals) > -math.inf:
        if not state.ended:
            raise ModelError(f"every continuation is forbidden at step {before.written}")
        yield finish(state)
        return
    done = decide(state, choice, facts, places, branches, interrupted)
    # the newest token was in the draft, so the model has read it; without a cache everything is read again
    known = choice.tokens is None and bool(done.survivors) and state.prefix.cache is not None
    scores = state.own_scores() if known else None
    written = [facts.tokens[places.start + survivor] for survivor in done.survivors]
    state.live = before.continued(done.rows, written, done.texts)
    state.survivors, state.parents = done.survivors, done.parents
    if done.finished:
        state.ended = retain(state.ended + done.finished, choice.pruning, lane.strategy.length_penalty)
    state.draft, state.proposed = None if choice.draft is None else choice.draft[done.survivors], None
    state.known_scores, state.accepted, state.scores = None, choice.accepted, None
    if scores is not None:
        parents = to_device(done.parents, scores.logits.device)
        state.known_scores = scores.map(lambda tensor: tensor[parents, choice.accepted][:, None])
    if facts.tokens[places.start] or done.finished:
        event = events.Stepped(lane.name, state.step, tuple(done.rows), tuple(done.ended))
        if state.step == 0:
            state.first_token_s = state.clock() - state.began
        # drafts that only compare candidates of a search are not counted
        if drafted and branches == 1 and not lane.strategy.traits.takes_back:
            longest = max(len(row.written) for row in event.children)  # a row may end inside the accepted draft
            event = replace(event, drafted=drafted, accepted=min(choice.accepted, longest))
        yield event
        state.step += 1
    totals = facts.totals or ()
    if not done.survivors or (choice.is_done is not None and choice.is_done(state.ended, state.live, totals)):
        yield finish(state)


def decide(
    state: LaneState, choice: Choice, facts: Facts, own_places: range, branches: int, interrupted: str
) -> Committed:
    """Decide for each candidate, in order, whether it lives on, ends with a result, or is dropped.

    `own_places` are the lane's candidates in `facts`; each live row has `branches` scored rows.
    """
    lane, live, done = state.lane, state.live, Committed()
    totals, pruning, texts = facts.totals, choice.pruning, live.texts
    seen: dict[int, int] = {}  # candidates of each group of a beam so far
    taken: dict[int, int] = {}  # those of them that live on
    group, lives, counts = 0, True, True
    for place in own_places:
        if totals is not None and not totals[place] > -math.inf:
            continue  # impossible
        candidate, scored = place - own_places.start, facts.rows[place] - own_places.start
        if pruning is not None:
            group = 0 if pruning.groups is None else pruning.groups[candidate]
            lives = taken.get(group, 0) < pruning.width
            among_best = lives and seen.get(group, 0) < pruning.width
            counts = among_best if facts.may_finish is None else facts.may_finish[candidate]
            seen[group] = seen.get(group, 0) + 1
        if not (lives or counts):
            continue
        row, tokens, logprobs = scored // branches, facts.tokens[place], facts.logprobs[place]
        index = live.indices[row]
        if index is None and lane.strategy.traits.independent:
            index = candidate  # the first choice numbers the returned sequences
        text = texts[row] if texts else None
        if text is not None and len(own_places) > 1:  # an only candidate continues its row's text in place
            text = text.fork()
        shown, stop, whole = written_to(state, row, tokens, logprobs, text, interrupted)
        logprob = live.logprobs[row] + sum(logprobs[: len(shown)])
        total = logprob if totals is None else totals[place]
        if stop is None and lives:
            note = "" if choice.notes is None else choice.notes[candidate]
            words = facts.words(place, lane, shown)
            done.survivors.append(candidate)
            done.parents.append(scored)
            done.rows.append(events.Row(lane.name, row, words, logprob, total, index, note))
            if text is not None:
                done.texts.append(text)
            taken[group] = taken.get(group, 0) + 1
        elif stop is not None and counts:  # an end is a result only for a candidate among the best
            written = (*newest(live.row_tokens.nodes[row], live.written), *tokens[: len(shown)])
            tier = 0 if pruning is None or pruning.tiers is None else pruning.tiers[candidate]
            result = FinishedRow(written, logprob, total, stop.reason, index, stop.what, group, tier, stop.kind, whole)
            done.finished.append(result)
            done.ended.append(events.Ended(lane.name, row, facts.words(place, lane, shown), hypothesis(lane, result)))
    return done


def finish(state: LaneState) -> events.Finished:
    """End a search. Returns its results, ordered by sequence, tier and score, as many as the lane returns."""
    state.close()
    lane, penalty = state.lane, state.lane.strategy.length_penalty
    seconds = state.clock() - state.decoding
    best = sorted(state.ended, key=lambda row: (row.sequence_index or 0, -row.tier, -row.score(penalty)))
    results = tuple(hypothesis(lane, row) for row in best[: lane.returned])
    return events.Finished(lane.name, results, lane.prompt_length, seconds, state.first_token_s, state.passes)


def hypothesis(lane: Lane, row: FinishedRow) -> events.Hypothesis:
    """A finished row as a result."""
    score = row.score(lane.strategy.length_penalty)
    return events.Hypothesis(
        row.tokens, row.logprob, row.total, row.reason, score, row.sequence_index, row.stop, row.text, row.kind
    )


def written_to(
    state: LaneState, row: int, tokens: list[int], logprobs: list[float], text: RowText | None, interrupted: str
) -> tuple[list[str], Stop | None, str]:
    """Add new tokens to the `text` of a row, up to the first that ends the row.

    Returns the text to show for each added token, why the row ends (None if it lives on), and the whole text if it
    ended.
    """
    shown: list[str] = []
    logprob = state.live.logprobs[row]
    for count, token in enumerate(tokens, 1):
        logprob += logprobs[count - 1]
        if text is not None:
            text.push(token)
        stop = first_stop(state, row, tokens[:count], logprob, text)
        if stop is None and interrupted and count == len(tokens):
            stop = Stop(interrupted)
        if stop is not None:
            last, whole = ("", "") if text is None else text.finish(stop.reason)
            return [*shown, last], stop, whole
        shown.append("" if text is None else text.show())
    return shown, None, ""


def first_stop(state: LaneState, row: int, tokens: list[int], logprob: float, text: RowText | None) -> Stop | None:
    """Why a row ends after new `tokens`, which its `text` includes; None if it lives on."""
    lane, live = state.lane, state.live
    token, count = tokens[-1], live.written + len(tokens)
    if token in lane.eos:
        return Stop("eos")
    if lane.criteria:
        last = tail(live.row_tokens.nodes[row], tokens)
        written = Written(token, count, logprob, last, state.clock() - state.began, text)
        for criterion in lane.criteria:
            if (stop := criterion(written)) is not None:
                return Stop(*stop)
    if count >= lane.max_new_tokens:
        return Stop("context" if lane.limit else "length", lane.limit)
    return None


def retain(ended: Sequence[FinishedRow], pruning: Pruning | None, length_penalty: float) -> list[FinishedRow]:
    """The results to keep: the best `width` of each group, by tier and score; without pruning, all."""
    if pruning is None:
        return list(ended)
    results: list[FinishedRow] = []
    count: Counter[int] = Counter()
    for row in sorted(ended, key=lambda row: (-row.tier, -row.score(length_penalty))):
        if count[row.group] < pruning.width:
            count[row.group] += 1
            results.append(row)
    return results
