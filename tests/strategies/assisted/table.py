"""A model that can be computed on paper: a table gives the next token's distribution after the last two tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from genctl.decode.runtime import Abilities, Output, Pass
from genctl.decode.step_costs import PassPrice
from genctl.decode.types import Prefix
from genctl.transformers.runtime import TransformersRuntime


class Table(TransformersRuntime):
    """`TransformersRuntime` over logits f32 [V, V, V]: row (a, b) holds the logits after a, b. No cache."""

    def __init__(self, logits: Tensor) -> None:
        self.table = logits
        self.device = logits.device
        self.model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
        self.is_encoder_decoder = False
        self.bound = math.inf
        self.abilities = Abilities(supports_cache=False, reads_padded=False)
        self.forwards = 0
        self.pass_price = PassPrice("float32", 1e9)  # type: ignore[misc]

    def prefill(self, ids: Sequence[int], source: Any, **_: Any) -> Prefix:
        tokens = torch.tensor([list(ids)])
        return Prefix(tokens, None, self(Pass(tokens, keep=1)).logits[:, -1])

    def __call__(self, given: Pass) -> Output:
        self.forwards += 1
        before = torch.cat([given.feed[:, :1], given.feed[:, :-1]], 1)
        return Output(self.table[before, given.feed][:, -given.keep :], None)

    def distribution(self, prompt: Sequence[int], length: int, process: Any = None) -> dict[tuple[int, ...], float]:
        """The probability of every sequence of `length` tokens after the prompt, token by token."""
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            longer = {}
            for made, probability in found.items():
                text = torch.tensor([[*prompt, *made]])
                scores = self(Pass(text, keep=1)).logits[:, -1]
                scores = scores if process is None else process(text, scores)
                for token, part in enumerate(scores.softmax(-1)[0].tolist()):
                    longer[(*made, token)] = probability * part
            found = longer
        return found
