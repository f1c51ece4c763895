"""The input rows and records of `genctl score`, and their text and TSV forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from genctl import events
from genctl.documents.reader import kind_of
from genctl.io import jsonl, writers
from genctl.io.records import SCHEMA, finite, token_entry
from genctl.io.rows import RefusedRow

TEXTS = ("text", "prompt", "candidates")
KNOWN = ("id", *TEXTS, "context", "target")
COLUMNS = ("id", "rank", "ppl", "nll", "tokens", "bits", "bpb", "text", "context", "target", "error")


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
    for key in ("text", "prompt", "target", "context"):
        value = own.get(key, "-")
        if not isinstance(value, str):
            mistakes.append(f"{key}: expected a string, got {kind_of(value)}")
        elif not value:
            mistakes.append(f"{key}: is empty")
    extra: dict[str, Any] = {key: own[key] for key in ("context", "target") if key in own}
    if "candidates" in own:
        try:
            extra["candidates"] = _candidates(own["candidates"])
        except RefusedRow as error:
            mistakes.append(f"candidates: {error}")
    if mistakes:
        raise RefusedRow("; ".join(mistakes))
    return {"prompt": own.get("text", own.get("prompt")), "extra": extra}


ROW = jsonl.RowShape(KNOWN, TEXTS, _fields, nested=frozenset(("candidates",)))


def _candidates(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise RefusedRow(f"expected a list of strings, got {kind_of(value)}")
    if not value:
        raise RefusedRow("is empty")
    for place, item in enumerate(value, 1):
        if not isinstance(item, str):
            raise RefusedRow(f"item {place}: expected a string, got {kind_of(item)}")
        if not item:
            raise RefusedRow(f"item {place}: is empty")
    return tuple(value)


def score_record(
    id: str,
    text: str,
    token_ids: Sequence[int],
    *,
    nll: float,
    tokens: int,
    ppl: float,
    bpb: float,
    bits: float,
    bytes: int,
    model: str,
    extra: Mapping[str, Any] | None = None,
    scores: Sequence[events.Token] | None = None,
) -> dict[str, Any]:
    """One scored text. `nll` is in nats, summed over the `tokens` scored ones, which are the last of `token_ids`.

    `extra` (context, target, rank, …) precedes the per-token `scores`. Numbers that are not finite become null.
    """
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "id": id,
        "text": text,
        "token_ids": list(token_ids),
        "nll": nll,
        "tokens": tokens,
        "ppl": ppl,
        "bpb": bpb,
        "bits": bits,
        "bytes": bytes,
        "model": model,
        **(extra or {}),
    }
    if scores is not None:
        fields["scores"] = [token_entry(token) for token in scores]
    plain: dict[str, Any] = finite(fields)
    return plain


class ScoreTextWriter(writers.TextWriter):
    """`ppl`, `nll`, `tokens` and the text with its controls escaped, between tabs: one line for each text."""

    def write(self, record: writers.Record) -> None:
        if "error" in record:
            super().write(record)
            return
        shown = record.get("target", record["text"])
        cells = [_number(record["ppl"]), _number(record["nll"]), str(record["tokens"]), writers.tsv_cell(shown)]
        self._sink.write(("\t".join(cells) + "\n").encode())


FORMATS = {
    "text": writers.OutputFormat(lambda sink, setup: ScoreTextWriter(sink, setup.on_error), records=False),
    "json": writers.FORMATS["json"],
    "jsonl": writers.FORMATS["jsonl"],
    "tsv": writers.OutputFormat(lambda sink, setup: writers.TsvWriter(sink, COLUMNS), (".tsv",)),
}


def open_writer(
    format: writers.Format, sink: writers.Binary, *, on_error: Callable[[writers.Record], None]
) -> writers.Writer:
    """As `writers.open_writer`, for these records."""
    return writers.open_writer(format, sink, on_error=on_error, formats=FORMATS)


def _number(value: float | None) -> str:
    return "inf" if value is None else f"{value:.4f}"
