"""Score and choose: the processors change the model's scores, and the strategies choose the next tokens from them.

Adjacent lanes with equal knobs and independent rows choose together: one call of the processors, one argmax, and a draw
from each lane's own generator. Each gets the tokens that it would choose alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genctl import events
from genctl.decode.commit import Facts, commit, finish, first_stop
from genctl.decode.lane import LaneState, OutOfMemory, padded, raise_shortage, too_large
from genctl.decode.score import ModelScores, ProcessedScores, Stages, counted, damaged, score, score_at
from genctl.decode.transfer import fetch
from genctl.decode.types import Choice, Context, Lane, RowsOfLane, Scores
from genctl.errors import ContractError, GenctlError, ModelError, is_shortage
from genctl.kernels.ops import entropy, log_softmax

if TYPE_CHECKING:
    from genctl.decode.processors import Processor


@dataclass(eq=False)
class LanesChosen:
    """The choice of one lane, or of several together, and the tensors to copy to the host.

    Without a choice, `why` is the lane's error, or None if its search has returned. It is OutOfMemory if the choice did
    not fit; the lanes after this one then do not choose.
    """

    states: list[LaneState]
    counts: Sequence[int] = ()  # candidates of each lane
    choice: Choice | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the fields of `Facts`
    stages: Stages = field(default_factory=list)
    why: GenctlError | OutOfMemory | None = None

    @property
    def questions(self) -> list[Tensor]:
        """The tensors to copy to the host."""
        return [*self.tensors.values()]

    @property
    def next_tokens(self) -> Tensor | None:
        """The token to feed to each row next, int64 [C], if every row lives on; None if more than that is needed."""
        first = self.states[0]
        together = len(self.states) > 1 or (first.mode.independent is not None and first.drafts is None)
        return self.choice.tokens if self.choice is not None and together else None

    def commit(self, answers: list[Any], interrupted: str) -> Iterator[events.Event]:
        """Commit the choice; `answers` are the numbers of `questions`, on the host.

        Without a choice: Finished, or Failed. Raises OutOfMemory if the choice did not fit.
        """
        if isinstance(self.why, OutOfMemory):
            raise self.why
        if self.choice is None:
            yield finish(self.states[0]) if self.why is None else self.states[0].fail(self.why)
            return
        traced: list[list[tuple[events.Trace, ...]]] = []  # the effect of each processor on each candidate, [m][C]
        if self.stages:
            from genctl.decode.processors.trace import traces

            steps = zip(self.stages, self.tensors["tokens"].unbind(1), strict=False)
            traced = [traces(stage, self.choice.rows, written) for stage, written in steps]
        facts = Facts(**dict(zip(self.tensors, answers, strict=True)), traces=traced)
        # if all numbers are finite, nothing is left to check
        sound = math.isfinite(sum(map(sum, [*facts.logprobs, *(facts.best or ())])))
        at = 0
        for state, count in zip(self.states, self.counts, strict=True):
            own = range(at, at := at + count)
            committed: Iterable[events.Event] = commit(state, self.choice, facts, own, interrupted)
            try:
                if not sound:
                    committed = self._checked(state, facts, own, committed)
                yield from committed
            except GenctlError as error:
                yield state.fail(error)

    def _checked(
        self, state: LaneState, facts: Facts, own: range, committed: Iterable[events.Event]
    ) -> Iterable[events.Event]:
        """`committed`, unless the lane's scores are NaN or leave no token. Raises UsageError or ModelError."""
        if not state.mode.tolerant and math.isnan(sum(map(sum, facts.logprobs[own.start : own.stop]))):
            raise damaged(f"at step {state.step}")
        if facts.best is None:
            return committed
        best = facts.best if len(self.states) == 1 else [facts.best[0][own.start : own.stop]]
        if state.proposed is not None:  # do not check scores after the end of the row
            committed = [*committed]
            best = best[: sum(one.new_tokens for one in committed if isinstance(one, events.Stepped))]
        _check_choosable(best, state.lane.processors)
        return committed


def choose(states: Sequence[LaneState]) -> list[LanesChosen]:
    """The choices of all lanes that have scores."""
    choices: list[LanesChosen] = []
    for group in _groups([state for state in states if state.scores is not None]):
        try:
            choices += _together(group) if len(group) > 1 else [_alone(group[0])]
        except OutOfMemory as error:
            choices.append(LanesChosen(group[:1], why=error.without_frames()))
            break
    return choices


def _groups(states: Sequence[LaneState]) -> list[list[LaneState]]:
    """Lanes that choose together: neighbours in one pass with equal knobs."""
    groups: list[list[LaneState]] = []
    for state in states:
        group = groups[-1] if groups else []
        key = state.mode.key if state.draft is None and (state.mode.drafting is None or state.drafts) else None
        apart = group and (state.scores is not group[0].scores or state.place.start != group[-1].place.stop)
        if not group or key is None or key != group[0].mode.key or apart:
            groups.append([state])
        else:
            group.append(state)
    return groups


