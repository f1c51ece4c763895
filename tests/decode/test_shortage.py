"""When memory runs out: fewer lanes at once, the same results, and only what does not fit alone fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode import choose
from genctl.decode.loop import decode
from genctl.decode.prefix_cache import KeptTexts
from genctl.decode.runtime import ModelRuntime, Pass
from genctl.decode.score import ModelScores
from genctl.decode.types import Lane
from genctl.errors import is_shortage
from genctl.strategies.beam import Beam
from genctl.strategies.contrast import Contrastive
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests import runtimes
from tests.decode.driver import PROMPTS, Case
from tests.tiny import SEQ2SEQ, tiny


class Small(TransformersRuntime):
    """A model on a device whose memory bounds the `rows` of a pass, and its `tokens` in all rows."""

    def __init__(self, model: Any, rows: int, *, tokens: int = 10**9, error: str = "") -> None:
        super().__init__(model)
        self.most, self.tokens = rows, tokens
        self.error = error

    def __call__(self, given: Pass) -> Any:
        if len(given.feed) > self.most or given.feed.numel() > self.tokens:
            super().__call__(given)  # half done: some layers have appended already
            raise RuntimeError(self.error) if self.error else torch.OutOfMemoryError("CUDA out of memory. Tried to …")
        return super().__call__(given)


def lanes(double: bool) -> list[Lane]:
    strategies = [Sample(), Beam(2), Sample(True, 2), Sample(), Beam(3), Sample(True)]
    found = []
    for number, strategy in enumerate(strategies):
        ids = tuple(range(5 + number, 12 + 3 * number))
        tokens, source = ((2,), ids) if double else (ids, None)
        found.append(
            Lane(str(number), tokens, strategy, 9 + number, source=source, seed=number, returned=strategy.max_rows)
        )
    return found


def results(forward: ModelRuntime, width: int, given: list[Lane]) -> tuple[dict[str, Any], list[int]]:
    told: list[int] = []
    found: dict[str, Any] = {}
    steps: dict[str, list[int]] = {}
    for event in decode(forward, given, width=width, on_shortage=told.append):
        if isinstance(event, events.Finished):
            found[event.lane] = [h.tokens for h in event.hypotheses]
        elif isinstance(event, events.Failed):
            found[event.lane] = (event.code, event.message)
        elif isinstance(event, events.Stepped):
            steps.setdefault(event.lane, []).append(event.step)
    for made in steps.values():
        assert made == list(range(len(made)))  # no step is reported twice, and none is missing
    return found, told


@pytest.mark.parametrize("arch", ["gpt2", "llama", "mistral", "mamba", "jamba", *SEQ2SEQ])
def test_lanes_step_back_and_go_on_with_the_same_tokens(arch: str) -> None:
    model = tiny(arch)
    given = lanes(arch in SEQ2SEQ)
    wanted, told = results(runtimes.forward(model), 6, given)
    assert not told
    found, told = results(Small(model, 5), 6, given)
    assert found == wanted
    assert told
    assert all(width < 6 for width in told)


def test_kept_texts_make_room_when_memory_runs_out() -> None:
    """Regression: the caches of earlier texts stayed, however little memory was left."""
    small, texts = Small(tiny("llama"), 1), KeptTexts()
    texts.keep(small.prefill(PROMPTS[1], None))
    assert texts.bytes > 0
    lane = Lane("a", tuple(PROMPTS[0]), Sample(True, 2), 3, returned=2)  # two rows do not fit
    (failed,) = [event for event in decode(small, [lane], texts=texts) if isinstance(event, events.Failed)]
    assert (failed.code, texts.bytes) == ("memory", 0)


class SometimesFull(TransformersRuntime):
    """A model on a device whose memory is short now and then, in passes over more than three rows."""

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__(model)
        self.generator, self.shortages = torch.Generator().manual_seed(seed), 0

    def __call__(self, given: Pass) -> Any:
        if len(given.feed) > 3 and float(torch.rand((), generator=self.generator)) < 0.2:
            self.shortages += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(given)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("arch", ["llama", "gpt2", "t5"])
def test_beams_that_step_back_join_running_rows_again_with_the_rows_that_they_had(arch: str, seed: int) -> None:
    double = arch in SEQ2SEQ
    given = []
    for number in range(10):
        ids = tuple(range(5 + number, 9 + 2 * number))
        strategy = Beam(2 + number % 2) if number % 3 else Sample()
        tokens, source = ((2,), ids) if double else (ids, None)
        more = {"source": source, "seed": number, "returned": strategy.max_rows}
        given.append(Lane(str(number), tokens, strategy, 8 + 3 * (number % 4), **more))
    wanted, _ = results(runtimes.forward(tiny(arch)), 1, given)
    scarce = SometimesFull(tiny(arch), seed)
    found, told = results(scarce, 6, given)
    assert told
    assert found == wanted


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_lanes_that_wait_while_the_choice_of_others_runs_out_of_memory_write_the_same(
    arch: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows are read again without the newest token, so they must not choose from their old scores."""
    kinds = [Sample(), Sample(True), Sample(True, sampler="counter")]  # neighbours of a kind choose together
    given = [
        Lane(str(number), tuple(range(5, 9 + number)), strategy, 12 + number % 5, seed=number, returned=strategy.n)
        for number, strategy in enumerate(kind for kind in kinds for _ in range(6))
    ]
    wanted, _ = results(runtimes.forward(tiny(arch)), 6, given)
    generator, shortages, right = torch.Generator().manual_seed(seed), [], choose.score

    def scarce(processors: Any, text: Any, draft: Any, model: ModelScores, *rest: Any, **named: Any) -> Any:
        if len(model.logits) > 2 and float(torch.rand((), generator=generator)) < 0.15:
            shortages.append(len(model.logits))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(processors, text, draft, model, *rest, **named)

    monkeypatch.setattr(choose, "score", scarce)
    found, told = results(runtimes.forward(tiny(arch)), 16, given)
    assert shortages
    assert told
    assert found == wanted


