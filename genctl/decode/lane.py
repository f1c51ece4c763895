"""The state of a live lane between two steps: its rows, its search, its scores, and the tokens to feed next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from genctl import events
from genctl.decode.cache.cache import Cache
from genctl.decode.row_tokens import PaddedTokens, RowTokens, newest
from genctl.decode.runtime import ModelRuntime
from genctl.decode.score import ModelScores, ProcessedScores, Stages
from genctl.decode.transfer import to_device
from genctl.decode.types import Draft, Drafting, FinishedRow, Independent, Lane, LaneDrafts, Prefix, Rows, Search
from genctl.errors import GenctlError, is_shortage

if TYPE_CHECKING:
    from genctl.decode.prefix_cache import PrefixCache
    from genctl.decode.processors.build import NamedProcessor

ROOM = 1024  # new tokens that fit without a reallocation


class OutOfMemory(Exception):
    """A step or a prompt did not fit."""

    def without_frames(self) -> OutOfMemory:
        """A copy without the traceback, whose frames keep the tensors of the failed pass alive."""
        return OutOfMemory(str(self))


def raise_shortage(error: BaseException) -> None:
    """Raises OutOfMemory if the exception reports a shortage of memory. Any other is left to the caller."""
    if isinstance(error, (MemoryError, RuntimeError)) and is_shortage(error):
        error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames keep the pass's tensors alive
        raise OutOfMemory(str(error)) from None


@contextmanager
def shortages() -> Iterator[None]:
    """`raise_shortage` for exceptions from the block. For code that does not run at every token."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise_shortage(error)
        raise


def too_large(lane: Lane, rows: int, shortage: Exception) -> GenctlError:
    """The error of a lane that does not fit alone."""
    tokens = len(lane.tokens) + len(lane.source or ())
    many = f"{rows} rows of it" if rows > 1 else "it alone"
    why = f" ({str(shortage).splitlines()[0][:120]})" if str(shortage) else ""
    error = GenctlError(f"not enough memory for a prompt of {tokens} tokens, {many}{why}")
    error.code = "memory"
    return error


