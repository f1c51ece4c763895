"""Guarantees of the loop for every strategy: one prefill a prompt, true log-probabilities, no work for dead rows."""

from __future__ import annotations

import time

import pytest
import torch

from genctl import events
from genctl.decode.batch import Batch
from genctl.decode.lane import LaneState
from genctl.decode.loop import decode
from genctl.decode.stopping.row_text import RowText
from genctl.decode.types import Strategy
from genctl.models.text import Detokenizer
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests.decode.driver import PROMPTS, Case
from tests.tiny import tokenizer


@pytest.fixture(scope="module")
def case() -> Case:
    return Case("llama")


def test_lanes_with_one_prompt_share_one_prefill_and_one_forward_per_step(case: Case) -> None:
    lanes = [
        case.lane(PROMPTS[0], Sample(True), name="a", seed=1, eos=()),
        case.lane(PROMPTS[0], Sample(), name="b", eos=()),
        case.lane(PROMPTS[0], Sample(True, 3), name="c", seed=2, eos=()),
    ]
    before = case.forward.forwards
    found = case.stream(lanes, width=3)
    assert case.forward.forwards - before == 1 + 19  # a prefill, and a pass for each token but the last
    assert [event.shared for event in found if isinstance(event, events.Prefilled)] == [False, True, True]


def test_logprobs_are_the_models_own(case: Case) -> None:
    finished = next(e for e in case.stream([case.lane(PROMPTS[0])]) if isinstance(e, events.Finished))
    tokens = finished.hypotheses[0].tokens
    ids = torch.tensor([[*PROMPTS[0], *tokens]])
    with torch.no_grad():
        logprobs = case.model(ids).logits.log_softmax(-1)[0]
    start = len(PROMPTS[0]) - 1
    expected = sum(float(logprobs[start + i, token]) for i, token in enumerate(tokens))
    assert finished.hypotheses[0].logprob == pytest.approx(expected, abs=1e-3)


def test_reported_ranks_entropies_and_alternatives_are_those_of_the_distribution(case: Case) -> None:
    steps = [
        e
        for e in case.stream([case.lane(PROMPTS[0], top=3, scores=True, max_new_tokens=2)])
        if isinstance(e, events.Stepped)
    ]
    token = steps[0].rows[0].written[0]
    with torch.no_grad():
        logprobs = case.model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    assert token.rank == 1
    assert [i for i, _, _ in token.top] == logprobs.topk(3).indices.tolist()
    assert token.entropy == pytest.approx(float(-(logprobs.exp() * logprobs).sum()), abs=1e-4)
    assert token.logprob == pytest.approx(float(logprobs.max()), abs=1e-4)


@pytest.mark.parametrize("strategy", [Sample(), Sample(True, 3), Beam(4, n=4)])
def test_texts_are_made_beside_the_tokens_and_alternatives_are_named(case: Case, strategy: Strategy) -> None:
    words = Detokenizer(tokenizer())
    named = case.stream([case.lane(PROMPTS[0], strategy, top=2, watch=(70,), text=RowText(words))])
    bare = case.stream([case.lane(PROMPTS[0], strategy, top=2, watch=(70,))])
    for one, other in zip(named, bare, strict=True):
        if isinstance(one, events.Stepped) and isinstance(other, events.Stepped):
            for row, same in zip(one.children, other.children, strict=True):
                for token, plain in zip(row.written, same.written, strict=True):
                    assert (token.id, token.logprob, plain.text) == (plain.id, plain.logprob, "")
                    assert token.top == tuple((id, words.piece(id), value) for id, _, value in plain.top)
                    assert [name for _, name, *_ in token.watched] == [words.piece(70)]
            for end in one.ended:
                assert end.hypothesis.text == words.decode(end.hypothesis.tokens)
    finished = named[-1]
    assert isinstance(finished, events.Finished)
    assert [one.text for one in finished.hypotheses] == [words.decode(one.tokens) for one in finished.hypotheses]
    assert any(one.text for one in finished.hypotheses)


def test_a_lane_that_may_grow_beyond_the_bound_joins_only_lanes_of_its_own_length(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case.forward, "bound", 20)

    def state(length: int, new: int) -> LaneState:
        lane = case.lane(range(5, 5 + length), max_new_tokens=new)
        return LaneState(lane, case.forward.prefill(lane.tokens, None), case.forward, time.perf_counter, 0.0, 1)

    short, long = Batch(case.forward), Batch(case.forward)
    for one in (state(5, 8), state(7, 8)):
        assert short.accepts(one)
        short.states.append(one)
    assert short.accepts(state(6, 8))
    assert not short.accepts(state(5, 40))  # as long as one of its lanes, but not as the other
    long.states.append(state(5, 40))
    assert long.accepts(state(5, 40))
    assert not long.accepts(state(7, 8))


def test_an_interrupt_ends_live_rows_with_that_reason_and_begins_no_other(case: Case) -> None:
    steps = 0

    def interrupted() -> str:
        return "interrupted" if steps >= 3 else ""

    found = []
    lanes = [case.lane(PROMPTS[i % 3], name=str(i), eos=()) for i in range(6)]
    for event in decode(case.forward, lanes, width=2, interrupted=interrupted):
        steps += isinstance(event, events.Stepped)
        found.append(event)
    ends = {e.lane: e.hypotheses[0].reason for e in found if isinstance(e, events.Finished)}
    assert ends == {"0": "interrupted", "1": "interrupted"}
