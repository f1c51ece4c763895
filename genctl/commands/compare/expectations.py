"""Recorded outputs and their differences: the file of `--save`, and the check of `--expect`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypedDict

from annotated_types import Ge, Le

from genctl.config.dry import settings_of
from genctl.config.layers import Resolved
from genctl.documents import reader
from genctl.documents.reader import BadJson, Unreadable
from genctl.documents.shapes import BadShape, Known, Natural, value_of
from genctl.errors import InputError, count, percent, printable
from genctl.events import LARGEST, Id, Seed, shared_length
from genctl.identity import change, changed, checkpoint_change
from genctl.io import jsonl
from genctl.io.rows import InputRow, RefusedRow
from genctl.io.writers import to_json
from genctl.params import Generation, Runtime

SCHEMA = "genctl-compare/1"
TOLERANCE = 1e-3  # on log-probabilities, nats
_SHOWN = 400  # characters of a text on each side of a difference

Figure: TypeAlias = Annotated[Known, Ge(-LARGEST), Le(LARGEST)] | None  # in nats; None: not finite when it was written
Key = tuple[str, str, int]  # run, row id, which of its sequences (seeds in order)


class _Run(TypedDict):
    """The given settings. The effective ones are beside them (`resolved`), for people who read them."""

    name: str
    settings: dict[str, Any]


class _Error(TypedDict):
    code: str
    message: str


class _Token(TypedDict):
    id: Id
    text: str
    logprob: Figure


class _Identified(TypedDict):
    id: str


class _Record(_Identified, total=False):
    """A record as `--format jsonl --scores` writes it. There is more in it, which is not compared."""

    run: str
    sequence: Natural
    seed: Seed | None
    text: str
    token_ids: list[Id]
    tokens: list[_Token]
    logprob: Figure
    score: Figure
    finish_reason: str
    error: _Error


COMPARED = ("text", "token_ids", "tokens", "logprob", "score", "finish_reason")


@dataclass(frozen=True)
class Recording:
    """The content of a `--save` file: enough to run it again, and to see what it ran on."""

    seed: Seed
    seeds: Annotated[int, Ge(1)]
    versions: dict[str, str]
    checkpoints: dict[str, str]  # name -> fingerprint
    runs: tuple[Annotated[dict[str, Any], _Run], ...]
    prompts: tuple[dict[str, Any], ...]  # as in a JSONL input
    records: tuple[Annotated[dict[str, Any], _Record], ...] = ()

    def head(self) -> dict[str, Any]:
        """Everything but the records."""
        return {
            "schema": SCHEMA,
            "versions": self.versions,
            "seed": self.seed,
            "seeds": self.seeds,
            "checkpoints": self.checkpoints,
            "runs": list(self.runs),
            "prompts": list(self.prompts),
        }

    def encode(self) -> bytes:
        """The file: one JSON object, with a line for each prompt, run and record, so that versions can be diffed."""
        lines = []
        for key, value in self.head().items():
            listed = isinstance(value, list)
            text = _lines(value) if listed else to_json(value) if isinstance(value, dict) else json.dumps(value)
            lines.append(f'"{key}": {text}')
        lines.append(f'"records": {_lines(self.records)}')
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8", "backslashreplace")

    def rows(self, name: str) -> Iterator[InputRow]:
        """Its prompts. `name` is the file, for messages. Raises InputError."""
        for index, data in enumerate(self.prompts):
            try:
                if unknown := jsonl.unknown_keys(data, (*jsonl.KNOWN, "input")):
                    raise RefusedRow("; ".join(unknown))
                own, fields = jsonl.row_id(data), jsonl.ROW.fields(data, ())
                if not isinstance(columns := data.get("input", {}), dict):
                    raise RefusedRow(f"input: expected an object, got {reader.kind_of(columns)}")
            except RefusedRow as error:
                raise InputError(f"--expect: {name}: prompt {index + 1}: {error}") from None
            id, where = str(index) if own is None else own, f"{name}, prompt {index + 1}"
            own_id = own not in (None, str(index))
            yield InputRow(id, index, where=where, own_id=own_id, columns=columns, **fields)


def _lines(items: Sequence[Mapping[str, Any]]) -> str:
    return "[\n" + ",\n".join(to_json(item) for item in items) + "\n]" if items else "[]"


def prompt_entry(row: InputRow, references: Sequence[str]) -> dict[str, Any]:
    """A row as in a JSONL input."""
    entry: dict[str, Any] = {"id": row.id}
    if row.prompt is not None:
        entry["prompt"] = row.prompt
    elif row.prompt_ids is not None:
        entry["prompt_ids"] = list(row.prompt_ids)
    else:
        entry["messages"] = list(row.messages or ())
    if row.params:
        entry["params"] = row.params
    entry |= {key: value for key, value in row.extra.items() if key != "reference"}
    if references:
        entry["reference"] = list(references)
    if row.columns:
        entry["input"] = row.columns
    return entry


def read(path: str) -> Recording:
    """A recording. Raises InputError for a file that cannot be read or is no recording."""
    name = f"--expect: {printable(path)}"
    try:
        text = reader.text(path)
        data = reader.loads(text)
    except Unreadable as error:
        raise InputError(f"--expect: {error}: {printable(path)}", hint="--save FILE writes one") from None
    except BadJson as error:
        is_golden = '"kind":"golden"' in text.partition("\n")[0].replace(" ", "")
        hint = f"it is a golden file: genctl parity MODEL --expect {printable(path)}" if is_golden else ""
        raise InputError(f"{name} is not what --save wrote: {error}", hint=hint) from None
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise InputError(f"{name} is no recording of {SCHEMA}; it should be a file that --save wrote")
    try:
        recording: Recording = value_of(Recording, data)
        for number, record in enumerate(recording.records):
            _check_record(f"records.{number}", record)
        for part in ("runs", "prompts", "records"):
            if not getattr(recording, part):
                raise BadShape(f"{part}: expected at least 1, got none: there would be nothing to compare")
        if recording.seeds > len(recording.records):
            raise BadShape(f"seeds: expected at most {len(recording.records)}, the number of records")
    except BadShape as error:
        raise InputError(f"{name}: {error}") from None
    return recording


def _check_record(place: str, record: Mapping[str, Any]) -> None:
    """Raises BadShape if a record lacks what it is compared by."""
    if "error" in record:
        return
    if missing := [key for key in COMPARED if key not in record]:
        raise BadShape(f"{place}: {' and '.join(missing)}: expected here, but missing")
    if [token["id"] for token in record["tokens"]] != record["token_ids"]:
        raise BadShape(f"{place}.tokens: expected the tokens of token_ids")


@dataclass(frozen=True)
class Difference:
    """One output that changed. `lines` describe the change."""

    run: str
    id: str
    sequence: int
    seed: int | None
    lines: tuple[str, ...]

    def heading(self, prompt: str) -> str:
        """The run, prompt, seed and sequence of the output. `prompt` is what messages call it; "" if it is alone."""
        words = [f"run {self.run}"] if self.run else []
        words += [f"prompt {prompt}"] if prompt else []
        words += [f"seed {self.seed}"] if self.seed is not None else []
        words += [f"sequence {self.sequence + 1}"] if self.sequence else []
        return " · ".join(words)


@dataclass
class Outcome:
    """The result of a comparison with a recording."""

    compared: int = 0
    differences: list[Difference] = field(default_factory=list)

    def lines(self, path: str | None, notes: Sequence[str], names: Mapping[str, str]) -> list[str]:
        """What differs from the recording at `path`, or that nothing does. `names`: what messages call a prompt."""
        lines: list[str] = []
        for difference in self.differences:
            lines += [
                difference.heading(names.get(difference.id, difference.id)),
                *(f"  {line}" for line in difference.lines),
                "",
            ]
        lines += [f"note: {note}" for note in notes]
        if not self.differences:
            lines.append(f"{count(self.compared, 'output')} as recorded in {path}")
        return lines


def compare(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], tolerance: float) -> Outcome:
    """Compare every recorded output with the current one; outputs on one side only are differences too.

    `after` may carry `top` alternatives in its tokens: then the current probability of the old token is reported.
    """
    old, new = _keyed(before), _keyed(after)
    outcome = Outcome()
    for key in dict.fromkeys([*old, *new]):
        recorded, current = old.get(key), new.get(key)
        outcome.compared += 1
        if recorded is None or current is None:
            side = current if recorded is None else recorded
            assert side is not None
            lines: list[str] = [
                "only now: it is not in the file" if recorded is None else "missing: it was recorded before"
            ]
        else:
            side, lines = current, differences(recorded, current, tolerance)
        if lines:
            difference = Difference(key[0], key[1], int(side.get("sequence", 0)), side.get("seed"), tuple(lines))
            outcome.differences.append(difference)
    return outcome


def _keyed(records: Sequence[Mapping[str, Any]]) -> dict[Key, Mapping[str, Any]]:
    keyed: dict[Key, Mapping[str, Any]] = {}
    for record in records:
        run, id = str(record.get("run", "")), str(record["id"])
        place = 0
        while (run, id, place) in keyed:
            place += 1
        keyed[run, id, place] = record
    return keyed


def differences(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> list[str]:
    """How one output differs from the recorded one, in lines; none if equal."""
    if "error" in before or "error" in after:
        return _errors(before, after)
    lines, seeds = [], (before.get("seed"), after.get("seed"))
    if None not in seeds and seeds[0] != seeds[1]:  # None: nothing is drawn
        lines.append(f"seed: {before.get('seed')} before, {after.get('seed')} now")
    if before["token_ids"] != after["token_ids"]:
        lines += _tokens(before, after)
    else:
        if before["text"] != after["text"]:
            lines += ["the same tokens are another text", *_texts(before["text"], after["text"])]
        lines += _scores(before, after, tolerance)
    if before["finish_reason"] != after["finish_reason"]:
        lines.append(f"ended by {before['finish_reason']} before, by {after['finish_reason']} now")
    return lines


def _errors(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    recorded, current = before.get("error"), after.get("error")
    if recorded and current:
        same = (recorded.get("code"), recorded.get("message")) == (current.get("code"), current.get("message"))
        return [] if same else [f"failed before: {recorded.get('message')}", f"fails now: {current.get('message')}"]
    if current:
        return [f"fails now: {current.get('message')}"]
    return [f"failed before: {recorded.get('message') if recorded else ''}", "now there is a text"]


def _tokens(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    old, new = before["token_ids"], after["token_ids"]
    at = shared_length(old, new)
    lines = _texts(before["text"], after["text"])
    was, now = _token(before, at), _token(after, at)
    lines.append(f"first different token: number {at + 1}")
    lines.append(f"    before {_told(was)}")
    lines.append(f"    now    {_told(now)}{_other(was, now)}")
    return lines


def _token(record: Mapping[str, Any], at: int) -> Mapping[str, Any] | None:
    tokens = record["tokens"]
    return tokens[at] if at < len(tokens) else None


def _told(token: Mapping[str, Any] | None) -> str:
    if token is None:
        return "nothing: the text had ended"
    text = json.dumps(token["text"], ensure_ascii=False) if token["text"] else f"id {token['id']}"
    return f"{text} {_percent(token.get('logprob'))}"


def _other(was: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """The gap: the current probability of the old token."""
    if was is None or now is None:
        return ""
    logprob = next((entry[2] for entry in now.get("top") or () if entry[0] == was["id"]), None)
    if logprob is not None and now.get("logprob") is not None:
        gap = now["logprob"] - logprob
        return f"; the old token has {_percent(logprob)} now, {abs(gap):.3f} nats {'less' if gap >= 0 else 'more'}"
    if was.get("logprob") is None or now.get("logprob") is None:
        return ""
    return f"; {abs(now['logprob'] - was['logprob']):.3f} nats apart, and the old token is not among the likely ones"


def _percent(logprob: float | None) -> str:
    if logprob is None:
        return "of unknown probability"
    return f"{percent(math.exp(min(logprob, 0.0)), 2)} ({logprob:.3f})"


def _texts(before: str, after: str) -> list[str]:
    """Both texts, one per line; a long common prefix is cut."""
    start = max(shared_length(before, after) - 60, 0)

    def cut(text: str) -> str:
        part = text[start : start + _SHOWN]
        inside = json.dumps(part, ensure_ascii=False)[1:-1]
        return f"{'…' if start else ''}{inside}{'…' if start + _SHOWN < len(text) else ''}"

    return [f"  - {cut(before)}", f"  + {cut(after)}"]


def _scores(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> list[str]:
    lines = []
    pairs = [
        (n, recorded, current)
        for n, (recorded, current) in enumerate(zip(before["tokens"], after["tokens"], strict=False))
        if _apart(recorded.get("logprob"), current.get("logprob")) > tolerance
    ]
    if pairs:
        n, recorded, current = max(pairs, key=lambda pair: _apart(pair[1].get("logprob"), pair[2].get("logprob")))
        largest = _apart(recorded.get("logprob"), current.get("logprob"))
        lines.append(
            f"the same text, but {len(pairs)} of {len(before['token_ids'])} log-probabilities changed by more than "
            f"{tolerance:g}; the most at token {n + 1}, by {largest:.4g}"
        )
        lines += [f"    before {_told(recorded)}", f"    now    {_told(current)}"]
    scale = max(len(before["token_ids"]), 1) if before["score"] == before.get("logprob") else 1  # a sum, not a mean
    if _apart(before["score"], after["score"]) > tolerance * scale:
        lines.append(f"score {_figure(before['score'])} before, {_figure(after['score'])} now")
    return lines


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b)


def notes(before: Recording, checkpoints: Mapping[str, str], versions: Mapping[str, str]) -> list[str]:
    """Changes of checkpoints and versions, which alone are no failure."""
    lines = []
    for name, now in checkpoints.items():
        known = before.checkpoints.get(name)
        if known is None:
            names = ", ".join(before.checkpoints) or "nothing"
            lines.append(f"checkpoint {name} is not in the recording, which was made with {names}")
        elif known != now:
            lines.append(checkpoint_change(name, known, now, what="the recording"))
    known_packages = before.versions.keys() & versions.keys()
    return lines + [change(*one) for one in changed(before.versions, versions) if one[0] in known_packages]


def changed_settings(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that hold now and did not, of runs as `run_entry` writes them; those of seeds are told with each output.

    A change of several runs is one line.
    """
    recorded = {str(run["name"]): run.get("resolved") for run in before}
    defaults = vars(Generation()) | vars(Runtime())  # a setting that an older genctl did not know had no effect
    changes: dict[str, list[str]] = {}
    for run in now:
        then = recorded.get(run["name"])
        if not isinstance(then, Mapping):
            continue
        for key, old, new in changed(then, json.loads(to_json(run["resolved"]))):
            if key != "seed" and (key in then or new != defaults.get(key)):
                changes.setdefault(change(key, old, new), []).append(run["name"])
    return [
        change if len(runs) == len(now) else f"run {' and '.join(runs)}: {change}" for change, runs in changes.items()
    ]


def run_entry(name: str, resolved: Resolved, seed: int) -> dict[str, Any]:
    """A run: `settings` are those from all layers above the checkpoint's, `resolved` are all."""
    names = {key for key, setting in resolved.settings.items() if setting.kind != "model"}
    values = {key: value for key, value in settings_of(resolved).items() if key in names}
    for key, listed in (("processors", resolved.processors), ("stopping", resolved.stopping)):
        if key in names and listed is not None:
            values[key] = list(listed)
    resolved_values = {**settings_of(resolved), "seed": seed}
    return {"name": name, "settings": {**values, "seed": seed}, "resolved": resolved_values}
