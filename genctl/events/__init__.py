"""Events of a run, as frozen values: no tensors, no tokenizer, no handles.

A run is a stream of events; a file of them, one JSON object per line, is a recording that can be replayed. Two events
are equal if their fields are equal. Log-probabilities are in nats. docs/records.md lists all fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias, TypedDict, TypeVar

from annotated_types import Ge, Le

from genctl.config.reader import kind_of
from genctl.config.shapes import BadShape, Known, Natural, value_of
from genctl.errors import InputError, hide_secrets, nearest

S = TypeVar("S")
CUT = ("length", "context", "time")  # finish reasons of texts that could have continued

# Bounds of the fields of events. Sums of the largest numbers stay finite.
LARGEST = 1e40  # magnitude; beyond the range of float32, in which numbers are computed
ROUNDING = 1e-3  # how far rounding may exceed 0 or 1
Logprob: TypeAlias = Annotated[float, Ge(-LARGEST), Le(ROUNDING)]  # nats
Score: TypeAlias = Annotated[float, Ge(-LARGEST), Le(LARGEST)]
Share: TypeAlias = Annotated[Known, Ge(-ROUNDING), Le(1 + ROUNDING)]  # a probability
Amount: TypeAlias = Annotated[Known, Ge(-ROUNDING), Le(LARGEST)]
Id: TypeAlias = Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]  # of a token; negative if a server does not report it
Rank: TypeAlias = Annotated[int, Ge(1), Le(2**63 - 1)]
Seed: TypeAlias = Annotated[int, Ge(-(2**63)), Le(2**64 - 1)]
Alternative: TypeAlias = tuple[Id, str, Logprob]  # id, text, log-probability
UNKNOWN_ID = -1  # of a token whose id a server does not report; its alternatives have lower ids
Watched: TypeAlias = tuple[Id, str, Logprob, Rank]  # id, text, log-probability, rank


@dataclass(frozen=True, slots=True)
class Trace:
    """The effect of one processor on one row's scores at one step."""

    processor: str
    removed: Natural  # tokens whose probability became 0
    moved: Share  # total variation between the distribution before and after, in [0, 1]
    changed: bool  # whether another token is now the most probable
    before: Share  # probability of the chosen token before
    after: Share  # and after
    seconds: Amount = 0.0  # time spent, shared by all rows of the call


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `logprob` is the model's own, before any processor."""

    id: Id
    logprob: Logprob
    text: str = ""  # the characters that this token completed; empty while a character is incomplete
    rank: Rank | None = None  # 1 is the model's most probable token
    entropy: Amount | None = None  # of the model's distribution, in nats
    top: tuple[Alternative, ...] = ()
    trace: tuple[Trace, ...] = ()
    watched: tuple[Watched, ...] = ()  # the tokens of --watch, at the step in which this token was chosen
    processed: float | None = None  # the log-probability after all processors, if it is reported


