"""The interface between a command and the engine that computes for it.

A command passes an engine to its job. Neither this module nor any engine depends on commands.
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

# -- requests to a session: prompts with their settings, and what to report for each token -----------------------------


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
    written: int = 0  # tokens at the end of the prompt that already belong to the grammar's text
    prefill: str = ""  # the beginning of the answer to `messages`, which the text continues
    run: int = 0  # number of the run in a comparison, from 1

    @property
    def name(self) -> str:
        """The request's name in messages."""
        return row_name(self.id, self.place)


@dataclass(frozen=True)
class Skipped:
    """A row of the input that cannot be decoded. It still counts in its group."""

    index: int


@dataclass(frozen=True)
class Report:
    """What events report for each token besides its id and log-probability."""

    top: int = 0  # alternatives
    scores: bool = False  # rank and entropy
    trace: bool = False  # each processor's effect
    watch: tuple[int, ...] = ()  # ids whose log-probability and rank are reported at each token
    steps: bool = True  # the caller uses the steps of all lanes; otherwise an engine may leave them out
    parents: bool = True  # the caller uses the steps of beam searches


def grouped(requests: Iterable[Request | Skipped | None], span: int) -> Iterator[Iterator[Request]]:
    """The requests in groups of `span` rows of the input, read lazily: read each group to its end before the next.

    Groups depend only on the index of a row, so a row has the same neighbours wherever a run was resumed.
    """
    rows = (row for row in requests if row is not None)
    for first in rows:
        group = itertools.chain([first], itertools.islice(rows, span - 1 - first.index % span))
        yield (row for row in group if isinstance(row, Request))


# -- texts to score, and their scores, for all engines -----------------------------------------------------------------


By: TypeAlias = Literal["mean", "total", "bits-per-byte"]


@dataclass(frozen=True)
class Detail:
    """What is reported for each token besides its log-probability."""

    ranks: bool = False  # rank and entropy
    top: int = 0  # alternatives


@dataclass(frozen=True)
class ScoringOptions:
    """How texts are read, and what is reported of them."""

    add_eos: bool = False
    stride: int | None = None  # tokens between windows; None refuses texts longer than the context
    window: int | None = None  # tokens; None is the model's context
    by: By = "mean"  # how candidates are ranked
    batch_size: int = 16  # texts, windows or candidates in one pass
    chunk: int = 64  # texts that are read from the input and sorted by length at a time
    detail: Detail = field(default_factory=Detail)
    captions: bool = True  # whether tokens carry their text
    context: str | None = None  # for texts without a context of their own
    target: str | None = None
    rank: bool = False  # whether candidates are ranked
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
    bytes: int  # UTF-8 bytes of the scored tokens' characters
    tokens: tuple[Token, ...]  # the scored ones
    lead: str = ""  # the text of the tokens that are not scored
    windows: int = 1
    length: int = 0  # tokens that were read at once, including those before the text
    candidate: int | None = None  # its index among the candidates
    rank: int | None = None  # its rank, from 1
    backend: str = ""  # the server that scored it

    @property
    def mean(self) -> float:
        """Mean log-probability per token."""
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
        """Bits per UTF-8 byte; NaN if only special tokens were scored."""
        return self.bits / self.bytes if self.bytes else math.nan


def perplexity(nll: float, count: int) -> float:
    """exp(nll / count); infinite if that overflows."""
    try:
        return math.exp(nll / count)
    except OverflowError:
        return math.inf


def ranked(candidates: Sequence[Scored], by: By) -> list[Scored]:
    """The candidates of a text with index and rank, best first; equal ones keep their order."""
    worth = {"total": lambda one: -one.nll, "mean": lambda one: one.mean, "bits-per-byte": lambda one: -one.bpb}[by]
    placed = [replace(one, candidate=place) for place, one in enumerate(candidates)]
    placed.sort(key=worth, reverse=True)
    return [replace(one, rank=rank) for rank, one in enumerate(placed, 1)]


# -- an engine: what it loads, how it decodes, and what it reports about itself ----------------------------------------


Outcome: TypeAlias = "list[Scored] | GenctlError"
Key = TypeVar("Key")
Rows: TypeAlias = "Iterable[Request | Skipped | None]"


