"""What a step fetches from another device: the same numbers, with as few waits as possible.

There is no other device here, so the CPU stands in for one: only the one fetch may read values of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode import transfer
from genctl.decode.loop import decode
from genctl.decode.processors import filters
from genctl.decode.processors.build import ProcessorContext, build
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane
from genctl.params import Generation
from genctl.strategies.factory import choose
from genctl.transformers.runtime import TransformersRuntime
from tests.decode.driver import NEW, PROMPTS, Case

READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "sample": {"do_sample": True, "top_k": 0},
    "filters": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "inverse-cdf": {"do_sample": True, "top_k": 0, "sampler": "inverse-cdf"},
    "beam": {"num_beams": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "beam-sample": {"num_beams": 3, "do_sample": True},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
}


@pytest.fixture(scope="module")
def case() -> Case:
    made = Case("gpt2")
    made.forward = TransformersRuntime(made.model)  # whose passes are counted
    return made


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (transfer, filters):
        monkeypatch.setattr(module, "on_host", lambda *tensors: False)
    monkeypatch.setattr(ModelRuntime, "runs_ahead", True)


def lane(case: Case, way: str, name: str = "0", new: int = NEW, **fields: Any) -> Lane:
    generation = Generation(**WAYS[way])
    prompt = PROMPTS[int(name)]
    material = ProcessorContext(generation, len(prompt), len(prompt) + new, case.forward.vocab_size)
    return Lane(name, prompt, choose(generation), new, processors=build(material), seed=5, **fields)


@contextmanager
def counted(
    monkeypatch: pytest.MonkeyPatch, excuse: Sequence[str] = ("__call__", "prefill", "prefill_together")
) -> Iterator[list[str]]:
    """The waits within this context, except those in the excused methods of `TransformersRuntime`."""
    waits: list[str] = []
    aside = 0

    def excused(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal aside
            aside += 1
            try:
                return function(*args, **kwargs)
            finally:
                aside -= 1

        return call

    def noted(name: str) -> Callable[..., Any]:
        plain = getattr(torch.Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not aside:
                waits.append(name)
            return excused(plain)(*args, **kwargs)

        return call

    wait = transfer.PendingCopy.wait

    def waited(pending: transfer.PendingCopy) -> Any:
        if any(pending.groups):
            waits.append("fetch")
        return excused(wait)(pending)

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, noted(name))
        patch.setattr(transfer.PendingCopy, "wait", waited)
        for name in excuse:
            patch.setattr(TransformersRuntime, name, excused(getattr(TransformersRuntime, name)))
        yield waits


@pytest.mark.parametrize("way", WAYS)
def test_another_device_writes_the_same(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = [lane(case, way, str(number), scores=True, top=3) for number in range(3)]
    expected = [event for event in case.stream(lanes, width=3) if isinstance(event, events.Finished)]
    for module in (transfer, filters):
        monkeypatch.setattr(module, "on_host", lambda *tensors: False)
    found = [event for event in case.stream(lanes, width=3) if isinstance(event, events.Finished)]
    for one, other in zip(expected, found, strict=True):
        for hypothesis, again in zip(one.hypotheses, other.hypotheses, strict=True):
            assert hypothesis.tokens == again.tokens
            assert hypothesis.logprob == pytest.approx(again.logprob, abs=1e-4)


@pytest.mark.parametrize("way", ["greedy", "penalty", "sample", "filters", "inverse-cdf", "beam"])
@pytest.mark.usefixtures("away")
def test_a_step_waits_for_the_device_once(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as waits:
        stepped = [event for event in case.stream([lane(case, way)]) if isinstance(event, events.Stepped)]
    steps = len(stepped)
    assert steps > 5
    assert waits == ["fetch"] * len(waits)
    assert len(waits) <= steps


@pytest.mark.parametrize("arch", ["gpt2", "llama", "qwen2", "t5"])
@pytest.mark.usefixtures("away")
def test_a_padded_step_of_the_model_waits_for_nothing(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Case(arch)
    lanes = [other.lane(prompt, choose(Generation()), name=str(number)) for number, prompt in enumerate(PROMPTS[:3])]
    wanted = [event for event in other.stream(lanes, width=1) if isinstance(event, events.Finished)]
    with counted(monkeypatch, excuse=("prefill", "prefill_together", "encode")) as waits:
        found = [event for event in other.stream(lanes, width=3) if isinstance(event, events.Finished)]
    assert waits == ["fetch"] * len(waits)
    tokens = [{event.lane: event.hypotheses[0].tokens for event in told} for told in (wanted, found)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("way", ["greedy", "filters", "inverse-cdf", "beam"])
@pytest.mark.usefixtures("away")
def test_damaged_logits_are_told_before_anything_is_written(
    case: Case, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TransformersRuntime.__call__

    def damaged(self: TransformersRuntime, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits[..., 7] = math.nan
        return output

    monkeypatch.setattr(TransformersRuntime, "__call__", damaged)
    told = list(decode(case.forward, [lane(case, way)]))
    assert "not finite at step" in told[-1].message  # type: ignore[union-attr]
    assert all(not event.rows for event in told if isinstance(event, events.Stepped) and event.step > 1)


@pytest.mark.usefixtures("away")
def test_what_is_fetched_keeps_its_shape_and_its_kind() -> None:
    whole, real = torch.tensor([[1, 2], [3, 16_777_217]]), torch.tensor([0.1, -math.inf])
    nothing, flags = torch.empty(3, 0, dtype=torch.long), torch.tensor([True, False])
    assert transfer.fetch([[whole, real], [], [nothing, flags]]) == [
        [[[1, 2], [3, 16_777_217]], [pytest.approx(0.1), -math.inf]],
        [],
        [[[], [], []], [True, False]],
    ]
