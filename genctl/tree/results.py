"""What commands yield, as frozen values of the schema of `genctl.events` (`events.to_json` writes each)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from genctl.events import Stepped, Trace
from genctl.tree.token_tree import At, TokenNode


@dataclass(frozen=True, slots=True)
class Alternative:
    """One token that may follow a node."""

    id: int
    text: str  # of the token alone
    rank: int  # by the model, from 1
    logprob: float  # the model's, in nats
    processed: float  # after the processors; -inf: removed
    removed_by: str = ""  # the processor that removed it
    node: int | None = None  # where the tree has it

    @property
    def probability(self) -> float:
        """By the model."""
        return float(np.exp(self.logprob))

    @property
    def chance(self) -> float:
        """After the processors: with it a draw takes the token."""
        return float(np.exp(self.processed))


@dataclass(frozen=True, slots=True)
class Effect:
    """What one processor did to the distribution."""

    processor: str
    removed: int  # tokens that lost all their probability here
    moved: float  # total variation between the distribution before and after, in [0, 1]


@dataclass(frozen=True, slots=True)
class TokenWritten:
    """A token was written to the end of a branch."""

    token: TokenNode
    known: bool = False  # the tree had it before


@dataclass(frozen=True, slots=True)
class Searching:
    """A step of a search whose rows compete. Its results become nodes when it is done."""

    step: Stepped
    start: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """A continuation is done."""

    node: int  # its end
    start: int
    reason: str  # eos, length, stop, time, interrupted
    text: str
    logprob: float  # of its tokens, the model's own
    seed: int | None = None
    score: float | None = None  # of a search


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings, above those that the tree began with."""

    values: dict[str, Any]
    notes: tuple[str, ...] = ()  # what else changed with them: whether tokens are drawn


@dataclass(frozen=True, slots=True)
class Shown:
    """The distribution of the next token."""

    node: int
    entropy: float
    mass: float  # of the listed alternatives, by the model
    alternatives: tuple[Alternative, ...]
    effects: tuple[Effect, ...] = ()
    after_eos: bool = False  # the text has ended before


@dataclass(frozen=True, slots=True)
class Why:
    """What each processor did to a token."""

    token: Alternative
    trace: tuple[Trace, ...]
    after_eos: bool = False


@dataclass(frozen=True, slots=True)
class BranchText:
    """The text of a branch."""

    node: int
    text: str
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """The tree is in another file now, which gets what follows."""

    path: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """One of all continuations, in the order of their joint probability."""

    node: int
    token_ids: tuple[int, ...]
    text: str
    logprob: float  # the model's own, in nats
    total: float  # by the distribution that was expanded: after the processors
    mass: float  # probability of this and all continuations before it
    ended: bool = False  # with EOS; else it has the depth, or is dead
    dead: bool = False  # the processors leave no token after it: `total` is -inf


@dataclass(frozen=True, slots=True)
class Covered:
    """An expansion is done."""

    mass: float
    continuations: int
    nodes: int  # whose distributions were computed
    complete: bool  # the mass, or everything, is reached
    reason: str = field(default="")  # why not
    dead_ends: int = 0  # texts after which the processors leave no token


Result: TypeAlias = (
    TokenWritten | Searching | Wrote | At | Settings | Shown | Why | BranchText | Saved | Continuation | Covered
)  # fmt: skip
