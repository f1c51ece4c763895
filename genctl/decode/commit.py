"""Score and commit: what the model said, as a search sees it; what a search chose, written down.

The one place where tokens are written, rows end and candidates are cut. Every written token is looked at in order, so a
stop inside an accepted draft is found where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from genctl import events
from genctl.decode import host
from genctl.decode.host import Asked
from genctl.decode.processors import trace as tracing
from genctl.decode.processors.rows import RowCandidates
from genctl.decode.types import Choice, Closed, Lane, Rows, Scores, Space, Stop, Written

Node = tuple[int, Any]  # a token and the node before it; None at the prompt: forks share their stem


@dataclass
class Pending:
    """The live rows of a lane with all that belongs to them."""

    rows: Rows
    nodes: list[Node | None]  # R, the new tokens of each row as a linked list
    slots: list[int | None]  # R, which returned sequence each row is
    buffer: Tensor  # int64 [R, capacity], `rows.tokens` is its filled part


@dataclass
class Commit:
    """What one choice came to."""

    pending: Pending
    survivors: list[int]  # indices into the candidates
    parents: list[int]  # the scored row that each survivor continues
    written: list[tuple[events.Token, ...]]  # of each survivor
    closed: list[tuple[int, tuple[events.Token, ...], Closed]] = field(
        default_factory=list
    )  # row, written, what it became


def begin(tokens: Tensor, capacity: int) -> Pending:
    """One empty row after a prompt. tokens int64 [1, T]; `capacity` is how many tokens may follow."""
    length = int(tokens.shape[1])
    buffer = torch.empty(1, length + capacity, dtype=torch.long, device=tokens.device)
    buffer[:, :length] = tokens
    return Pending(Rows(buffer[:, :length], [0.0], [0.0], length), [None], [None], buffer)


def score(
    lane: Lane,
    rows: Rows,
    draft: Tensor | None,
    raw: Tensor,
    normalizer: Tensor,
    space: Space,
    asked: Asked | None = None,
) -> tuple[Tensor, list[list[tracing.Stage]], list[RowCandidates] | None]:
    """Apply the lane's processors to what follows each row and each draft prefix.

    raw f32 [N, D+1, V]; draft int64 [R, B, D] or None. Returns scores [N, D+1, V], the stages for each of the D+1
    positions when the lane is traced, and, where filters came last and nothing is drafted, what they left of each row.
    With `asked` the scores are checked when it is fetched.
    """
    scores = raw - normalizer[..., None] if space == "logprobs" else raw
    if space == "raw" or not lane.processors:
        return scores, [], None
    history = rows.tokens
    flat: Tensor | None = None
    if draft is not None:
        history = history.repeat_interleave(draft.shape[1], 0)
        flat = draft.flatten(0, 1)
    columns, stages, left = [], [], None
    for position in range(raw.shape[1]):
        seen = history if position == 0 or flat is None else torch.cat([history, flat[:, :position]], 1)
        here = scores[:, position]
        if lane.trace:
            here, stage = tracing.apply(lane.processors, seen, here, timing=True)
            stages.append(stage)
        else:
            here, left = tracing.sift(lane.processors, seen, here, asked)
        columns.append(here)
    if len(columns) > 1:
        return torch.stack(columns, 1), stages, None
    return columns[0][:, None], stages, left


class Writing:
    """A choice on its way to what is written: `decide` once its numbers are known, `commit` once what is told of it is.

    In between the host may wait for the device, for several lanes at once. Raises IndexError when a strategy names rows
    that were not scored.
    """

    def __init__(
        self,
        lane: Lane,
        pending: Pending,
        draft: Tensor | None,
        scores: Scores,
        choice: Choice,
        stages: list[list[tracing.Stage]],
    ) -> None:
        self.lane, self.pending, self.scores, self.choice, self.stages = lane, pending, scores, choice, stages
        self.branches = 1 if draft is None else draft.shape[1]
        self.written = _written(draft, choice)  # int64 [C, m]
        self.said: list[Any] = []
        _ask(scores, choice, self.written, self.said)
        self.survivors: list[int] = []
        self.ended: list[tuple[int, int, Stop]] = []  # candidate, last position, why
        self.report = _Report()

    def decide(self, elapsed: Callable[[], float], interrupted: str = "") -> None:
        """Who survives, and what ended."""
        lane, pending, choice = self.lane, self.pending, self.choice
        scored, tokens, steps, *_ = self.said
        before, count = pending.rows.written, self.written.shape[1]
        width, ends, groups = choice.width, choice.ends, choice.groups
        live: dict[int, int] = {}
        seen: dict[int, int] = {}
        for candidate, place in enumerate(scored):
            group = 0 if groups is None else groups[candidate]
            at = seen.get(group, 0)
            seen[group] = at + 1
            full = width is not None and live.get(group, 0) == width
            counts = ends[candidate] if ends is not None else width is None or at < width
            if full and not (ends is not None and counts):
                continue
            row = place // self.branches
            stop = None
            logprob = pending.rows.logprobs[row]
            for position, token in enumerate(tokens[candidate]):
                logprob += steps[candidate][position]
                stop = _why(lane, pending.nodes[row], tokens[candidate], position, token, before, logprob, elapsed)
                if stop is None and interrupted and position == count - 1:
                    stop = Stop(interrupted)
                if stop is not None:
                    if counts:  # an end that the beam would not have kept is not a result
                        self.ended.append((candidate, position, stop))
                    break
            if stop is None and not full:
                self.survivors.append(candidate)
                live[group] = live.get(group, 0) + 1
        if lane.scores or lane.top or lane.trace:
            shown = self.survivors + [candidate for candidate, *_ in self.ended]
            self.report.ask(lane, self.scores, scored, tokens, shown, self.stages)

    def commit(self) -> Commit:
        """Close what ended, write the rest."""
        pending, choice, survivors = self.pending, self.choice, self.survivors
        scored, tokens, steps, *totals_said = self.said
        ranks = totals_said[0] if totals_said else None

        def words(candidate: int) -> tuple[events.Token, ...]:
            return self.report.words(candidate, tokens[candidate], steps[candidate])

        result_rows = [scored[c] // self.branches for c in survivors]
        nodes: list[Node | None] = []
        logprobs, totals, slots = [], [], []
        for candidate, row in zip(survivors, result_rows, strict=True):
            node = pending.nodes[row]
            for token in tokens[candidate]:
                node = (token, node)
            nodes.append(node)
            logprob = pending.rows.logprobs[row] + sum(steps[candidate])
            logprobs.append(logprob)
            totals.append(logprob if ranks is None else ranks[candidate])
            slots.append(None if choice.slots is None else choice.slots[candidate])
        closed = []
        for candidate, position, stop in self.ended:
            row = scored[candidate] // self.branches
            made = (*_new_tokens(pending, row), *tokens[candidate][: position + 1])
            logprob = pending.rows.logprobs[row] + sum(steps[candidate][: position + 1])
            total = logprob if ranks is None else ranks[candidate]
            slot = None if choice.slots is None else choice.slots[candidate]
            group = 0 if choice.groups is None else choice.groups[candidate]
            standing = 0 if choice.standing is None else choice.standing[candidate]
            found = Closed(made, logprob, total, stop.reason, slot, stop.what, group, standing, stop.kind)
            closed.append((row, words(candidate)[: position + 1], found))
        rows, buffer = _extend(pending, result_rows, self.written, survivors)
        new = Rows(rows, logprobs, totals, pending.rows.prompt_len)
        return Commit(
            Pending(new, nodes, slots, buffer),
            survivors,
            [scored[c] for c in survivors],
            [words(c) for c in survivors],
            closed,
        )


def retain(ended: Sequence[Closed], width: int | None, length_penalty: float) -> list[Closed]:
    """The results worth keeping: the best `width` of each group, by standing and score; all where `width` is None."""
    if width is None:
        return list(ended)
    kept: list[Closed] = []
    count: Counter[int] = Counter()
    for closed in sorted(ended, key=lambda closed: (-closed.standing, -closed.score(length_penalty))):
        if count[closed.group] < width:
            count[closed.group] += 1
            kept.append(closed)
    return kept


def history(node: Node | None) -> tuple[int, ...]:
    """The tokens that lead to a node, oldest first."""
    tokens = []
    while node is not None:
        token, node = node
        tokens.append(token)
    return tuple(reversed(tokens))


def _new_tokens(pending: Pending, row: int) -> Sequence[int]:
    """The new tokens of a row so far, oldest first."""
    rows = pending.rows
    if host.near(rows.tokens):
        found: list[int] = rows.tokens[row, rows.prompt_len :].tolist()
        return found
    return history(pending.nodes[row])


def _ask(scores: Scores, choice: Choice, written: Tensor, said: list[Any]) -> None:
    """Put into `said` what the host has to know of a choice: rows, written tokens, log-probability of each, and ranks.

    written int64 [C, m] -> C numbers, twice C lists of m, and C numbers where the search ranks by its own.
    """
    ranks = [] if choice.ranks is None else [choice.ranks]
    if host.near(scores.raw):  # numpy takes a tenth of the time to find a few numbers
        rows, tokens = choice.rows.tolist(), written.tolist()
        raw, normalizer = scores.raw.numpy(), scores.normalizer.numpy()
        logprobs = [
            [float(raw[row, place, token] - normalizer[row, place]) for place, token in enumerate(line)]
            for row, line in zip(rows, tokens, strict=True)
        ]
        said += [rows, tokens, logprobs, *(rank.tolist() for rank in ranks)]
        return
    positions, at = torch.arange(written.shape[1], device=written.device), choice.rows[:, None]
    of_each = scores.raw[at, positions, written] - scores.normalizer[at, positions]
    for tensor in (choice.rows, written, of_each, *ranks):
        scores.asked.ask(tensor, said.append)


def _written(draft: Tensor | None, choice: Choice) -> Tensor:
    parts = []
    if draft is not None and choice.kept:
        parts.append(draft.flatten(0, 1)[choice.rows, : choice.kept])
    if choice.tokens is not None:
        parts.append(choice.tokens[:, None])
    if not parts:
        return choice.rows.new_empty(len(choice.rows), 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _why(
    lane: Lane,
    node: Node | None,
    written: Sequence[int],
    position: int,
    token: int,
    before: int,
    logprob: float,
    elapsed: Callable[[], float],
) -> Stop | None:
    """Why a row ends after this token: EOS, then the criteria in their order, then the length."""
    if token in lane.eos:
        return Stop("eos")
    count = before + position + 1
    if lane.criteria:

        def tail(wanted: int) -> list[int]:
            newest = list(written[max(0, position + 1 - wanted) : position + 1])
            at, older = node, list[int]()
            while at is not None and len(newest) + len(older) < wanted:
                older.append(at[0])
                at = at[1]
            return [*reversed(older), *newest]

        look = Written(token, count, logprob, tail, elapsed())
        for criterion in lane.criteria:
            stop = criterion(look)
            if stop is not None:
                return Stop(*stop)
    return Stop("length", lane.limit) if count >= lane.max_new_tokens else None


def _extend(pending: Pending, rows: list[int], written: Tensor, survivors: list[int]) -> tuple[Tensor, Tensor]:
    """The survivors' tokens, in place where no row moved."""
    buffer, count = pending.buffer, written.shape[1]
    length = int(pending.rows.tokens.shape[1])
    if rows != list(range(buffer.shape[0])):
        buffer = buffer.index_select(0, host.sent(rows, buffer.device))
    if length + count > buffer.shape[1]:
        room = buffer.new_empty(buffer.shape[0], max(64, buffer.shape[1] // 2) + count)
        buffer = torch.cat([buffer, room], 1)
    if count and survivors:
        kept = written if len(survivors) == written.shape[0] else written[host.sent(survivors, written.device)]
        if host.near(buffer):
            buffer.numpy()[:, length : length + count] = kept.numpy()
        else:
            buffer[:, length : length + count] = kept
    return buffer.narrow(1, 0, length + count), buffer


class _Report:
    """What was asked to be reported about the tokens that are shown, beside the log-probability of each."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}  # candidate -> its place among those shown
        self.figures: list[Any] = []  # for each position rank, entropy, values and ids of the best, one after another
        self.traces: list[list[tuple[events.Trace, ...]] | None] = []

    def ask(
        self,
        lane: Lane,
        scores: Scores,
        scored: list[int],
        tokens: list[list[int]],
        shown: list[int],
        stages: list[list[tracing.Stage]],
    ) -> None:
        """Ask about the tokens of the candidates `shown`."""
        self.places = {candidate: place for place, candidate in enumerate(shown)}
        device = scores.raw.device
        for position in range(len(tokens[shown[0]]) if shown else 0):
            rows = host.sent([scored[c] for c in shown], device)
            ids = host.sent([tokens[c][position] for c in shown], device)
            logprobs = scores.raw[rows, position] - scores.normalizer[rows, position, None]  # [shown, V]
            chosen = logprobs.gather(1, ids[:, None])
            best = logprobs.topk(min(lane.top, logprobs.shape[1]), dim=1)
            scores.asked.ask((logprobs > chosen).sum(1) + 1, self.figures.append)
            scores.asked.ask(torch.special.entr(logprobs.exp()).sum(1), self.figures.append)
            scores.asked.ask(best.values, self.figures.append)
            scores.asked.ask(best.indices, self.figures.append)
            self.traces.append(tracing.traces(stages[position], rows, ids) if stages else None)

    def words(self, candidate: int, tokens: list[int], steps: list[float]) -> tuple[events.Token, ...]:
        """The tokens of one candidate, with what is known of them."""
        place = self.places.get(candidate)
        if place is None:
            return tuple(map(events.Token, tokens, steps))
        found = []
        for position, (token, step) in enumerate(zip(tokens, steps, strict=True)):
            ranks, entropy, values, indices = self.figures[4 * position : 4 * position + 4]
            top = tuple((i, "", v) for i, v in zip(indices[place], values[place], strict=True))
            traces = self.traces[position]
            trace = traces[place] if traces is not None else ()
            found.append(events.Token(token, step, rank=ranks[place], entropy=entropy[place], top=top, trace=trace))
        return tuple(found)
