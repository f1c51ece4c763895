"""What makes one encoder-decoder family differ from another, as values. No torch.

`seq2seq_families` fills these from a checkpoint's config.json; `encoder_decoder` computes what they say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class Side:
    """The sizes of the encoder, or of the decoder."""

    vocab: int
    layers: int
    heads: int
    head_dim: int
    inner: int  # width of the MLP


@dataclass(frozen=True)
class Relative:
    """Relative positions (Raffel et al. 2020, arXiv:1910.10683, section 2.1): a bias of the scores for each distance.

    Distances share buckets: near ones have one each, farther ones share on a logarithmic scale.
    """

    buckets: int
    farthest: int  # from this distance on there is one bucket


@dataclass(frozen=True)
class Seq2SeqSpec:
    """One encoder-decoder. Sizes are counted in features unless something else is said."""

    family: str
    hidden: int
    encoder: Side
    decoder: Side

    # -- norms ---------------------------------------------------------------------------------------------------------
    norm: Literal["rms", "layer"]  # T5: rms, without biases; BART and its kin: layer norms
    norm_first: bool  # of what a sublayer reads (T5, mBART, Pegasus), else of the sum with what it adds (BART, Marian)
    eps: float
    embed_norm: bool = False  # of the embeddings (BART, mBART)
    final_norm: bool = True  # of what each side ends with (T5, mBART, Pegasus)

    # -- positions: one of these ---------------------------------------------------------------------------------------
    relative: Relative | None = None  # T5
    learned: int | None = None  # a table, which begins this many rows late (BART: 2)
    sinusoidal: bool = False  # Marian, Pegasus
    context: int | None = None  # most tokens of either side; None where nothing bounds them

    # -- matrices ------------------------------------------------------------------------------------------------------
    scaled: bool = True  # scores are divided by the root of `head_dim`; T5 has that in its initialisation
    bias: bool = False  # whether every matrix has one
    activation: str = "relu"
    gated: bool = False  # act(gate(x)) * up(x), else act(up(x)) (T5 1.1)
    embed_scale: float = 1.0

    # -- embeddings and the head ---------------------------------------------------------------------------------------
    shared: bool = True  # both sides have one vocabulary (not in some Marian models)
    tied: bool = True  # sides with one vocabulary share a matrix, and the head has the decoder's
    head_scale: float = 1.0  # what the head reads is multiplied by it (T5 1.0)

    # positions are places or distances, never angles
    rope: ClassVar[None] = None
    local_rope: ClassVar[None] = None
    windows: ClassVar[tuple[int | None, ...]] = ()

    @property
    def vocab(self) -> int:
        """Entries of the output distribution."""
        return self.decoder.vocab

    @property
    def layers(self) -> int:
        """The decoder's."""
        return self.decoder.layers

    @property
    def heads(self) -> int:
        """The decoder's."""
        return self.decoder.heads

    @property
    def kv_heads(self) -> int:
        """The decoder's: every query has keys and values of its own."""
        return self.decoder.heads

    @property
    def head_dim(self) -> int:
        """The decoder's."""
        return self.decoder.head_dim

    def scaling(self, side: Side) -> float:
        """What scores are multiplied by."""
        return side.head_dim**-0.5 if self.scaled else 1.0
