"""The input of each forward pass and the cache after it, as events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from genctl import events
from genctl.decode.cache.layer import CROSS
from genctl.decode.runtime import ModelRuntime, Passed


@dataclass
class CacheObserver:
    """Reads the cache after every pass of `forward`, until it is closed."""

    forward: ModelRuntime
    passed: Passed | None = None

    def __post_init__(self) -> None:
        self.forward.watch = self

    def close(self) -> None:
        """Stop observing."""
        self.forward.watch = None

    def __call__(self, passed: Passed) -> None:
        """Record a pass."""
        self.passed = passed

    def read(self, lanes: Sequence[str], step: int, reordered: Sequence[int] = ()) -> events.CacheRead:
        """The last pass as an event. `lanes` names the lane of each row."""
        passed = self.passed
        assert passed is not None
        cache = passed.cache
        fed = passed.inputs.get("decoder_input_ids", passed.inputs.get("input_ids"))
        assert fed is not None
        mask = passed.inputs.get("decoder_attention_mask" if self.forward.is_encoder_decoder else "attention_mask")
        count = int(fed.shape[1])
        layers = [] if cache is None else cache.describe()
        for layer in layers:  # the columns of this pass; cross-attention is computed once, with the prompt
            layer["new"] = (layer["shape"][2] if passed.first else 0) if layer["kind"] == CROSS else count
        return events.CacheRead(
            lanes[0] if lanes else "",
            step,
            tuple(layers),
            events.Given(
                _rows(fed) or (),
                passed.past,
                tuple(range(passed.past, passed.past + count)),
                _rows(passed.inputs.get("position_ids")),
                _rows(mask),
            ),
            tuple(lanes),
            tuple(reordered),
            0 if cache is None else cache.reserved(),
        )


def _rows(tensor: Any) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(tensor, Tensor) or tensor.dim() != 2:
        return None
    return tuple(tuple(row) for row in tensor.tolist())
