"""Faults as they occur in engines, planted into a loaded side: its modules or what its runtime is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from genctl.decode.runtime import Pass
from genctl.native.runtime import NativeModel, NativeRuntime
from genctl.parity.sides import LocalSide

Change = Callable[[Pass], Pass]


@dataclass
class Altered:
    """A product of a native model with changed results."""

    product: Any
    alter: Callable[[Tensor], Tensor]
    is_compiled = False

    def __call__(self, x: Tensor) -> Tensor:
        return self.alter(self.product(x))


def _passes(side: LocalSide, change: Change) -> None:
    """Every pass of a side after the prefill goes through `change`."""
    kind: Any = type(side.session.forward)

    class Faulty(kind):  # type: ignore[misc]
        def __call__(self, given: Pass) -> Any:
            return super().__call__(given if given.first else change(given))

    side.session.forward.__class__ = Faulty


def _own_code(side: LocalSide) -> None:
    """Make every pass call the decoder's parts, which are about to change. A list of calls would keep the old ones."""
    if isinstance(side.session.forward, NativeRuntime):
        side.session.forward.steps = None


def off_by_one_position(side: LocalSide) -> None:
    """Every step has a position that is one too high."""

    def change(given: Pass) -> Pass:
        assert given.positions is not None
        return replace(given, positions=given.positions + 1)

    _passes(side, change)


def wide_mask(side: LocalSide) -> None:
    """A padded row sees the last column of its padding."""

    def change(given: Pass) -> Pass:
        if given.mask is None:
            return given
        mask = given.mask.clone()
        for row in mask:
            if not row[0]:
                row[int((row == 0).sum()) - 1] = 1
        return replace(given, mask=mask)

    _passes(side, change)


def stale_column(side: LocalSide) -> None:
    """A column of the first layer's values still holds those of the token before."""

    def change(given: Pass) -> Pass:
        if given.cache is not None and given.cache.length == 10:
            values: Any = given.cache.layers[0].content()[1]
            values[:, :, -1] = values[:, :, -2]
        return given

    _passes(side, change)


def lost_bias(side: LocalSide) -> None:
    """A projection of the first layer has no bias."""
    model = side.session.loaded.model
    if isinstance(model, NativeModel):
        layer = model.decoder.weights.layers[0]
        biases = [getattr(part, "wide_bias", None) for part in layer.qkv.parts]
        if biases[0] is None:  # nothing is compiled
            biases = [part.bias for part in layer.qkv.parts]  # type: ignore[attr-defined]
    else:
        biases = [
            module.bias
            for name, module in model.named_modules()
            if name.rpartition(".")[2] in ("q_proj", "c_attn") and getattr(module, "bias", None) is not None
        ]
    assert float(biases[0].abs().max()) > 0
    biases[0].data.zero_()


def swapped_rope_halves(side: LocalSide) -> None:
    """Rotary angles turn the other way, as if the halves of a head were swapped."""
    _own_code(side)
    model = side.session.loaded.model
    if isinstance(model, NativeModel):
        rotary: Any = model.decoder.rotary
        turn = rotary.turn
        rotary.turn = lambda x, cos, sin: turn(x, cos, -sin)
        return
    rotary = model.get_decoder().rotary_emb
    forward = rotary.forward

    def turned(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        cos, sin = forward(*arguments, **named)
        return cos, -sin

    rotary.forward = turned


def other_epsilon(side: LocalSide) -> None:
    """The norms of attention and MLP add 1e-5 where the checkpoint says 1e-6, or the reverse."""
    _own_code(side)
    model = side.session.loaded.model
    if isinstance(model, NativeModel):
        for layer in model.decoder.weights.layers:
            for norm in (layer.attn_norm, layer.mlp_norm):
                _set_epsilon(norm)
        return
    for module in model.modules():
        _set_epsilon(module)


def _set_epsilon(norm: Any) -> None:
    for name in ("variance_epsilon", "number", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            new = 1e-5 if value < 5e-6 else 1e-6
            setattr(norm, name, new)
            if name == "number":  # the native norm has it twice
                norm.eps = torch.tensor(new)
            return


def half_precision_norm(side: LocalSide) -> None:
    """The norms of attention are computed in bfloat16."""
    _own_code(side)

    def rounded(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: norm(x).bfloat16().to(x.dtype)

    model = side.session.loaded.model
    if isinstance(model, NativeModel):
        for layer in model.decoder.weights.layers:
            layer.attn_norm = rounded(layer.attn_norm)
        return
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.forward = rounded(module.forward)


# -- faults of one layer -----------------------------------------------------------------------------------------------


def lost_mlp_bias(side: LocalSide, layer: int) -> None:
    """The last product of an MLP has no bias."""
    _own_code(side)
    model = side.session.loaded.model
    if isinstance(model, NativeModel):
        mlp = model.decoder.weights.layers[layer].mlp
        bias = getattr(mlp.down, "wide_bias", None)
        bias = mlp.down.bias if bias is None else bias
        mlp.down = Altered(mlp.down, lambda result: result - bias)
    else:
        names = ("mlp.c_proj", "mlp.dense_4h_to_h", "mlp.fc2", "fc2")
        product = next(each for name, each in _layer(model, layer).named_modules() if name in names)
        bias = product.bias.data.clone()
        product.bias.data.zero_()
    assert float(bias.abs().max()) > 0


def scaled(side: LocalSide, layer: int, part: str) -> None:
    """The output of a part of T5 ("cross" or "encoder") is multiplied by 1.001."""
    model = side.session.loaded.model
    if isinstance(model, NativeModel):
        weights = (model.encoder if part == "encoder" else model.decoder).weights.layers[layer]
        inner: Any = weights.cross if part == "cross" else weights
        product = inner.o
        inner.o = lambda x: product(x) * 1.001
        return
    name = "layer.1.EncDecAttention.o" if part == "cross" else "layer.0.SelfAttention.o"
    stack = model.encoder if part == "encoder" else model.decoder
    stack.block[layer].get_submodule(name).register_forward_hook(lambda module, given, output: output * 1.001)


def _layer(model: Any, layer: int) -> Any:
    decoder = model.get_decoder()
    return next(getattr(decoder, name) for name in ("layers", "h") if hasattr(decoder, name))[layer]


FAULTS: dict[str, Callable[[LocalSide], None]] = {
    plant.__name__: plant
    for plant in (
        off_by_one_position,
        wide_mask,
        stale_column,
        lost_bias,
        swapped_rope_halves,
        other_epsilon,
        half_precision_norm,
    )
}
