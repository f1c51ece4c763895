"""The differences between families as values: their layers and the names of their tensors. No torch.

The families' functions fill these from a checkpoint's config.json; `decoder` implements them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Last parts of names of tensors that every version of an architecture computes from its config.
COMPUTED = re.compile(
    r"inv_freq|original_inv_freq|position_ids|token_type_ids|masked_bias|causal_mask|attn_mask|attention_mask"
    r"|freqs_cis|(cos|sin)(_cached)?|_float_tensor|num_batches_tracked|version"
)

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): pairs of features turn by an angle that grows with position.

    `kind` is the method that stretches the angles for contexts longer than in training.
    """

    size: int  # number of leading features of a head that are rotated
    theta: float = 10000.0
    interleaved: bool = False  # pairs are neighbours (GPT-J), not features half a head apart
    kind: RopeKind = "default"
    factor: float = 1.0
    attention_factor: float = 1.0  # cosines and sines are multiplied by it (yarn, longrope)
    context: int = 0  # max_position_embeddings; the training context for dynamic
    original: int = 0  # training context before it was extended: yarn, longrope, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope, one for each pair
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()  # of the frequencies, if a GGUF file has them: one for each pair
    reads_again: bool = False  # longrope: recompute the whole text when it exceeds `original` tokens (Phi-3)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angle of a position depends on the length of the text."""
        return self.kind in ("dynamic", "longrope")

    @property
    def bound(self) -> int:
        """If angles depend on the length: the number of tokens up to which they are the same for every text."""
        return self.context if self.kind == "dynamic" else self.original


@dataclass(frozen=True)
class Relative:
    """Relative positions (Raffel et al. 2020, arXiv:1910.10683, section 2.1): a bias on the scores for each distance.

    Distances fall into buckets: near ones have one each, farther ones share buckets on a logarithmic scale.
    """

    buckets: int
    farthest: int  # from this distance on there is one bucket
    every_layer: bool = False  # each layer has its own biases (umT5); else all use the first layer's


@dataclass(frozen=True)
class Experts:
    """A mixture of MLPs: a router chooses some for each token (Shazeer et al. 2017, arXiv:1701.06538)."""

    count: int
    chosen: int  # for each token
    inner: int  # width of each
    layers: frozenset[int]  # layers with experts; the others have one MLP
    normed: bool = True  # rescale the chosen experts' weights to sum to 1; else their softmax over all experts
    # gpt-oss: router and experts have biases, one tensor holds all experts' matrices, gate and up features interleaved
    limit: float | None = None  # gate and up are clamped to it
    alpha: float = 1.0  # gate · sigmoid(alpha · gate)


