"""Golden files: the recorded results of a reference, to compare another side with later.

JSON lines, to keep diffs readable: a head, a line for each text, below it one for each position, and a last line with
the checksum of all others. A position has the log-probabilities of the best tokens (at most `TOP`, as float32 numbers)
and the total probability of all others.

Parity for programs and tests: two sides, or one side and a golden file. Settings files are not read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Le, MinLen

from genctl.commands.parity.loading import LoadedSides, check_same
from genctl.commands.parity.options import read_side
from genctl.config import reader
from genctl.config.layers import Layer, Resolved
from genctl.config.reader import BadJson, Unreadable
from genctl.config.shapes import Known, Natural, value_of
from genctl.config.sides import Side
from genctl.engines.protocol import EngineSetup, Request
from genctl.errors import CheckError, InputError, ModelError, cannot_read, count, printable, quote
from genctl.events import LARGEST, ROUNDING, row_name, shared_length
from genctl.io import writers
from genctl.io.records import SCHEMA
from genctl.io.writers import to_json
from genctl.models.text import detokenizer
from genctl.params import CacheForm, Quantized
from genctl.parity.golden import compare as compare_golden
from genctl.parity.golden import f32, record
from genctl.parity.measure import measure
from genctl.parity.sides import LocalSide
from genctl.parity.values import Golden, KnownTop, Parity, Place, Text

KIND = "golden"
VERSION = 1
HEAD = ("reference", "fingerprint", "dtype", "knobs", "vocabulary", "written", "new_tokens")  # fields of `Golden`
HINT = "genctl parity MODEL --save FILE writes a golden file"
AGAIN = "genctl parity MODEL --save FILE --force records it as it is now"


def content(golden: Golden, text_of: Callable[[int], str]) -> bytes:
    """The content of a golden file. `text_of` gives the text of a token, for people who read the file."""
    head = {"schema": SCHEMA, "kind": KIND, "version": VERSION, **{name: getattr(golden, name) for name in HEAD}}
    head |= {"knobs": dict(golden.knobs), "texts": len(golden.texts), "versions": dict(golden.versions)}
    lines: list[dict[str, Any]] = [head]
    for text in golden.texts:
        lines.append({"kind": "text", "id": text.id, "prompt": text.prompt, "prompt_ids": list(text.prompt_ids)})
        for index, token in enumerate(text.token_ids):
            known = golden.known[text.id, index]
            top = [[id, _short(value)] for id, value in known.top]
            numbers = {"logprob": _short(known.logprob), "top": top, "tail": _short(known.tail)}
            lines.append({"token": token, "text": text_of(token), **numbers})
    body = "".join(f"{to_json(line)}\n" for line in lines).encode()
    end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}
    return body + f"{to_json(end)}\n".encode()


def _short(value: float) -> float:
    """The shortest decimal that rounds to the same float32."""
    import numpy

    return float(str(numpy.float32(value)))


# -- reading -----------------------------------------------------------------------------------------------------------

Logprob: TypeAlias = Annotated[Known, Ge(-LARGEST), Le(ROUNDING)]


@dataclass(frozen=True)
class _Knobs:
    """The knobs of a head: all that affect the compared numbers."""

    quantize: Quantized | None = None
    adapter: str | None = None
    cache_implementation: CacheForm | None = None
    runtime: Literal["native", "transformers"] | None = None


@dataclass(frozen=True)
class _Head:
    schema: str
    kind: str
    version: int
    reference: str
    fingerprint: str
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    knobs: _Knobs
    vocabulary: Annotated[int, Ge(1), Le(2**31)]
    written: bool
    new_tokens: Natural | None
    texts: Natural
    versions: dict[str, str]


@dataclass(frozen=True)
class _TextLine:
    kind: Literal["text"]
    id: str
    prompt: str
    prompt_ids: tuple[Natural, ...]
    new_tokens: Natural | None = None  # its own limit, in files of earlier versions


@dataclass(frozen=True)
class _PositionLine:
    token: Natural
    text: str
    logprob: Logprob
    top: Annotated[tuple[tuple[Natural, Logprob], ...], MinLen(1)]
    tail: Annotated[Known, Ge(0.0), Le(1.0 + ROUNDING)]


def read(path: str) -> Golden:
    """Read a golden file. Raises InputError, which names it, if it is damaged or no golden file."""
    name = printable(path)
    try:
        lines = list(reader.lines(path))
    except Unreadable as error:
        raise InputError(cannot_read(name, error, "--expect"), hint=HINT) from None
    head = _object(lines[0]) if lines else {}
    if head.get("schema") != SCHEMA or head.get("kind") != KIND:
        raise InputError(f"--expect: {name} is no golden file of {SCHEMA}", hint=HINT)
    if head.get("version") != VERSION:
        raise InputError(f"--expect: {name} is a golden file of version {head.get('version')!r:.20}; this is {VERSION}")
    if _object(lines[-1]).get("sha256") != hashlib.sha256(b"".join(lines[:-1])).hexdigest():
        raise InputError(f"--expect: {name} is cut off or damaged: its checksum is that of other lines", hint=HINT)
    texts: dict[str, _TextLine] = {}
    tokens: dict[str, list[int]] = {}  # of each text
    known: dict[Place, KnownTop] = {}
    place = 1
    try:
        first: _Head = value_of(_Head, head)
        for place, line in enumerate(lines[1:-1], 2):  # noqa: B007 (an error names it)
            data = reader.loads(line)
            if isinstance(data, dict) and "kind" in data:
                text: _TextLine = value_of(_TextLine, data)
                if text.id in texts:
                    raise ValueError(f"id: the text {quote(text.id)} is there already")
                _check_ids("prompt_ids", text.prompt_ids, first.vocabulary)
                texts[text.id], tokens[text.id] = text, []
            else:
                position = _position(data, first.vocabulary)
                if not texts:
                    raise ValueError("a position without a text before it")
                id = next(reversed(texts))
                known[id, len(tokens[id])] = KnownTop(
                    f32(position.logprob),
                    tuple((token, f32(value)) for token, value in position.top),
                    f32(position.tail),
                )
                tokens[id].append(position.token)
        place = 1
        if len(texts) != first.texts:
            raise ValueError(f"texts: expected {count(first.texts, 'text')}, got {len(texts)}")
        if not known:
            raise ValueError("texts: expected positions, got none")
    except ValueError as error:
        raise InputError(f"--expect: {name} lacks what a golden file has: line {place}: {error}", hint=HINT) from None
    knobs = {name: value for name, value in asdict(first.knobs).items() if value is not None}
    fields = {name: getattr(first, name) for name in HEAD} | {"knobs": knobs}
    return Golden(
        **fields,
        versions=first.versions,
        texts=tuple(
            Text(id, text.prompt_ids, tuple(tokens[id]), text.prompt, row_name(id, at + 1 if id == str(at) else 0))
            for at, (id, text) in enumerate(texts.items())
        ),
        known=known,
    )


def _object(line: bytes) -> dict[str, Any]:
    """The object of a line; empty without one."""
    try:
        found = reader.loads(line)
    except BadJson:
        return {}
    return found if isinstance(found, dict) else {}


def _position(data: Any, vocabulary: int) -> _PositionLine:
    """Parse a position. Raises ValueError."""
    position: _PositionLine = value_of(_PositionLine, data)
    _check_ids("token", (position.token,), vocabulary)
    _check_ids("top", [id for id, _ in position.top], vocabulary)
    values = [value for _, value in position.top]
    if len({id for id, _ in position.top}) < len(values) or values != sorted(values, reverse=True):
        raise ValueError("top: expected each token once, the most probable first")
    if math.fsum(map(math.exp, values)) > 1 + ROUNDING:
        raise ValueError("top: the probabilities are more than 1 together")
    return position


def _check_ids(place: str, ids: Sequence[int], vocabulary: int) -> None:
    if ids and max(ids) >= vocabulary:
        raise ValueError(f"{place}: the token {max(ids)} is beyond the vocabulary of {vocabulary}")


# -- whether the compared side has the same tokens ---------------------------------------------------------------------


def check_tokens(golden: Golden, side: LocalSide) -> None:
    """Raises ModelError, which names the first difference, if the side tokenises differently.

    Raises InputError if the file contradicts itself.
    """
    if golden.vocabulary != side.vocabulary:
        raise ModelError(
            f"{side.name} has {side.vocabulary} entries in a distribution, and the golden file {golden.vocabulary}",
            hint=AGAIN,
        )
    recorded_adapter, own = golden.knobs.get("adapter"), side.session.planner.runtime.adapter
    if (recorded_adapter is None) != (own is None) and golden.fingerprint == side.session.loaded.fingerprint():
        raise InputError(
            f"the golden file says adapter {recorded_adapter or 'none'}, and its fingerprint is that of a checkpoint "
            f"with adapter {own or 'none'}",
            hint=AGAIN,
        )
    if not golden.written or side.session.loaded.tokenizer is None:
        return
    for text in (text for text in golden.texts if text.prompt):
        ids = side.session.planner.read(Request(text.id, side.resolved, 0, prompt=text.prompt)).ids
        if tuple(ids) != text.prompt_ids:
            raise ModelError(
                f"{side.name} reads the prompt of text {text.name} in other tokens than the golden file: "
                f"token {shared_length(ids, text.prompt_ids) + 1} differs",
                hint="--chat and --system, as they were then, make the same prompts",
            )


# -- for programs and tests: two sides, or one side and a golden file; settings files are not read ---------------------

NEW_TOKENS = 32  # for each prompt


def compare(reference: str, other: str, prompts: Sequence[str], max_new_tokens: int = NEW_TOKENS) -> Parity:
    """Compare two sides on their greedy texts. Raises GenctlError, also for a prompt that a side cannot read."""
    sides = [_side(text, max_new_tokens) for text in (reference, other)]
    with closing(LoadedSides(_setup)) as loaded:
        mine, theirs = (loaded.load(side) for side in sides)
        named = [(str(number), text) for number, text in enumerate(prompts, 1)]
        check_same(mine.session.loaded, theirs.session.loaded, named)
        one = measure(mine, theirs, _requests(mine, prompts))
    for id, reason in one.failed.items():
        raise InputError(f"text {int(id) + 1} could not be compared: {reason}")
    return one


def check(path: Path, side: str, prompts: Sequence[str], max_new_tokens: int = NEW_TOKENS) -> str:
    """Compare a side with a golden file. Returns the findings as a sentence; raises CheckError beyond tie and drift."""
    name = f"golden {path.stem}"
    if not path.exists():
        raise InputError(f"{name}: there is no {path}", hint="pytest --genctl-update records it")
    golden = read(str(path))
    if (golden.new_tokens, [text.prompt for text in golden.texts]) != (max_new_tokens, [*prompts]):
        raise InputError(
            f"{name}: {path} is that of another test: its prompts or its max_new_tokens differ",
            hint="remove the file, and pytest --genctl-update records it again",
        )
    with closing(LoadedSides(_setup)) as loaded:
        here = loaded.load(_side(side, max_new_tokens))
        check_tokens(golden, here)
        one = compare_golden(golden, here)
    names = {text.id: text.name for text in one.texts}
    failed = [f"text {names[id]} could not be read: {reason}" for id, reason in one.failed.items()]
    notes = (f"{here.name} against {path.name}, which has {golden.reference}", *one.notes)
    words = "; ".join((f"{name}: {failed[0] if failed else one.sentence}", *notes))
    if failed or one.verdict not in ("tie", "drift"):
        raise CheckError(words)
    return words


def write(path: Path, side: str, prompts: Sequence[str], max_new_tokens: int = NEW_TOKENS) -> str:
    """Write a golden file of a side, completely or not at all. Returns a message."""
    with closing(LoadedSides(_setup)) as loaded:
        here = loaded.load(_side(side, max_new_tokens))
        named = {str(at): prompt for at, prompt in enumerate(prompts)}
        golden, failed = record(here, _requests(here, prompts), (), named)
        if failed:
            raise InputError(next(iter(failed.values())))
        whole = content(golden, detokenizer(here.session.loaded.tokenizer).piece)
    path.parent.mkdir(exist_ok=True)
    sink = writers.open_output(path, None, force=True, at_once=True)
    try:
        sink.write(whole)
        sink.close()
    finally:
        sink.abandon()
    return f"golden {path.stem}: recorded, {len(whole):,} bytes"


def _side(text: str, max_new_tokens: int) -> Side:
    """A side of a test."""
    length = Layer("max_new_tokens of the test", {"max_new_tokens": max_new_tokens}, declared="user", typed=True)
    return read_side(text, (length,))


def _setup(early: Resolved, layers: Sequence[Layer]) -> EngineSetup:
    return EngineSetup(early.runtime, tuple(layers), need_tokenizer=True, named=early.names_model)


def _requests(side: LocalSide, prompts: Sequence[str]) -> list[Request]:
    if not prompts:
        raise InputError("there is no prompt to compare the sides on")
    return [Request(str(at), side.resolved, 0, prompt=prompt, place=at + 1) for at, prompt in enumerate(prompts)]
