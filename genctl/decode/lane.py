"""One lane at work: its rows, its search, and what it tells of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from genctl import events
from genctl.decode import cache as caches
from genctl.decode.commit import Commit, Pending, Writing, begin, retain, score
from genctl.decode.host import Asked, Desk, sent
from genctl.decode.processors.trace import Stage
from genctl.decode.runtime import ModelRuntime, Output
from genctl.decode.types import Choice, Closed, Context, Lane, Prefix, Scores, Search
from genctl.errors import GenctlError, ModelError


@dataclass
class Run:
    """A lane's state between two forward passes. `choose` is score -> choose, `settle` and `tell` commit.

    Between the three the host may wait for a device, for the lanes of a batch together (see `host`).
    """

    lane: Lane
    prefix: Prefix
    forward: ModelRuntime
    clock: Callable[[], float]
    began: float  # when the lane was admitted
    passes: int
    live: bool = True
    step: int = 0
    first_token_s: float = 0.0
    search: Search | None = None
    choice: Choice | None = None
    draft: Tensor | None = None  # int64 [R, B, D], on trial in the pass to come
    survivors: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [0])  # the scored row that each live row continues
    ended: list[Closed] = field(default_factory=list)
    fed_draft: int = 0  # draft tokens in the last pass
    stages: list[list[Stage]] = field(default_factory=list)  # what each processor did at this step, if traced
    front: tuple[Tensor, Tensor | None] | None = None  # what is already known of the newest token, if nothing is unfed
    own: Any = None  # a cache of its rows, made by `reread`
    writing: Writing | None = None  # what was chosen, until it is told
    failure: GenctlError | None = None

    def __post_init__(self) -> None:
        tokens = self.prefix.tokens
        self.decoding = self.clock()
        self.pending: Pending = begin(tokens, min(self.lane.max_new_tokens, 1024))
        rng = torch.Generator(device=self.prefix.logits.device)
        rng.manual_seed(self.lane.seed)
        # asked to replace what is not a number, the lane goes on with what its processors make of it
        self.tolerant = any(
            getattr(processor, "name", "") == "remove_invalid_values" for processor in self.lane.processors
        )
        lane = self.lane
        self.context = Context(
            self.prefix, rng, lane.eos, lane.max_new_tokens, self.forward, lane.processors, self._process
        )

    @property
    def length(self) -> int:
        """Tokens of each row, prompt included; the newest may not have been read by the model yet."""
        return int(self.pending.rows.tokens.shape[1])

    @property
    def branches(self) -> int:
        return 1 if self.draft is None else self.draft.shape[1]

    @property
    def drafted(self) -> int:
        return 0 if self.draft is None else self.draft.shape[2]

    @property
    def reach(self) -> int:
        """Tokens of each row once the model has read everything, those on trial included."""
        return self.length + self.drafted

    @property
    def rows(self) -> int:
        """Rows that the next pass has for this lane."""
        return len(self.survivors) * self.branches

    @property
    def read(self) -> int:
        """Tokens of each row that the cache which the lane brings has: the prompt's, or all but the newest."""
        return self.length - (self.front is None) if self.own is not None else int(self.prefix.tokens.shape[1])

    def reread(self) -> None:
        """Make a cache of the lane's own by reading all rows again, where the one that held them was given up."""
        self.fed_draft = 0
        if self.prefix.cache is None or self.pending.rows.written <= 1:
            return  # nothing is cached, or all rows still begin at the prompt's end
        tokens = self.pending.rows.tokens
        known = tokens if self.front is not None else tokens[:, :-1]
        cache = self.forward.reread(known, self.prefix)
        branches = torch.arange(len(known), device=known.device).repeat_interleave(self.branches)
        self.own = caches.kept_as(caches.select(cache, branches), self.lane.cache)

    def first(self, interrupted: str) -> Iterator[events.Event]:
        """The first choice, from what the prefill said."""
        prefix, desk = self.prefix, Desk()
        hidden = None if prefix.hidden is None else prefix.hidden[:, -1:]
        self._choose(prefix.logits[:, None], None, hidden, prefix.layers, desk)
        desk.fetch()
        self.settle(interrupted)
        desk.fetch()
        yield from self.tell()

    def choose(self, output: Output, normalizer: Tensor, desk: Desk) -> None:
        """Let the search choose. output.logits f32 [N, F, V] is what the model said of what was fed, normalizer [N, F].

        What the host has to know of the choice is asked for at `desk`.
        """
        raw, hidden, layers = output.logits, output.hidden, output.layers
        if self.front is not None:  # the newest token had been scored as a draft; its own scores come first
            front, front_hidden = self.front
            raw = torch.cat([front[:, None].repeat_interleave(self.branches, 0), raw], 1)
            if hidden is not None and front_hidden is not None:
                hidden = torch.cat([front_hidden[:, None].repeat_interleave(self.branches, 0), hidden], 1)
            self._choose(raw, None, hidden, layers, desk)
        else:
            self._choose(raw, normalizer, hidden, layers, desk)

    def settle(self, interrupted: str) -> None:
        """Decide who survives, once what was asked for is there. What is to be told of it is asked for."""
        writing = self.writing
        if writing is None:
            return
        try:
            writing.scores.asked.settle()
            writing.decide(self._elapsed, interrupted)
        except GenctlError as error:
            self.failure = error

    def tell(self) -> Iterator[events.Event]:
        """Write what was decided, and say so."""
        writing, self.writing = self.writing, None
        if self.failure is not None:
            self.close()
            yield events.Failed(self.lane.name, self.failure.code, self.failure.message)
            return
        if writing is None:
            yield self._finish()
            return
        drafted, branches, choice = self.drafted * self.branches, self.branches, writing.choice
        writing.scores.asked.settle()
        made = writing.commit()
        self._take(writing, made)
        if any(made.written) or made.closed:
            if self.step == 0:
                self.first_token_s = self.clock() - self.began
            yield self._stepped(made, branches, drafted)
            self.step += 1
        if not made.survivors or (choice.enough is not None and choice.enough(self.ended, self.pending.rows)):
            yield self._finish()

    def unfed(self) -> Tensor:
        """What the model has not read yet, int64 [N, F]: the newest token, unless a draft held it, and the draft."""
        tokens = self.pending.rows.tokens
        newest = tokens.narrow(1, tokens.shape[1] - 1, 1)
        if self.draft is None:
            return newest
        flat = self.draft.flatten(0, 1)
        if self.front is not None:
            return flat
        return torch.cat([newest.repeat_interleave(self.branches, 0), flat], 1)

    def _choose(
        self,
        raw: Tensor,
        normalizer: Tensor | None,
        hidden: Tensor | None,
        layers: tuple[Tensor, ...] | None,
        desk: Desk,
    ) -> None:
        if normalizer is None:
            normalizer = raw.logsumexp(-1)
        lane, draft = self.lane, self.draft
        asked, space = Asked(desk), lane.strategy.space
        try:
            if not self.tolerant:
                asked.ask(normalizer.flatten(), self._finite)
            processed, self.stages, left = score(lane, self.pending.rows, draft, raw, normalizer, space, asked)
            if getattr(lane.strategy, "waits", True):
                asked.fetch()
            ended = tuple(self.ended)
            scores = Scores(
                self.pending.rows, raw, processed, normalizer, self.survivors, ended, hidden, layers, left, asked
            )
            if self.search is None:
                self._refuse()
                self.search = lane.strategy.search(scores, self.context)
                choice = next(self.search)
            else:
                choice = self.search.send(scores)
            self.choice = choice
            self.writing = Writing(lane, self.pending, draft, scores, choice, self.stages)
        except GenctlError as error:
            self.failure = error
        except StopIteration:
            self.writing = None

    def _take(self, writing: Writing, made: Commit) -> None:
        """Go on with what was written."""
        lane, choice, scores = self.lane, writing.choice, writing.scores
        self.pending, self.survivors, self.parents = made.pending, made.survivors, made.parents
        if made.closed:
            found = [closed for _, _, closed in made.closed]
            self.ended = retain(self.ended + found, choice.width, lane.strategy.length_penalty)
        self.draft = None if choice.draft is None else choice.draft[made.survivors]
        self.front = None
        # without a cache everything is read again, the newest token too
        if choice.tokens is None and made.survivors and self.prefix.cache is not None:
            parents, hidden = sent(made.parents, scores.raw.device), scores.hidden
            self.front = scores.raw[parents, choice.kept], None if hidden is None else hidden[parents, choice.kept]

    def _finite(self, normalizer: list[float]) -> None:
        if not all(map(math.isfinite, normalizer)):
            raise ModelError(
                f"the model's logits are not finite at step {self.step}: its weights or activations are damaged"
            )

    def _elapsed(self) -> float:
        """Seconds since the lane was admitted."""
        return self.clock() - self.began

    def _refuse(self) -> None:
        """Raises ModelError where the cache cannot take back what the strategy will put on trial."""
        strategy, cache = self.lane.strategy, self.prefix.cache
        if getattr(strategy, "drafts", False) and cache is not None and not caches.croppable(cache):
            layers = caches.self_part(cache).layers
            recurrent = any(hasattr(layer, "recurrent_states") for layer in layers)
            what = "recurrent states" if recurrent else "states that cannot be cut back"
            raise ModelError(
                f"{strategy.kind} decoding takes back tokens that it tried; {self.forward.name} cannot, "
                f"it keeps {what}: use_cache = false reads everything again instead"
            )

    def _process(self, scores: Tensor) -> Tensor:
        """The lane's processors on a search's own scores, f32 [N, V]."""
        processed, self.stages, _ = score(self.lane, self.pending.rows, None, scores[:, None], scores[:, :1], "logits")
        return processed[:, 0]

    def _stepped(self, made: Commit, branches: int, drafted: int) -> events.Stepped:
        name, pending = self.lane.name, made.pending
        assert self.choice is not None
        notes = self.choice.notes
        rows = tuple(
            events.Row(
                name,
                made.parents[i] // branches,
                made.written[i],
                pending.rows.logprobs[i],
                pending.rows.totals[i],
                pending.slots[i],
                "" if notes is None else notes[made.survivors[i]],
            )
            for i in range(len(made.survivors))
        )
        ended = tuple(
            events.Ended(name, row, written, self._hypothesis(closed)) for row, written, closed in made.closed
        )
        if branches > 1:  # candidates that are compared, not a text that is guessed
            return events.Stepped(name, self.step, rows, ended)
        # a row may have ended inside the accepted draft
        longest = max([*(len(row.written) for row in rows), *(len(row.written) for row in ended)])
        return events.Stepped(name, self.step, rows, ended, drafted, min(self.choice.kept, longest))

    def _hypothesis(self, closed: Closed) -> events.Hypothesis:
        penalty = self.lane.strategy.length_penalty
        return events.Hypothesis(
            closed.tokens,
            closed.logprob,
            closed.total,
            closed.reason,
            closed.score(penalty),
            closed.slot,
            closed.stop,
            kind=closed.kind,
        )

    def _finish(self) -> events.Finished:
        self.close()
        lane = self.lane
        penalty = lane.strategy.length_penalty
        best = sorted(self.ended, key=lambda closed: (closed.slot or 0, -closed.standing, -closed.score(penalty)))
        found = [self._hypothesis(closed) for closed in best]
        prompt = len(lane.source) if lane.source is not None else len(lane.tokens)
        seconds = self.clock() - self.decoding
        return events.Finished(
            lane.name, tuple(found[: lane.returned]), prompt, seconds, self.first_token_s, self.passes
        )

    def close(self) -> None:
        """End the search: its `finally` clauses run."""
        self.live = False
        if self.search is not None:
            self.search.close()
