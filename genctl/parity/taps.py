"""What each sublayer of a model puts out, recorded from outside while a text is read.

Of a native model a copy is read whose parts record what they return; the weights are shared, and the model itself does
not change. transformers' models get hooks for the while.

A part is known by its place, which is the same in both runtimes: what the embedding, attention, cross-attention and the
MLP of a layer put out, and what the layer ends with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from genctl.engines.session import Session
from genctl.native.decoder import Stack
from genctl.native.runtime import NativeModel
from genctl.parity.values import ENCODER

LOGITS = 4096  # entries of a distribution that are compared, spread evenly


@dataclass(frozen=True)
class Sublayer:
    """A part of a model. Parts of two models have the same place if all but their names are equal."""

    layer: int | None  # None: before the first layer, or after the last
    sublayer: str  # embedding, attention, cross-attention, mlp, layer, head; ENCODER before it
    name: str = field(compare=False)  # the part's own: "model.layers.3.self_attn"

    @property
    def of_encoder(self) -> bool:
        """Whether its positions are those of a source."""
        return self.sublayer.startswith(ENCODER)


Outputs: TypeAlias = dict[Sublayer, Tensor]  # [positions, E] of each part


@dataclass
class Taps:
    """What each part puts out at the last `count` positions, in the order in which parts first ran."""

    count: int
    passes: dict[Sublayer, list[Tensor]] = field(default_factory=dict)  # [F, E] each, pass by pass

    def receive(self, part: Sublayer, output: Any) -> None:
        """Record the output of a part."""
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.dim() == 2:  # OPT's MLP: [F, E] of all rows
            tensor = tensor[None]
        if isinstance(tensor, Tensor) and tensor.dim() == 3 and len(tensor) == 1:
            passes = self.passes.setdefault(part, [])
            passes.append(tensor[0, -self.count :].detach().cpu().clone())
            if sum(map(len, passes[1:])) >= self.count:
                del passes[0]

    def receive_logits(self, logits: Tensor) -> None:
        """Record the logits [V] at a position: an even selection of them."""
        some = logits.detach()[:: -(-len(logits) // LOGITS)].double()
        some = some.where(some.isfinite(), 0.0)  # some models forbid tokens by -inf
        self.receive(Sublayer(None, "head", "logits"), some[None, None])

    def outputs(self) -> Outputs:
        """The outputs of all parts that ran at so many positions; a source may have fewer."""
        found = {part: torch.cat(passes)[-self.count :] for part, passes in self.passes.items()}
        return {part: output for part, output in found.items() if part.of_encoder or len(output) == self.count}


@contextmanager
def tapped(session: Session, count: int) -> Iterator[tuple[Session, Taps]]:
    """A session that reads as the given one does, and the outputs of its parts at the last `count` positions."""
    taps, model = Taps(count), session.loaded.model
    with ExitStack() as stack:
        if isinstance(model, NativeModel):
            forward: Any = copy.copy(session.forward)
            forward.decoder, forward.graphs, forward.steps = _tapped_stack(model.decoder, taps), None, None
            if model.encoder is not None:
                forward.encoder = _tapped_stack(model.encoder, taps, ENCODER)
            session = copy.copy(session)
            session.forward = forward
        else:
            _add_hooks(model, taps, stack)
        yield session, taps


# -- native models -----------------------------------------------------------------------------------------------------


def _tap(inner: Any, taps: Taps, part: Sublayer) -> Callable[..., Tensor]:
    """A part that records what it returns."""

    def tapped(x: Tensor, *arguments: Any) -> Tensor:
        output: Tensor = inner(x, *arguments)
        taps.receive(part, output)
        return output

    return tapped


def _tapped_stack(stack: Stack, taps: Taps, kind: str = "") -> Any:
    """A copy of a stack that records what its parts put out; `kind` is before the names of these."""
    twin: Any = copy.copy(stack)
    path = f"{kind.strip()}." if kind else ""
    twin.embed, layer = _tap(twin.embed, taps, Sublayer(None, f"{kind}embedding", f"{path}embed")), twin.layer

    def tapped_layer(x: Tensor, number: int, *arguments: Any) -> Tensor:
        return _tap(layer, taps, Sublayer(number, f"{kind}layer", f"{path}layers.{number}"))(x, number, *arguments)

    twin.layer, layers = tapped_layer, []
    for number, w in enumerate(stack.weights.layers):
        name = f"{path}layers.{number}"
        parts: dict[str, Any] = {
            "o": _tap(w.o, taps, Sublayer(number, f"{kind}attention", f"{name}.o")),
            "mlp": _tap(w.mlp, taps, Sublayer(number, f"{kind}mlp", f"{name}.mlp")),
        }
        if w.cross is not None:
            inner: Any = _tap(w.cross.o, taps, Sublayer(number, "cross-attention", f"{name}.cross.o"))
            parts["cross"] = replace(w.cross, o=inner)
        layers.append(replace(w, **parts))
    twin.weights = replace(stack.weights, layers=layers)
    return twin


# -- transformers' models ----------------------------------------------------------------------------------------------


def _add_hooks(model: Any, taps: Taps, until: ExitStack) -> None:
    """Put hooks on the modules of a model that are parts of its stacks; `until` removes them."""
    names = {id(module): name for name, module in model.named_modules()}

    def add(module: nn.Module, layer: int | None, sublayer: str, *, named: nn.Module | None = None) -> None:
        part = Sublayer(layer, sublayer, names.get(id(named or module), type(module).__name__))
        handle = module.register_forward_hook(lambda module, given, output: taps.receive(part, output))
        until.callback(handle.remove)

    def add_input(module: nn.Module, sublayer: str) -> None:
        part = Sublayer(None, sublayer, "embeddings")

        def hook(module: nn.Module, given: Any, keywords: dict[str, Any]) -> None:
            taps.receive(part, given[0] if given else keywords.get("hidden_states"))

        until.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    stacks = [(model.get_decoder() if hasattr(model, "get_decoder") else model, "")]
    if getattr(model.config, "is_encoder_decoder", False):
        stacks.insert(0, (model.get_encoder(), ENCODER))
    for stack, kind in stacks:
        for number, layer in enumerate(_layers(stack, model.config)):
            if number == 0:
                add_input(layer, f"{kind}embedding")
            for module, word in _sublayers(layer):
                add(_product(module), number, kind + word, named=module)
            add(layer, number, f"{kind}layer")


def _layers(stack: Any, config: Any) -> Any:
    """The layers of a stack."""
    depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [module for module in stack.modules() if isinstance(module, nn.ModuleList) and len(module)]
    children = {id(module) for module in stack.children()}
    # an encoder may have another number of layers than its decoder
    own = [each for each in lists if id(each) in children] or [each for each in lists if len(each) == depth]
    return next((each for each in own if len(each) == depth), own[0] if own else [])


def _sublayers(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The sublayers among the modules of a layer, not those inside of sublayers."""
    for name, module in layer.named_children():
        if word := _sublayer(name):
            yield module, word
        else:
            yield from _sublayers(module)


def _sublayer(name: str) -> str:
    """What a module is, by its name; "" if that is not clear."""
    name = name.lower()
    if "drop" in name or "norm" in name or name.startswith("ln"):
        return ""
    if "attn" in name or "attention" in name:
        return "cross-attention" if "enc" in name or "cross" in name else "attention"
    kinds = ("mlp", "feed_forward", "ffn", "densereludense", "moe", "mixer", "fc2", "dense_4h_to_h")
    return "mlp" if any(kind in name for kind in kinds) else ""


def _product(module: Any) -> Any:
    """The module that puts out what a sublayer adds: its last product, where it adds that itself."""
    if "residual" not in inspect.signature(module.forward).parameters:
        return module
    products = [child for child in module.children() if isinstance(child, nn.Linear)]
    return products[-1] if products else module
