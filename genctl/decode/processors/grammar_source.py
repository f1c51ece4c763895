"""The grammar text of the knobs, checked before any model is loaded. This file does not import torch.

All three kinds are converted to llguidance's dialect of Lark. `no_forcing` keeps llguidance from forcing one
tokenisation where the text is certain: all tokenisations are allowed, and the model chooses.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from genctl.config import reader
from genctl.config.check import names_file
from genctl.config.reader import BadJson, Unreadable
from genctl.errors import UsageError, one_line, printable
from genctl.params import GRAMMARS, Generation

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_BYTES = 1 << 20  # the largest grammar file
_HEADER = '%llguidance {"no_forcing": true}\n'

# Between the tokens of JSON: nothing, one blank, or a new line with its indentation. If white space were unbounded,
# small models would write it without end. `"x-guidance"` in a schema overrides this.
_JSON = {"whitespace_pattern": r"(\n[ ]{0,24}| )?"}

# parts of llguidance's error messages, and their replacements
_REASONS = {
    r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?": "",
    "^Unimplemented keys:": "unsupported keywords",
    "^oneOf constraints are not supported.*": "oneOf whose parts may overlap is not supported",
    "^oneOf not fully supported.*": "oneOf, which is read as anyOf",
    "^Failed to generate regex for .* range: .*": "minimum or maximum is too large",
    "^Expected f64 for": "Expected a number for",
}
_LENIENT = 'in the schema, "x-guidance": {"lenient": true} leaves out what is not supported'
_HINTS = {
    "oneOf": 'in the schema, "x-guidance": {"coerce_one_of": true} reads oneOf as anyOf',
    "unsupported keywords": _LENIENT,
    "Unknown format": _LENIENT,
}


class GrammarSource(NamedTuple):
    """A grammar that parses, from the knob `knob`."""

    knob: str
    lark: str
    notes: tuple[str, ...] = ()  # on what is not enforced

    def matcher(self, tokenizer: LLTokenizer) -> LLMatcher:
        """llguidance's matcher of this grammar for a vocabulary, at the beginning of a text."""
        from llguidance import LLMatcher

        return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(self.lark), log_level=0)


def read(generation: Generation, only: str | None = None) -> GrammarSource | None:
    """The grammar of the first knob that is set (`only`: of this knob); None if none is.

    Raises UsageError if a file cannot be read or a grammar does not parse.
    """
    for knob in GRAMMARS if only is None else (only,):
        value = getattr(generation, knob)
        if value is None:
            continue
        where, text = knob, value
        try:
            if not isinstance(value, str):
                text = json.dumps(value)
            elif names_file(knob, value):
                where, text = f"{knob} ({_shown(value)})", _file(knob, value)
            text.encode()
            return _parsed(knob, where, text)
        except UnicodeEncodeError as error:
            reason = f"half of a surrogate pair at character {error.start + 1}"
            raise UsageError(f"{where}: not Unicode text: {reason}") from None
        except RecursionError as error:
            raise UsageError(f"{where}: nested too deeply") from error
    return None


@lru_cache(maxsize=8)  # a grammar is read once for all rows of a run
def _parsed(knob: str, where: str, text: str) -> GrammarSource:
    return {"json_schema": _json_schema, "regex": _regex, "grammar": _grammar}[knob](where, text)


def validate(lark: str) -> tuple[str, list[str]]:
    """llguidance's error message for a grammar, "" if there is none, and its warnings."""
    from llguidance import LLMatcher

    wrong, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(lark))
    return (messages[0].strip(), []) if wrong else ("", messages)


def _file(knob: str, name: str) -> str:
    try:
        return reader.text(Path(name).expanduser(), MOST_BYTES, regular=True)
    except (Unreadable, RuntimeError) as error:  # RuntimeError: ~NAME of an unknown user
        reason = error if isinstance(error, Unreadable) else "not a file name"
        raise UsageError(f"{knob}: cannot read {_shown(name)}: {reason}") from None


def _shown(text: str) -> str:
    """External text for one line of a message, at most 200 characters."""
    line = printable(text)
    return line if len(line) <= 200 else f"{line[:199]}…"


# -- JSON schemas ------------------------------------------------------------------------------------------------------


