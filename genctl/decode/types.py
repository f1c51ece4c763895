"""The central types. A strategy yields a `Choice` and is sent `Scores`; the loop does everything in between.

Shapes: R live rows, B branches per row, N = R·B, D draft tokens, V vocabulary, T tokens so far, C candidates,
S source tokens of an encoder, H hidden size. One lane is one prompt with one strategy. All rows of a lane have the same
length, so only `Sources`, which belong to a batch, are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from genctl.decode.cache.growing import GrowingLayer

if TYPE_CHECKING:
    from genctl import events
    from genctl.decode.cache.cache import Cache
    from genctl.decode.processors import Processor
    from genctl.decode.processors.rows import RowCandidates
    from genctl.decode.row_tokens import RowTokens
    from genctl.decode.stopping import Criterion
    from genctl.decode.stopping.row_text import RowText

# The input of the processors: logits or log-probabilities. With "raw" the search itself calls `Context.process`.
Space: TypeAlias = Literal["logits", "logprobs", "raw"]

# Whether no better result is possible: (results so far, live rows, totals of the candidates) -> bool.
IsDone: TypeAlias = Callable[["Sequence[FinishedRow]", "Rows", "Sequence[float]"], bool]


@dataclass(frozen=True)
class Source:
    """The encoder's output for a prompt, computed once."""

    ids: Tensor  # int64 [1, S]
    states: Any  # the encoder's output, last_hidden_state f32 [1, S, H]


@dataclass
class Sources:
    """The encoder side of a batch: one row for each decoder row. Rows of one prompt are equal and never reordered."""

    states: Tensor  # [N, S, H]; views of one row where a prompt has several
    mask: Tensor | None  # int64 [N, S], None when nothing is padded
    # Cross-attention layers, computed once per prompt: N rows, or one per prompt if all have the same number of rows
    cross: Sequence[GrowingLayer] | None


def join_sources(
    sources: Sequence[Source],
    cross: Sequence[Sequence[GrowingLayer] | None],
    counts: Sequence[int],
    *,
    group: bool = False,
) -> Sources:
    """The encoder side of a batch from one source for each lane: lane i has `counts[i]` rows.

    One source: a view of its single row, `counts[0]` times. Several: copied once, padded on the right and masked. With
    `group` (all counts must be equal), cross-attention has one row for each source.
    """
    longest = max(source.states.shape[1] for source in sources)
    layers: list[GrowingLayer] | None = None
    known = [part for part in cross if part is not None]
    if len(known) == len(cross):
        layers, own_counts = [], [1] * len(counts) if group else counts
        for parts in zip(*known, strict=True):
            layer = GrowingLayer()
            keys, values = zip(*(part.content() for part in parts), strict=True)
            layer.hold(_padded(keys, own_counts, longest), _padded(values, own_counts, longest))
            layers.append(layer)
    states = _padded([source.states[:, None] for source in sources], counts, longest)[:, 0]
    if len(sources) == 1 and layers is None:  # every pass reads the states, and not every architecture accepts a view
        states = states.contiguous()
    mask = None
    if any(source.states.shape[1] < longest for source in sources):
        ones = [torch.ones_like(source.ids)[:, None, :, None] for source in sources]
        mask = _padded(ones, counts, longest)[:, 0, :, 0]
    return Sources(states, mask, layers)


