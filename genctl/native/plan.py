"""The tensors that a spec requires of a checkpoint, and their shapes, checked against the file headers. No torch.

The embeddings of an encoder, those of its decoder, and the head may be one matrix, and files may hold any of its
copies. A missing copy is taken from the shared matrix or, if that is missing too, from a copy that the files hold (as
transformers ties them).

GGUF files use llama.cpp's tensor names, the same for every architecture (`TENSOR_NAMES` in
github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py). Matrices are [out, in]. A GGUF file splits
matrices as the checkpoint does, but may fuse queries, keys and values, and stacks experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from genctl.native.config import NotNative, Unfit
from genctl.native.spec import COMPUTED, Experts, Found, Names, Spec

Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # of tensors, by their names in the files
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


# Parts of layers without and with experts. The names of an expert's matrices have {} for its number.
_MLP = ("gate", "up", "gate_up", "down")
_EXPERTS = ("router", "expert_gate", "expert_up", "expert_down", "experts_up", "experts_down")


class StackPlan:
    """The tensors of one stack, by their names in the files."""

    def __init__(self, spec: Spec, names: Names, shapes: Shapes) -> None:
        self.spec, self.names = spec, names
        self.bare = not any(name.startswith(names.prefix) for name in shapes)
        self.prefix = self.name(names.prefix)
        self.embed = f"{self.prefix}{names.embed}.weight"  # if the file has one
        table = f"{self.prefix}{names.positions}.weight"
        self.relative: list[str] = []  # one table of distances for all layers, or one for each
        if spec.relative is not None:
            layers = range(spec.layers if spec.relative.every_layer else 1)
            self.relative = [f"{self.prefix}{names.relative.format(number)}.weight" for number in layers]
        self.positions = table if spec.learned is not None or (spec.sinusoidal == "marian" and table in shapes) else ""

    def name(self, name: str) -> str:
        """The name in the files; a checkpoint of the bare model lacks the first part."""
        return name.partition(".")[2] if self.bare else name

    def layer(self, number: int) -> dict[str, str]:
        """Our names for the parts of a layer -> their names in the files."""
        begin, experts = self.prefix + self.names.layer.format(number), self.spec.experts
        without = _MLP if experts is not None and number in experts.layers else _EXPERTS
        return {part: begin + theirs for part, theirs in self.names.parts.items() if part not in without}

    def wanted(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of all tensors but the embeddings."""
        spec, names, prefix = self.spec, self.names, self.prefix
        if self.positions:
            assert spec.context is not None
            yield self.positions, (spec.context + (spec.learned or 0), spec.hidden)
        for table in self.relative:
            assert spec.relative is not None
            yield table, (spec.relative.buckets, spec.heads)
        if spec.embed_norm:
            yield from _norm(f"{prefix}{names.embed_norm}", spec)
        if spec.embed_size:
            yield f"{prefix}{names.project_in}.weight", (spec.hidden, spec.width)
            yield f"{prefix}{names.project_out}.weight", (spec.width, spec.hidden)
        for number in range(spec.layers):
            for part, name in self.layer(number).items():
                yield from _part(part, name, spec, transposed=names.transposed)
        if spec.final_norm:
            yield from _norm(f"{prefix}{names.final}", spec)


