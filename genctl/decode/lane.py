"""One lane at work: its rows, its search, and the events of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genctl import events
from genctl.decode import cache as caches
from genctl.decode.commit import (
    Decision,
    Facts,
    LiveRows,
    decide,
    finished_row,
    retain,
    sequence_index,
    survived,
)
from genctl.decode.processors import trace as tracing
from genctl.decode.processors.context import NamedProcessor
from genctl.decode.runtime import ModelRuntime
from genctl.decode.score import Stages, score
from genctl.decode.transfer import to_device
from genctl.decode.types import Choice, Context, FinishedRow, Independent, Lane, Prefix, RowsOfLane, Search
from genctl.errors import GenctlError, ModelError

ROOM = 1024  # new tokens for which a lane has room at once


class Said(NamedTuple):
    """What the model said after F tokens of each of N rows."""

    logits: Tensor  # f32 [N, F, V]
    logprobs: Tensor  # f32 [N, F, V]
    layers: tuple[Tensor, ...] | None = None  # hidden states of each layer, [N, F, H]

    @classmethod
    def of(cls, logits: Tensor, layers: tuple[Tensor, ...] | None = None) -> Said:
        """logits f32 [N, F, V]."""
        return cls(logits, logits.log_softmax(-1), layers)

    def map(self, change: Callable[[Tensor], Tensor]) -> Said:
        """The same change of every tensor."""
        return Said(change(self.logits), change(self.logprobs), self.layers and tuple(map(change, self.layers)))

    def cut(self, rows: slice, newest: int) -> Said:
        """What was said to some rows, after the newest tokens."""
        return self.map(lambda tensor: tensor[rows, -newest:])

    def followed_by(self, other: Said) -> Said:
        """Along F, as many rows of both."""
        layers = None
        if self.layers is not None and other.layers is not None:
            layers = tuple(torch.cat(pair, 1) for pair in zip(self.layers, other.layers, strict=True))
        logits = torch.cat([self.logits, other.logits], 1)
        return Said(logits, torch.cat([self.logprobs, other.logprobs], 1), layers)


@dataclass(eq=False)
class LaneState:
    """A lane between two steps. Made from its prompt: what the prefill said is what it chooses from first."""

    lane: Lane
    prefix: Prefix
    model: ModelRuntime
    clock: Callable[[], float]
    began: float  # when the lane was admitted
    passes: int  # of the model for this lane

    def __post_init__(self) -> None:
        prefix = self.prefix
        self.decoding = self.clock()
        self.first_token_s = 0.0
        self.alive, self.step = True, 0
        self.live = LiveRows.begin(prefix.tokens, min(self.lane.max_new_tokens, ROOM))
        rng = torch.Generator(device=prefix.logits.device)
        rng.manual_seed(self.lane.seed)
        lane = self.lane
        named = [processor for processor in lane.processors if isinstance(processor, NamedProcessor)]
        # asked to replace what is not a number, the lane goes on with what its processors make of it
        self.tolerant = any(processor.name == "remove_invalid_values" for processor in named)
        # a strategy without memory needs no search of the lane's own
        self.independent = lane.strategy if isinstance(lane.strategy, Independent) else None
        self.shares = self._shares(named)
        self.stages: Stages = []  # what each processor did at this step, where it is traced
        self.context = Context(prefix, rng, lane.eos, lane.max_new_tokens, self.model, lane.processors, self._process)
        self.search: Search | None = None
        self.ended: list[FinishedRow] = []  # results so far
        self.survivors, self.parents = [0], [0]  # of the last choice: candidates, and the scored rows they continue
        self.draft: Tensor | None = None  # int64 [R, B, D], on trial in the next pass
        self.fed_draft = 0  # its tokens that the cache holds
        self.accepted = 0  # and those of them that stay
        self.front: Said | None = None  # what is known after the newest token, where a draft held it: F = 1
        self.torn = False  # whether memory ran out within its search
        self.own: Any = None  # a cache of its rows, made by `reread`
        self.said: Said | None = Said.of(prefix.logits[:, None], prefix.layers)  # None: the rows must be fed first
        self.place = slice(0, 1)  # the lane's rows in `said`

    def _shares(self, named: list[NamedProcessor]) -> Any:
        """What lanes have in common that choose together; None where this one chooses alone."""
        lane = self.lane
        keys = tuple(processor.key for processor in named)
        if lane.trace or self.independent is None or len(keys) < len(lane.processors) or None in keys:
            return None
        return lane.strategy, keys, lane.top, lane.scores

    def _process(self, scores: Tensor) -> Tensor:
        """The lane's processors on a search's own scores, f32 [N, V]."""
        lane, rows = self.lane, self.live.rows
        scored = score(lane.processors, rows.text, None, scores[:, None], scores[:, None], "logits", trace=lane.trace)
        self.stages = scored.stages
        if scored.best is not None and not lane.trace:
            tracing.judge(scored.best.tolist(), lane.processors)
        return scored.logits[:, 0]

    @property
    def length(self) -> int:
        """Tokens of each row, prompt included; the newest may not have been read by the model yet."""
        return self.live.rows.text.length

    @property
    def branches(self) -> int:
        """Rows that one live row is read in: one for each draft."""
        return 1 if self.draft is None else self.draft.shape[1]

    @property
    def drafted(self) -> int:
        """Tokens on trial in each row."""
        return 0 if self.draft is None else self.draft.shape[2]

    @property
    def reach(self) -> int:
        """Tokens of each row once the model has read what the next pass feeds it."""
        return self.length + self.drafted + (self.said is not None)

    @property
    def rows(self) -> int:
        """Rows that the next pass has for this lane."""
        return len(self.survivors) * self.branches

    @property
    def read(self) -> int:
        """Tokens of each row that the cache which the lane brings has: the prompt's, or all but the newest."""
        return self.length - (self.front is None) if self.own is not None else int(self.prefix.tokens.shape[1])

    @property
    def reordered(self) -> list[int]:
        """The scored row that each row of the next pass continues."""
        return [parent for parent in self.parents for _ in range(self.branches)]

    @property
    def newest(self) -> list[int] | None:
        """The one token of each row that the model has not read; None where that is not all, or not so."""
        if self.draft is not None or self.front is not None:
            return None
        return [node[0] for node in self.live.nodes if node is not None]

    def unfed(self) -> Tensor:
        """What the model has not read yet, int64 [N, F]: the newest token, unless a draft held it, and the draft."""
        tokens = self.live.rows.tokens
        newest = tokens.narrow(1, tokens.shape[1] - 1, 1)
        if self.draft is None:
            return newest
        flat = self.draft.flatten(0, 1)
        if self.front is not None:
            return flat
        return torch.cat([newest.repeat_interleave(self.branches, 0), flat], 1)

    def whole(self) -> Tensor:
        """All tokens of each row and its draft, int64 [N, T+D]."""
        tokens = self.live.rows.tokens
        if self.draft is None:
            return tokens
        return torch.cat([tokens.repeat_interleave(self.branches, 0), self.draft.flatten(0, 1)], 1)

    def hear(self, said: Said, place: slice) -> None:
        """Take in what a pass said of what was fed, in rows `place` of `said`."""
        self.passes += 1
        self.fed_draft = self.drafted
        self.said, self.place = said, place

    def heard(self) -> Said:
        """What the model said after the newest token and after each token of the draft, of this lane's rows."""
        assert self.said is not None
        said, place = self.said, self.place
        if place.stop - place.start < said.logits.shape[0]:
            said = said.map(lambda tensor: tensor[place])
        if self.front is not None:  # the newest token had been scored as a draft; its own scores come first
            said = self.front.map(lambda tensor: tensor.repeat_interleave(self.branches, 0)).followed_by(said)
        return said

    def rows_of_lane(self) -> RowsOfLane:
        """Its rows for a strategy whose rows are independent; before the first choice one for all of them."""
        indices = [sequence_index(self.live, row, row) for row in range(len(self.survivors))]
        count = self.lane.strategy.rows
        fresh = self.live.indices == [None]
        return RowsOfLane(self.context.rng, range(count) if fresh else indices, count)

    def reread(self) -> None:
        """Make a cache of the lane's own by reading all rows again, where the one that held them was given up."""
        self.fed_draft = 0
        if self.prefix.cache is None or self.live.rows.written <= (self.front is None):
            return  # nothing is cached, or nothing was read behind the prompt
        tokens = self.live.rows.tokens
        known = tokens if self.front is not None else tokens[:, :-1]
        cache = self.model.reread(known, self.prefix)
        branches = torch.arange(len(known), device=known.device).repeat_interleave(self.branches)
        self.own = caches.kept_as(caches.select(cache, branches), self.lane.cache)

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(
        self, choice: Choice, facts: Facts, written: Tensor, traces: Any, interrupted: str
    ) -> Iterator[events.Event]:
        """Write a choice whose facts are known: Stepped, and Finished when nothing lives. written int64 [C, m]."""
        lane, branches, drafted = self.lane, self.branches, self.branches * self.drafted
        said, independent = self.said, lane.strategy.independent
        assert said is not None
        if facts.totals and not max(facts.totals) > -torch.inf:
            if not self.ended:
                raise ModelError(f"every continuation is forbidden at step {self.live.rows.written}")
            yield self.finish()
            return
        before = self.live
        decision = decide(lane, before, choice, facts, branches, self._elapsed, interrupted)
        closed = [finished_row(before, choice, facts, ended, branches, independent) for ended in decision.ended]
        survivors = decision.survivors
        # without a cache everything is read again, the newest token too
        held = choice.tokens is None and bool(survivors) and self.prefix.cache is not None
        heard = self.heard() if held else None
        self.live = survived(before, facts, written, survivors, branches, independent)
        self.survivors, self.parents = survivors, [facts.rows[candidate] for candidate in survivors]
        if closed:
            width = None if choice.pruning is None else choice.pruning.width
            self.ended = retain(self.ended + closed, width, lane.strategy.length_penalty)
        self.draft = None if choice.draft is None else choice.draft[survivors]
        self.front, self.accepted, self.said = None, choice.accepted, None
        if heard is not None:
            parents = to_device(self.parents, heard.logits.device)
            self.front = heard.map(lambda tensor: tensor[parents, choice.accepted][:, None])
        if written.shape[1] or closed:
            if self.step == 0:
                self.first_token_s = self._elapsed()
            yield self._stepped(decision, closed, choice, facts, traces, branches, drafted)
            self.step += 1
        totals = facts.totals or ()
        if not survivors or (choice.is_done is not None and choice.is_done(self.ended, self.live.rows, totals)):
            yield self.finish()

    def _elapsed(self) -> float:
        """Seconds since the lane was admitted."""
        return self.clock() - self.began

    def _stepped(
        self,
        decision: Decision,
        closed: list[FinishedRow],
        choice: Choice,
        facts: Facts,
        traces: Any,
        branches: int,
        drafted: int,
    ) -> events.Stepped:
        name, live, notes = self.lane.name, self.live, choice.notes
        rows = tuple(
            events.Row(
                name,
                self.parents[place] // branches,
                facts.words(candidate, traces),
                live.rows.logprobs[place],
                live.rows.totals[place],
                live.indices[place],
                "" if notes is None else notes[candidate],
            )
            for place, candidate in enumerate(decision.survivors)
        )
        ended = tuple(
            events.Ended(
                name,
                facts.rows[one.candidate] // branches,
                facts.words(one.candidate, traces)[: one.count],
                self._hypothesis(row),
            )
            for one, row in zip(decision.ended, closed, strict=True)
        )
        if branches > 1 or not drafted:  # candidates that are compared are no text that is guessed
            return events.Stepped(name, self.step, rows, ended)
        # a row may have ended inside the accepted draft
        longest = max([*(len(row.written) for row in rows), *(len(row.written) for row in ended)])
        return events.Stepped(name, self.step, rows, ended, drafted, min(choice.accepted, longest))

    def _hypothesis(self, row: FinishedRow) -> events.Hypothesis:
        score = row.score(self.lane.strategy.length_penalty)
        return events.Hypothesis(
            row.tokens, row.logprob, row.total, row.reason, score, row.sequence_index, row.stop, kind=row.kind
        )

    def finish(self) -> events.Finished:
        """End the search, and hand back what it found: by sequence, tier and score."""
        self.close()
        lane = self.lane
        penalty = lane.strategy.length_penalty
        best = sorted(self.ended, key=lambda row: (row.sequence_index or 0, -row.tier, -row.score(penalty)))
        prompt = len(lane.source) if lane.source is not None else len(lane.tokens)
        return events.Finished(
            lane.name,
            tuple(map(self._hypothesis, best[: lane.returned])),
            prompt,
            self.clock() - self.decoding,
            self.first_token_s,
            self.passes,
        )

    def fail(self, error: GenctlError) -> events.Failed:
        """End the search, and say what went wrong."""
        self.close()
        return events.Failed(self.lane.name, error.code, error.message)

    def close(self) -> None:
        """End the search: its `finally` clauses run."""
        self.alive = False
        if self.search is not None:
            self.search.close()
