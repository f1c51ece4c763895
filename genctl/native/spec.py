"""What makes one family differ from another, as values: its layers, and the names of its tensors. No torch.

The functions of the families fill these from a checkpoint's config.json; `decoder` computes what they say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# The last part of a tensor's name: computed from the config by every version of an architecture.
COMPUTED = re.compile(
    r"inv_freq|original_inv_freq|position_ids|token_type_ids|masked_bias|causal_mask|attn_mask|attention_mask"
    r"|freqs_cis|(cos|sin)(_cached)?|_float_tensor|num_batches_tracked|version"
)

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): pairs of features turn by an angle that grows with position.

    `kind` says how the angles are stretched for contexts longer than those of the training.
    """

    size: int  # features of a head that turn, the first ones; the rest stay
    theta: float = 10000.0
    interleaved: bool = False  # pairs are neighbours (GPT-J), not features half a head apart
    kind: RopeKind = "default"
    factor: float = 1.0
    attention_factor: float = 1.0  # cosines and sines are multiplied by it (yarn, longrope)
    context: int = 0  # tokens of the training: dynamic
    original: int = 0  # tokens of the training before it was extended: yarn, longrope, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope, one for each pair
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()  # of the frequencies, where a GGUF file holds them: one for each pair
    reads_again: bool = False  # longrope: the whole text is read again when it passes `original` tokens (Phi-3)

    @property
    def depends_on_length(self) -> bool:
        """Whether the angle of a position depends on how long the text is."""
        return self.kind in ("dynamic", "longrope")

    @property
    def bound(self) -> int:
        """Where it depends on the length: the tokens up to which it is the same for every text."""
        return self.context if self.kind == "dynamic" else self.original


@dataclass(frozen=True)
class Relative:
    """Relative positions (Raffel et al. 2020, arXiv:1910.10683, section 2.1): a bias of the scores for each distance.

    Distances share buckets: near ones have one each, farther ones share on a logarithmic scale.
    """

    buckets: int
    farthest: int  # from this distance on there is one bucket
    every_layer: bool = False  # each layer has biases of its own (umT5), else all have those of the first


@dataclass(frozen=True)
class Experts:
    """MLPs of which a router chooses some for each token (Shazeer et al. 2017, arXiv:1701.06538)."""

    count: int
    chosen: int  # for each token
    inner: int  # width of each
    layers: frozenset[int]  # that have them; the others have one MLP
    normed: bool = True  # the weights of the chosen sum to 1: their probabilities among all do not
    # gpt-oss: router and experts have biases, a tensor holds the matrices of all experts, gate and up features in turn
    limit: float | None = None  # gates and ups are cut off at it
    alpha: float = 1.0  # gate · sigmoid(alpha · gate)


@dataclass(frozen=True)
class Spec:
    """One stack of layers: a decoder, or an encoder. Sizes are numbers of features unless stated otherwise."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int  # heads that keys and values have: fewer than `heads` where several query heads share one
    head_dim: int
    inner: int  # width of the MLP
    context: int | None = None  # most tokens; None where nothing bounds them

    # -- two stacks ----------------------------------------------------------------------------------------------------
    encoder: Spec | None = None  # of an encoder-decoder: the stack that reads the source, to which every layer attends
    causal: bool = True  # False for an encoder: its tokens attend to all others, not only to earlier ones
    shared: bool = True  # both stacks have one vocabulary (not in some Marian models)

    # -- norms ---------------------------------------------------------------------------------------------------------
    norm: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    norm_bias: bool = False  # layer norm: whether it has a bias
    norm_weight: bool = True  # False: it only normalises (OLMo)
    weight_plus_one: bool = False  # the stored weight is the distance from 1 (Gemma)
    round_after_weight: bool = False  # rounded to the type of the weights after their product, not before (OLMo 3)

    # -- positions: one of these ---------------------------------------------------------------------------------------
    rope: Rope | None = None
    local_rope: Rope | None = None  # of the layers with a window, where they have their own (Gemma 3)
    no_rope_layers: frozenset[int] = frozenset()  # the layers in which nothing turns (SmolLM3, Command R7B)
    learned: int | None = None  # a table of positions, which begins this many rows late (OPT: 2)
    # a table of sines, computed where the files hold none (Marian, Pegasus), or always (M2M-100)
    sinusoidal: Literal["", "marian", "fairseq"] = ""
    padding: int | None = None  # a token without a position; the table begins behind its row (M2M-100)
    relative: Relative | None = None  # T5
    # a bias that grows with the distance; Falcon rounds it to bfloat16, MPT has other slopes
    alibi: Literal["", "bloom", "falcon", "mpt"] = ""

    # -- attention -----------------------------------------------------------------------------------------------------
    scaling: float = 1.0  # of the scores
    scaling_by_layer: bool = False  # divided by the number of the layer, from 1 (GPT-2's option)
    # three matrices; one; one with q, k, v of each group in turn; one with q, v, k of four blocks in turn (CodeGen)
    qkv: Literal["split", "joined", "grouped", "blocks"] = "split"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["", "head", "each", "whole"] = (
        ""  # one norm for all heads; one for each head; over all heads at once
    )
    windows: tuple[int | None, ...] = ()  # for each layer, how many tokens it sees, itself included; None: all
    softcap: float | None = None  # soft cap of the scores: cap * tanh(score / cap) (Gemma 2)
    sinks: bool = False  # the softmax of each head has one more score, which belongs to no token (gpt-oss)
    clip_qkv: float | None = None  # queries, keys and values are cut off at it (OLMo)

    # -- MLP -----------------------------------------------------------------------------------------------------------
    activation: str = "silu"
    gated: bool = True  # act(gate(x)) * up(x), else act(up(x))
    mlp_bias: bool = False
    experts: Experts | None = None

    # -- the residual stream -------------------------------------------------------------------------------------------
    parallel: bool = False  # attention and MLP read the same x (GPT-J, GPT-NeoX, Falcon)
    residual_scale: float = 1.0  # factor of what a sublayer adds (Granite)
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
        """Features of the embeddings and of what the head reads."""
        return self.embed_size or self.hidden


@dataclass(frozen=True)
class Names:
    """The tensors of a family, without `.weight` and `.bias`."""

    prefix: str  # of everything but the head; a checkpoint of the bare model lacks its first part
    embed: str
    layer: str  # with {} for the number
    parts: dict[str, str]  # our name for a part of a layer -> theirs (see `plan.matrix_shape`)
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
    ignored: tuple[str, ...] = ()  # endings of tensors that files may hold and nothing reads


Found = tuple[Spec, Names]  # the result of a family's function
