"""The outputs of each run for each prompt, and their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from genctl.comparing import metrics
from genctl.comparing.metrics import Divergence, Values, divergence, divergence_entry, mean_of, measure
from genctl.errors import InputError
from genctl.events.results import Result
from genctl.events.results import Sequence as Written
from genctl.io.records import error_record, finite, result_record
from genctl.io.rows import BadRow, InputRow

COLUMNS = (  # of a comparison as TSV
    "run", "id", "sequence", "seed", "finish_reason", "logprob", "score", "tokens", "mean_logprob", "perplexity",
    "entropy", "distinct_1", "distinct_2", "longest_repeat", "self_bleu", "exact_match", "chrf", "bleu", "ter",
    "text", "prompt", "error"
)  # fmt: skip


def number(value: float | None, digits: int = 2) -> str:
    """A number for a cell: – if unknown, in scientific notation if large. A number that rounds to 0 has no sign."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 1e6:
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.2e}"
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def signed(value: float | None, digits: int = 2) -> str:
    """A signed difference for a cell."""
    shown = number(value, digits)
    return f"+{shown}" if value is not None and value > 0 and shown.strip("0.") else shown


@dataclass(frozen=True)
class Failure:
    """Why a run could not continue a prompt."""

    code: str
    message: str
    hint: str = ""  # what may help


Cell: TypeAlias = Result | Failure | None


@dataclass
class ComparedPrompt:
    """One prompt and its outputs: `cells[run][repetition]`, None until it is finished."""

    row: InputRow | BadRow
    references: tuple[str, ...]
    cells: list[list[Cell]]
    lanes: dict[int, list[str]] = field(default_factory=dict)  # by run

    @property
    def begun(self) -> bool:
        """Whether any run has finished."""
        return any(cell is not None for cells in self.cells for cell in cells)

    def forget(self) -> None:
        """Free the results once they are written."""
        self.cells = [[None] * len(cells) for cells in self.cells]
        self.lanes = {}

    def results(self, run: int) -> list[Result]:
        """The results of a run, one per seed."""
        return [cell for cell in self.cells[run] if isinstance(cell, Result)]

    def failures(self, run: int) -> list[Failure]:
        """The errors of a run, each once."""
        return list(dict.fromkeys(cell for cell in self.cells[run] if isinstance(cell, Failure)))


def prompts_of(rows: Sequence[InputRow | BadRow], path: str | None, runs: int, seeds: int) -> list[ComparedPrompt]:
    """The prompts with their references, from the rows or from the file at `path`.

    Raises InputError if both have references, or if the file does not fit, and UsageError if sacrebleu is missing.
    """
    if path is not None:
        metrics.check_installed("--references")
    listed: list[list[str]] = [[]] * len(rows) if path is None else [[line] for line in metrics.read(path, len(rows))]
    prompts = []
    for place, row in enumerate(rows):
        own: Any = [] if isinstance(row, BadRow) else row.extra.get("reference", [])
        known = [own] if isinstance(own, str) else list(own)
        if known and listed[place]:
            raise InputError(f"{row.where} has a reference, and so has line {place + 1} of --references")
        if known:
            metrics.check_installed(f'{row.where}: "reference"')
        prompts.append(ComparedPrompt(row, tuple(known or listed[place]), [[None] * seeds for _ in range(runs)]))
    return prompts


@dataclass(frozen=True)
class Measured:
    """One text, its metrics, and where it diverges from the text of the base run."""

    result: Result
    number: int
    sequence: Written
    values: Values
    divergence: Divergence | None


def measured(
    prompt: ComparedPrompt, runs: Sequence[str], base: str, *, timing: bool = False
) -> dict[str, list[Measured]]:
    """Every text of a prompt with its numbers, by run."""
    sequences_of: dict[str, list[Measured]] = {}
    home = list(runs).index(base)
    for place, run in enumerate(runs):
        texts = [sequence.text for result in prompt.results(place) for sequence in result.sequences]
        selves = iter(metrics.self_bleu(texts))
        sequences_of[run] = []
        for repetition, cell in enumerate(prompt.cells[place]):
            if not isinstance(cell, Result):
                continue
            for number, sequence in enumerate(cell.sequences):
                values = measure(sequence)
                values["self_bleu"] = next(selves)
                if prompt.references:
                    values |= metrics.against(sequence.text, prompt.references)
                if timing:
                    tokens = sum(sequence.hypothesis.length for sequence in cell.sequences)
                    values["tokens_per_s"] = tokens / cell.decode_s if cell.decode_s > 0 else None
                # from the base run's first text with the same seed
                other, point = prompt.cells[home][repetition], None
                if place != home and isinstance(other, Result) and other.sequences:
                    same_tokens = cell.model == other.model and not (cell.backend or other.backend)
                    point = divergence(sequence, other.sequences[0], base, same_tokens=same_tokens)
                sequences_of[run].append(Measured(cell, number, sequence, values, point))
    return sequences_of


def records(
    prompt: ComparedPrompt,
    runs: Sequence[str],
    measured: dict[str, list[Measured]],
    *,
    baseline: str | None,
    load_s: float | None = None,
    tokens: bool = False,
) -> list[dict[str, Any]]:
    """The records of a prompt: those of `genctl run` with `run` and `metrics` appended.

    `metrics.divergence` is where a text diverges from the first run's (or the `baseline`'s): `position` counts the
    tokens before it, `token` and `other` are [id, text, logprob], null if a text has ended. With `baseline`,
    `metrics.difference` holds each number minus the mean over the baseline's texts. `load_s` adds `timing`.
    """
    row = prompt.row
    if isinstance(row, BadRow):
        return [error_record(row.id, row.code, row.message, row.columns)]
    rows = []
    for place, run in enumerate(runs):
        for failure in prompt.failures(place):
            rows.append({**error_record(row.id, failure.code, failure.message, row.columns), "run": run})
        for item in measured[run]:
            metrics: dict[str, Any] = {key: finite(value) for key, value in item.values.items()}
            if item.divergence is not None:
                metrics["divergence"] = divergence_entry(item.divergence)
            if baseline is not None and run != baseline and measured[baseline]:
                metrics["difference"] = {"to": baseline, **_difference(item.values, measured[baseline])}
            rows.append(
                result_record(
                    row,
                    item.result,
                    item.number,
                    tokens=tokens,
                    load_s=load_s,
                    extra={"run": run, "metrics": metrics},
                    reused_tokens=item.result.reused or None,
                )
            )
    return rows


def _difference(values: Values, base: Sequence[Measured]) -> Values:
    means = mean_of([item.values for item in base])
    return {
        key: finite(value - other)
        for key, value in values.items()
        if value is not None and (other := means.get(key)) is not None
    }
