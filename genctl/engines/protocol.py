"""The interface between a command and the engine that computes for it.

A command has one job, which is given an engine. Nothing here, and no engine, knows of commands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from genctl import events
from genctl.config.layers import Layer, Resolved
from genctl.errors import BackendError, GenctlError
from genctl.events import Token, row_name
from genctl.params import Runtime

# -- requests to a session: prompts with their settings, and what to report of their tokens ----------------------------


@dataclass(frozen=True)
class Request:
    """One prompt with its own settings. Exactly one of `prompt`, `prompt_ids` and `messages` is set."""

    id: str
    resolved: Resolved
    seed: int
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    place: int = 0  # in the input, from 1; 0 if the id is a name
    index: int = 0  # of the row in the input, from 0
    written: int = 0  # tokens at the end of the prompt that are the beginning of a text of the grammar
    prefill: str = ""  # the beginning of the answer to `messages`, which the text continues
    run: int = 0  # of a comparison, from 1

    @property
    def name(self) -> str:
        """What messages call the request."""
        return row_name(self.id, self.place)


@dataclass(frozen=True)
class Skipped:
    """A row of the input that cannot be decoded. It has a place in its group."""

    index: int


@dataclass(frozen=True)
class Report:
    """What events report of each token besides its id and log-probability."""

    top: int = 0  # alternatives
    scores: bool = False  # rank and entropy
    trace: bool = False  # what each processor did
    watch: tuple[int, ...] = ()  # ids whose log-probability and rank are reported at each token
    steps: bool = True  # somebody reads the steps of all lanes; else an engine may leave them out
    parents: bool = True  # somebody reads the steps of beam searches


def grouped(requests: Iterable[Request | Skipped | None], span: int) -> Iterator[Iterator[Request]]:
    """The requests of each `span` rows of the input, read lazily: read each group to its end before the next.

    Groups depend on the index of a row alone, so that a row has the same neighbours wherever a run began.
    """
    rows = (row for row in requests if row is not None)
    for first in rows:
        group = itertools.chain([first], itertools.islice(rows, span - 1 - first.index % span))
        yield (row for row in group if isinstance(row, Request))


# -- texts to score, and their scores, whoever computes them -----------------------------------------------------------


By: TypeAlias = Literal["mean", "total", "bits-per-byte"]


@dataclass(frozen=True)
class Detail:
    """What is reported of each token besides its log-probability."""

    ranks: bool = False  # rank and entropy
    top: int = 0  # alternatives


@dataclass(frozen=True)
class ScoringOptions:
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
    length: int = 0  # tokens that were read at once, those before the text included
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


# -- an engine: what it loads, how it decodes, and what is known of it -------------------------------------------------


Outcome: TypeAlias = "list[Scored] | GenctlError"
Key = TypeVar("Key")
Rows: TypeAlias = "Iterable[Request | Skipped | None]"


def never() -> str:
    """No reason to end."""
    return ""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine loads, and the callbacks that report on it."""

    runtime: Runtime
    layers: tuple[Layer, ...] = ()  # checked before the weights are read
    need_tokenizer: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False
    named: bool = False  # a setting names the model
    live: bool = False  # somebody watches: texts of servers come piece by piece
    waits: bool = False  # rows come from a pipe or a person, so the next one may take long
    on_event: Callable[[events.Loading], None] | None = None
    on_plan: Callable[[int], object] = lambda tokens: None  # receives the length of a prompt before it is read
    note: Callable[[str], object] = lambda line: None  # unless --quiet
    remark: Callable[[str], object] = lambda line: None
    interrupted: Callable[[], object] = never

    @property
    def trust(self) -> dict[str, bool]:
        """What the user allows a checkpoint to do."""
        return {"allow_pickle": self.allow_pickle, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True)
