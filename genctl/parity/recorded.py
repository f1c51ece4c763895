"""A recorded reference, as values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from genctl.parity.values import Text


@dataclass(frozen=True)
class KnownTop:
    """A distribution before a token: the log-probability of that token, those of the best ones, and what they leave.

    All log-probabilities are float32 numbers, so that a file has them as they are.
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
    own_lengths: Mapping[str, int] = field(default_factory=dict)  # limits of texts that had one of their own, by id

    def length(self, text: str) -> int | None:
        """The limit of what the reference wrote for a text."""
        return self.own_lengths.get(text, self.new_tokens)
