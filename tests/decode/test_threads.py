"""Two models in two threads do not interfere: each writes what it writes alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests import runtimes
from tests.tiny import SEQ2SEQ, tiny

PROMPT = tuple(torch.randint(5, 300, (90,), generator=torch.Generator().manual_seed(4)).tolist())


def lanes(arch: str) -> list[Lane]:
    made = [Lane("beams", PROMPT, Beam(4), 16, returned=4), Lane("samples", PROMPT, Sample(True, 3), 16, seed=5)]
    if arch not in SEQ2SEQ:
        return made
    return [Lane(one.name, (2,), one.strategy, 16, seed=5, source=PROMPT) for one in made]


def written(forward: ModelRuntime, arch: str, meet: Callable[[], object]) -> dict[str, Any]:
    """Tokens and scores of each lane. `meet` is called before each step."""
    found: dict[str, Any] = {}
    for event in decode(forward, lanes(arch), width=2):
        meet()
        if isinstance(event, events.Finished):
            found[event.lane] = [(one.tokens, one.logprob) for one in event.hypotheses]
    return found


@pytest.mark.parametrize("make", [TransformersRuntime, runtimes.native], ids=["transformers", "native"])
@pytest.mark.parametrize("pair", [("llama", "gpt2"), ("llama", "llama"), ("gpt2", "t5")], ids="-".join)
def test_two_models_in_two_threads_do_not_meet(pair: tuple[str, str], make: Callable[[Any], ModelRuntime]) -> None:
    forwards = [make(tiny(arch, seed=seed)) for seed, arch in enumerate(pair, 1)]
    apart = [written(forward, arch, lambda: None) for forward, arch in zip(forwards, pair, strict=True)]
    together: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def meet() -> None:
        try:
            barrier.wait(timeout=60)  # both start their steps at the same moment
        except threading.BrokenBarrierError:  # the other one is done
            return

    def run(place: int) -> None:
        try:
            together[place] = written(forwards[place], pair[place], meet)
        finally:
            barrier.abort()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == apart