@dataclass(eq=False)
class LaneState:
    """A lane between two steps. It begins with the scores of its prefill."""

    lane: Lane
    prefix: Prefix
    model: ModelRuntime
    clock: Callable[[], float]
    began: float  # when the lane was admitted
    passes: int  # forward passes for this lane

    def __post_init__(self) -> None:
        lane, prefix = self.lane, self.prefix
        self.decoding = self.clock()
        self.first_token_s = 0.0
        self.alive, self.step = True, 0
        tokens = RowTokens.begin(prefix.tokens, min(lane.max_new_tokens, ROOM))
        self.live = Rows(tokens, [0.0], [0.0], [None], 0, [] if lane.text is None else [lane.text.fork()])
        self.rng = torch.Generator(device=prefix.logits.device)
        self.rng.manual_seed(lane.seed)
        self.mode = choice_mode(lane)
        self.search: Search | None = None
        self.scored: ProcessedScores | None = None  # the scores of a search at this step
        self.stages: Stages = []  # the effect of each processor at this step, if traced
        self.ended: list[FinishedRow] = []  # results so far
        self.survivors, self.parents = [0], [0]  # of the last choice: candidates, and the scored rows they continue
        self.scores: ModelScores | None = ModelScores(prefix.logits[:, None], prefix.layers)  # None: to be fed first
        self.place = slice(0, 1)  # the lane's rows in `scores`
        self.draft: Tensor | None = None  # int64 [R, B, D], on trial in the next pass
        self.fed_draft = 0  # draft tokens that the cache holds
        self.accepted = 0  # of these, tokens that stay
        self.proposed: Draft | None = None  # `draft` as its drafter returned it, if `types.Drafting` verifies it
        self.drafts: LaneDrafts | None = None  # the lane's drafter, from the first choice on
        self.draft_known = 0  # new tokens that `drafts` has received
        self.known_scores: ModelScores | None = None  # F = 1, after the newest token if that was a draft token
        self.padded: PaddedLanes | None = None  # the tokens of the lanes that choose together, on the first of them
        self.own: Cache | None = None  # the cache of its rows from `reread`
        self.is_forgotten = False  # whether the prefix has lost its cache

    @property
    def length(self) -> int:
        """Tokens of each row, prompt included; the model may not have read the newest yet."""
        return self.live.row_tokens.length

    @property
    def branches(self) -> int:
        """Drafts of each row. Each takes one row of the pass."""
        return 1 if self.draft is None else self.draft.shape[1]

    @property
    def drafted(self) -> int:
        """Tokens on trial in each row."""
        return 0 if self.draft is None else self.draft.shape[2]

    @property
    def rejected(self) -> int:
        """Draft tokens of each row that the cache holds although they were not accepted."""
        return self.fed_draft - self.accepted if self.fed_draft else 0

    @property
    def fed_length(self) -> int:
        """Tokens of each row that the model will have read after the next pass."""
        return self.length + self.drafted + (self.scores is not None)

    @property
    def row_count(self) -> int:
        """Rows of this lane in the next pass."""
        return len(self.survivors) * self.branches

    @property
    def read(self) -> int:
        """Tokens of each row in the cache of a joining lane: the prompt's, or what `reread` has read."""
        return self.length - (self.known_scores is None) if self.own is not None else int(self.prefix.tokens.shape[1])

    def unfed(self) -> Tensor:
        """The tokens that the model has not read, int64 [N, F]: the newest, unless it was in a draft, and the draft."""
        draft = None if self.draft is None else self.draft.flatten(0, 1)
        if draft is not None and self.known_scores is not None:
            return draft
        newest = [node[0] for node in self.live.row_tokens.nodes if node is not None for _ in range(self.branches)]
        fed = to_device(newest, self.model.device)[:, None]
        return fed if draft is None else torch.cat([fed, draft], 1)

    def propose(self, plan: Any) -> None:
        """Let the lane draft. Raises ModelError and OutOfMemory."""
        assert self.drafts is not None
        count = self.live.written - self.draft_known
        self.draft_known = self.live.written
        draft = self.drafts.next(newest(self.live.row_tokens.nodes[0], count), plan)
        if draft is not None:
            self.proposed, self.draft = draft, to_device(draft.tokens, self.model.device)[None, None]

    def to_feed(self) -> list[list[int]]:
        """The tokens of each row that the model has not read, on the host."""
        if self.draft is not None and self.proposed is None:
            return self.unfed().tolist()
        newest = [node[0] for node in self.live.row_tokens.nodes if node is not None]
        return [[token, *(self.proposed.tokens if self.proposed else ())] for token in newest]

    def all_tokens(self) -> Tensor:
        """All tokens of each row and its draft, int64 [N, T+D]."""
        tokens = self.live.tokens
        if self.draft is None:
            return tokens
        return torch.cat([tokens.repeat_interleave(self.branches, 0), self.draft.flatten(0, 1)], 1)

    def receive(self, scores: ModelScores, place: slice) -> None:
        """Store the scores of a pass. The lane's rows are at `place`."""
        self.passes += 1
        self.fed_draft = self.drafted
        self.scores, self.place = scores, place

    def own_scores(self) -> ModelScores:
        """The scores of this lane's rows after the newest token and after each token of the draft."""
        assert self.scores is not None
        scores, place = self.scores, self.place
        if place.stop - place.start < scores.logits.shape[0]:
            scores = scores.map(lambda tensor: tensor[place])
        if self.known_scores is not None:
            known = self.known_scores.map(lambda tensor: tensor.repeat_interleave(self.branches, 0))
            scores = known.followed_by(scores)
        return scores

    def forget_prompt(self) -> None:
        """Drop the keys and values of the prompt, which will be read again."""
        if self.prefix.cache is not None:
            empty = self.model.new_cache()
            empty.convert(self.lane.cache)
            self.prefix, self.is_forgotten = replace(self.prefix, cache=empty), True

    def reread(self, prefixes: PrefixCache) -> LaneState:
        """Read all rows again into a cache of the lane's own, after a preemption dropped the batch's cache."""
        self.fed_draft = 0
        if self.proposed is not None:
            self.draft = self.proposed = None
        if self.prefix.cache is None:
            return self
        only_prompt = self.live.written <= (self.known_scores is None)
        if self.is_forgotten and (only_prompt or self.prefix.source is not None):
            self.prefix, self.is_forgotten = prefixes.take(self.lane)[0], False
        if self.live.written == 0 and self.known_scores is None and self.draft is None:  # it has not chosen yet
            self.scores, self.place = ModelScores(self.prefix.logits[:, None], self.prefix.layers), slice(0, 1)
        if only_prompt:
            return self
        tokens = self.live.tokens
        known = tokens if self.known_scores is not None else tokens[:, :-1]
        self.own = self.model.reread(known, self.prefix)
        if self.branches > 1:
            self.own = self.own.select(torch.arange(len(known), device=known.device).repeat_interleave(self.branches))
        self.own.convert(self.lane.cache)
        return self

    def fail(self, error: GenctlError) -> events.Failed:
        """End the search with an error."""
        self.close()
        return events.Failed(self.lane.name, error.code, error.message)

    def close(self) -> None:
        """End the search: its `finally` clauses run."""
        self.alive = False
        if self.drafts is not None and self.ended:
            self.drafts.end(self.ended[0].tokens[self.draft_known :])
        if self.search is not None:
            self.search.close()