def _together(states: list[LaneState]) -> list[LanesChosen]:
    """One choice for lanes whose rows are independent."""
    first, model = states[0], states[0].scores
    lane, strategy = first.lane, first.mode.independent
    assert model is not None
    assert strategy is not None
    place = slice(first.place.start, states[-1].place.stop)
    if place.stop - place.start < model.logits.shape[0]:
        model = model.map(lambda tensor: tensor[place])
    try:
        text = padded(states, model.logits.shape[-1]) if first.mode.reads_rows else first.live.row_tokens
        scored = score(lane.processors, text, None, model, strategy.traits.space)
        tokens = strategy.tokens(scored.logits[:, 0], map(_rows_of, states), scored.left)
        rows = counted(tokens.shape[0], tokens.device)
        counts = [len(state.survivors) for state in states]
        return [_chosen(states, counts, Choice(rows, tokens), model, scored)]
    except (GenctlError, MemoryError, ValueError, RuntimeError, IndexError) as error:
        raise_shortage(error)
        return [_alone(state) for state in states]  # so that only the lane at fault fails


def _alone(state: LaneState) -> LanesChosen:
    """One lane's choice."""
    lane, traits, independent, model = state.lane, state.lane.strategy.traits, state.mode.independent, None
    try:
        scores = state.own_scores()
        if independent is None and (traits.reads_scores or not traits.drafts):
            _ = scores.logprobs  # compute them here: after a failure within a search the choice cannot be repeated
        model = scores
        _refuse(state)
        if state.mode.drafting is not None and state.drafts is None:
            state.drafts = state.mode.drafting.begin(_context(state))
        if traits.reads_scores and not state.mode.tolerant and bool(model.logprobs.amax(-1).isnan().any()):
            raise damaged(f"at step {state.step}")
        state.stages = []
        scored = score(lane.processors, state.live.row_tokens, state.draft, model, traits.space, trace=lane.trace)
        choice = _choice(state, model, scored)
        if state.stages:  # from `Context.process`
            scored = scored._replace(stages=state.stages)
        return _chosen([state], [choice.rows.shape[0]], choice, model, scored)
    except StopIteration:
        return LanesChosen([state])
    except ContractError:  # of a draft model
        raise
    except GenctlError as error:
        return LanesChosen([state], why=(model and _damage(state, model.logits)) or error)
    except (MemoryError, ValueError, RuntimeError, IndexError) as error:
        if independent is None and model is not None and is_shortage(error):  # the search cannot be repeated
            return LanesChosen([state], why=too_large(lane, state.row_count, error))
        raise_shortage(error)
        if model is None or (damage := _damage(state, model.logits)) is None:
            raise
        return LanesChosen([state], why=damage)


def _choice(state: LaneState, model: ModelScores, scored: ProcessedScores) -> Choice:
    """The accepted part of a draft and the token after it; or a token for each row; or the next choice of the search.

    Raises StopIteration if the search returns.
    """
    lane, logits, left = state.lane, scored.logits, scored.left
    if state.proposed is not None and state.mode.drafting is not None:
        row = torch.zeros(1, dtype=torch.long, device=logits.device)
        accepted, token = state.mode.drafting.verify(logits[0], state.proposed, _rows_of(state))
        note = f"{accepted} of {len(state.proposed.tokens)} drafts"
        return Choice(row, row.new_tensor([token]), accepted=accepted, notes=[note])
    if state.mode.independent is not None:
        rows, logits = _rows_of(state), logits[:, 0]
        count = len(rows.indices)
        index = counted(count, logits.device)
        if count != logits.shape[0]:  # the prompt's single row serves all
            logits, left, index = logits.expand(count, -1), left and left * count, torch.zeros_like(index)
        return Choice(index, state.mode.independent.tokens(logits, [rows], left))
    if lane.strategy.traits.reads_scores and scored.best is not None:
        [[best]] = fetch([[scored.best]])
        _check_choosable(best, lane.processors)
    state.scored = scored
    scores = Scores(state.live, model, logits, state.survivors, tuple(state.ended))
    if state.search is not None:
        return state.search.send(scores)
    state.search = lane.strategy.search(scores, _context(state))
    return next(state.search)


def _rows_of(state: LaneState) -> RowsOfLane:
    """A lane's rows for an independent strategy. Before the first choice, all of them continue the prompt's one row."""
    count = state.lane.strategy.max_rows
    indices = [index for index in state.live.indices if index is not None]
    return RowsOfLane(state.rng, indices or range(count), count, state.live.written)