def never() -> str:
    """The default of `interrupted`: there is no reason to end."""
    return ""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine loads, and callbacks for its progress."""

    runtime: Runtime
    layers: tuple[Layer, ...] = ()  # checked before the weights are read
    need_tokenizer: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False
    named: bool = False  # a setting names the model
    live: bool = False  # a person watches: show the texts of servers piece by piece
    waits: bool = False  # rows come from a pipe or a person, so the next one may take long
    on_event: Callable[[events.Loading], None] | None = None
    on_plan: Callable[[int], object] = lambda tokens: None  # receives the length of each prompt before it is read
    note: Callable[[str], object] = lambda line: None  # shows a line unless --quiet
    remark: Callable[[str], object] = lambda line: None
    interrupted: Callable[[], object] = never

    @property
    def trust(self) -> dict[str, bool]:
        """What the user allows the checkpoint to do."""
        return {"allow_pickle": self.allow_pickle, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True)
class Flow:
    """How a stream of requests is decoded, and callbacks that report on it. Engines ignore fields that do not apply."""

    width: int = 1  # requests decoded at once
    span: int | None = None  # rows of a group, which is decoded to its end before the next begins; None: one group
    continuous: bool = False  # a row may begin whenever a slot is free, whatever its group
    threads: int | None = None  # torch threads for a step; None: do not change them
    ahead: int = 0  # requests read beyond those that have begun; the longest of them begins first
    ordered: bool = True  # engines whose events arrive late yield them in input order
    watch: bool = False  # CacheRead events are wanted
    interrupted: Callable[[], str] = never  # why every live row has to end; "" if none has to
    enough: Callable[[int], bool] = lambda last: False  # whether to end after the group with this last row
    on_shortage: Callable[[int, int], object] = lambda width, fewer: None  # memory ran out: the old and the new width


ALONE = Flow()  # one request after another


@dataclass(frozen=True)
class About:
    """What is known about an engine once it has loaded."""

    name: str  # the checkpoint, as the user named it, or the model of the servers
    has_texts: bool = True  # there is a tokenizer, so results have texts
    is_encoder_decoder: bool = False  # texts answer their prompts; otherwise they continue them
    remote: bool = False  # servers compute; they report no prefills and no forward passes
    trained: int | None = None  # length of the training texts in tokens, if longer ones are read with scaled positions
    prompt_cache: str | None = None  # the file of the saved prompt that it uses
    reuse_limit: str = ""  # why a saved prompt may be useless for another prompt
    facts: tuple[tuple[str, str], ...] = ()  # (label, value) lines for the summary of a page, beside the digests


def trained_length_note(trained: int | None) -> str:
    """The note on a text that is longer than the training texts."""
    return f"the text is longer than the {trained} tokens that the model was trained on; its positions are scaled"


@dataclass(frozen=True)
class JobPlan:
    """How an engine does a job."""

    strategy: str  # its name
    rows: int = 1  # live rows of each prompt
    remarks: tuple[str, ...] = ()  # shown to every user, not only with --verbose
    reads_hidden: bool = False  # reads hidden states: other jobs can reuse its prefills, but it cannot reuse theirs
    batch_invariant_by: str = ""  # how its numbers are computed, if they depend on no other rows and no thread count
    without_logprobs: Callable[[], str] = never  # the server that returns no log-probabilities; "" if there is none

    def require_logprobs(self, flag: str) -> None:
        """Raises BackendError if tokens have no log-probabilities, which `flag` needs."""
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
        """What is known about it."""

    @property
    def done(self) -> WorkDone:
        """What it has done so far."""

    def notes(self) -> Sequence[str]:
        """Notes for --verbose: on the checkpoint, and on how it runs."""

    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the checkpoint and of all auxiliary models, by name. Raises ModelError."""

    # -- settings ------------------------------------------------------------------------------------------------------

    def resolve(self, layers: Sequence[Layer]) -> Resolved:
        """Resolve the layers, with the checkpoint's own settings as the lowest."""

    def plan(self, resolved: Resolved) -> JobPlan:
        """Check once whether it can do a job, instead of failing every prompt.

        Raises the error of each prompt: UsageError, PresetError, ModelError or BackendError.
        """

    def watched(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """The ids of the tokens that --watch names. Raises UsageError."""

    def width(self, resolved: Resolved, default: int) -> int:
        """The number of prompts to decode at once."""

    def use_threads(self, rows: int, recorded: int | None = None) -> int | None:
        """Choose the number of threads for steps of so many rows; None if the engine does not choose.

        `recorded`: the number that an output was begun with.
        """

    # -- work ----------------------------------------------------------------------------------------------------------

    def stream(
        self, requests: Rows, report: Report | None = None, flow: Flow = ALONE
    ) -> Generator[events.Event, None, None]:
        """Decode requests. Yields for each: Began, Prefilled, Stepped …, then Finished or Failed.

        `requests` is read lazily. Skipped stands for a row without a request; None: the next row is not available yet.
        """

    def score(
        self,
        texts: Iterator[tuple[Key, TextToScore]],
        options: ScoringOptions,
        *,
        interrupted: Callable[[], str] = never,
    ) -> Iterator[tuple[Key, Outcome]]:
        """The outcome of each text, in order. Raises at once for options that it does not support."""

    def close(self, *, hurried: bool = False, failed: bool = False) -> None:
        """End what was started. `hurried`: after a signal, so do not wait. `failed`: an error is being reported."""
