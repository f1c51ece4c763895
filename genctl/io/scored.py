"""The input rows of `genctl score`, and the text and TSV forms of its records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from genctl.documents.reader import kind_of
from genctl.io import jsonl, writers
from genctl.io.rows import RefusedRow

TEXTS = ("text", "prompt", "candidates")
KNOWN = ("id", *TEXTS, "context", "target")
COLUMNS = ("id", "rank", "ppl", "nll", "tokens", "bits", "bpb", "text", "context", "target", "error")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RefusedRow(f"expected a string, got {kind_of(value)}")
    if not value:
        raise RefusedRow("is empty")
    return value


def _candidates(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise RefusedRow(f"expected a list of strings, got {kind_of(value)}")
    if not value:
        raise RefusedRow("is empty")
    return jsonl.each(value, _text)


def _fields(own: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """The keyword arguments of `InputRow` besides id, index, columns and where, for a row to be scored.

    A row has a `text` (or, equivalently, a `prompt`) with `context` or `target`, or a list of `candidates` with
    `context`; the latter three are in `extra`. Raises RefusedRow with all errors in one line.
    """
    mistakes = []
    texts = [key for key in TEXTS if key in own]
    if not texts:
        mistakes.append(jsonl.no_prompt("nothing to score", TEXTS, columns))
    elif len(texts) > 1:
        mistakes.append(f"{' and '.join(texts)} exclude each other")
    if "target" in own and "candidates" in own:
        mistakes.append("target and candidates exclude each other")
    values: dict[str, Any] = {}
    for key in ("text", "prompt", "context", "target", "candidates"):
        if key in own:
            try:
                values[key] = _candidates(own[key]) if key == "candidates" else _text(own[key])
            except RefusedRow as error:
                mistakes.append(f"{key}: {error}")
    if mistakes:
        raise RefusedRow("; ".join(mistakes))
    extra = {key: values[key] for key in ("context", "target", "candidates") if key in values}
    return {"prompt": values.get("text", values.get("prompt")), "extra": extra}


ROW = jsonl.RowShape(KNOWN, TEXTS, _fields, nested=frozenset(("candidates",)))


class ScoreTextWriter(writers.TextWriter):
    """`ppl`, `nll`, `tokens` and the text with its controls escaped, between tabs: one line for each text."""

    def write(self, record: writers.Record) -> None:
        if "error" in record:
            super().write(record)
            return
        numbers = ("inf" if record[name] is None else f"{record[name]:.4f}" for name in ("ppl", "nll"))
        cells = [*numbers, str(record["tokens"]), writers.tsv_cell(record.get("target", record["text"]))]
        self._sink.write(("\t".join(cells) + "\n").encode())


FORMATS = {
    "text": writers.OutputFormat(lambda sink, setup: ScoreTextWriter(sink, setup.on_error), records=False),
    "json": writers.FORMATS["json"],
    "jsonl": writers.FORMATS["jsonl"],
    "tsv": writers.OutputFormat(lambda sink, setup: writers.TsvWriter(sink, COLUMNS), (".tsv",)),
}
