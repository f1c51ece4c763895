"""A second reading of a side's checkpoint in another arithmetic: exact, or with random rounding.

The checkpoint is loaded again, as plainly as possible: by the runtime of the reference (of the side itself if its
weights are quantised, because each runtime quantises other layers), with torch's own products, in the stored dtype,
which keeps its weights memory-mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from genctl.engines.session import Session
from genctl.errors import GenctlError, ModelError
from genctl.models import runtime_choice
from genctl.models.hub import LoadedModel
from genctl.native.blocks import GgufFile
from genctl.native.linear import Products
from genctl.native.load import build, read
from genctl.native.runtime import NativeModel, SpecialTokens
from genctl.params import Runtime
from genctl.parity.arithmetic import Exact, Shaken, Weights
from genctl.parity.causes import Form
from genctl.parity.forms import Coded, MatrixPart, rounded
from genctl.parity.sides import LocalSide
from genctl.parity.values import Place, Text

Found = TypeVar("Found")
NEIGHBOURS = ("llama", "mistral", "mixtral", "granite", "olmo", "smollm3")  # llama.cpp pairs neighbours in RoPE
CHANGED = 0.25  # activations of each token that get another code in `shaken`: one for every four tokens


@dataclass(frozen=True)
class Reading:
    """Positions of a text to read again."""

    text: Text
    indices: tuple[int, ...]  # ascending


def places_read(readings: Sequence[Reading]) -> list[Place]:
    """The positions of readings."""
    return [(reading.text.id, index) for reading in readings for index in reading.indices]


class Oracle:
    """One checkpoint, read in the arithmetic of each side that has it."""

    def __init__(
        self, side: LocalSide, kind: Literal["native", "transformers"], *, quantize: str | None = None
    ) -> None:
        """`kind`: the runtime that reads; the side's own if `quantize` is set. Raises ModelError."""
        planner = side.session.planner
        checkpoint = side.session.loaded.checkpoint
        types: dict[int, str] = {}  # of a GGUF file's matrices, by address
        runtime = replace(
            planner.runtime, runtime=kind, dtype="auto", quantize=None,
            dequantize=checkpoint is not None and bool(checkpoint.gguf), pack=False, compile=False, prompt_cache=None,
        )  # fmt: skip
        unpacked = None if quantize is not None else _unpacked(side, runtime, types)
        if unpacked is not None:
            session = Session(unpacked, runtime)
        elif kind == "native":
            session = Session(_plain(side, runtime, quantize), runtime)
        else:
            session = side.loaded_again(replace(runtime, device=str(side.session.forward.device)))
            if hasattr(session.loaded.model, "set_experts_implementation"):
                session.loaded.model.set_experts_implementation("eager")  # the grouped product has no float64
            if quantize is not None:
                _use_codes(session.loaded.model, side)
        self.side = LocalSide(side.name, session, side.resolved, whole=True)
        self.border = 0.0  # activations move by up to this many codes before they are rounded to codes
        model: Any = session.loaded.model
        named = model.named_tensors() if isinstance(model, NativeModel) else model.named_parameters()
        self.stored = {tensor.dtype for _, tensor in named if tensor.is_floating_point()}
        self.parts = _parts(model, types)
        self._codes: tuple[str, dict[int, Tensor]] = ("", {})  # rounding and values of the latest rounded weights

    def exact(self, readings: Sequence[Reading], dtype: torch.dtype) -> Tensor:
        """Logits f64 [M, V] at the positions of `readings`, with weights of `dtype` and without any rounding."""
        with self._model_of(torch.float64), Exact(self._weights(dtype)) as exact:
            rows = self._read(readings)
        # a share of `border` / 2 of all activations changes its code: with less, a short text may have no such change,
        # and with more, the noise hides small faults
        tokens = sum(len(reading.text.prompt_ids) + max(reading.indices) + 1 for reading in readings)
        self.border = 2 * CHANGED * tokens / exact.coded if exact.coded else 0.0
        return rows

    def shaken(self, readings: Sequence[Reading], dtype: torch.dtype, seed: int) -> Tensor:
        """The same in arithmetic of `dtype` with random rounding; f64 [M, V]."""
        return self.shakily(dtype, seed, lambda: self._read(readings)).double()

    def exactly(
        self, dtype: torch.dtype, read: Callable[[], Found], form: Form | None = None, wide: torch.dtype = torch.float64
    ) -> Found:
        """The result of `read` with weights of `dtype`, without any rounding except that of `form` and of `wide`."""
        if form is None:
            with self._model_of(wide), Exact(self._weights(dtype), wide):
                return read()
        with self._model_of(wide), self._coded(form, dtype, wide):
            return read()

    def types(self, form: Form) -> tuple[str, ...]:
        """The rounding of each matrix: two file types may turn out to be the same."""
        coded = self._coded(form, torch.float32, torch.float32)
        return tuple(coded.type_of(part.matrix) for part in self.parts.values())

    def holds(self, form: Form) -> bool:
        """Whether weights are already rounded as in `form`, judged by some rows of some matrices."""
        coded = self._coded(form, torch.float32, torch.float32)
        some = [*self.parts.values()][:: max(len(self.parts) // 12, 1)]
        for matrix in (part.matrix for part in some):
            rows, kind = matrix[:32].float(), coded.type_of(matrix)
            if not kind or float((rounded(rows, kind) - rows).norm()) > 1e-3 * float(rows.norm()):
                return False
        return bool(some)

    def _coded(self, form: Form, dtype: torch.dtype, wide: torch.dtype) -> Coded:
        if self._codes[0] != form.weights:
            self._codes = form.weights, {}
        spec = getattr(self.side.session.loaded.model, "spec", None)
        return Coded(
            self._weights(dtype), form, wide, parts=self.parts, layers=getattr(spec, "layers", 1),
            neighbours=getattr(spec, "family", "") in NEIGHBOURS, codes=self._codes[1],
        )  # fmt: skip

    def shakily(self, dtype: torch.dtype, seed: int, read: Callable[[], Found]) -> Found:
        """The result of `read` in arithmetic of `dtype` with random rounding."""
        with self._model_of(dtype), Shaken(self._weights(dtype), seed, self.border):
            return read()

    def _read(self, readings: Sequence[Reading]) -> Tensor:
        rows = []
        for reading in readings:
            rows += [logits.cpu().clone() for _, logits in self.side.whole_text(reading.text, reading.indices)]
        return torch.stack(rows)

    def _weights(self, dtype: torch.dtype) -> Weights:
        model = self.side.session.loaded.model
        if not isinstance(model, NativeModel):
            return Weights([*model.parameters()], dtype)
        products = [part for product in model.products() for part in getattr(product, "parts", [product])]
        codes = [held for part in products if not all(map(torch.is_floating_point, held := part.tensors()))]
        rounded = {id(tensor) for held in codes for tensor in held}  # already rounded
        named = [(name, tensor) for name, tensor in model.named_tensors() if id(tensor) not in rounded]
        norms = [tensor for name, tensor in named if "norm" in name] if model.spec.weight_plus_one else []
        return Weights([tensor for _, tensor in named if tensor.is_floating_point()], dtype, from_one=norms)

    @contextmanager
    def _model_of(self, dtype: torch.dtype) -> Iterator[None]:
        """Give the native model's activations this dtype for a while; those of transformers follow the embeddings."""
        model = self.side.session.loaded.model
        stacks = [model.decoder, model.encoder] if isinstance(model, NativeModel) else []
        before = [(stack, stack.dtype) for stack in stacks if stack is not None]
        for stack, _ in before:
            stack.dtype = dtype
        try:
            yield
        finally:
            for stack, kept in before:
                stack.dtype = kept


def _parts(model: Any, types: Mapping[int, str]) -> dict[int, MatrixPart]:
    """The matrices of a model by address; of a transformers model its ends only. `types`: those in a GGUF file."""
    if not isinstance(model, NativeModel):
        ends = (("output", model.get_output_embeddings()), ("token_embd", model.get_input_embeddings()))
        plain = [(name, end.weight) for name, end in ends if hasattr(end, "weight")]  # a packed layer has none
        return {weight.data_ptr(): MatrixPart(name, 0, "", weight) for name, weight in plain}
    weights, found = model.decoder.weights, list[tuple[str, int, Any]]()
    for number, layer in enumerate(weights.layers):
        split, up = layer.qkv.parts, getattr(layer.mlp, "up", None)
        names = ("attn_q", "attn_k", "attn_v") if len(split) == 3 else ("attn_qkv",)
        found += [(name, number, part) for name, part in zip(names, split, strict=False)]
        found += [("ffn_up", number, part) for part in (() if up is None else up.parts)]
        found += [("attn_output", number, layer.o), ("ffn_down", number, getattr(layer.mlp, "down", None))]
    found += [("output", 0, model.decoder.output)]
    held = [(name, number, part.tensors()[0]) for name, number, part in found if part is not None]
    if isinstance(weights.embed, Tensor):
        held.insert(0, ("token_embd", 0, weights.embed))  # tied embeddings are the head
    return {place: MatrixPart(name, number, types.get(place, ""), matrix)
            for name, number, matrix in held for place in (matrix.data_ptr(),)}  # fmt: skip


def _unpacked(side: LocalSide, runtime: Runtime, types: dict[int, str]) -> LoadedModel | None:
    """A GGUF file on the native runtime, all blocks unpacked; None for other files, adapters and unsupported models.

    `types` gets the type of each matrix, by its address.
    """
    loaded, device = side.session.loaded, side.session.forward.device
    checkpoint = loaded.checkpoint
    if checkpoint is None or not checkpoint.gguf or runtime.adapter is not None:
        return None
    try:
        plan, _ = runtime_choice.plan(replace(runtime, runtime="auto", quantize="gguf", dequantize=False), checkpoint,
                                      trust_remote_code=False)  # fmt: skip
    except GenctlError:
        return None
    assert plan is not None
    assert plan.gguf is not None
    held = GgufFile(checkpoint.weights.files, plan.gguf)

    def get(name: str) -> Tensor:
        tensor = held.tensor(name).to(device, torch.float32)
        types[tensor.data_ptr()] = held.tensors.places[name].dtype.lower().replace("f32", "")
        return tensor

    special = SpecialTokens(checkpoint.generation.values)
    products = Products(None, pack=False, compiled=False)
    return replace(loaded, model=build(plan, get, checkpoint.config, special, dtype=torch.float32, products=products))


def _use_codes(model: Any, side: LocalSide) -> None:
    """Give the linear layers of transformers' `model` the side's 8-bit weights; torch multiplies."""
    from genctl.models.packed_layers import PackedLinear, plain_int8

    coded: Any = side.session.loaded.model
    for name, module in coded.named_modules(remove_duplicate=False):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, plain_int8(model.get_submodule(name), side.session.forward.dtype))


def _plain(side: LocalSide, runtime: Runtime, quantize: Any) -> LoadedModel:
    """The checkpoint of a side on the native runtime, with torch's own products. Raises ModelError."""
    loaded, device = side.session.loaded, side.session.forward.device
    checkpoint = loaded.checkpoint
    if checkpoint is None:
        raise ModelError(f"{loaded.name}: its files are not known")
    trust = bool(side.session.planner.flags.get("trust_remote_code"))
    plan, reason = runtime_choice.plan(
        replace(runtime, quantize=quantize, dequantize=False), checkpoint, trust_remote_code=trust
    )
    if plan is None:
        raise ModelError(f"{loaded.name} does not run natively: {reason}")
    stored = runtime_choice.stored_dtype(checkpoint) or "float32"
    model = read(
        plan,
        checkpoint.weights.files,
        checkpoint.config,
        SpecialTokens(checkpoint.generation.values),
        # round weights to the side's dtype before they are quantised
        dtype=side.session.forward.dtype if quantize else getattr(torch, stored),
        device=None if device.type == "cpu" else device,
        products=Products(quantize, pack=quantize is not None, compiled=False),
    )
    return replace(loaded, model=model, quantize=quantize)
