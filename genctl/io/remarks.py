"""Remarks on an input while it is read: columns that look like something else, lines that look like rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from genctl.config.check import setting_of
from genctl.errors import printable, quote
from genctl.io.jsonl import PROMPTS, RowShape, parse
from genctl.io.openai_rows import is_request
from genctl.io.rows import SCHEMA, RefusedRow

if TYPE_CHECKING:
    from genctl.io.template import Template

_ENOUGH = 3  # lines that look like JSON before a remark
_MOST_COLUMNS = 10_000  # names of columns that are looked at
_MOST_MODELS = 3  # that are reported
_BRIEF = 40  # characters of a value in a remark


def is_row(line: bytes, shape: RowShape, template: Template | None) -> bool:
    """Whether a line is a JSON object with a key that makes a prompt, or with a field of the template."""
    if not line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
        return False
    try:
        row = parse(line.decode("utf-8-sig"))
    except (UnicodeDecodeError, RefusedRow):
        return False
    fields = () if template is None else template.fields
    return not row.keys().isdisjoint((*shape.prompts, *fields)) or is_request(row, shape.prompts)


class Remarks:
    """Remarks on an input as a whole."""

    def __init__(self, report: Callable[[str], object], name: str, *, watch: bool) -> None:
        self._report, self._name = report, name
        self._watch = watch  # all lines so far may be rows of JSONL
        self._lines = 0
        self._columns: set[str] = set()  # names that were looked at
        self._models: set[str] = set()  # that requests name

    def columns(self, columns: Mapping[str, Any], shape: RowShape, where: str, used: Sequence[str]) -> None:
        """Report columns whose names look like misspelt keys or like settings, once; `used` are fields of a template.

        Records of genctl have the seed of their run: a column.
        """
        if len(self._columns) > _MOST_COLUMNS or not (new := columns.keys() - self._columns):
            return
        self._columns |= new
        settings: dict[str, str] = {}
        for column in islice((column for column in columns if column in new), _MOST_COLUMNS):
            if key := shape.suggested(column):
                self._report(f"warning: {where}: {quote(column)} is read as a column of your own; is {key} meant?")
            elif "params" not in shape.known or columns.get("schema") == SCHEMA or column in used:
                continue
            elif knob := setting_of(column):
                settings[column] = f'"{knob}": {_brief(columns[column])}'
        if settings:
            self._report(
                f"warning: {where}: read as columns of your own, not as settings: {', '.join(settings)}; "
                f'settings of a row are written "params": {{{", ".join(settings.values())}}}'
            )

    def model(self, name: str, where: str) -> None:
        """Report a model that a request names, once."""
        if name and name not in self._models and len(self._models) < _MOST_MODELS:
            self._models.add(name)
            self._report(f"note: {where}: the model {quote(name)} is not used: --model names that of all rows")

    def line(self, text: str) -> None:
        """Check a line. Three lines that look like JSON are reported; at the end of the input, one."""
        if not self._watch:
            return
        if not self._lines and text.lstrip().startswith(("[{", "[ {")):
            self._report(
                "hint: a JSON array is read as one prompt per line; JSON lines are rows: jq -c '.[]' FILE | genctl …"
            )
        try:
            row = parse(text) if text.lstrip().startswith("{") else {}
            self._watch = not row.keys().isdisjoint(PROMPTS) or is_request(row, PROMPTS)
        except RefusedRow:
            self._watch = False
        self._lines += 1
        if self._watch and self._lines == _ENOUGH:
            self.end(self._lines)

    def end(self, rows: int) -> None:
        """Note the end of the input, after so many rows, or of what has to be seen of it."""
        if not rows:
            self._report(f"note: no prompts: {self._name} is empty")
        elif self._watch and self._lines:
            self._watch = False
            self._report(
                "hint: each line looks like a JSON row but is read as a prompt; --input-format jsonl reads rows"
            )


def _brief(value: Any) -> str:
    """A value of a column as JSON; a number in a cell of a table is a number."""
    with suppress(ValueError, TypeError, RecursionError):
        value = json.loads(value)
    shown = printable(json.dumps(value, ensure_ascii=False))
    return shown if len(shown) <= _BRIEF else "…"