@dataclass(frozen=True, slots=True)
class Row:
    """A live row after a step: it continues row `parent` of its lane's rows before the step."""

    lane: str
    parent: Natural
    written: tuple[Token, ...]
    logprob: Logprob  # the model's own, summed over all new tokens
    total: Score  # the score that the search ranks by, with processors and penalties
    slot: Natural | None = None  # the index of the returned sequence that this row becomes, if rows are independent
    note: str = ""  # of the strategy: accepted drafts, progress of constraints
    thought: str = ""  # a server's addition to reasoning that it reports separately from the text


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence."""

    tokens: tuple[Id, ...]  # the new tokens, with EOS, without padding
    logprob: Logprob
    total: Score
    reason: str  # eos | length | context (full before max_new_tokens) | stop | time | interrupted
    score: Annotated[float, Ge(-1e300), Le(1e300)] = 0.0  # total / len(tokens) ** length_penalty
    slot: Natural | None = None
    stop: str = ""  # the stop string, pattern or token, if `reason` is "stop"
    text: str = ""
    kind: str = ""  # the criterion, if `reason` is "stop": string, regex, token, floor, repetition, plugin, server
    unmet: tuple[str, ...] = ()  # forced phrases that are not in it
    incomplete: str = ""  # the grammar (json_schema, regex, grammar) that the text was cut off in
    thought: Natural | None = None  # tokens of thought, if there is a budget
    thought_cut: bool = False  # whether the budget ended the thought
    thought_text: str = ""  # reasoning that a server reports separately from the text
    counted: Natural = 0  # number of new tokens, if a server does not report all their ids
    seed: Seed | None = None  # its own seed, if a server generated it in a later request

    @property
    def length(self) -> int:
        """The number of new tokens."""
        return self.counted or len(self.tokens)

    @property
    def cause(self) -> str:
        """The stop criterion, in words. Older files have these words in `stop`, and no `kind`."""
        if self.kind == "string":
            return f"string {json.dumps(self.stop, ensure_ascii=False)}"
        return f"{self.kind} {self.stop}" if self.kind in ("regex", "token") else self.stop


class LaneSettings(TypedDict, total=False):
    """The settings of a lane that are used here. There may be more."""

    length_penalty: Annotated[Known, Ge(-LARGEST), Le(LARGEST)]
    num_beams: Natural
    num_return_sequences: Natural
    truncated: Natural
    trained: Natural  # the training context length, if a text may be longer
    runtime: str
    structure: str
    src_lang: str
    tgt_lang: str


@dataclass(frozen=True, slots=True)
class Began:
    """A lane begins: one prompt with one strategy."""

    text: ClassVar[str] = ""

    lane: str
    prompt: str
    strategy: str
    model: str = ""
    seed: Seed | None = None  # None if nothing is sampled
    settings: Annotated[dict[str, Any], LaneSettings] = field(default_factory=dict)
    place: Natural = 0  # of the prompt in the input, from 1; 0 if the lane has its own name
    encoder_decoder: bool = False  # the text answers the prompt; else it continues it
    shown: str = ""  # the readable form of a conversation, without the chat template
    run: Natural = 0  # the number of the run in a comparison, in command-line order, from 1
    input: dict[str, Any] | None = None  # the columns of the row
    prompt_ids: tuple[Natural, ...] = ()  # the ids that were read, if they do not follow from the prompt's text


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt of a lane is in the cache. `shared`: another lane's prefill was used."""

    text: ClassVar[str] = ""

    lane: str
    prompt_tokens: Natural
    seconds: Amount = 0.0
    shared: bool = False
    reused: Natural = 0  # tokens found in a prompt cache, not read again


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step of one lane: the rows that stay live (`rows`, best first) and those that ended."""

    lane: str
    step: Natural
    rows: tuple[Row, ...]
    ended: tuple[Ended, ...] = ()
    drafted: Natural = 0  # draft tokens checked in the previous step
    accepted: Natural = 0  # draft tokens accepted
    text: str = ""  # set by `Model.stream` only: the addition to the lane's first text

    @property
    def children(self) -> tuple[Row | Ended, ...]:
        """All rows of the step: those that live on, then those that ended."""
        return (*self.rows, *self.ended)

    @property
    def new_tokens(self) -> int:
        """Tokens generated in this step. Competing rows count once."""
        written = [child.written for child in self.children]
        competing = bool(self.rows) and self.rows[0].slot is None
        return sum(map(len, written[:1] if competing else written))


@dataclass(frozen=True, slots=True)
class Ended:
    """A row that ended: it continued `parent` with `written`, and became `hypothesis`."""

    text: ClassVar[str] = ""

    lane: str
    parent: Natural
    written: tuple[Token, ...]
    hypothesis: Hypothesis


@dataclass(frozen=True, slots=True)
class Finished:
    """A lane is done. Hypotheses in the order in which they are returned."""

    lane: str
    hypotheses: tuple[Hypothesis, ...]
    prompt_tokens: Natural = 0
    seconds: Amount = 0.0  # decoding, without prefill
    first_token_s: Amount = 0.0  # from the lane's admission to its first token
    forwards: Natural = 0  # forward passes this lane took part in, prefill included
    others: tuple[Hypothesis, ...] = ()  # samples that best_of or mbr_samples did not choose, best first
    text: str = ""  # set by `Model.stream` only: the rest of the lane's first text


@dataclass(frozen=True, slots=True)
class Given:
    """The input of a forward pass; one tuple per row."""

    input_ids: tuple[tuple[int, ...], ...]  # [rows, fed]: the whole prompt, then the tokens of each step
    past_length: int  # tokens in the cache before the pass
    cache_position: tuple[int, ...]  # [fed], columns of the cache that were written
    position_ids: tuple[tuple[int, ...], ...] | None = None  # [rows or 1, fed]; None: the model takes none
    attention_mask: tuple[tuple[int, ...], ...] | None = None  # [rows, past + fed]; None: causal only


@dataclass(frozen=True, slots=True)
class CacheRead:
    """The cache after a forward pass, layer by layer (see `Cache.describe`), and the input of the pass."""

    text: ClassVar[str] = ""

    lane: str  # the first of `lanes`
    step: Natural  # 0 is the prompt
    layers: tuple[dict[str, Any], ...]
    given: Given | None = None
    lanes: tuple[str, ...] = ()  # the lane of each row
    reordered: tuple[int, ...] = ()  # row i was row reordered[i] before the pass; empty: no row was moved or copied
    reserved: Natural = 0  # bytes of the buffers, room for later tokens included


@dataclass(frozen=True, slots=True)
class Failed:
    """A lane failed; the others continue."""

    text: ClassVar[str] = ""

    lane: str
    code: str
    message: str
    hint: str = ""  # what may help


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of a checkpoint: `done` of `total` (bytes when downloading, tensors when reading)."""

    text: ClassVar[str] = ""

    what: str
    done: Natural
    total: Natural
    unit: str = "B"


