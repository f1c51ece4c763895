"""What an audit of a trace finds, as values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from genctl.parity.causes import Cause
from genctl.parity.values import Text


@dataclass(frozen=True)
class AuditPosition:
    """A token before and after the explanation, in nats and in units of the noise."""

    id: str
    index: int
    token: int
    number: float  # as written
    reference: float  # the log-probability in the reference
    before: float
    after: float
    ratio: float  # of `before` to noise
    ratio_after: float


@dataclass(frozen=True)
class TriedCause:
    """A line of the report."""

    causes: tuple[str, ...]
    words: str
    explained: float
    log_likelihood: float  # over that of no cause
    ratio: float


@dataclass(frozen=True)
class Audit:
    """All that is found about a trace."""

    trace: str
    reference: str
    verdict: str  # same, explained, unexplained
    reason: str
    causes: tuple[Cause, ...]
    candidates: tuple[TriedCause, ...]  # that cannot be told apart
    tried: tuple[TriedCause, ...]
    positions: tuple[AuditPosition, ...]
    texts: tuple[Text, ...]
    explained: float
    rows_left: int
    first: tuple[str, int] | None  # the first position with a difference
    ratio: float  # median of the difference to noise, before an explanation
    allowed: float
    noise: float  # nats, median
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
