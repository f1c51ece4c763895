"""Run the loop on a tiny checkpoint, and transformers' `generate` for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane, Strategy
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.tiny import SEQ2SEQ, tiny

PROMPTS: tuple[tuple[int, ...], ...] = tuple(
    tuple(torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (5, 12, 9)
)
NEW = 20


def written(forward: ModelRuntime, lanes: Iterable[Lane], width: int = 1) -> dict[str, list[list[int]]]:
    """The new tokens of each lane's hypotheses. No lane may fail."""
    found = list(decode(forward, lanes, width=width))
    assert not [event for event in found if isinstance(event, events.Failed)]
    return {e.lane: [[*one.tokens] for one in e.hypotheses] for e in found if isinstance(e, events.Finished)}


class Case:
    """One architecture: lanes for the loop, results of the oracle."""

    def __init__(self, arch: str, **options: Any) -> None:
        self.arch = arch
        self.model = tiny(arch, **options)
        self.forward = runtimes.forward(self.model)
        self.encoder_decoder = arch in SEQ2SEQ
        config = self.model.generation_config
        eos = config.eos_token_id
        self.eos: tuple[int, ...] = (eos,) if isinstance(eos, int) else tuple(eos)
        self.start = config.decoder_start_token_id
        self._greedy: dict[tuple[int, ...], list[list[int]]] = {}

    def lane(self, prompt: Sequence[int], strategy: Strategy | None = None, name: str = "0", **fields: Any) -> Lane:
        strategy = strategy or Sample()
        fields = {"max_new_tokens": NEW, "eos": self.eos, "returned": getattr(strategy, "n", 1), **fields}
        if self.encoder_decoder:
            return Lane(name, (self.start,), strategy, source=tuple(prompt), **fields)
        return Lane(name, tuple(prompt), strategy, **fields)

    def ours(self, lanes: Iterable[Lane], width: int = 1) -> dict[str, list[list[int]]]:
        return written(self.forward, lanes, width)

    def stream(self, lanes: Iterable[Lane], width: int = 1) -> list[events.Event]:
        found = list(decode(self.forward, lanes, width=width))
        failed = [event for event in found if isinstance(event, events.Failed)]
        assert not failed, failed
        return found

    def generate(self, prompt: Sequence[int], **options: Any) -> list[list[int]]:
        """The tokens that `model.generate` writes, with EOS, without padding. Greedy texts are cached."""
        if options == {"do_sample": False}:
            if tuple(prompt) not in self._greedy:
                self._greedy[tuple(prompt)] = self._generate(prompt, **options)
            return self._greedy[tuple(prompt)]
        return self._generate(prompt, **options)

    def _generate(self, prompt: Sequence[int], **options: Any) -> list[list[int]]:
        ids = torch.tensor([list(prompt)])
        options = {"max_new_tokens": NEW, **options}
        made = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()
        skipped = 1 if self.encoder_decoder else len(prompt)
        return [self.cut(row[skipped:]) for row in made]

    def cut(self, tokens: list[int]) -> list[int]:
        for place, token in enumerate(tokens):
            if token in self.eos:
                return tokens[: place + 1]
        return tokens
