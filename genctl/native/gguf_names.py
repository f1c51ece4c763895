"""What the tensors of a native family are called in a GGUF file, and how their rows lie. No torch.

Names are those of llama.cpp (github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py, `TENSOR_NAMES`), the
same for every architecture. Matrices are [out, in]; one that is several in the checkpoint is several here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from genctl.native.config import NotNative
from genctl.native.spec import Found, Names, Spec

ROPE_FACTORS = "rope_freqs.weight"
_PARTS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "qkv": "attn_qkv",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
    "mlp_out_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "expert_gate": "ffn_gate_exps.{}",
    "expert_up": "ffn_up_exps.{}",
    "expert_down": "ffn_down_exps.{}",
}
# Families in which llama.cpp's converter turns rows of queries and keys, so that neighbours turn together.
_NEIGHBOURS = ("llama", "mistral", "mixtral", "granite", "olmo", "smollm3")


@dataclass(frozen=True)
class GgufTensors:
    """The tensors of a GGUF file by name (`models.gguf.GgufTensor`), and what is done to some of them."""

    places: Mapping[str, Any]
    neighbours: Mapping[str, int]  # those whose first rows pair neighbours: heads -> pairs half a head apart
    head_dim: int = 0
    from_one: bool = False  # norms are stored with 1 added, where the family's checkpoints have the distance from 1


def in_gguf(found: Found, tensors: Mapping[str, Any], rope_factors: tuple[float, ...]) -> tuple[Found, GgufTensors]:
    """A family's spec and names for a GGUF file. Raises NotNative.

    `rope_factors` are what the file divides the frequencies of the rotary positions by; () where it has none.
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
    """The tensors by name; what holds one for each expert, or one for each head, as one for each."""
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
