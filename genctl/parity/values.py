"""The results of comparing two sides, as values, and a recorded reference. Imports no torch.

The first side is the reference. Logarithms are natural; lengths are in tokens; indices count from 0 over the
compared tokens of a text, without its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["tie", "drift", "other weights", "defect"]
SEVERITY: dict[Verdict, int] = {"tie": 0, "drift": 1, "other weights": 2, "defect": 3}
Place: TypeAlias = tuple[str, int]  # the id of a text, the index of a token
ENCODER = "encoder "  # prefix for the parts of an encoder


def worst(*verdicts: Verdict | None) -> Verdict | None:
    """The most severe verdict; None if there is none."""
    return max((verdict for verdict in verdicts if verdict is not None), key=SEVERITY.__getitem__, default=None)


@dataclass(frozen=True)
class Text:
    """A text that both sides read."""

    id: str  # of its request
    prompt_ids: tuple[int, ...]  # the encoder's source for an encoder-decoder
    token_ids: tuple[int, ...]  # the compared tokens
    prompt: str = ""  # as it was written, "" for ids
    name: str = ""  # what messages call it: its own id, else its place in the input from 1; "": as `id`

    def token(self, index: int) -> str:
        """A token of the text, as messages call it."""
        return f"text {self.name or self.id}, token {index + 1}"


@dataclass(frozen=True)
class Bounds:
    """Both ends of a figure that is not known exactly; `high` may be infinite."""

    low: float
    high: float


@dataclass(frozen=True)
class Position:
    """The distributions of both sides before one token of a text that both read."""

    text: str  # the id of the text
    index: int  # of the token
    token: int  # that follows in the text
    kl: float  # KL(reference ‖ other) in nats; the lower bound if `kl_bounds` is set
    same: bool  # whether both sides have the same first choice
    regret: float  # nats that the reference loses by the other's first choice, at least 0
    first_reference: int  # the reference's first choice
    first_other: int  # the other's first choice
    rank_in_reference: int  # rank, from 1, of the other's first choice in the reference
    rank_in_other: int | None  # rank, from 1, of the reference's first choice in the other
    logprob_reference: float  # of `token`
    logprob_other: float  # of `token`
    # root mean square over the vocabulary of the difference of logits without its mean, in nats; against a recording
    # over the log-probabilities that it has
    shift: float
    margin: float  # nats between the reference's first and second choice
    kl_bounds: Bounds | None = None  # against a recording, which only has the best tokens: then KL is only bounded

    @property
    def difference(self) -> float:
        """|Δ log-probability| of the token of the text."""
        equal = self.logprob_other == self.logprob_reference  # both may be infinite
        return 0.0 if equal else abs(self.logprob_other - self.logprob_reference)


@dataclass(frozen=True)
class TextParting:
    """Where the texts that both sides write on their own diverge."""

    text: str  # the id of the text
    index: int  # of the first token that differs
    token_reference: int | None  # None: the reference's text had ended
    token_other: int | None  # None: the other's text had ended
    logprobs_reference: tuple[float, float]  # of both tokens by the reference; NaN where a token is None
    logprobs_other: tuple[float, float]  # of both tokens by the other; NaN where it is not known
    margin: float  # nats by which the reference prefers its own token
    verdict: Verdict
    reason: str  # one sentence


@dataclass(frozen=True)
class Quantiles:
    """The distribution of a figure over all positions. All fields are NaN if there are none."""

    mean: float
    median: float
    q90: float
    q95: float
    q99: float
    q999: float
    max: float
    min: float
    uncertainty: float  # standard error of the mean, positions taken as independent
    q001: float = math.nan  # the quantile of 0.1 percent; and so on
    q01: float = math.nan
    q05: float = math.nan
    q10: float = math.nan
    q25: float = math.nan
    q75: float = math.nan

    def __repr__(self) -> str:
        return f"Quantiles(mean={self.mean:.3g}, median={self.median:.3g}, p99={self.q99:.3g}, max={self.max:.3g})"


@dataclass(frozen=True)
class Estimate:
    """A figure with its standard error; positions are taken as independent, as llama-perplexity does."""

    value: float
    uncertainty: float


@dataclass(frozen=True)
class Summary:
    """All positions of a pair of sides."""

    positions: int
    kl: Quantiles  # of the lower bounds where KL is bounded
    regret: Quantiles
    difference: Quantiles  # |Δ log-probability| of the tokens of the texts
    agreement: Estimate  # share of positions with the same first choice
    perplexity_reference: Estimate
    perplexity_other: Estimate
    log_ratio: Estimate  # ln(PPL_other / PPL_reference)
    ratio: Estimate  # PPL_other / PPL_reference
    perplexity_difference: Estimate  # PPL_other - PPL_reference
    correlation: float  # of the log-probabilities of both sides; NaN where either is constant
    probability_change: Quantiles  # Δp of the tokens of the texts, from -1 to 1
    probability_rms: Estimate  # root mean square of Δp
    kl_high: Quantiles | None = None  # of the upper bounds, where KL is bounded
    perplexity_positions: int | None = None  # those with log-probabilities of their tokens, if fewer

    def __repr__(self) -> str:
        return f"Summary({self.positions} positions, kl={self.kl!r}, agreement={self.agreement!r})"


@dataclass(frozen=True)
class Variation:
    """One way in which the reference was read again, and how far its logits moved."""

    name: str  # "alone", "one thread", "float64", "bfloat16 rounding", …
    shift: Quantiles  # `Position.shift` between both readings
    equal: bool  # whether every logit was equal


@dataclass(frozen=True)
class Noise:
    """How far apart sides may be while computing the same function; every number is measured."""

    positions: int  # on which it was measured
    variations: tuple[Variation, ...]
    margin: float  # nats: a margin up to this is a tie
    reference: float  # the median `Position.shift` from the reference's own rounding
    explained: float  # the median `Position.shift` that the other side's weights and rounding explain
    residual: float  # the median `Position.shift` that is left without the effect of the weights
    allowed: float  # the largest allowed ratio of remainder to rounding: twice what rounding itself reaches
    typical_ratio: float  # the median ratio of remainder to rounding on the other side
    largest_ratio: float  # the largest ratio of a position
    how: str  # one sentence: what was measured, and how
    typical_allowed: float = 0.0  # the largest allowed median ratio: twice what rounding itself reaches
    changed: float | None = None  # for a server as a side, which was removed; null in records


@dataclass(frozen=True)
class LayerDifference:
    """One point of the curve by layer: the outputs of a part on both sides."""

    layer: int | None  # None: before the first layer, or after the last
    sublayer: str  # embedding, layer, head; prefixed with ENCODER for outputs of an encoder
    name: str  # "embeddings", "layers.3", "logits" or "encoder"
    size: float  # norm of the difference over the norm of the output, the largest over all positions
    noise: float  # the same for what weights and rounding explain
    position: int  # the index of the text's token before which the difference is largest; for an encoder, of the source


@dataclass(frozen=True)
class Fault:
    """The first part whose output differs by more than rounding does."""

    text: str  # the id of the text that was read
    layer: int | None  # None: before the first layer, after the last, or outside of the layers
    sublayer: str  # as in `LayerDifference`; "batch" if a text that is read alone agrees
    name: str
    position: int  # the first that diverges, counted from the beginning of the prompt
    size: float  # at that position, as `LayerDifference.size`; of "batch" the largest ratio to rounding
    reason: str  # one sentence


@dataclass(frozen=True)
class Parity:
    """The findings about a pair of sides."""

    reference: str  # the name of the side
    other: str
    texts: tuple[Text, ...]
    positions: tuple[Position, ...]  # in the order of the texts
    partings: tuple[TextParting, ...]
    summary: Summary
    noise: Noise
    verdict: Verdict | None  # the worst of what positions and partings show; None: no position was compared
    reason: str  # one sentence
    fault: Fault | None = None  # searched for if the verdict is a defect, or if the curve is wanted
    curve: tuple[LayerDifference, ...] = ()
    notes: tuple[str, ...] = ()  # sentences for the user, such as "config.json differs in rms_norm_eps"
    failed: Mapping[str, str] = field(default_factory=dict)  # id of a text -> why a side could not read it

    @property
    def word(self) -> str:
        """The verdict, as messages call it."""
        return self.verdict or "no verdict"

    @property
    def sentence(self) -> str:
        """The verdict with its reason."""
        return f"{self.word}: {self.reason}"

    def __repr__(self) -> str:
        return f"<{self.other} against {self.reference}: {self.word}>"


@dataclass(frozen=True)
class KnownTop:
    """A distribution before a token: the log-probability of that token, those of the best ones, and what they leave.

    All log-probabilities are float32 numbers, which a file stores exactly.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable first
    tail: float  # the probability of all others


@dataclass(frozen=True)
class Golden:
    """A recorded reference."""

    reference: str  # the side, as it was typed
    fingerprint: str  # of its checkpoint
    dtype: str  # in which it computed
    knobs: Mapping[str, Any]  # knobs of the side that were set
    vocabulary: int
    written: bool  # whether the reference wrote the texts, greedily; else they were given
    new_tokens: int | None  # the limit of what it wrote
    versions: Mapping[str, str]
    texts: tuple[Text, ...]
    known: Mapping[tuple[str, int], KnownTop]  # by text and index of a token