def _json_schema(where: str, text: str) -> GrammarSource:
    try:
        schema = reader.loads(text)
    except BadJson as error:
        raise UsageError(f"{where}: {error}") from None
    if schema is False:
        raise UsageError(f"{where}: the schema false allows no text at all")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UsageError(f"{where}: a schema is a JSON object, true or false, not {json.dumps(schema)[:40]}")
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        raise UsageError(f'{where}: "x-guidance" must be an object')
    guidance = guidance if "whitespace_flexible" in guidance else {**_JSON, **guidance}
    lark = f"{_HEADER}start: %json {json.dumps({**schema, 'x-guidance': guidance})}"
    fault, warnings = validate(lark)
    pattern = re.search(r"^error: (.*)", fault, re.MULTILINE)  # of a regular expression inside the schema
    lines = [f"pattern: {pattern[1]}" if pattern else fault.partition("\n")[0], *warnings]
    for known, words in _REASONS.items():
        lines = [re.sub(known, words, line) for line in lines]
    fault, *warnings = map(_shown, lines)
    if fault:
        hint = next((hint for word, hint in _HINTS.items() if fault.startswith(word)), "")
        raise UsageError(f"{where}: {fault}", hint=hint)
    return GrammarSource("json_schema", lark, tuple(f"{where}: not enforced: {one}" for one in warnings))


# -- regular expressions, Lark and GBNF --------------------------------------------------------------------------------


def _regex(where: str, value: str) -> GrammarSource:
    from llguidance import regex_to_lark

    if not value:
        raise UsageError("regex: the pattern is empty, and so would be the text")
    lark = f"{_HEADER}start: /{regex_to_lark(value, use_ascii='')}/"
    fault, _ = validate(lark)
    if fault:
        match = re.search(r"^( *)\^+\nerror: (.*)", fault, re.MULTILINE)  # a caret below the pattern, indented by 4
        place = f"at character {len(match[1]) - 3} of" if match and "\n" not in value else "in"
        reason = match[2] if match else re.sub(r"^at .* \(in regex\): | in regex /.*", "", fault.splitlines()[0])
        raise UsageError(f"regex: {_shown(reason)} {place} {_shown(json.dumps(value, ensure_ascii=False))}")
    return GrammarSource("regex", lark)


def _grammar(where: str, text: str) -> GrammarSource:
    # llama.cpp's GBNF defines rules with `::=` and starts at `root`
    gbnf = re.search(r"^\s*root\s*::=", text, re.MULTILINE) is not None
    lark = _HEADER + (_lark_of(text, where) if gbnf else text)
    fault, _ = validate(lark)
    if fault:
        reason = fault.splitlines()[0]  # the other lines show the grammar
        if gbnf:
            raise UsageError(f"{where}: {_shown(reason)}, in the Lark that GBNF was converted to")
        placed = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", reason)
        if placed:
            where, reason = f"{where}, line {int(placed[1]) - 1}, column {placed[2]}", placed[3]
        raise UsageError(f"{where}: {_shown(reason)}")
    return GrammarSource("grammar", lark)


_PART = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/|//[^\n]*|[A-Za-z_][A-Za-z0-9_]*')
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.", re.DOTALL)


def _lark_of(text: str, where: str) -> str:
    """Convert GBNF to Lark. llguidance's converter turns rules into terminals, which match greedily and would refuse
    texts that GBNF allows; they are turned back into rules here. Raises UsageError, which begins with `where`.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    def character(match: re.Match[str]) -> str:
        code = next((one for one in match.groups() if one), None)
        character = chr(int(code, 16)) if code and int(code, 16) < 0x110000 else ""
        return character if character.isprintable() and character not in '"\\[]^-/' else match[0]

    def rule(match: re.Match[str]) -> str:
        if match[0] == "/./":
            return "/(?s:.)/"
        return match[0] if match[0][0] in '"/' else match[0].lower()

    try:
        lark: str = gbnf_to_lark(_CODE.sub(character, text))
    except Exception as error:  # the converter raises plain exceptions
        reason = one_line(error) if str(error) else "it ends too early"
        raise UsageError(f"{where}: not GBNF: {reason}") from error
    return _PART.sub(rule, lark.partition("\n")[2])
