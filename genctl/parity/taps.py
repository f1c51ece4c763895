"""What each sublayer of a model reads and puts out, seen from outside while a text is read.

Of a native model a copy is read whose parts write down what they return; the weights are shared, and the model itself
does not change. Of transformers' models the modules have hooks for the while.

A part is known by its place, which is the same in both runtimes: what attention reads and puts out in a layer, what
the MLP reads and puts out, what the layer ends with. What a sublayer reads is a norm's output, and has its name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from genctl.engines.session import Session
from genctl.native.decoder import Decoder, Stack, StackWeights
from genctl.native.norms import same
from genctl.native.runtime import NativeModel
from genctl.parity.values import ENCODER

LOGITS = 4096  # entries of a distribution that are compared, spread evenly


@dataclass(frozen=True)
class Sublayer:
    """A part of a model. Parts of two models have the same place if all but their names are equal."""

    layer: int | None  # None: before the first layer, or after the last
    sublayer: str  # embedding, norm, attention, cross-attention, mlp, layer, head; ENCODER before it
    beside: str  # of a norm: the sublayer that reads what it puts out, or "after" that whose output it reads
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
    _norm: tuple[Any, str] = (None, "")  # what a norm of transformers put out last, and its name
    _output: tuple[Any, Sublayer | None] = (None, None)  # what a sublayer put out last

    def receive(self, part: Sublayer, output: Any) -> None:
        """Note the output of a part."""
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        self._output = tensor, part
        if isinstance(tensor, Tensor) and tensor.dim() == 2:  # OPT's MLP: [F, E] of all rows
            tensor = tensor[None]
        if isinstance(tensor, Tensor) and tensor.dim() == 3 and len(tensor) == 1:
            passes = self.passes.setdefault(part, [])
            passes.append(tensor[0, -self.count :].detach().cpu().clone())
            if sum(map(len, passes[1:])) >= self.count:
                del passes[0]

    def receive_input(self, part: Sublayer, given: Any) -> None:
        """Note what a sublayer reads, under the name of the norm that made it."""
        made, name = self._norm
        self.receive(replace(part, name=name) if given is made else part, given)

    def receive_norm(self, name: str, given: Any, output: Any) -> None:
        """Note a norm: what it puts out, if it reads what a sublayer has put out."""
        self._norm = output, name
        before, part = self._output
        if given is before and part is not None and part.sublayer.endswith(("attention", "mlp")):
            self.receive(_after(part, name), output)

    def receive_logits(self, logits: Tensor) -> None:
        """Note the logits [V] at a position: an even selection of them."""
        every = -(-len(logits) // LOGITS)
        some = logits.detach()[::every].double()
        some = torch.where(some.isfinite(), some, 0.0)  # some models forbid tokens by -inf
        self.receive(Sublayer(None, "head", "", "logits"), some[None, None])

    def outputs(self) -> Outputs:
        """The outputs of all parts that ran at so many positions; a source may have fewer."""
        found = {part: torch.cat(passes)[-self.count :] for part, passes in self.passes.items()}
        return {part: output for part, output in found.items() if part.of_encoder or len(output) == self.count}


def _before(part: Sublayer, name: str) -> Sublayer:
    """The norm whose output a sublayer reads."""
    kind = ENCODER * part.of_encoder + "norm"
    return Sublayer(part.layer, kind, part.sublayer, name)


def _after(part: Sublayer, name: str) -> Sublayer:
    """The norm that reads what a sublayer puts out."""
    return replace(_before(part, name), beside=f"after {part.sublayer}")


@contextmanager
def tapped(session: Session, count: int) -> Iterator[tuple[Session, Taps]]:
    """A session that reads as the given one does, and the outputs of its parts at the last `count` positions."""
    taps = Taps(count)
    model = session.loaded.model
    if isinstance(model, NativeModel):
        forward: Any = copy.copy(session.forward)
        forward.decoder, forward.graphs, forward.steps = _tapped_decoder(model.decoder, taps), None, None
        if model.encoder is not None:
            end = Sublayer(None, f"{ENCODER}norm", "source", "encoder.final_norm")
            forward.encoder = _tap(_tapped_stack(model.encoder, taps, ENCODER, "encoder."), taps, end)
        twin = copy.copy(session)
        twin.forward = forward
        yield twin, taps
        return
    hooks = _Hooks(model, taps)
    try:
        hooks.place()
        yield session, taps
    finally:
        for handle in hooks.handles:
            handle.remove()


# -- native models -----------------------------------------------------------------------------------------------------


def _tap(inner: Any, taps: Taps, after: Sublayer, before: Sublayer | None = None) -> Callable[..., Tensor]:
    """A part that writes down what it returns, and perhaps what it reads."""

    def tapped(x: Tensor, *arguments: Any) -> Tensor:
        if before is not None:
            taps.receive(before, x)
        output: Tensor = inner(x, *arguments)
        taps.receive(after, output)
        return output

    return tapped


def _tapped_stack(stack: Stack, taps: Taps, kind: str = "", path: str = "") -> Any:
    """A copy of a stack that writes down what its parts put out; `kind` and `path` are before the names of these."""
    twin: Any = copy.copy(stack)
    twin.weights = _tapped_weights(stack.weights, taps, kind)
    twin.embed, layer = _tap(twin.embed, taps, Sublayer(None, f"{kind}embedding", "", f"{path}embed")), twin.layer

    def tapped_layer(x: Tensor, number: int, *arguments: Any) -> Tensor:
        part = Sublayer(number, f"{kind}layer", "", f"{path}layers.{number}")
        return _tap(layer, taps, part)(x, number, *arguments)

    twin.layer = tapped_layer
    return twin


def _tapped_decoder(decoder: Decoder, taps: Taps) -> Any:
    twin = _tapped_stack(decoder, taps)
    head = twin.head

    def tapped_head(x: Tensor) -> Tensor:
        taps.receive(Sublayer(None, "norm", "head", "final_norm"), x)
        logits: Tensor = head(x)
        return logits

    twin.head = tapped_head
    return twin


def _tapped_weights(weights: StackWeights, taps: Taps, stack: str) -> StackWeights:
    layers = []
    for number, w in enumerate(weights.layers):
        path = f"{stack.strip()}.layers.{number}".lstrip(".")
        attention = Sublayer(number, f"{stack}attention", "", f"{path}.o")
        mlp = Sublayer(number, f"{stack}mlp", "", f"{path}.mlp")
        # the norm whose output the MLP reads
        norm_of_mlp = "attn_norm" if w.attn_sum_norm is same else "attn_sum_norm"
        norm_of_mlp = norm_of_mlp if w.mlp_norm is None else "mlp_norm"
        parts: dict[str, Any] = {
            "attn_norm": _tap(w.attn_norm, taps, _before(attention, f"{path}.attn_norm")),
            "o": _tap(w.o, taps, attention),
            "mlp": _tap(w.mlp, taps, mlp, _before(mlp, f"{path}.{norm_of_mlp}")),
        }
        if w.attn_out_norm is not same:
            parts["attn_out_norm"] = _tap(w.attn_out_norm, taps, _after(attention, f"{path}.attn_out_norm"))
        if w.mlp_out_norm is not same:
            parts["mlp_out_norm"] = _tap(w.mlp_out_norm, taps, _after(mlp, f"{path}.mlp_out_norm"))
        if w.cross is not None:
            cross = Sublayer(number, "cross-attention", "", f"{path}.cross.o")
            inner: dict[str, Any] = {
                "norm": _tap(w.cross.norm, taps, _before(cross, f"{path}.cross.norm")),
                "o": _tap(w.cross.o, taps, cross),
            }
            parts["cross"] = replace(w.cross, **inner)
        layers.append(replace(w, **parts))
    return replace(weights, layers=layers)


# -- transformers' models ----------------------------------------------------------------------------------------------


class _Hooks:
    """Hooks on the modules of a model that are parts of its stacks."""

    def __init__(self, model: nn.Module, taps: Taps) -> None:
        self.model: Any = model
        self.taps, self.handles = taps, list[Any]()
        self.names: dict[int, str] = {id(module): name for name, module in model.named_modules()}

    def place(self) -> None:
        """Place all hooks."""
        model = self.model
        if getattr(model.config, "is_encoder_decoder", False):
            encoder = model.get_encoder()
            self._stack(encoder, ENCODER)
            self._output(encoder, Sublayer(None, f"{ENCODER}norm", "source", self._name(encoder)))
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        self._stack(decoder, "")
        head = model.get_output_embeddings()
        if isinstance(head, nn.Module):
            norms = [module for name, module in decoder.named_children() if _is_norm(name) and "emb" not in name]
            self._input(head, Sublayer(None, "norm", "head", self._name(norms[-1] if norms else head)), named=False)

    def _stack(self, stack: Any, kind: str) -> None:
        layers = _layers(stack, self.model.config)
        if len(layers):
            embedding = stack.get_input_embeddings() if hasattr(stack, "get_input_embeddings") else None
            name = "embeddings" if embedding is None else self._name(embedding)
            self._input(layers[0], Sublayer(None, f"{kind}embedding", "", name), named=False)
        for number, layer in enumerate(layers):
            self._sublayers(layer, number, kind)
            self._output(layer, Sublayer(number, f"{kind}layer", "", self._name(layer)))

    def _sublayers(self, layer: nn.Module, number: int, kind: str) -> None:
        """Those among the modules of a layer, not those inside of sublayers."""
        for name, module in layer.named_children():
            if _is_norm(name):
                self._norm(module)
                continue
            word = _sublayer(name)
            if not word:
                if name != "fc1":
                    self._sublayers(module, number, kind)
                    continue
                word = "mlp"
            part = Sublayer(number, kind + word, "", self._name(module))
            if name != "fc2":
                self._input(module, _before(part, f"input of {part.name}"))
            if name != "fc1":
                self._output(_product(module), part)

    def _name(self, module: nn.Module) -> str:
        return self.names.get(id(module), type(module).__name__)

    def _output(self, module: nn.Module, part: Sublayer) -> None:
        self.handles.append(module.register_forward_hook(lambda module, given, output: self.taps.receive(part, output)))

    def _input(self, module: nn.Module, part: Sublayer, *, named: bool = True) -> None:
        """Note what a module reads; `named`: under the name of the norm that made it."""
        receive = self.taps.receive_input if named else self.taps.receive

        def hook(module: nn.Module, given: Any, keywords: dict[str, Any]) -> None:
            receive(part, given[0] if given else keywords.get("hidden_states"))

        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _norm(self, module: nn.Module) -> None:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            self.taps.receive_norm(self._name(module), given[0] if given else None, output)

        self.handles.append(module.register_forward_hook(hook))


def _layers(stack: Any, config: Any) -> Any:
    """The layers of a stack."""
    depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [module for module in stack.modules() if isinstance(module, nn.ModuleList) and len(module)]
    children = {id(module) for module in stack.children()}
    # an encoder may have another number of layers than its decoder
    own = [each for each in lists if id(each) in children] or [each for each in lists if len(each) == depth]
    return next((each for each in own if len(each) == depth), own[0] if own else [])


def _is_norm(name: str) -> bool:
    return "norm" in name.lower() or name.startswith("ln")


def _product(module: Any) -> Any:
    """The module that puts out what a sublayer adds: its last product, where it adds that itself."""
    if "residual" not in inspect.signature(module.forward).parameters:
        return module
    products = [child for child in module.children() if isinstance(child, nn.Linear)]
    return products[-1] if products else module


def _sublayer(name: str) -> str:
    """What a module is, by its name; "" if that is not clear."""
    name = name.lower()
    if "drop" in name:
        return ""
    if "attn" in name or "attention" in name:
        return "cross-attention" if "enc" in name or "cross" in name else "attention"
    kinds = ("mlp", "feed_forward", "ffn", "densereludense", "moe", "mixer", "fc2", "dense_4h_to_h")
    return "mlp" if any(kind in name for kind in kinds) else ""