class PaddedLanes(NamedTuple):
    """The tokens of lanes that choose together. Each row grows by one token at each step."""

    lanes: list[tuple[LaneState, int, int]]  # each lane, its number of rows and their length
    tokens: PaddedTokens


def padded(states: Sequence[LaneState], pad: int) -> PaddedTokens:
    """The tokens of all rows of lanes that choose together, padded with an id outside of the vocabulary."""
    first = states[0]
    known, lanes = first.padded, [(state, len(state.live.row_tokens.nodes), state.length) for state in states]
    if known is not None and lanes == [(state, rows, length + 1) for state, rows, length in known.lanes]:
        tokens = known.tokens
        tokens.append([node[0] for state in states for node in state.live.row_tokens.nodes if node is not None])
    else:
        texts = [
            (*state.lane.tokens, *newest(node, state.live.written))
            for state in states
            for node in state.live.row_tokens.nodes
        ]
        tokens = PaddedTokens(texts, pad, first.prefix.logits.device)
    first.padded = PaddedLanes(lanes, tokens)
    return tokens


class ChoiceMode(NamedTuple):
    """How a lane chooses, the same at every step. Lanes with equal knobs whose rows are independent choose together."""

    independent: Independent | None  # its strategy, if that needs no search
    tolerant: bool  # whether NaN logits are accepted
    one_row: bool  # whether `independent` decodes a single row
    drafting: Drafting | None  # its strategy, if tokens may be drafted for it
    reads_rows: bool  # whether its processors read the tokens, not only the scores
    key: Any  # equal for lanes that may choose together; None if the lane chooses alone


def choice_mode(lane: Lane) -> ChoiceMode:
    """How a lane chooses."""
    independent = lane.strategy if isinstance(lane.strategy, Independent) else None
    named: list[NamedProcessor] = []
    if lane.processors:
        from genctl.decode.processors.build import NamedProcessor

        named = [processor for processor in lane.processors if isinstance(processor, NamedProcessor)]
    tolerant = any(processor.name == "remove_invalid_values" for processor in named)
    keys = tuple(processor.key for processor in named)
    one_row = independent is not None and independent.max_rows == 1
    key = None
    if not lane.trace and independent is not None and len(keys) == len(lane.processors) and None not in keys:
        key = independent, keys, lane.top, lane.scores, lane.watch, lane.processed
    reads_rows = any(processor.reads != "scores" for processor in named)
    drafting = lane.strategy if isinstance(lane.strategy, Drafting) else None
    return ChoiceMode(independent, tolerant, one_row, drafting, reads_rows, key)