class WeightPlan:
    """The names and shapes of a checkpoint's tensors, as a spec requires. Raises NotNative if its files differ.

    `gguf`: the tensors of a GGUF file; None for safetensors files.
    """

    def __init__(self, spec: Spec, names: Names, shapes: Shapes, gguf: GgufTensors | None = None) -> None:
        self.spec, self.names, self.gguf = spec, names, gguf
        self.source = "config.json" if gguf is None else "the metadata"
        self.decoder = StackPlan(spec, names, shapes)
        self.encoder: StackPlan | None = None
        if spec.encoder is not None and names.encoder is not None:
            self.encoder = StackPlan(spec.encoder, names.encoder, shapes)
        head = next((head for head in names.heads if f"{head}.weight" in shapes), names.heads[0])
        self.embeddings, held = self._embeddings(f"{head}.weight", shapes)
        self.head_bias = f"{head}.bias" if spec.head_bias else ""
        self.logits_bias = next((name for name in names.logits_bias if name in shapes), "")
        self.reads, self.unused = self._checked(shapes, held)

    def _embeddings(self, head: str, shapes: Shapes) -> tuple[dict[str, str], list[str]]:
        """The name of the matrix of each stack's embeddings and of the head; and all such names in the files."""
        spec = self.spec
        own = {"decoder": self.decoder.embed, "head": head}
        if self.encoder is not None:
            own = {"encoder": self.encoder.embed, **own}
        shared = f"{self.decoder.name(self.names.shared)}.weight" if self.names.shared else own["decoder"]
        held = [name for name in {shared: None, **dict.fromkeys(own.values())} if name in shapes]
        missing = [part for part, name in own.items() if name not in shapes]
        fallback = {}
        if spec.tied and self.encoder is None:
            fallback = {"head": own["decoder"]} if own["decoder"] in shapes else {}
        elif spec.tied and not spec.shared:  # two vocabularies: the head shares the decoder's matrix
            pair = {"decoder": head, "head": own["decoder"]}
            fallback = {part: name for part, name in pair.items() if name in shapes}
        elif spec.tied:
            if shared not in held and missing and len(held) > 1:
                raise NotNative(f"the weight files hold no {shared}, and several matrices that could be it")
            fallback = dict.fromkeys(own, held[0]) if held else {}
        for part in missing:
            if part not in fallback:
                raise Unfit(f"the weight files lack {shared if self.encoder and spec.shared else own[part]}")
            own[part] = fallback[part]
        return own, held

    def _wanted(self) -> Iterator[tuple[str, Shape]]:
        spec, encoder = self.spec, self.encoder
        yield self.embeddings["decoder"], (spec.vocab, spec.width)
        yield self.embeddings["head"], (spec.vocab, spec.width)
        if self.head_bias:
            yield self.head_bias, (spec.vocab,)
        if self.logits_bias:
            yield self.logits_bias, (1, spec.vocab)
        if encoder is not None:
            yield self.embeddings["encoder"], (encoder.spec.vocab, encoder.spec.width)
            yield from encoder.wanted()
        yield from self.decoder.wanted()

    def _checked(self, shapes: Shapes, known: list[str]) -> tuple[frozenset[str], list[str]]:
        """The names of tensors in the files that are read, and of those that are not. Raises Unfit."""
        shape_of = dict(self._wanted())
        for name, shape in shape_of.items():
            if shapes.get(name) != shape:
                held = "nothing" if name not in shapes else str(list(shapes[name]))
                raise Unfit(f"the weight files hold {held} as {name}, where {self.source} implies {list(shape)}")
        ignored = self.names.ignored or ("\0",)
        others = (name for name in shapes.keys() - shape_of.keys() - set(known) if not name.endswith(ignored))
        return frozenset(shape_of), sorted(name for name in others if not COMPUTED.fullmatch(name.rpartition(".")[2]))