def test_a_search_that_runs_out_of_memory_within_its_choice_is_the_one_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [
        Lane(str(place), (5, 6, 7 + place), kind, 9, returned=1)
        for place, kind in enumerate([Sample(), Sample(True), Beam(3), Sample(True)])
    ]
    wanted, _ = results(runtimes.forward(tiny("llama")), 4, given)
    right = choose.score

    def scarce(processors: Any, text: Any, draft: Any, model: ModelScores, *rest: Any, **named: Any) -> Any:
        if len(model.logits) == 3:  # of the beam
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(processors, text, draft, model, *rest, **named)

    monkeypatch.setattr(choose, "score", scarce)
    found, _ = results(runtimes.forward(tiny("llama")), 4, given)
    assert found.pop("2")[0] == "memory"
    assert found == {lane: tokens for lane, tokens in wanted.items() if lane != "2"}


def test_only_what_does_not_fit_alone_fails() -> None:
    model = tiny("gpt2")
    given = lanes(False)
    wanted, _ = results(runtimes.forward(model), 1, given)
    found, told = results(Small(model, 2), 6, given)
    code, message = found.pop("4")  # a beam of three rows
    assert code == "memory"
    assert "3 rows" in message
    assert found == {name: tokens for name, tokens in wanted.items() if name != "4"}
    assert told[-1] == 1


def test_a_prompt_that_does_not_fit_waits_for_the_others_before_it_fails() -> None:
    model = tiny("llama")
    given = [Lane(str(count), tuple(range(5, 5 + count)), Sample(), 5) for count in (4, 17, 9, 6)]
    wanted, _ = results(runtimes.forward(model), 1, given)
    found, told = results(Small(model, 100, tokens=16), 3, given)
    assert next(iter(found)) == "4"
    assert told == [1]
    assert found.pop("17")[0] == "memory"
    wanted.pop("17")
    assert found == wanted


def test_other_errors_are_not_taken_for_a_shortage() -> None:
    assert is_shortage(MemoryError())
    assert is_shortage(torch.OutOfMemoryError("x"))
    assert is_shortage(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8")
    )
    assert not is_shortage(RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="broken"):
        results(Small(tiny("gpt2"), 1, error="broken"), 4, lanes(False))


def test_a_shortage_while_scores_are_put_together_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contrastive search copies earlier scores together with its candidates': that, too, may not fit."""
    made, calls = ModelScores.followed_by, []

    def scarce(self: ModelScores, other: ModelScores) -> ModelScores:
        calls.append(self)
        if len(calls) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(self, other)

    monkeypatch.setattr(ModelScores, "followed_by", scarce)
    case = Case("llama")
    *_, last = decode(case.forward, [case.lane(PROMPTS[0], Contrastive(3, 0.5), max_new_tokens=8)])
    assert isinstance(last, events.Failed)
    assert last.code == "memory"
