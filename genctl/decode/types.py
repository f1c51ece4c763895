"""The central types. A strategy yields a `Choice` and is sent `Scores`; the loop does everything in between.

Shapes: R live rows, B branches per row, N = R·B, D draft tokens, V vocabulary, T tokens so far, C candidates,
S source tokens of an encoder, H hidden size. One lane is one prompt with one strategy; all rows of a lane are equally
long, so nothing in here is ever padded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from genctl.decode.host import Asked
    from genctl.decode.processors.rows import RowCandidates

# What processors are given: logits, log-probabilities, or nothing yet: with "raw" the search calls `Context.process`.
Space: TypeAlias = Literal["logits", "logprobs", "raw"]

# Whether nothing better can come: (results kept so far, live rows after the choice) -> bool.
Enough: TypeAlias = Callable[["Sequence[Closed]", "Rows"], bool]


@dataclass(frozen=True)
class Source:
    """What an encoder made of a prompt, computed once."""

    ids: Tensor  # int64 [1, S]
    states: Any  # the encoder's output, last_hidden_state f32 [1, S, H]


@dataclass(frozen=True)
class Prefix:
    """A prompt that the model has read once. Any number of lanes may start from it; it is never written to."""

    tokens: Tensor  # int64 [1, T]; for an encoder-decoder the decoder's, its start token included
    cache: Any  # keys and values of all T tokens, or None without a cache
    logits: Tensor  # f32 [1, V], what follows the prompt
    hidden: Tensor | None = None  # f32 [1, T, H], the last hidden states
    layers: tuple[Tensor, ...] | None = None  # hidden states per layer at the last position, each [1, 1, H]
    source: Source | None = None
    reused: int = 0  # tokens of the prompt that were not read for it, because a saved prompt held them


@dataclass
class Rows:
    """The live hypotheses of a lane, best first."""

    tokens: Tensor  # int64 [R, T], prompt included
    logprobs: list[float]  # R sums over the new tokens, the model's own, in nats
    totals: list[float]  # R sums that the search ranks by
    prompt_len: int

    @property
    def written(self) -> int:
        """New tokens in each row."""
        return int(self.tokens.shape[1]) - self.prompt_len


def _nothing() -> Asked:
    from genctl.decode.host import Asked  # torch comes with it

    return Asked()


@dataclass
class Scores:
    """What the model says after each row (j = 0) and after each draft prefix (j = 1..D)."""

    rows: Rows
    raw: Tensor  # f32 [N, D+1, V], the model's logits
    logits: Tensor  # f32 [N, D+1, V], after the processors, in the strategy's space
    normalizer: Tensor  # f32 [N, D+1], logsumexp of `raw`
    survivors: list[int]  # R indices into the candidates of the last Choice
    ended: Sequence[Closed] = ()
    hidden: Tensor | None = None  # f32 [N, D+1, H]
    layers: tuple[Tensor, ...] | None = None  # per layer [N, D+1, H]
    left: Sequence[RowCandidates] | None = None  # N, `logits` without what filters removed, where it is known
    asked: Asked = field(default_factory=_nothing)  # by the loop, of this step: fetched with what a search asks

    @property
    def logprobs(self) -> Tensor:
        """f32 [N, D+1, V]: the model's own log-probabilities, in nats."""
        return self.raw - self.normalizer[..., None]


@dataclass
class Choice:
    """What to write now, what to try next. Candidates best first; the loop closes the finished and cuts the rest."""

    rows: Tensor  # int64 [C], which of the N scored rows each candidate continues
    tokens: Tensor | None  # int64 [C], the token to write; None when the draft already holds it
    kept: int = 0  # draft tokens accepted, written before `tokens`
    draft: Tensor | None = None  # int64 [C, B, D], to score before the next choice
    ranks: Tensor | None = None  # f32 [C], the totals the search ranks by; None means the model's log-probability
    width: int | None = None  # rows to keep alive, and results to keep, in each group; None keeps every candidate
    groups: Sequence[int] | None = None  # [C], which group each candidate belongs to; None is one group
    ends: Sequence[bool] | None = None  # [C], whether its end is a result; None: of the first `width` of a group
    standing: Sequence[int] | None = None  # [C], results of a higher standing come before those of a lower one
    slots: Sequence[int] | None = None  # [C], which returned sequence each candidate is, where rows are independent
    notes: Sequence[str] | None = None  # [C], what to show beside each candidate
    enough: Enough | None = None  # asked once it is written: whether the search ends here, without a further pass


