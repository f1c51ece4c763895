"""A pass that begins before the host knows its input: every event is the same as without that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from genctl import events
from genctl.decode import score, transfer
from genctl.decode.loop import decode
from genctl.decode.processors import filters
from genctl.decode.processors.build import ProcessorContext, build
from genctl.decode.runtime import ModelRuntime, Output, Pass
from genctl.decode.stopping import Stop, Written
from genctl.decode.types import Lane
from genctl.errors import ModelError
from genctl.native import graphs
from genctl.native.runtime import NativeRuntime
from genctl.params import Generation
from genctl.strategies.assisted import Assisted
from genctl.strategies.beam import Beam
from genctl.strategies.drafters import PromptLookup
from genctl.strategies.factory import choose
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.decode.driver import Case
from tests.tiny import tiny

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    {"do_sample": True, "sampler": "counter", "num_return_sequences": 3},
    {"no_repeat_ngram_size": 2},
)
PLAIN = [1, 2, 0, 3, 4, 1]  # places in WAYS


def after_a_third(written: Written) -> Stop | None:
    """A row ends where its last tokens say so, which only the host reads."""
    return Stop("stop", "a third") if sum(written.tail(2)) % 3 == 0 and written.count > 4 else None


def lanes(case: Case, ways: Sequence[int], **fields: Any) -> list[Lane]:
    found = []
    for number, way in enumerate(ways):
        generation = Generation(**WAYS[way])
        prompt = tuple(5 + (number + 7 * place) % 190 for place in range(4 + number % 5))
        new = 9 + number % 4
        material = ProcessorContext(generation, len(prompt), len(prompt) + new, case.forward.vocab_size)
        given: dict[str, Any] = {
            "processors": build(material), "seed": number, "max_new_tokens": new,
            "returned": generation.num_return_sequences, **fields,
        }  # fmt: skip
        found.append(case.lane(prompt, choose(generation), str(number), **given))
    return found


def told(case: Case, given: list[Lane], width: int, *, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events of each lane, without times."""
    with monkeypatch.context() as patch:
        patch.setattr(ModelRuntime, "runs_ahead", ahead)
        found = list(decode(case.forward, given, width=width))
    timeless = []
    for event in found:
        if isinstance(event, events.Finished):
            event = replace(event, seconds=0.0, first_token_s=0.0)
        elif isinstance(event, events.Prefilled):
            event = replace(event, seconds=0.0)
        timeless.append(event)
    return timeless


def tokens_of(found: list[Any]) -> list[Any]:
    return sorted(
        (event.lane, [h.tokens for h in event.hypotheses]) for event in found if isinstance(event, events.Finished)
    )


