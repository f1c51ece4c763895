"""The grammar text of the knobs, checked before any model is loaded. This file does not import torch.

All three kinds become llguidance's dialect of Lark. `no_forcing` keeps llguidance from prescribing one tokenisation
if the text is certain: all tokenisations are allowed, and the model chooses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genctl.config.check import names_file
from genctl.decode.processors.closed_schema import closed
from genctl.decode.processors.schema_forms import Unenforceable, written
from genctl.documents import reader
from genctl.documents.reader import BadJson, Unreadable
from genctl.errors import UsageError, one_line
from genctl.params import GRAMMARS, Generation

# -- GBNF, the grammars of llama.cpp, as Lark --------------------------------------------------------------------------
# llguidance converts the syntax. Its converter makes terminals of rules, which are read greedily and would refuse texts
# that GBNF allows; here they are rules again.


_PART = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/|//[^\n]*|[A-Za-z_][A-Za-z0-9_]*')
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.", re.DOTALL)
_ANY = "/./"


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF: its rules are written with `::=`, and it begins at `root`."""
    return re.search(r"^[ \t]*root\s*::=", text, re.MULTILINE) is not None


def lark_of(text: str, where: str) -> str:
    """The grammar in Lark. Raises UsageError, which begins with `where`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(_CODE.sub(_character, text))
    except Exception as error:  # the converter raises plain exceptions
        reason = one_line(error) if str(error) else "it ends too early"
        raise UsageError(f"{where}: not GBNF: {reason}") from error
    return _PART.sub(_rule, lark.partition("\n")[2])


def _character(match: re.Match[str]) -> str:
    code = next((one for one in match.groups() if one), None)
    character = chr(int(code, 16)) if code and int(code, 16) < 0x110000 else ""
    if not character or not character.isprintable() or character in '"\\[]^-/':
        return match[0]
    return character


def _rule(match: re.Match[str]) -> str:
    part = match[0]
    if part == _ANY:
        return "/(?s:.)/"
    return part if part[0] in '"/' else part.lower()


MOST_BYTES = 1 << 20  # of a file; no grammar is that long
MOST_TRIES = 256  # parts of a schema that are checked alone, to find the wrong one
_MOST_SHOWN = 200  # characters of a quotation in a message
_MOST_KEPT = 8  # grammars that were read last
_HEADER = '%llguidance {"no_forcing": true}\n'

# Between the tokens of JSON: nothing, one blank, or a new line with its indentation. Small models would write unbounded
# white space without end. `"x-guidance"` in a schema changes it.
_JSON = {"whitespace_pattern": r"(\n[ ]{0,24}| )?"}


# llguidance's reasons, and ours
_REASONS = {
    r"^Invalid type: (\w+)$": r'unknown type "\1"',
    "^Unimplemented keys:": "unsupported keywords",
    "^Unsatisfiable schema: (.*)": r"no value is allowed: \1",
    "^Expected f64 for '(.*?)', got (.*)": r"\1 must be a number, not \2",
    "^Expected positive integer for '(.*?)', got (.*)": r"\1 must be a whole number from 0 on, not \2",
    "^Expected (array|string) for '(.*?)', got (.*)": r"\2 must be of type \1, not \3",
    "^schema too large": "its conditions have too many combinations",
    "^Resource '(.*?)' is not present.*": r'the reference "\1" is not followed; those inside the schema are',
}


@dataclass(frozen=True)
class GrammarSource:
    """A grammar that parses. `knob` is its knob."""

    knob: str
    lark: str
    notes: tuple[str, ...] = ()  # on what is not enforced


def read(generation: Generation, only: str | None = None) -> GrammarSource | None:
    """The grammar of the knobs (`only`: of one knob); None if none is set.

    A grammar is read once for all rows of a run, and again only if its file has changed. Raises UsageError if a file
    cannot be read or a grammar does not parse, with the place.
    """
    for knob in GRAMMARS if only is None else (only,):
        value = getattr(generation, knob)
        if value is not None:
            return _read_once(knob, value, generation)
    return None


def _read_once(knob: str, value: Any, generation: Generation) -> GrammarSource:
    reader = _READERS[knob]
    drop = generation.json_schema_unenforced == "drop"
    try:
        key = knob, repr(value), drop, _version(value) if names_file(knob, value) else ()
    except RecursionError:  # the reader says where it is nested too deeply
        return reader(value, drop)
    source = _LATEST.pop(key, None) or reader(value, drop)
    _LATEST[key] = source  # at the end: the first is the one that was used longest ago
    while len(_LATEST) > _MOST_KEPT:
        del _LATEST[next(iter(_LATEST))]
    return source


def _version(value: str) -> tuple[int, ...]:
    """What changes with the file that a knob names; empty if there is none."""
    try:
        state = Path(value).expanduser().stat()
    except (OSError, ValueError, RuntimeError):
        return ()
    return state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size


def _json_schema(value: dict[str, Any] | bool | str, drop: bool) -> GrammarSource:
    where = "json_schema"
    schema: Any = value
    if isinstance(value, str):
        text = value
        if names_file("json_schema", value):
            where, text = f"json_schema ({_shown(value)})", _file("json_schema", value)
        try:
            schema = reader.loads(text)
        except BadJson as error:
            raise UsageError(f"{where}: {error}") from None
    if schema is True:
        schema = {}
    if schema is False:
        raise UsageError(f"{where}: the schema false allows no text at all")
    if not isinstance(schema, dict):
        raise UsageError(f"{where}: a schema is a JSON object, true or false, not {json.dumps(schema)[:40]}")
    if not isinstance(schema.get("x-guidance", {}), dict):
        raise UsageError(f'{where}: "x-guidance" must be an object at #')
    try:
        lark, notes = _lark(schema, drop)
        fault = _fault(schema, drop)
        if fault:
            tries = iter(range(MOST_TRIES))
            pointer, reason = next(_inner(schema, schema, "#", fault, tries, drop), ("#", fault))
            raise UsageError(f"{where}: {_shown(reason)} at {_shown(pointer)}")
        return GrammarSource("json_schema", lark, tuple(f"{where}: {_shown(note)}" for note in notes))
    except RecursionError as error:
        raise UsageError(f"{where}: nested too deeply") from error
    except Unenforceable as error:
        raise UsageError(
            f"{where}: {_shown(error.keyword)} cannot be enforced at {_shown(error.pointer)}: {error.reason}",
            hint='json_schema_unenforced = "drop" leaves out what cannot be enforced, with a note',
        ) from error


def _lark(schema: dict[str, Any], drop: bool) -> tuple[str, tuple[str, ...]]:
    """The schema as a grammar, and notes. Raises Unenforceable."""
    guidance = schema.get("x-guidance", {})
    form, notes = written(schema, drop=drop)
    guided = {**closed(form), "x-guidance": guidance if "whitespace_flexible" in guidance else {**_JSON, **guidance}}
    return f"{_HEADER}start: %json {json.dumps(guided)}", notes


def _fault(schema: dict[str, Any], drop: bool) -> str:
    try:
        lark, _ = _lark(schema, drop)
    except Unenforceable:  # a part that is taken only where it stands
        return ""
    fault = validate(lark)
    pattern_error = re.search(r"^error: (.*)", fault, re.MULTILINE)  # of a regular expression inside the schema
    if pattern_error:
        return f"pattern: {pattern_error[1]}"
    reason = re.sub(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?", "", _reason(fault)) if fault else ""
    for pattern, words in _REASONS.items():
        reason = re.sub(pattern, words, reason)
    return reason


def _inner(
    root: dict[str, Any], part: Any, pointer: str, fault: str, tries: Iterator[int], drop: bool
) -> Iterator[tuple[str, str]]:
    """The deepest part of a schema that has the same fault alone; at most `tries` parts are checked."""
    if isinstance(part, dict):
        inner = [(f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}", item) for key, item in part.items()]
    elif isinstance(part, list):
        inner = [(f"{pointer}/{place}", item) for place, item in enumerate(part)]
    else:
        return
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root and pointer == "#"}
    for where, item in inner:
        yield from _inner(root, item, where, fault, tries, drop)
        if not isinstance(item, dict) or where in ("#/$defs", "#/definitions"):
            continue
        if next(tries, None) is None:
            return
        if _fault({**shared, **item}, drop) == fault:
            yield where, fault


def _regex(value: str, drop: bool) -> GrammarSource:
    from llguidance import regex_to_lark

    if not value:
        raise UsageError("regex: the pattern is empty, and so would be the text")
    _text("regex", value)
    lark = f"{_HEADER}start: /{regex_to_lark(value, use_ascii='')}/"
    fault = validate(lark)
    if fault:
        match = re.search(r"^( *)\^+\nerror: (.*)", fault, re.MULTILINE)  # a caret below the pattern, indented by 4
        place = f"at character {len(match[1]) - 3} of" if match and "\n" not in value else "in"
        reason = match[2] if match else re.sub(r"^at .* \(in regex\): | in regex /.*", "", _reason(fault))
        raise UsageError(f"regex: {_shown(reason)} {place} {_shown(json.dumps(value, ensure_ascii=False))}")
    return GrammarSource("regex", lark)


def _grammar(value: str, drop: bool) -> GrammarSource:
    is_file = names_file("grammar", value)
    where, text = (f"grammar ({_shown(value)})", _file("grammar", value)) if is_file else ("grammar", value)
    _text(where, text)
    gbnf = is_gbnf(text)
    if gbnf:
        text = lark_of(text, where)
    fault = validate(_HEADER + text)
    if fault:
        reason = _reason(fault)
        if gbnf:
            raise UsageError(f"{where}: {_shown(reason)}, in the Lark that GBNF was converted to")
        placed = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", reason)
        if placed:
            where, reason = f"{where}, line {int(placed[1]) - 1}, column {placed[2]}", placed[3]
        raise UsageError(f"{where}: {_shown(reason)}")
    return GrammarSource("grammar", _HEADER + text)


_READERS: dict[str, Callable[[Any, bool], GrammarSource]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
}
_LATEST: dict[tuple[str, str, bool, tuple[int, ...]], GrammarSource] = {}


def validate(lark: str) -> str:
    """The error of a grammar in llguidance's words; "" if there is none."""
    from llguidance import LLMatcher

    wrong, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(lark))
    return messages[0] if wrong else ""


def _reason(fault: str) -> str:
    """The first line of a message; the others show the generated grammar."""
    return fault.strip().splitlines()[0]


def _file(knob: str, name: str) -> str:
    try:
        return reader.text(Path(name).expanduser(), MOST_BYTES, regular=True)
    except (Unreadable, RuntimeError) as error:  # RuntimeError: ~ of a user who is not there
        reason = error if isinstance(error, Unreadable) else "not a file name"
        raise UsageError(f"{knob}: cannot read {_shown(name)}: {reason}") from None


def _text(where: str, text: str) -> None:
    """Raises UsageError unless `text` is Unicode text, which half of a surrogate pair is not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: not Unicode text: half of a surrogate pair at character {error.start + 1}"
        ) from None


def _shown(text: str) -> str:
    """Text from elsewhere, on one line of a message."""
    line = "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in text)
    return line if len(line) <= _MOST_SHOWN else line[: _MOST_SHOWN - 1] + "…"