def _context(state: LaneState) -> Context:
    """The context of a lane's search."""
    lane = state.lane

    def process(scores: Tensor) -> Tensor:
        """Apply the lane's processors to a search's own scores, f32 [N, V]."""
        scored = score(
            lane.processors, state.live.row_tokens, None, ModelScores(scores[:, None]), "logits", trace=lane.trace
        )
        state.stages = scored.stages
        if scored.best is not None and not lane.trace:
            _check_choosable(scored.best.tolist(), lane.processors)
        return scored.logits[:, 0]

    def rescore(place: int) -> bool:
        """Apply the processors again to the scores after `place` tokens of the draft; whether a token is left."""
        scored, model = state.scored, state.own_scores()
        assert scored is not None
        history = state.all_tokens()[:, : state.length + place]
        here, stage, _ = score_at(lane.processors, history, model.logits[:, place], trace=lane.trace)
        scored.logits[:, place] = here  # the reported scores are those that the token was chosen from
        scored.stages[place : place + 1] = stage
        return bool((here > -torch.inf).any())

    def ends(tokens: Sequence[int]) -> bool:
        """Whether the row would end with the last of these tokens if they were written."""
        text, logprob = state.live.texts[0].fork(), state.live.logprobs[0]
        logprobs = state.own_scores().logprobs[0] if lane.criteria else None
        for place, token in enumerate(tokens):
            text.push(token)
            logprob += 0.0 if logprobs is None else float(logprobs[place, token])
        return first_stop(state, 0, [*tokens], logprob, text) is not None

    return Context(
        state.prefix, state.rng, lane.eos, lane.max_new_tokens, state.model, lane.processors, process, rescore, ends
    )


def _chosen(
    states: list[LaneState], counts: list[int], choice: Choice, model: ModelScores, scored: ProcessedScores
) -> LanesChosen:
    """The choice, with the tensors that the host needs to commit it."""
    lane, draft = states[0].lane, states[0].draft
    parts = [] if draft is None or not choice.accepted else [draft.flatten(0, 1)[choice.rows, : choice.accepted]]
    if choice.tokens is not None:
        parts.append(choice.tokens[:, None])
    if not parts:
        parts = [choice.rows.new_empty(choice.rows.shape[0], 0)]
    written = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    tensors = {"rows": choice.rows, "tokens": written, "logprobs": model.logprobs_of(choice.rows, written)}
    if scored.best is not None:
        tensors["best"] = scored.best
    if choice.totals is not None:
        tensors["totals"] = choice.totals
    if choice.pruning is not None and choice.pruning.may_finish is not None:
        tensors["may_finish"] = choice.pruning.may_finish
    if lane.explains:
        tensors |= _figures(lane, model.logprobs, scored.logits, choice.rows[:, None], written)
    return LanesChosen(states, counts, choice, tensors, scored.stages)


def _figures(lane: Lane, logprobs: Tensor, scores: Tensor, rows: Tensor, written: Tensor) -> dict[str, Tensor]:
    """Statistics of tokens int64 [C, m] after rows [C, 1]: rank, entropy, the best and the watched ids; and the
    log-probability by the processed `scores`, NaN for a search that computes its own scores.
    """
    places = rows, counted(written.shape[1], written.device)
    here = logprobs[places]  # [C, m, V]
    chosen = here.gather(2, written[..., None])
    best = here.topk(min(lane.top, here.shape[2]), -1)
    figures = {"ranks": (here > chosen).sum(-1) + 1, "entropies": entropy(here)}
    figures |= {"top_logprobs": best.values, "top_ids": best.indices}
    if lane.watch:
        own = here[..., list(lane.watch)]
        # one watched id at a time: W times less memory
        ranks = [(here > logprob[..., None]).sum(-1) + 1 for logprob in own.unbind(-1)]
        figures |= {"watched_logprobs": own, "watched_ranks": torch.stack(ranks, -1)}
    if lane.processed and lane.strategy.traits.space == "raw":
        figures["processed"] = scores.new_full(written.shape, torch.nan)
    elif lane.processed:
        figures["processed"] = log_softmax(scores[places]).gather(2, written[..., None])[..., 0]
    return figures


def _refuse(state: LaneState) -> None:
    """Raises ModelError, before the first choice, for a strategy that drafts if the model cannot verify or reject."""
    strategy, cache = state.lane.strategy, state.prefix.cache
    if state.search is not None or state.drafts is not None or not strategy.traits.drafts:
        return
    if cache is not None and not cache.is_croppable:
        state_kind = "recurrent states" if cache.is_recurrent else "states that cannot be cropped"
        raise ModelError(
            f"{strategy.kind} decoding takes back tokens that it tried; {state.model.name} cannot, "
            f"it keeps {state_kind}: use_cache = false reads everything again instead"
        )
    if not state.model.abilities.reads_several(cache is not None):
        raise ModelError(
            f"{strategy.kind} decoding checks several tokens in one pass; {state.model.name} computes other numbers "
            "for them than for one at a time, so the text would not be the model's own"
        )


def _damage(state: LaneState, logits: Tensor) -> ModelError | None:
    """The error for NaN logits, if there are any and the lane does not accept them."""
    nan = not state.mode.tolerant and bool(logits.log_softmax(-1).isnan().any())
    return damaged(f"at step {state.step}") if nan else None


def _check_choosable(best: Sequence[Sequence[float]], processors: Sequence[Processor]) -> None:
    """Check the best score of each row after the processors. Raises UsageError or ModelError."""
    from genctl.decode.processors.build import check_choosable

    check_choosable(best, processors)