def matrix_shape(part: str, spec: Spec) -> tuple[Shape, bool] | None:
    """The shape [out, in] of a matrix of a layer, and whether it has a bias; None for a part that is a norm."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[Shape, bool]] = {
        "q": ((queries, spec.hidden), spec.qkv_bias),
        "k": ((keys, spec.hidden), spec.qkv_bias),
        "v": ((keys, spec.hidden), spec.qkv_bias),
        "qkv": ((queries + 2 * keys, spec.hidden), spec.qkv_bias),
        "o": ((spec.hidden, queries), spec.o_bias),
        "gate": ((spec.inner, spec.hidden), spec.mlp_bias),
        "up": ((spec.inner, spec.hidden), spec.mlp_bias),
        "gate_up": ((2 * spec.inner, spec.hidden), spec.mlp_bias),
        "down": ((spec.hidden, spec.inner), spec.mlp_bias),
    }
    return shapes.get(part.removeprefix("cross_"))


def _part(part: str, name: str, spec: Spec, *, transposed: bool) -> Iterator[tuple[str, Shape]]:
    if spec.experts is not None and part in _EXPERTS:
        yield from _expert_part(part, name, spec.hidden, spec.experts)
        return
    matrix = matrix_shape(part, spec)
    if matrix is not None:
        (out, into), bias = matrix
        yield f"{name}.weight", (into, out) if transposed else (out, into)
        if bias:
            yield f"{name}.bias", (out,)
    elif part == "sinks":
        yield name, (spec.heads,)
    elif part in ("q_norm", "k_norm"):
        heads = spec.heads if part == "q_norm" else spec.kv_heads
        if spec.qk_norm == "each":
            yield from ((f"{name}.{head}.weight", (spec.head_dim,)) for head in range(heads))
        else:
            yield from _norm(name, spec, spec.head_dim if spec.qk_norm == "head" else heads * spec.head_dim)
    else:
        yield from _norm(name, spec)


def _expert_part(part: str, name: str, hidden: int, experts: Experts) -> Iterator[tuple[str, Shape]]:
    if part == "router":
        yield f"{name}.weight", (experts.count, hidden)
        if experts.limit is not None:
            yield f"{name}.bias", (experts.count,)
        return
    if part in ("experts_up", "experts_down"):
        into, out = (hidden, 2 * experts.inner) if part == "experts_up" else (experts.inner, hidden)
        yield name, (experts.count, into, out)
        yield f"{name}_bias", (experts.count, out)
        return
    shape = (hidden, experts.inner) if part == "expert_down" else (experts.inner, hidden)
    yield from ((f"{name.format(number)}.weight", shape) for number in range(experts.count))


def _norm(name: str, spec: Spec, size: int | None = None) -> Iterator[tuple[str, Shape]]:
    if spec.norm_weight:
        yield f"{name}.weight", (size or spec.hidden,)
        if spec.norm == "layer" and spec.norm_bias:
            yield f"{name}.bias", (size or spec.hidden,)


ROPE_FACTORS = "rope_freqs.weight"
_PARTS = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "qkv": "attn_qkv", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "attn_out_norm": "post_attention_norm", "mlp_norm": "ffn_norm",
    "gate": "ffn_gate", "up": "ffn_up", "gate_up": "ffn_up", "down": "ffn_down", "mlp_out_norm": "post_ffw_norm",
    "router": "ffn_gate_inp", "expert_gate": "ffn_gate_exps.{}", "expert_up": "ffn_up_exps.{}",
    "expert_down": "ffn_down_exps.{}",
}  # fmt: skip
# Families for which llama.cpp's converter permutes rows of queries and keys for interleaved RoPE.
_NEIGHBOURS = ("llama", "mistral", "mixtral", "granite", "olmo", "smollm3")


@dataclass(frozen=True)
class GgufTensors:
    """The tensors of a GGUF file by name (`models.gguf.GgufTensor`), and how some are converted."""

    places: Mapping[str, Any]
    neighbours: Mapping[str, int]  # tensor name -> heads whose rows are permuted back from interleaved to half-split
    head_dim: int = 0
    from_one: bool = False  # the file's norms have 1 added, unlike the family's checkpoints


def in_gguf(found: Found, tensors: Mapping[str, Any], rope_factors: tuple[float, ...]) -> tuple[Found, GgufTensors]:
    """A family's spec and names for a GGUF file. Raises NotNative.

    The frequencies of the rotary positions are divided by the file's `rope_factors`; () if it has none.
    """
    spec, names = found
    if spec.encoder is not None or not names.parts.keys() <= _PARTS.keys():
        raise NotNative(f"GGUF files of {spec.family} models are read by transformers' classes only")
    if rope_factors:
        if spec.rope is None or spec.rope.kind != "default" or len(rope_factors) != spec.rope.size // 2:
            raise NotNative(f"the GGUF file holds {ROPE_FACTORS}, for which the model has no place")
        spec = replace(spec, rope=replace(spec.rope, divisors=rope_factors))
    parts = {part: _PARTS[part] for part in names.parts}
    if spec.family == "falcon" and "mlp_norm" in parts:
        parts |= {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
    if "q" in parts and "blk.0.attn_qkv.weight" in tensors:
        parts = {part: theirs for part, theirs in parts.items() if part not in ("q", "k", "v")} | {"qkv": "attn_qkv"}
    if "qkv" in parts:
        spec = replace(spec, qkv="joined")
    theirs = Names(
        prefix="",
        embed="token_embd",
        layer="blk.{}.",
        parts=parts,
        final="output_norm",
        heads=("output",),
        positions="position_embd",
        embed_norm="token_embd_norm",
        ignored=(ROPE_FACTORS, "rope_factors_short.weight", "rope_factors_long.weight"),
    )
    return (spec, theirs), GgufTensors(
        dict(_taken_apart(spec, tensors)), _neighbours(spec), spec.head_dim, spec.weight_plus_one
    )


def _neighbours(spec: Spec) -> dict[str, int]:
    heads = {"attn_q": spec.heads, "attn_k": spec.kv_heads, "attn_qkv": spec.heads + spec.kv_heads}
    return {
        f"blk.{number}.{part}.{end}": count
        for number in range(spec.layers if spec.family in _NEIGHBOURS else 0)
        for part, count in heads.items()
        for end in (("weight",) if spec.family == "olmo" else ("weight", "bias"))
    }


def _taken_apart(spec: Spec, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors by name; a tensor stacked over experts, or over heads, is split into one for each."""
    experts = 0 if spec.experts is None else spec.experts.count
    heads = {"attn_q_norm": spec.heads, "attn_k_norm": spec.kv_heads} if spec.qk_norm == "each" else {}
    for name, tensor in tensors.items():
        stem, _, end = name.rpartition(".")
        part = stem.rpartition(".")[2]
        count = heads.get(part, experts if part.endswith("_exps") else 0)
        if not count or len(tensor.shape) < 2 or tensor.shape[0] != count:
            yield name, tensor
            continue
        size = (tensor.end - tensor.begin) // count
        for number in range(count):
            begin = tensor.begin + number * size
            yield f"{stem}.{number}.{end}", replace(tensor, shape=tensor.shape[1:], begin=begin, end=begin + size)