@dataclass(frozen=True)
class Spec:
    """One stack of layers: a decoder or an encoder. Sizes count features unless stated otherwise."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int  # heads of keys and values: fewer than `heads` if several query heads share one
    head_dim: int
    inner: int  # width of the MLP
    context: int | None = None  # maximum number of tokens; None: unbounded

    # -- two stacks ----------------------------------------------------------------------------------------------------
    encoder: Spec | None = None  # of an encoder-decoder: the stack that reads the source, to which every layer attends
    causal: bool = True  # False for an encoder: its tokens attend to all others, not only to earlier ones
    shared: bool = True  # both stacks share a vocabulary (not in some Marian models)

    # -- norms ---------------------------------------------------------------------------------------------------------
    norm: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    norm_bias: bool = False  # layer norm: whether it has a bias
    norm_weight: bool = True  # False: it only normalises (OLMo)
    weight_plus_one: bool = False  # the stored weight is the gain minus 1 (Gemma)
    round_after_weight: bool = False  # round to the weights' type after multiplying by them, not before (OLMo 3)

    # -- positions: one of these ---------------------------------------------------------------------------------------
    rope: Rope | None = None
    local_rope: Rope | None = None  # of the layers with a window, where they have their own (Gemma 3)
    no_rope_layers: frozenset[int] = frozenset()  # layers without rotary positions (SmolLM3, Command R7B)
    learned: int | None = None  # a table of positions; position 0 is at this row (OPT: 2)
    # a table of sines, computed if the files have none (Marian, Pegasus), or always (M2M-100)
    sinusoidal: Literal["", "marian", "fairseq"] = ""
    padding: int | None = None  # a token without a position; position 0 is at the row after it (M2M-100)
    relative: Relative | None = None  # T5
    # a bias that grows with the distance; Falcon rounds it to bfloat16, MPT has other slopes
    alibi: Literal["", "bloom", "falcon", "mpt"] = ""

    # -- attention -----------------------------------------------------------------------------------------------------
    scaling: float = 1.0  # of the scores
    scaling_by_layer: bool = False  # divide scores by the layer number, from 1 (an option of GPT-2)
    # three matrices; one; one with q, k, v of each group in turn; one with q, v, k of four blocks in turn (CodeGen)
    qkv: Literal["split", "joined", "grouped", "blocks"] = "split"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["", "head", "each", "whole"] = (
        ""  # one norm for all heads; one for each head; over all heads at once
    )
    windows: tuple[int | None, ...] = ()  # per layer, how many tokens a token sees, itself included; None: all
    softcap: float | None = None  # soft cap of the scores: cap * tanh(score / cap) (Gemma 2)
    sinks: bool = False  # the softmax of each head has one more score, which belongs to no token (gpt-oss)
    clip_qkv: float | None = None  # queries, keys and values are clamped to it (OLMo)

    # -- MLP -----------------------------------------------------------------------------------------------------------
    activation: str = "silu"
    gated: bool = True  # act(gate(x)) * up(x), else act(up(x))
    mlp_bias: bool = False
    experts: Experts | None = None

    # -- the residual stream -------------------------------------------------------------------------------------------
    parallel: bool = False  # attention and MLP read the same x (GPT-J, GPT-NeoX, Falcon)
    residual_scale: float = 1.0  # factor of a sublayer's output (Granite)
    embed_scale: float = 1.0  # Gemma: sqrt(hidden)
    embed_scale_rounded: bool = False  # to the type of the weights (Gemma)
    embed_norm: bool = False  # BLOOM
    embed_size: int = 0  # OPT-350m: embeddings are narrower, and projected; 0: as wide as `hidden`

    # -- the head ------------------------------------------------------------------------------------------------------
    tied: bool = False  # the head's matrix is the embeddings'
    head_scale: float = 1.0  # factor of the head's input (T5 1.0)
    head_bias: bool = False
    final_norm: bool = True
    logits_scale: float = 1.0  # logits are divided by it (Granite)
    final_softcap: float | None = None  # soft cap of the logits (Gemma 2)

    @property
    def width(self) -> int:
        """Features of the embeddings and of the head's input."""
        return self.embed_size or self.hidden


@dataclass(frozen=True)
class Names:
    """The tensor names of a family, without `.weight` and `.bias`."""

    prefix: str  # of everything but the head; checkpoints of the bare model lack its first part
    embed: str
    layer: str  # with {} for the number
    parts: dict[str, str]  # our name for a part of a layer -> the checkpoint's (see `plan.matrix_shape`)
    final: str
    heads: tuple[str, ...] = ("lm_head",)  # possible names of the head
    logits_bias: tuple[str, ...] = ()  # possible names of a bias of the logits
    relative: str = ""  # the table of distances, with {} for the layer
    shared: str = ""  # the embeddings of both stacks of an encoder-decoder
    encoder: Names | None = None
    positions: str = ""
    embed_norm: str = ""
    project_in: str = ""
    project_out: str = ""
    transposed: bool = False  # matrices of the layers are [in, out]
    ignored: tuple[str, ...] = ()  # endings of names of tensors that files may hold but nothing reads


Found = tuple[Spec, Names]  # the result of a family's function
