"""Score and choose: model scores go through the processors, and searches choose what to write.

Adjacent lanes with equal knobs whose rows are independent choose together: one pass of the processors, one argmax, a
draw from each lane's own generator. They choose what each would choose alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from genctl import events
from genctl.decode import cache as caches
from genctl.decode.commit import Facts
from genctl.decode.lane import LaneState
from genctl.decode.out_of_memory import OutOfMemory, shortages
from genctl.decode.processors import trace as tracing
from genctl.decode.score import ProcessedScores, Stages, score
from genctl.decode.transfer import fetch
from genctl.decode.types import Choice, Independent, Scores
from genctl.errors import GenctlError, ModelError


@dataclass(eq=False)
class Chosen:
    """What one lane chose, or several together; the tensors of which the host has to know the numbers."""

    states: list[LaneState]
    counts: list[int]  # candidates of each lane
    choice: Choice
    written: Tensor  # int64 [C, m]
    questions: list[Tensor]
    stages: Stages
    judged: bool  # whether the first question is the best score of each scored row

    def commit(self, answers: list[Any], interrupted: str) -> Iterator[events.Event]:
        """Write it, once the numbers are known."""
        best = answers.pop(0) if self.judged else None
        rows, tokens, logprobs = answers[:3]
        rest = answers[3:]
        totals = None if self.choice.totals is None else rest.pop(0)
        pruning = self.choice.pruning
        may_finish = None if pruning is None or pruning.may_finish is None else rest.pop(0)
        steps = zip(self.stages, self.written.unbind(1), strict=False) if self.stages else ()
        traces = [tracing.traces(stage, self.choice.rows, written) for stage, written in steps]
        facts = Facts(rows, tokens, logprobs, totals, may_finish, rest)
        at = 0
        for state, count, part in zip(self.states, self.counts, facts.split(self.counts), strict=True):
            here = slice(at, at := at + count)
            try:
                _check(state, part, best if best is None or len(self.states) == 1 else [best[0][here]])
                yield from state.commit(self.choice, part, self.written[here], traces, interrupted)
            except GenctlError as error:
                yield state.fail(error)


@dataclass(eq=False)
class Over:
    """A lane whose search returned, or failed."""

    state: LaneState
    error: GenctlError | None = None
    questions: list[Tensor] = field(default_factory=list)

    def commit(self, answers: list[Any], interrupted: str) -> Iterator[events.Event]:
        """Say so."""
        yield self.state.finish() if self.error is None else self.state.fail(self.error)


@dataclass(eq=False)
class Stuck:
    """A choice for which there was not enough memory: the lanes before it are written, those after it are not asked."""

    error: OutOfMemory
    questions: list[Tensor] = field(default_factory=list)

    def commit(self, answers: list[Any], interrupted: str) -> Iterator[events.Event]:
        """Raises OutOfMemory."""
        yield from ()
        raise self.error


def choose(states: Sequence[LaneState]) -> list[Chosen | Over | Stuck]:
    """Let the lanes choose that have scores."""
    made: list[Chosen | Over | Stuck] = []
    for group in _groups([state for state in states if state.scores is not None]):
        try:
            made += _together(group) if len(group) > 1 else [_alone(group[0])]
        except OutOfMemory as error:
            group[0].torn = error.torn
            made.append(Stuck(error))
            break
    return made


def _groups(states: Sequence[LaneState]) -> Iterator[list[LaneState]]:
    """Lanes that choose together: neighbours in one pass with equal knobs."""
    group: list[LaneState] = []
    for state in states:
        if group and (state.shares is None or state.shares != group[0].shares or state.scores is not group[0].scores):
            yield group
            group = []
        group.append(state)
    if group:
        yield group


def _together(states: list[LaneState]) -> list[Chosen | Over | Stuck]:
    """One choice for lanes whose rows are independent."""
    first, last = states[0], states[-1]
    lane, strategy, model = first.lane, first.independent, first.scores
    assert model is not None
    assert strategy is not None
    place = slice(first.place.start, last.place.stop)
    if place.stop - place.start < model.logits.shape[0]:
        model = model.map(lambda tensor: tensor[place])
    try:
        with shortages():
            # processors of lanes that share look at no text
            scored = score(lane.processors, first.live.rows.text, None, model.logits, model.logprobs, strategy.space)
            tokens = strategy.tokens(scored.logits[:, 0], [state.rows_of_lane() for state in states], scored.left)
            rows = counted(tokens.shape[0], tokens.device)
            counts = [len(state.survivors) for state in states]
            return [_chosen(states, counts, Choice(rows, tokens), model.logprobs, scored)]
    except (GenctlError, ValueError, RuntimeError, IndexError):
        return [_alone(state) for state in states]  # so that the one at fault fails alone


def _alone(state: LaneState) -> Chosen | Over:
    """One lane's choice."""
    lane, strategy, model = state.lane, state.lane.strategy, state.own_scores()
    try:
        with shortages(torn=state.independent is None):
            _refuse(state)
            if strategy.reads_scores and not state.tolerant:
                _finite(state, model.logprobs)
            tokens = state.live.rows.text
            state.stages = []
            scored = score(
                lane.processors, tokens, state.draft, model.logits, model.logprobs, strategy.space, trace=lane.trace
            )
            if state.independent is not None:
                choice = _independent(state, state.independent, scored)
            else:
                if strategy.reads_scores and scored.best is not None:
                    [[best]] = fetch([[scored.best]])
                    tracing.judge(best, lane.processors)
                ended = tuple(state.ended)
                scores = Scores(
                    state.live.rows, model.logits, scored.logits, model.logprobs, state.survivors, ended, model.layers
                )
                if state.search is None:
                    state.search = strategy.search(scores, state.context)
                    choice = next(state.search)
                else:
                    choice = state.search.send(scores)
            if state.stages:  # made by `Context.process`
                scored = scored._replace(stages=state.stages)
            return _chosen([state], [choice.rows.shape[0]], choice, model.logprobs, scored)
    except StopIteration:
        return Over(state)
    except GenctlError as error:
        return Over(state, _damage(state, model.logprobs) or error)
    except (ValueError, RuntimeError, IndexError):
        damage = _damage(state, model.logprobs)
        if damage is None:
            raise
        return Over(state, damage)


