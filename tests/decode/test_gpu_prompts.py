"""Prompts on a GPU: those that begin at once are read in one pass, a long one in between the steps of others.

The GPU is a fake one (`fake_cuda`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode import prefix_cache
from genctl.decode.cache.cache import RowOfPass
from genctl.decode.loop import decode
from genctl.decode.runtime import Pass
from genctl.decode.types import Lane
from genctl.native.runtime import NativeRuntime
from genctl.strategies.assisted import Assisted
from genctl.strategies.beam import Beam
from genctl.strategies.drafters import PromptLookup
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.fake_cuda import fake_gpu
from tests.tiny import tiny

KINDS = ("llama", "gpt2", "mistral", "bloom")


class Counted(NativeRuntime):
    """Records the shape of the feed of each pass."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.fed: list[tuple[int, ...]] = []

    def __call__(self, given: Pass) -> Any:
        self.fed.append(tuple(given.feed.shape))
        return super().__call__(given)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_gpu(monkeypatch):
        yield


def counted(arch: str) -> Counted:
    return Counted(runtimes.native(tiny(arch), device=torch.device("cuda")).model)


def ids(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(5 + (start + 7 * place) % 190 for place in range(length))


def told(forward: Any, lanes: list[Lane], width: int) -> list[events.Event]:
    found = list(decode(forward, lanes, width=width))
    assert not [event for event in found if isinstance(event, events.Failed)]
    return found


def tokens(found: list[events.Event]) -> dict[str, list[tuple[int, ...]]]:
    return {e.lane: [h.tokens for h in e.hypotheses] for e in found if isinstance(e, events.Finished)}


def lanes(**fields: Any) -> list[Lane]:
    many = [Lane(str(n), ids(30 + n % 6, n), Sample(), 4 + n % 3, **fields) for n in range(9)]
    others = [
        Lane("beams", ids(33, 50), Beam(2), 5, **fields),
        Lane("draft", ids(34, 60), Assisted(PromptLookup(2)), 5, **fields),
        Lane("drawn", ids(32, 70), Sample(True), 5, seed=3, **fields),
        Lane("pair", ids(35, 80), Sample(True, 2), 5, seed=4, returned=2, **fields),
    ]
    return [*many, *others]


@pytest.mark.parametrize("form", ["dynamic", "static", "quantized", "offloaded"])
@pytest.mark.parametrize("arch", KINDS)
def test_prompts_that_begin_at_once_are_read_in_one_pass(arch: str, form: str) -> None:
    given = lanes(cache=form)
    alone, together = counted(arch), counted(arch)
    wanted = tokens(told(alone, given, 1))
    assert tokens(told(together, given, len(given))) == wanted
    read = [shape for shape in together.fed if shape[1] > 9]
    assert read == [(len(given), 35)]


def test_rows_of_a_pass_are_not_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    plain = RowOfPass.layers.fget
    assert plain is not None
    monkeypatch.setattr(RowOfPass, "layers", property(lambda self: copied.append(self.row) or plain(self)))
    given = [Lane(str(n), ids(30 + n, n), Sample(), 4) for n in range(6)]
    forward = counted("llama")
    found = told(forward, given, 6)
    assert not copied
    assert len({id(event) for event in found if isinstance(event, events.Prefilled)}) == 6
    assert len(forward.fed) == 4  # the prompts, and three steps


def test_a_long_prompt_does_not_halt_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "PIECE", 16)
    given = [
        Lane("short", ids(6), Sample(), 12),
        Lane("brief", ids(7, 3), Sample(), 3),
        Lane("long", ids(90, 9), Sample(), 4),
        Lane("windowed", ids(70, 5), Sample(True), 4, seed=1),
    ]
    for arch in ("llama", "mistral"):
        wanted = tokens(told(counted(arch), given, 1))
        forward = counted(arch)
        found = told(forward, given, 3)
        assert tokens(found) == wanted
        names = [event.lane for event in found if isinstance(event, (events.Stepped, events.Prefilled))]
        between = names[names.index("brief") : names.index("long")]
        assert between.count("short") >= 90 // 16 or "long" not in names[names.index("short") :]
        pieces = [shape for shape in forward.fed if shape[0] == 1 and shape[1] in (16, 90 % 16)]
        assert len(pieces) >= 6


def test_an_interrupted_run_leaves_a_prompt_that_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "PIECE", 16)
    given = [Lane("a", ids(6), Sample(), 8), Lane("b", ids(7), Sample(), 2), Lane("long", ids(300, 9), Sample(), 4)]
    steps: list[events.Event] = []
    reasons = [""]
    for event in decode(counted("llama"), given, width=2, interrupted=lambda: reasons[-1]):
        steps.append(event)
        if isinstance(event, events.Stepped) and event.lane == "a" and event.step == 5:
            reasons.append("interrupted")
    assert {event.lane for event in steps if isinstance(event, events.Finished)} == {"a", "b"}
    assert "long" not in {event.lane for event in steps if isinstance(event, events.Prefilled)}
