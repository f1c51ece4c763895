"""When GPU memory runs out: what did not fit is freed, and every lane that fits alone ends well.

The GPU is a fake one (`fake_cuda`) that counts the bytes of every tensor and has a limit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode import batch_cache as memory
from genctl.decode.cache.cache import new_cache
from genctl.decode.loop import decode
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests import runtimes
from tests.fake_cuda import fake_gpu, moved
from tests.tiny import SEQ2SEQ, tiny

SEARCHES = {"greedy": Sample(), "beams": Beam(3), "samples": Sample(True, 2)}


def lanes(search: str, arch: str, count: int = 6) -> list[Lane]:
    found = []
    for number in range(count):
        ids = tuple(5 + (number * 7 + place * 3) % 200 for place in range(60 + number % 5))
        tokens, source = ((2,), ids) if arch in SEQ2SEQ else (ids, None)
        strategy = SEARCHES[search]
        found.append(Lane(str(number), tokens, strategy, 4, source=source, seed=number, returned=strategy.max_rows))
    return found


def on_gpu(model: Any) -> ModelRuntime:
    return runtimes.native(model, device=torch.device("cuda"))


def results(forward: ModelRuntime, given: list[Lane], width: int) -> tuple[dict[str, Any], list[int]]:
    told: list[int] = []
    found: dict[str, Any] = {}
    for event in decode(forward, given, width=width, on_shortage=told.append):
        if isinstance(event, events.Finished):
            found[event.lane] = [h.tokens for h in event.hypotheses]
        elif isinstance(event, events.Failed):
            found[event.lane] = event.message
    return found, told


@pytest.mark.parametrize(
    ("arch", "kind", "search"),
    [
        *(("llama", "native", search) for search in SEARCHES),
        *(("gpt2", "transformers", search) for search in ("greedy", "beams")),
        ("mistral", "native", "greedy"),
        ("t5", "native", "greedy"),
    ],
)
def test_every_lane_ends_well_that_fits_alone(
    arch: str, kind: str, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 prompts that did not fit together used to fail one and all, because the first try did not free its memory."""
    model, given = tiny(arch), lanes(search, arch)
    plain: Any = TransformersRuntime(model) if kind == "transformers" else runtimes.native(model)
    wanted, _ = results(plain, given, 1)
    with fake_gpu(monkeypatch) as device:
        forward = TransformersRuntime(moved(model)) if kind == "transformers" else on_gpu(model)
        before = device.used
        found, _ = results(forward, given, 1)
        assert found == wanted
        alone = device.most - before
        assert alone > 0
        # rows that are read again do not share a prompt
        for share in (1.3, 2) if search == "greedy" else (2.5, 4):
            device.total, device.most = int(before + share * alone), device.used
            found, told = results(forward, given, len(given))
            assert found == wanted
            if share == 1.3 and arch != "mistral":  # whose window keeps little
                assert min(told) < len(given)
            assert device.most > before + 0.4 * share * alone  # several at once
        assert device.used - before < 0.1 * alone


def test_free_columns_of_a_buffer_are_not_counted_as_read() -> None:
    """A cache of slots has 64 columns after one token: a row seemed to need 64 times its memory, so two ran at once."""
    plain, slotted = new_cache([None, 4], 0), new_cache([None, 4], 0)
    for layer in plain.layers:
        layer.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    assert slotted.open_slots(1, 2, 8, torch.float32, torch.device("cpu"), 1)
    slotted.written()
    wanted, found = ([memory._grown(part, 600) for part in cache.describe()] for cache in (plain, slotted))
    assert found == wanted == [600 * 2 * 8 * 2 * 4, 4 * 2 * 8 * 2 * 4]


def test_unused_memory_of_torch_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch) as device:
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *args: 700)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *args: 300)
        assert memory.available(torch.device("cuda")) == device.total + 400
