"""A static cache is allocated once, for the prompt and all new tokens, and never again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane, Strategy
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests.tiny import SEQ2SEQ, tiny
from tests.versions import CACHE

NEW = 9
PROMPT = tuple(range(3, 14))


def passes(arch: str, prompts: Sequence[tuple[int, ...]], strategy: Strategy, **asked: Any) -> list[tuple[Any, Any]]:
    """After each pass since the prefill, the shapes of the layers, and the addresses of their tensors."""
    forward = TransformersRuntime(tiny(arch))
    held: list[Any] = []

    def look(module: Any, arguments: Any, given: dict[str, Any]) -> None:
        cache = given[CACHE]
        layers = getattr(cache, "self_attention_cache", cache).layers
        held.append(
            [layer.keys.data_ptr() if layer.is_initialized else 0 for layer in layers if layer.kind == "static"]
        )

    kept: dict[str, Any] = {"returned": strategy.max_rows, "cache": "static", **asked}
    lanes = [
        Lane(str(i), (1,) if arch in SEQ2SEQ else prompt, strategy, NEW, **kept, **source(arch, prompt))
        for i, prompt in enumerate(prompts)
    ]
    hook = forward.model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        seen = list(decode(forward, lanes, width=len(lanes), watch=True))
    finally:
        hook.remove()
    assert not [event for event in seen if isinstance(event, events.Failed)]
    shown = [
        [(layer["shape"], layer["bytes"]) for layer in event.layers if layer["kind"] == "static"]
        for event in seen
        if isinstance(event, events.CacheRead)
    ]
    return list(zip(shown, held[-len(shown) :], strict=True))


def source(arch: str, prompt: tuple[int, ...]) -> dict[str, Any]:
    return {"source": prompt} if arch in SEQ2SEQ else {}


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2", "t5"])
def test_one_row_has_all_its_room_from_the_prefill_on(arch: str) -> None:
    found = passes(arch, [PROMPT], Sample())
    assert len(found) == NEW
    columns = (1 if arch in SEQ2SEQ else len(PROMPT)) + NEW - 1  # the last token is never read
    assert all(shape[0] == 1 and shape[2] == columns for layers, _ in found for shape, _ in layers)
    assert len({str(layers) for layers, _ in found}) == 1
    assert len({str(places) for _, places in found[1:]}) == 1  # one allocation


@pytest.mark.parametrize("strategy", [Beam(3), Sample(True, 3)])
def test_several_rows_are_allocated_when_they_begin(strategy: Strategy) -> None:
    found = passes("llama", [PROMPT], strategy)
    for layers, places in found[1:]:
        assert [shape for shape, _ in layers] == [[3, 2, len(PROMPT) + NEW - 1, 8]] * 2
        assert places == found[1][1]


def test_rows_of_a_batch_are_allocated_when_they_come_together() -> None:
    found = passes("llama", [PROMPT, PROMPT[:4], PROMPT[:7]], Sample())[3:]
    assert len(found) == NEW - 1
    for layers, places in found:
        assert [shape for shape, _ in layers] == [[3, 2, len(PROMPT) + NEW - 1, 8]] * 2
        assert places == found[0][1]


def test_a_prompt_that_comes_twice_is_not_written_over() -> None:
    """The first lane continues in the buffers that its prompt was read into; the second needs the prompt unchanged."""
    forward = TransformersRuntime(tiny("llama"))

    def lanes() -> list[Lane]:
        return [Lane(name, PROMPT, Sample(), new, cache="static") for name, new in (("a", NEW), ("b", 5), ("c", NEW))]

    together = [event for event in decode(forward, lanes(), width=1) if isinstance(event, events.Finished)]
    alone = [
        event for lane in lanes() for event in decode(forward, [lane], width=1) if isinstance(event, events.Finished)
    ]
    assert [event.hypotheses[0].tokens for event in together] == [event.hypotheses[0].tokens for event in alone]