Event: TypeAlias = Began | Prefilled | Stepped | Ended | Finished | CacheRead | Failed | Loading

KINDS: dict[str, type] = {
    kind.__name__.lower(): kind for kind in (Began, Prefilled, Stepped, Ended, Finished, CacheRead, Failed, Loading)
}


def row_name(id: str, place: int) -> str:
    """A row's name in messages: its `place` in the input from 1, or its own id, in quotes if it looks like a place."""
    if place:
        return str(place)
    return f'"{id}"' if id.isdecimal() else id


def conversation(messages: Iterable[Mapping[str, Any]], system: str | None = None) -> str:
    """The value of `Began.shown` for messages: their text, after the `system` message.

    Each message is labelled with its role, unless it is the only one and a user's.
    """
    every: list[Mapping[str, Any]] = [*([] if system is None else [{"role": "system", "content": system}]), *messages]
    if [message.get("role") for message in every] == ["user"]:
        return _content(every[0])
    return "\n".join(f"{message.get('role', '')}: {_content(message)}" for message in every)


def _content(message: Mapping[str, Any]) -> str:
    """The content of a message, or the texts of its parts. Tool calls follow: `weather({"city": "Paris"})`."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f"{function.get('name', '')}({shown})")
    return " ".join(str(part) for part in parts if part)


def advance(
    before: Sequence[S],
    event: Stepped,
    grow: Callable[[S, Row | Ended], S],
) -> tuple[list[S], list[S]]:
    """The states of `event.rows` and of `event.ended`, from `before`, the states of the rows before the step.

    The state of a row is `grow(state of its parent, row)`, called first for the live rows, then for those that ended.
    Raises InputError if a row continues one that does not exist.
    """
    rows, ended = event.rows, event.ended
    if len(rows) == 1 == len(before) and not ended and rows[0].parent == 0:  # greedy search: no reordering
        return [grow(before[0], rows[0])], []
    children, count = event.children, len(before)
    for child in children:
        if not 0 <= child.parent < count:
            raise InputError(
                f"lane {event.lane!r}: a row continues row {child.parent}, "
                f"but there are {count} before step {event.step}",
                hint="the recording is damaged or incomplete",
            )
    grown = [grow(before[child.parent], child) for child in children]
    return grown[: len(rows)], grown[len(rows) :]


def to_json(event: Any) -> dict[str, Any]:
    """The event (or another value of this schema) as a JSON object; `"event"` names its kind.

    Fields at their default are left out. Unknown (NaN) and infinite numbers are null.
    """
    return {"event": type(event).__name__.lower(), **_plain(event)}


def from_json(data: dict[str, Any], kinds: Mapping[str, type] = KINDS) -> Any:
    """The inverse of `to_json`; passwords and keys in addresses are hidden.

    Raises BadShape, a ValueError, for an unknown kind or a field that does not fit.
    """
    fields = {name: hide_secrets(value) if name in ("model", "settings") else value for name, value in data.items()}
    kind = fields.pop("event", None)
    if not isinstance(kind, str):
        found = "nothing" if kind is None else kind_of(kind)
        raise BadShape(f'"event": expected the name of an event such as "began", got {found}')
    if kind not in kinds:
        near = nearest(kind, kinds)
        raise BadShape(f"unknown event {kind!r:.60}" + (f"; did you mean {near}?" if near else ""))
    return value_of(kinds[kind], fields)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {}
        for item in dataclasses.fields(value):
            here = getattr(value, item.name)
            if item.default is not dataclasses.MISSING and here == item.default:
                continue
            plain[item.name] = _plain(here)
        return plain
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    for place, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return place
    return min(len(a), len(b))