def _padded(parts: Sequence[Tensor], counts: Sequence[int], longest: int) -> Tensor:
    """Parts [1, G, length, D], each repeated `counts` times, padded with zeros; a view if there is only one part."""
    rows = []
    for part, count in zip(parts, counts, strict=True):
        short = longest - part.shape[2]
        rows.append((functional.pad(part, (0, 0, 0, short)) if short else part).expand(count, -1, -1, -1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


@dataclass(frozen=True)
class Prefix:
    """A prompt that the model has read. Any number of lanes may start from it; it is never written to."""

    tokens: Tensor  # int64 [1, T]; for an encoder-decoder those of the decoder, its start token included
    cache: Cache | None  # keys and values of all T tokens; None without a cache
    logits: Tensor  # f32 [1, V], the scores after the prompt
    hidden: Tensor | None = None  # f32 [1, T, H], the last hidden states
    layers: tuple[Tensor, ...] | None = None  # hidden states per layer at the last position, each [1, 1, H]
    source: Source | None = None
    reused: int = 0  # tokens of the prompt that came from a text read before


@dataclass
class Rows:
    """The live hypotheses of a lane, best first."""

    row_tokens: RowTokens
    logprobs: list[float]  # R sums over the new tokens of the model's own log-probabilities, in nats
    totals: list[float]  # R sums by which the search ranks
    indices: list[int | None]  # R, the index of the returned sequence, if rows are independent
    written: int  # new tokens in each row
    texts: list[RowText]  # R, the text of each; empty if the lane has no text

    def continued(self, rows: Sequence[events.Row], written: Sequence[Sequence[int]], texts: list[RowText]) -> Rows:
        """The rows after a step: `rows` are its records, `written` their new tokens. Do not use `self` afterwards."""
        tokens, indices = self.row_tokens, [row.slot for row in rows]
        logprobs, totals = [row.logprob for row in rows], [row.total for row in rows]
        if len(rows) == len(self.indices) == 1:  # in place: no other row shares them
            for token in written[0]:
                tokens.append(token)
        else:
            tokens = tokens.continued([row.parent for row in rows], written)
        count = self.written + (len(written[0]) if written else 0)
        return Rows(tokens, logprobs, totals, indices, count, texts)

    @property
    def tokens(self) -> Tensor:
        """int64 [R, T], prompt included."""
        return self.row_tokens.tensor()

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.row_tokens.length - self.written


class RawScores(Protocol):
    """The scores of a model before the processors (`score.ModelScores`)."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def logprobs(self) -> Tensor: ...

    @property
    def layers(self) -> tuple[Tensor, ...] | None: ...


@dataclass
class Scores:
    """The scores after each row (j = 0) and after each draft prefix (j = 1..D)."""

    rows: Rows
    model: RawScores  # before the processors
    logits: Tensor  # f32 [N, D+1, V], after the processors, in the strategy's space
    survivors: list[int]  # R indices into the candidates of the last Choice
    ended: Sequence[FinishedRow] = ()
    left: Sequence[RowCandidates] | None = None  # N, the tokens that the filters left in each row, if known

    @property
    def raw(self) -> Tensor:
        """f32 [N, D+1, V], the model's logits."""
        return self.model.logits

    @property
    def logprobs(self) -> Tensor:
        """f32 [N, D+1, V], the model's own log-probabilities, in nats; computed on first use."""
        return self.model.logprobs

    @property
    def layers(self) -> tuple[Tensor, ...] | None:
        """Hidden states of each layer, [N, D+1, H]."""
        return self.model.layers

    @property
    def hidden(self) -> Tensor | None:
        """f32 [N, D+1, H], the input of the output head."""
        return None if self.layers is None else self.layers[-1]


@dataclass
class Pruning:
    """Which candidates of a beam live on, and which ends count as results."""

    width: int  # rows to keep alive, and results to keep, in each group
    groups: Sequence[int] | None = None  # [C], the group of each candidate; None is one group
    may_finish: Tensor | None = None  # bool [C], whether its end is a result; None: for the first `width` of a group
    tiers: Sequence[int] | None = None  # [C], results of a higher tier rank before those of a lower one


@dataclass
class Choice:
    """The tokens to write and the next draft. Candidates best first; a total of -inf means impossible."""

    rows: Tensor  # int64 [C], which of the N scored rows each candidate continues
    tokens: Tensor | None  # int64 [C], the token to write; None when the draft already holds it
    accepted: int = 0  # draft tokens to write before `tokens`
    draft: Tensor | None = None  # int64 [C, B, D], to score before the next choice
    totals: Tensor | None = None  # f32 [C], by which the search ranks; None: by the model's log-probability
    pruning: Pruning | None = None  # None keeps every candidate and every result
    notes: Sequence[str] | None = None  # [C], what to show beside each candidate
    is_done: IsDone | None = None  # called after the commit: whether the search can end without another pass


@dataclass(frozen=True)
class FinishedRow:
    """A hypothesis that ended."""

    tokens: tuple[int, ...]  # new tokens only
    logprob: float  # the model's own, nats
    total: float  # the search's own sum
    reason: str
    sequence_index: int | None = None  # index of the returned sequence, if rows are independent
    stop: str = ""
    group: int = 0
    tier: int = 0
    kind: str = ""
    text: str = ""  # as shown: cut at a stop

    def score(self, length_penalty: float) -> float:
        """total / length ** length_penalty (GNMT's normalisation in transformers' simpler form)."""
        return float(self.total / max(len(self.tokens), 1) ** length_penalty)


@dataclass
class Context:
    """What a search may use besides its scores."""

    prefix: Prefix
    rng: torch.Generator
    eos: tuple[int, ...] = ()
    max_new_tokens: int = 0
    model: Any = None  # the runtime.ModelRuntime that runs the lane, for strategies that draft or need the head
    processors: tuple[Processor, ...] = ()
    # Applies the lane's processors to the search's own scores after each row, f32 [N, V]. For the space "raw".
    process: Callable[[Tensor], Tensor] = lambda scores: scores
    # Applies the processors again after so many draft tokens, when they ban more than before. Changes `Scores.logits`.
    # False if no token is left there.
    rescore: Callable[[int], bool] = lambda place: True
    # Whether the only row would end with the last of these tokens: tokens of the draft, and one more.
    ends: Callable[[Sequence[int]], bool] = lambda tokens: False


Search: TypeAlias = Generator[Choice, Scores, None]


@dataclass(frozen=True)
class Traits:
    """What the loop needs to know about a strategy. The defaults hold for most."""

    space: Space = "logits"
    needs_hidden: bool = False  # reads `Scores.layers`
    drafts: bool = False  # rejects tokens of a draft, so the cache must be croppable
    takes_back: bool = False  # its drafts are tokens that it chose and may take back; they are not counted as drafts
    independent: bool = False  # rows do not interact: row i is returned sequence i, candidate i of the first choice
    reads_scores: bool = False  # the search copies numbers to the host; the loop then checks the scores before it


@runtime_checkable
class Strategy(Protocol):
    """One way to choose tokens: a frozen dataclass of knobs with one generator.

    Yield a Choice; the loop writes it, runs the model once and sends back the Scores. Return when the search is done.
    """

    @property
    def kind(self) -> str:
        """The name in records."""

    @property
    def max_rows(self) -> int:
        """The maximum number of rows of one lane, branches included."""

    @property
    def length_penalty(self) -> float:
        """The exponent of a result's score (`FinishedRow.score`)."""

    @property
    def traits(self) -> Traits:
        """What the loop needs to know about it."""

    def search(self, scores: Scores, context: Context) -> Search:
        """The search, from the scores after the prompt."""


class RowsOfLane(NamedTuple):
    """Rows of one lane in a choice for several lanes."""

    rng: torch.Generator
    indices: Sequence[int]  # the index of each row's sequence
    sequences: int  # the lane's number of sequences
    position: int  # of the token to choose: the number of new tokens before it

    @property
    def seed(self) -> int:
        """The lane's seed, 64 bits."""
        return self.rng.initial_seed() & (1 << 64) - 1


@runtime_checkable
class Independent(Strategy, Protocol):
    """A strategy without memory: lanes with equal knobs may choose together."""

    def tokens(self, logits: Tensor, lanes: Iterable[RowsOfLane], left: Sequence[RowCandidates] | None) -> Tensor:
        """One token for each row: logits f32 [R, V] of all lanes, one after another -> int64 [R]."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens."""

    tokens: list[int]  # D
    rates: Sequence[Any] = ()  # for each token, how often such tokens were accepted (`strategies.assisted.Rate`)


@runtime_checkable
class Drafting(Independent, Protocol):
    """A strategy of one row whose next tokens may be drafted and then verified in one pass."""

    def begin(self, context: Context) -> LaneDrafts:
        """The drafter of a lane. Raises ModelError if nothing can be drafted for it."""

    def verify(self, logits: Tensor, draft: Draft, rows: RowsOfLane) -> tuple[int, int]:
        """The number of accepted draft tokens, and the token after them; logits f32 [D+1, V]."""


class LaneDrafts(Protocol):
    """Drafts for one lane."""

    def rests(self) -> bool:
        """Whether nothing is drafted at this step. Called once for each step, before `next`."""

    def next(self, written: Sequence[int], plan: Any) -> Draft | None:
        """The draft for the next pass to verify, if any. `written`: the tokens written since the last call.

        `plan` gives the cost of that pass, which verifies the drafts of all lanes (`step_costs.PassPlan`).
        """

    def end(self, written: Sequence[int]) -> None:
        """The lane has ended."""


@dataclass(frozen=True)
class Lane:
    """One prompt with one strategy, and all options of the loop."""

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
    cache: str = "dynamic"  # kind of cache: dynamic, static, quantized, offloaded
    top: int = 0  # alternatives reported for each token
    scores: bool = False  # whether rank and entropy are reported for each token
    watch: tuple[int, ...] = ()  # ids whose log-probability and rank are reported at each token
    trace: bool = False  # whether each processor's effect is reported
    processed: bool = False  # whether the log-probability after the processors is reported
    returned: int = 1  # number of returned hypotheses
    limit: str = ""  # what limits the length if not the max_new_tokens setting ("context of 512 tokens")
    text: RowText | None = None  # the text of a row without new tokens, to fork; None: rows have no text

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt; for an encoder-decoder, those of the encoder."""
        return len(self.tokens if self.source is None else self.source)

    @cached_property
    def explains(self) -> bool:
        """Whether tokens are reported with more than their log-probability."""
        return self.scores or self.top > 0 or self.trace or self.processed or bool(self.watch)
