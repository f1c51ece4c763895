"""A text to score, and its score, whoever computes it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from genctl.events import Token

By: TypeAlias = Literal["mean", "total", "bits-per-byte"]


@dataclass(frozen=True)
class Detail:
    """What is reported of each token besides its log-probability."""

    ranks: bool = False  # rank and entropy
    top: int = 0  # alternatives


@dataclass(frozen=True)
class Options:
    """How texts are read, and what is reported of them."""

    add_eos: bool = False
    stride: int | None = None  # tokens between windows; None refuses what is longer than the context
    window: int | None = None  # tokens; None is the model's context
    by: By = "mean"  # how candidates are ranked
    batch_size: int = 16  # texts (windows of them, candidates) in one pass
    chunk: int = 64  # texts sorted by length together
    detail: Detail = field(default_factory=Detail)
    captions: bool = True  # whether tokens carry their text
    context: str | None = None  # of texts that have none of their own
    target: str | None = None
    rank: bool = False  # candidates are ranked
    row_timeout: float | None = None  # seconds for a row, on a server


@dataclass(frozen=True)
class TextToScore:
    """A text to score: alone, after `context`, as the `target` of an encoder-decoder, or several `candidates`.

    With candidates, `text` is empty; they continue `context`, the source of an encoder-decoder.
    """

    text: str
    context: str | None = None
    target: str | None = None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scored:
    """A text and its likelihood. Sums are over the scored tokens; logarithms are in nats unless noted."""

    text: str
    token_ids: tuple[int, ...]  # the text's own; the last `count` of them are scored
    nll: float  # negative log-likelihood
    count: int  # scored tokens
    bytes: int  # of UTF-8, in the characters of the scored tokens
    tokens: tuple[Token, ...]  # the scored ones
    lead: str = ""  # the text of the tokens that are not scored
    windows: int = 1
    candidate: int | None = None  # its index among the candidates
    rank: int | None = None  # its rank, from 1
    backend: str = ""  # the server that scored it

    @property
    def mean(self) -> float:
        """Mean log-probability of a token."""
        return -self.nll / self.count

    @property
    def ppl(self) -> float:
        """Perplexity: exp of the mean negative log-likelihood."""
        return perplexity(self.nll, self.count)

    @property
    def bits(self) -> float:
        """Negative log-likelihood in bits."""
        return self.nll / math.log(2)

    @property
    def bpb(self) -> float:
        """Bits per byte of UTF-8; NaN where nothing but special tokens was scored."""
        return self.bits / self.bytes if self.bytes else math.nan


def perplexity(nll: float, count: int) -> float:
    """exp(nll / count); infinite where that is more than a float holds."""
    try:
        return math.exp(nll / count)
    except OverflowError:
        return math.inf


def ranked(candidates: Sequence[Scored], by: By) -> list[Scored]:
    """The candidates of a text with their places, the best first; equal ones in their order."""
    worth = {"total": lambda one: -one.nll, "mean": lambda one: one.mean, "bits-per-byte": lambda one: -one.bpb}[by]
    placed = [replace(one, candidate=place) for place, one in enumerate(candidates)]
    placed.sort(key=worth, reverse=True)
    return [replace(one, rank=rank) for rank, one in enumerate(placed, 1)]
