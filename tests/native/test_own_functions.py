"""In float32 a native pass uses no torch function whose last bits depend on the CPU, rows or threads.

torch's exponentials, softmax, sums and products round by instruction set, and differently in the tail of a vector.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.kernels import ops
from genctl.native.decoder import Decoder, Encoder
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.native import seq2seq_variations, variations

ROUNDED = {
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logaddexp", "logsumexp", "softmax", "log_softmax"),
    *("sigmoid", "logsigmoid", "tanh", "erf", "silu", "gelu", "softplus", "sin", "cos", "tan", "sqrt", "rsqrt", "pow"),
    *("norm", "layer_norm", "rms_norm", "sum", "mean", "var", "std", "prod", "cumsum"),
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear", "dot", "mv", "scaled_dot_product_attention"),
}
FREQUENCIES = {"llama, dynamic rope": {"pow"}}  # rotary frequencies that depend on the length are torch's
OPERATORS = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow"}


class Called(TorchFunctionMode):
    """The names of the functions of torch that are called with floating-point numbers on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if any(one.is_floating_point() for one in tensors):
            name = getattr(func, "__name__", "")
            self.names.add(
                {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow"}.get(name, name.strip("_"))
            )
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def compiled() -> None:
    if ops.library() is None:
        pytest.skip("THE PRODUCTS ARE NOT COMPILED HERE: run python genctl/kernels/build.py")


NAMES = [*variations.VARIATIONS, *seq2seq_variations.VARIATIONS]


@pytest.mark.parametrize("name", NAMES)
def test_a_native_pass_calls_no_function_of_torch_that_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of two lengths together, with padding, steps, and beams; and the encoder."""
    module: Any = variations if name in variations.VARIATIONS else seq2seq_variations
    runtime = runtimes.native(module.model(name))
    runtime.steps = None  # a list of library calls has no function of torch in it
    called = Called()

    def watched(call: Any) -> Any:
        def perform(*args: Any, **given: Any) -> Any:
            with called:
                return call(*args, **given)

        return perform

    for kind in (Decoder, Encoder):
        monkeypatch.setattr(kind, "__call__", watched(kind.__call__))
    prompts = ((5, 60, 7, 8, 9, 11), (3, 60, 7))
    source = runtime.is_encoder_decoder
    lanes = [
        Lane(f"{strategy.kind} {prompt}", (2,) if source else prompt, strategy, 5, source=prompt if source else None)
        for prompt in prompts
        for strategy in (Sample(), Beam(2))
    ]
    done = list(decode(runtime, lanes, width=4))
    assert not [event for event in done if isinstance(event, events.Failed)]
    assert called.names, "nothing was seen"
    assert called.names & ROUNDED == FREQUENCIES.get(name, set())