@pytest.mark.parametrize("criteria", [(), (after_a_third,)], ids=["eos", "stop"])
@pytest.mark.parametrize("width", [1, 3, 6])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "mistral", "mamba", "bart"])
def test_the_events_are_the_same(arch: str, width: int, criteria: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(arch)
    given = lanes(case, PLAIN, criteria=criteria, scores=True, top=2)
    if arch != "mamba":
        given.insert(2, case.lane((7, 8, 9, 7, 8), Beam(2), "beams", max_new_tokens=8))
        given.insert(5, case.lane((7, 8, 9, 7, 8), Assisted(PromptLookup(2)), "draft", max_new_tokens=8))
    wanted = told(case, given, width, ahead=False, monkeypatch=monkeypatch)
    found = told(case, given, width, ahead=True, monkeypatch=monkeypatch)
    if arch == "mamba":  # a row's last digits depend on the others of its pass, and a row that has ended is still in it
        wanted, found = tokens_of(wanted), tokens_of(found)
    assert found == wanted


def test_a_row_that_has_ended_costs_one_pass_and_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama")
    given = [
        case.lane((5, 6, 7 + number), Sample(), str(number), max_new_tokens=12, criteria=(ends_at(3 + number),))
        for number in range(3)
    ]
    fed: list[int] = []
    plain = type(case.forward).__call__

    def noted(self: Any, pass_: Pass) -> Output:
        fed.append(len(pass_.feed))
        return plain(self, pass_)

    monkeypatch.setattr(type(case.forward), "__call__", noted)
    told(case, given, 3, ahead=True, monkeypatch=monkeypatch)
    # the prompts; the first tokens; the second ones, ahead; the third, of which one row ended, and so on
    assert fed == [3, 3, 3, 3, 2, 1]


def ends_at(count: int) -> Any:
    return lambda written: Stop("stop", "enough") if written.count == count else None


def test_a_pass_begins_before_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    case, order = Case("llama"), []
    plain, wait = type(case.forward).__call__, transfer.PendingCopy.wait

    def passed(self: Any, given: Pass) -> Output:
        order.append("pass")
        return plain(self, given)

    def waited(self: transfer.PendingCopy) -> Any:
        order.append("wait")
        return wait(self)

    monkeypatch.setattr(type(case.forward), "__call__", passed)
    monkeypatch.setattr(transfer.PendingCopy, "wait", waited)
    told(case, [case.lane((5, 6, 7), Sample(), max_new_tokens=6)], 1, ahead=True, monkeypatch=monkeypatch)
    # the prompt; the first choice, whose row joins the batch; then a pass before each wait, and none after the last
    assert order == ["pass", "wait", "pass", *["pass", "wait"] * 4, "wait"]


@pytest.mark.parametrize("error", [ModelError("it broke"), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_was_chosen_is_told_before_a_pass_that_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    case, passes = Case("gpt2"), 0
    plain = type(case.forward).__call__

    def fails(self: Any, given: Pass) -> Output:
        nonlocal passes
        passes += 1
        output = plain(self, given)
        if passes == 5:  # after it has appended a column
            raise error
        return output

    given = lanes(case, [1, 0])
    wanted = told(case, given, 2, ahead=False, monkeypatch=monkeypatch)
    monkeypatch.setattr(type(case.forward), "__call__", fails)
    runs = []
    for ahead in (False, True):
        passes = 0
        runs.append(told(case, given, 2, ahead=ahead, monkeypatch=monkeypatch))
    if isinstance(error, ModelError):
        assert runs[1] == runs[0]
        assert {type(event) for event in runs[0][-2:]} == {events.Failed}
    else:
        assert [tokens_of(run) for run in runs] == [tokens_of(wanted)] * 2


def test_an_interrupted_run_has_told_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama")
    given = lanes(case, [1, 0, 2])
    runs = []
    for ahead in (False, True):
        monkeypatch.setattr(ModelRuntime, "runs_ahead", ahead)
        count, tokens = 0, []

        def asked() -> str:
            nonlocal count
            count += 1
            return "interrupted" if count == 6 else ""

        for event in decode(case.forward, given, width=3, interrupted=asked):
            if isinstance(event, events.Finished):
                tokens.append([(h.tokens, h.reason) for h in event.hypotheses])
        runs.append(tokens)
    assert runs[0] == runs[1]
    assert {reason for row in runs[0] for _, reason in row} == {"interrupted"}


class Launches(TorchDispatchMode):
    """Counts the operations that a device would receive."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("knobs", "most"),
    [
        ({}, 24),
        ({"do_sample": True, "sampler": "counter", "top_k": 0, "top_p": 0.9}, 220),
        ({"do_sample": True, "top_k": 20, "temperature": 0.7, "sampler": "inverse-cdf"}, 60),
        ({"bad_words_ids": [[7]], "repetition_penalty": 1.2, "no_repeat_ngram_size": 2}, 60),
    ],
    ids=["greedy", "counter, top-p", "top-k", "penalties"],
)
def test_what_a_step_launches_does_not_grow_with_its_rows(
    knobs: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (transfer, filters, score):
        monkeypatch.setattr(module, "on_host", lambda *tensors: False)
    monkeypatch.setattr(ModelRuntime, "runs_ahead", True)
    forward = NativeRuntime(runtimes.native(tiny("llama")).model, graphs=True)
    aside = Launches()
    compute = graphs._FixedStep.compute  # what is in the graph

    def outside(self: Any, *given: Any) -> Any:
        count = len(aside.names)
        try:
            return compute(self, *given)
        finally:
            del aside.names[count:]

    monkeypatch.setattr(graphs._FixedStep, "compute", outside)
    generation, counts = Generation(**knobs), []
    for rows in (2, 40):
        given = []
        for number in range(rows):
            prompt = tuple(5 + (number + place) % 90 for place in range(4 + number % 2))
            material = ProcessorContext(generation, len(prompt), len(prompt) + 12, forward.vocab_size)
            given.append(Lane(str(number), prompt, choose(generation), 12, processors=build(material), seed=number))
        steps: list[int] = []
        with aside:
            for event in decode(forward, given, width=rows):
                if isinstance(event, events.Stepped) and event.lane == "0":
                    steps.append(len(aside.names))
        between = [after - before for before, after in pairwise(steps)]
        counts.append(between[4:9])  # the first have the prompts, the last runs no pass
    draws = 40 - 2 if knobs.get("sampler") == "inverse-cdf" else 0  # each row draws its own number
    assert {count + draws for count in counts[0]} == {*counts[1]}
    assert max(counts[1]) <= most + draws