def _independent(state: LaneState, strategy: Independent, scored: ProcessedScores) -> Choice:
    rows = state.rows_of_lane()
    logits, left = scored.logits[:, 0], scored.left
    count = len(rows.indices)
    which = counted(count, logits.device)
    if count != logits.shape[0]:  # the prompt's one row, for all
        logits, left, which = logits.expand(count, -1), left and left * count, torch.zeros_like(which)
    return Choice(which, strategy.tokens(logits, [rows], left))


@lru_cache(maxsize=64)
def counted(count: int, device: torch.device) -> Tensor:
    """0, 1, … as int64 [count]. Not to be written to."""
    return torch.arange(count, device=device)


def _chosen(
    states: list[LaneState], counts: list[int], choice: Choice, logprobs: Tensor, scored: ProcessedScores
) -> Chosen:
    """A choice with what has to be known of it: logprobs f32 [N, D+1, V] are the model's own."""
    lane, draft = states[0].lane, states[0].draft
    parts = [] if draft is None or not choice.accepted else [draft.flatten(0, 1)[choice.rows, : choice.accepted]]
    if choice.tokens is not None:
        parts.append(choice.tokens[:, None])
    if not parts:
        parts = [choice.rows.new_empty(choice.rows.shape[0], 0)]
    written = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    rows, places = choice.rows[:, None], counted(written.shape[1], written.device)
    scored_places, vocabulary = logprobs.shape[1:]
    own = logprobs.take((rows * scored_places + places) * vocabulary + written)
    questions = [] if scored.best is None else [scored.best]
    questions += [choice.rows, written, own]
    if choice.totals is not None:
        questions.append(choice.totals)
    if choice.pruning is not None and choice.pruning.may_finish is not None:
        questions.append(choice.pruning.may_finish)
    if lane.scores or lane.top or lane.trace or lane.watch:
        here = logprobs[rows, places]  # [C, m, V]
        chosen = here.gather(2, written[..., None])
        best = here.topk(min(lane.top, here.shape[2]), -1)
        questions += [(here > chosen).sum(-1) + 1, torch.special.entr(here.exp()).sum(-1), best.values, best.indices]
        questions += _watched(here, lane.watch) if lane.watch else []
    return Chosen(states, counts, choice, written, questions, scored.stages, scored.best is not None)


def _watched(logprobs: Tensor, ids: Sequence[int]) -> list[Tensor]:
    """The log-probabilities and ranks of W ids, f32 and int64 [C, m, W], in logprobs f32 [C, m, V]."""
    own = logprobs[..., list(ids)]
    ranks = [(logprobs > one[..., None]).sum(-1) + 1 for one in own.unbind(-1)]  # one by one: W times less memory
    return [own, torch.stack(ranks, -1)]


def _refuse(state: LaneState) -> None:
    """Raises ModelError, before the first choice, where the cache cannot take back what the strategy puts on trial."""
    strategy, cache = state.lane.strategy, state.prefix.cache
    if state.search is None and strategy.drafts and cache is not None and not caches.croppable(cache):
        layers = caches.self_part(cache).layers
        recurrent = any(hasattr(layer, "recurrent_states") for layer in layers)
        what = "recurrent states" if recurrent else "states that cannot be cut back"
        raise ModelError(
            f"{strategy.kind} decoding takes back tokens that it tried; {state.model.name} cannot, "
            f"it keeps {what}: use_cache = false reads everything again instead"
        )


def _finite(state: LaneState, logprobs: Tensor) -> None:
    if bool(logprobs.amax(-1).isnan().any()):
        raise _damaged(state)


def _damage(state: LaneState, logprobs: Tensor) -> ModelError | None:
    """The error of NaN logits, if there are any."""
    return _damaged(state) if not state.tolerant and bool(logprobs.isnan().any()) else None


def _damaged(state: LaneState) -> ModelError:
    return ModelError(f"the model's logits are not finite at step {state.step}: its weights or activations are damaged")


def _check(state: LaneState, facts: Facts, best: list[list[float]] | None) -> None:
    """Raises ModelError where the model's numbers are none, UsageError where the processors left nothing to choose."""
    if not state.tolerant and math.isnan(sum(map(sum, facts.logprobs))):
        raise _damaged(state)
    if best is not None:
        tracing.judge(best, state.lane.processors)
