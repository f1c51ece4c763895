"""What the tensors of a native family are called in a GGUF file, and how their rows lie. No torch.

Names are those of llama.cpp (github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py, `TENSOR_NAMES`), the
same for every architecture. Matrices are [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from genctl.native.config import NotNative
from genctl.native.spec import Found, Names

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
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# Families whose tensors are those of their checkpoints, but for names and what is here.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
_NEIGHBOURS = ("llama", "mistral")  # llama.cpp turns neighbours, so that rows of queries and keys lie in that order


class Located(Protocol):
    """Where a tensor lies in a file (`models.weights.Tensor`)."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def begin(self) -> int: ...


@dataclass(frozen=True)
class GgufTensors:
    """The tensors of a GGUF file by name, and those whose rows pair neighbours, with their number of heads."""

    places: Mapping[str, Located]
    neighbours: Mapping[str, int]


def in_gguf(found: Found, places: Mapping[str, Located], rope_factors: tuple[float, ...]) -> tuple[Found, GgufTensors]:
    """A family's spec and names for a GGUF file. Raises NotNative.

    `rope_factors` are what the file divides the frequencies of the rotary positions by; () where it has none.
    """
    spec, names = found
    if spec.family not in _FAMILIES:
        raise NotNative(f"GGUF files of {spec.family} models are read by transformers' classes only")
    if rope_factors:
        if spec.rope is None or spec.rope.kind != "default" or len(rope_factors) != spec.rope.size // 2:
            raise NotNative(f"the GGUF file holds {ROPE_FACTORS}, for which the model has no place")
        spec = replace(spec, rope=replace(spec.rope, divisors=rope_factors))
    theirs = Names(
        prefix="",
        embed="token_embd",
        layer="blk.{}.",
        parts={part: _PARTS[part] for part in names.parts},
        final="output_norm",
        heads=("output",),
        positions="position_embd",
        ignored=(ROPE_FACTORS,),
    )
    neighbours = {}
    if spec.family in _NEIGHBOURS:
        neighbours = {
            f"blk.{number}.{part}.{end}": heads
            for number in range(spec.layers)
            for part, heads in (("attn_q", spec.heads), ("attn_k", spec.kv_heads))
            for end in ("weight", "bias")
        }
    return (spec, theirs), GgufTensors(places, neighbours)