@dataclass(frozen=True)
class Closed:
    """A hypothesis that ended."""

    tokens: tuple[int, ...]  # new tokens only
    logprob: float  # the model's own, nats
    total: float  # what the search summed
    reason: str
    slot: int | None = None
    stop: str = ""
    group: int = 0
    standing: int = 0
    kind: str = ""

    def score(self, length_penalty: float) -> float:
        """total / length ** length_penalty (GNMT's normalisation in transformers' simpler form)."""
        return float(self.total / max(len(self.tokens), 1) ** length_penalty)


@dataclass
class Context:
    """What a search may use besides the scores that it is sent."""

    prefix: Prefix
    rng: torch.Generator
    eos: tuple[int, ...] = ()
    max_new_tokens: int = 0
    model: Any = None  # the runtime.ModelRuntime that runs the lane, for strategies that draft or need the head
    processors: tuple[Processor, ...] = ()
    # The lane's processors on scores of the search's own, f32 [N, V], of what follows each row. For the space "raw".
    process: Callable[[Tensor], Tensor] = lambda scores: scores
    extra: dict[str, Any] = field(default_factory=dict)


Search: TypeAlias = Generator[Choice, Scores, None]


@runtime_checkable
class Strategy(Protocol):
    """One way to choose tokens: a frozen dataclass of knobs with one generator.

    Yield a Choice; the loop writes it, runs the model once and sends back the Scores. Return when nothing further is
    worth trying. A class attribute `waits = False` says that the search reads no number of a tensor but by
    `scores.asked`: what the loop has to check is then fetched together with that, instead of before.
    """

    @property
    def kind(self) -> str: ...
    @property
    def length_penalty(self) -> float: ...
    @property
    def needs_hidden(self) -> bool: ...
    @property
    def space(self) -> Space: ...
    @property
    def rows(self) -> int: ...

    def search(self, scores: Scores, context: Context) -> Search: ...


# A processor is a function of what was written and what was scored: (history [R, T], scores [R, V]) -> scores [R, V].
Processor: TypeAlias = Callable[["Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class Written:
    """What a stopping criterion looks at: a row just after its newest token. Built anew for each token."""

    token: int
    count: int  # new tokens, this one included
    logprob: float  # sum over them, nats
    tail: Callable[[int], list[int]]  # tail(n): the last n new tokens, this one included
    elapsed: float  # seconds since the lane began


class Stop(NamedTuple):
    """Why a row ends."""

    reason: str  # eos | length | stop | time | interrupted
    what: str = ""  # what exactly: the stop string, the pattern, the limit
    kind: str = ""  # which criterion, where `reason` is "stop": string, regex, token, floor, repetition, plugin


# Why a row ends after this token; None if it does not. A pair is (reason, what).
Criterion: TypeAlias = Callable[[Written], "Stop | tuple[str, str] | None"]


@dataclass(frozen=True)
class Lane:
    """One prompt with one strategy: everything the loop needs to know of it."""

    name: str
    tokens: tuple[int, ...]  # the prompt; the decoder's own prompt for an encoder-decoder
    strategy: Strategy
    max_new_tokens: int
    eos: tuple[int, ...] = ()
    source: tuple[int, ...] | None = None  # encoder ids
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    seed: int = 0
    use_cache: bool = True
    cache: str = "dynamic"  # how keys and values are kept: dynamic, static, quantized, offloaded
    top: int = 0  # alternatives reported for each token
    scores: bool = False  # whether rank and entropy are reported for each token
    trace: bool = False  # whether each processor's effect is reported
    returned: int = 1  # hypotheses handed back
    limit: str = ""  # what bounds the length, where it is not what was asked for ("context of 512 tokens")