class Flow:
    """How a stream of requests is decoded, and callbacks that report on it. An engine uses what applies to it."""

    width: int = 1  # requests decoded at once
    span: int | None = None  # rows of a group, which is decoded to its end before the next begins; None: one group
    continuous: bool = False  # a row may begin whenever a place is free, whatever its group
    threads: int | None = None  # that compute a step; None: as they are
    ahead: int = 0  # requests read beyond those that have begun: of them the longest begins first
    ordered: bool = True  # engines whose events come late give them in input order
    watch: bool = False  # CacheRead events are wanted
    interrupted: Callable[[], str] = never  # why every live row has to end
    enough: Callable[[int], bool] = lambda last: False  # whether to end after the group with this last row
    on_shortage: Callable[[int, int], object] = lambda width, fewer: None  # memory is short: old, new width


ALONE = Flow()  # one request after another


@dataclass(frozen=True)
class About:
    """What is known of an engine once it is loaded."""

    name: str  # the checkpoint, as the user named it, or the model of the servers
    has_texts: bool = True  # there is a tokenizer, so that results have texts
    is_encoder_decoder: bool = False  # texts answer their prompts; else they continue them
    remote: bool = False  # servers compute, and report no prefills and forward passes
    trained: int | None = None  # tokens in the texts of the training, if longer ones are read with scaled positions
    prompt_cache: str | None = None  # the file of a saved prompt that it uses
    reuse_limit: str = ""  # why a saved prompt may be useless for another prompt
    facts: tuple[tuple[str, str], ...] = ()  # label and value of lines in the summary of a page, beside the digests


def trained_length_note(trained: int | None) -> str:
    """The note on a text that is longer than those of the training."""
    return f"the text is longer than the {trained} tokens that the model was trained on; its positions are scaled"


@dataclass(frozen=True)
class JobPlan:
    """How an engine does a job."""

    strategy: str  # its name
    rows: int = 1  # that a prompt has while it is decoded
    remarks: tuple[str, ...] = ()  # what everybody should know of it
    reads_hidden: bool = False  # states: its prefill then serves other jobs too, but not the other way round
    batch_invariant_by: str = ""  # how its numbers are computed, if a row's depend on no other rows and no threads
    without_logprobs: Callable[[], str] = never  # the server that gives no log-probabilities

    def require_logprobs(self, flag: str) -> None:
        """Raises BackendError where tokens have no log-probabilities, which `flag` shows."""
        if server := self.without_logprobs():
            raise BackendError(f"{server}: {flag} needs log-probabilities, which the server does not give")


@dataclass(frozen=True)
class WorkDone:
    """What an engine has done so far."""

    passes: int = 0  # forward passes
    findings: tuple[str, ...] = ()  # about the model, for --verbose


class Engine(Protocol):
    """A loaded checkpoint, or servers in its place."""

    @property
    def about(self) -> About:
        """What is known of it."""

    @property
    def done(self) -> WorkDone:
        """What it has done so far."""

    def notes(self) -> Sequence[str]:
        """Notes for --verbose: on the checkpoint, and how it runs."""

    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the checkpoint and of all auxiliary models, by name. Raises ModelError."""

    # -- settings ------------------------------------------------------------------------------------------------------

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """The layers, with the checkpoint's own settings beneath them."""

    def plan(self, resolved: Resolved) -> JobPlan:
        """Check once whether it can do a job, instead of failing every prompt.

        Raises what each prompt would: UsageError, PresetError, ModelError or BackendError.
        """

    def watched(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """The ids of the tokens that --watch names. Raises UsageError."""

    def width(self, resolved: Resolved, default: int) -> int:
        """How many prompts are decoded at once."""

    def use_threads(self, rows: int, recorded: int | None = None) -> int | None:
        """Choose the number of threads for steps of so many rows; None where nothing is chosen.

        `recorded`: the number with which an output was begun.
        """

    # -- work ----------------------------------------------------------------------------------------------------------

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Decode requests: Began, Prefilled, Stepped …, Finished for each, or Failed.

        `requests` is read lazily. Skipped stands for a row without a request, None for one that has to be waited for.
        """

    def score(
        self,
        texts: Iterator[tuple[Key, TextToScore]],
        options: ScoringOptions,
        *,
        interrupted: Callable[[], str] = never,
    ) -> Iterator[tuple[Key, Outcome]]:
        """The outcome of each text, in order. Raises at once for options that it cannot do."""

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """End what was started. `hurried`: a signal came, so nothing may wait. `failed`: an error is reported."""
