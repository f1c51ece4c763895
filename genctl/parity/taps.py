"""What each sublayer of a model puts out, seen from outside while a text is read.

Of a native model a copy is read whose parts write down what they return; the weights are shared, and the model itself
does not change. Of transformers' models the modules have forward hooks for the while.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genctl.engines.local.session import Session
from genctl.native.decoder import Decoder, StackWeights
from genctl.native.model import NativeModel


class Sublayer(NamedTuple):
    """A sublayer."""

    layer: int | None
    sublayer: str  # embedding, norm, attention, mlp, layer, head
    name: str


@dataclass
class Taps:
    """The outputs of each part, pass by pass, in the order in which parts first ran."""

    passes: dict[Sublayer, list[Tensor]] = field(default_factory=dict)  # [1, F, E] each

    def receive(self, part: Sublayer, output: Any) -> None:
        """Note the output of a part."""
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.dim() == 3 and len(tensor) == 1:
            self.passes.setdefault(part, []).append(tensor.detach().double().cpu())

    def last(self, count: int) -> dict[Sublayer, Tensor]:
        """The outputs at the last `count` positions, f64 [count, E]."""
        outputs = {part: torch.cat(tensors, 1)[0, -count:] for part, tensors in self.passes.items()}
        return {part: output for part, output in outputs.items() if len(output) == count}


@contextmanager
def tapped(session: Session) -> Iterator[tuple[Session, Taps]]:
    """A session that reads as the given one does, and the outputs of its parts."""
    taps = Taps()
    model = session.loaded.model
    if isinstance(model, NativeModel):
        forward: Any = copy.copy(session.forward)
        forward.decoder, forward.graphs = _tapped_decoder(model.decoder, taps), None
        twin = copy.copy(session)
        twin.forward = forward
        yield twin, taps
        return
    handles = [
        module.register_forward_hook(lambda module, given, output, part=part: taps.receive(part, output))
        for part, module in _modules(model)
    ]
    try:
        yield session, taps
    finally:
        for handle in handles:
            handle.remove()


class _Tap:
    """A part of a layer that writes down what it returns."""

    def __init__(self, inner: Callable[[Tensor], Tensor], receive: Callable[[Any], None]) -> None:
        self.inner, self.receive = inner, receive

    def __call__(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        self.receive(output)
        return output


class _TappedDecoder(Decoder):
    """A decoder that also writes down its embeddings, layers and logits."""

    def __init__(self, decoder: Decoder, weights: StackWeights, taps: Taps) -> None:
        super().__init__(decoder.spec, weights, decoder.output)
        self.taps = taps

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = super().embed(tokens, positions)
        self.taps.receive(Sublayer(None, "embedding", "embed"), x)
        return x

    def layer(self, x: Tensor, number: int, *arguments: Any) -> Tensor:
        x = super().layer(x, number, *arguments)
        self.taps.receive(Sublayer(number, "layer", f"layers.{number}"), x)
        return x


def _tapped_decoder(decoder: Decoder, taps: Taps) -> Decoder:
    def tap(number: int | None, sublayer: str, name: str, inner: Any) -> Any:
        prefix = "" if number is None else f"layers.{number}."
        part = Sublayer(number, sublayer, prefix + name)
        return _Tap(inner, lambda output: taps.receive(part, output))

    layers = []
    for number, w in enumerate(decoder.weights.layers):
        named = {"attn_norm": "norm", "o": "attention", "mlp_norm": "norm", "mlp": "mlp"}
        parts = {
            name: tap(number, sublayer, name, getattr(w, name))
            for name, sublayer in named.items()
            if getattr(w, name) is not None
        }
        layers.append(replace(w, **parts))
    final_norm = tap(None, "norm", "final_norm", decoder.weights.final_norm)
    return _TappedDecoder(decoder, replace(decoder.weights, layers=layers, final_norm=final_norm), taps)


def _modules(model: Any) -> Iterator[tuple[Sublayer, Any]]:
    """The modules of a model of transformers that are parts of its decoder."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    config = model.config.get_text_config(decoder=True)
    depth = getattr(config, "num_hidden_layers", None)
    names = {id(module): name for name, module in model.named_modules()}
    lists = (module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == depth)
    layers: Any = next(lists, [])
    embedding = model.get_input_embeddings()
    if embedding is not None:
        yield Sublayer(None, "embedding", names[id(embedding)]), embedding
    for number, layer in enumerate(layers):
        for name, module in layer.named_children():
            sublayer = _sublayer(name)
            if sublayer:
                yield Sublayer(number, sublayer, names[id(module)]), module
        yield Sublayer(number, "layer", names[id(layer)]), layer
    for name, module in decoder.named_children():
        if _sublayer(name) == "norm":
            yield Sublayer(None, "norm", names.get(id(module), name)), module


def _sublayer(name: str) -> str:
    """What a child of a layer is, by its name; "" if that is not clear."""
    if "norm" in name or name.startswith("ln"):
        return "norm"
    if "attn" in name or "attention" in name:
        return "attention"
    kinds = ("mlp", "feed_forward", "ffn", "moe", "mixer", "fc2", "dense_4h_to_h")
    return "mlp" if any(kind in name for kind in kinds) else ""
