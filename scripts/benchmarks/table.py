"""Results as a table for people (Markdown) and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .measuring import Measured
from .sides import CTRANSLATE2, GENCTL, GENERATE, LLAMA, SIDES

COLUMNS = (GENCTL, GENERATE, CTRANSLATE2, LLAMA)
LIMIT = (
    "- share of the limit: the time in which the machine reads the weights and the cache that a step of genctl needs, "
    "as a share of the measured time of a step after the first"
)
WORDS = {True: "yes", False: "no", None: ""}


def record(measured: Measured, bandwidth: float | None = None) -> dict[str, Any]:
    """A case as JSON: medians, ratios with their spread, share of the limit, whether the tokens were generate()'s.

    `bandwidth` is in bytes a second.
    """
    case = measured.case
    sides: dict[str, Any] = {}
    for name, speeds in measured.speeds.items():
        here: dict[str, Any] = {
            "dtype": case.dtype_of(name),
            "median": statistics.median(speeds),
            "rounds": speeds,
            "tokens_equal": measured.same(name),
        }
        if ratios := measured.ratios(name) if name != GENCTL else []:
            here["ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        if name in case.targets:
            here["target"] = case.targets[name]
        if case.figure == "MiB":
            here["above_weights"] = case.above_weights(here["median"])
        if name == GENCTL and (kept := measured.kept()):
            here["texts_kept_with_drafts"] = kept
        sides[name] = here
    return {
        "row": case.key,
        "title": case.title,
        "unit": case.figure,
        "sides": sides,
        "absent": measured.absent,
        "share_of_limit": None if bandwidth is None else measured.share(bandwidth),
        "tokens_must_be_equal": case.equal,
        "tokens_equal": measured.same(GENCTL),
    }


def markdown(results: Sequence[Measured], bandwidth: float | None = None) -> str:
    """The table, then what could not be measured. `bandwidth` (bytes a second) gives the share of the limit."""
    peers = COLUMNS[1:]
    lines = [
        f"| work | unit | {' | '.join(COLUMNS)} | {' | '.join(f'× {name}' for name in peers)} "
        "| share of the limit | tokens equal |",
        f"|---|---|{'--:|' * len(COLUMNS)}{'--:|' * len(peers)}--:|---|",
    ]
    for measured in results:
        cells = [_value(measured, name) for name in COLUMNS] + [_ratio(measured, name) for name in peers]
        share = None if bandwidth is None else measured.share(bandwidth)
        cells += ["–" if share is None else f"{share:.0%}", WORDS[measured.same(GENCTL)]]
        lines.append(f"| {measured.case.title} | {measured.case.figure} | {' | '.join(cells)} |")
        for name in SIDES:  # peers of this case alone
            if name not in COLUMNS and name in measured.speeds:
                lines.append(_aside(measured, name))
    notes = _absences(results)
    if kept := _kept(results):
        notes.insert(0, kept)
    if any("≠" in line for line in lines):
        notes.insert(0, "- ≠: other tokens than generate()'s, as many")
    if any(measured.case.manner == "command" for measured in results):
        notes.insert(0, "- from the shell: `genctl run`; for generate() a plain script with Auto classes")
    if any(measured.case.limited for measured in results):
        notes.insert(0, LIMIT)
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def number(value: float) -> str:
    """Three figures."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _value(measured: Measured, name: str) -> str:
    case = measured.case
    if name not in measured.speeds:
        return "failed" if name in measured.failed else "–"
    # a peer that wrote something else did like work, not the same; of one that draws, nothing else is to be expected
    unlike = bool(case.equal) and not case.work.samples and name != GENCTL and measured.same(name) is False
    value, other = statistics.median(measured.speeds[name]), case.other_dtypes.get(name)
    above = f" (+{case.above_weights(value):.0%})" if case.figure == "MiB" else ""
    return number(value) + above + (f" ({other})" if other else "") + " ≠" * unlike


def _ratio(measured: Measured, name: str) -> str:
    ratios = measured.ratios(name)
    if not ratios:
        return "–"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def _aside(measured: Measured, name: str) -> str:
    """A line for a peer that has no column: its speed under generate()'s, and the ratio to it."""
    cells = ["", _value(measured, name), "", "", _ratio(measured, name), "", "", ""]
    return f"| the same, {name} | {measured.case.figure} | {' | '.join(cells)} | |"


def _absences(results: Sequence[Measured]) -> list[str]:
    """Why there are dashes: each reason once, with the rows that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for measured in results:
        for name, why in measured.absent.items():
            found.setdefault((name, why), []).append(measured.case.key)
    lines = []
    for (name, why), keys in found.items():
        where = "" if len(keys) == len(results) else f" ({', '.join(keys)})"
        lines.append(f"- {name}{where}: {why}")
    return lines


def _kept(results: Sequence[Measured]) -> str:
    """How many texts stay what they are without drafts, "" where nothing drafts."""
    found = [kept for measured in results if (kept := measured.kept()) is not None]
    same, count = sum(same for same, _ in found), sum(count for _, count in found)
    return f"- texts that are with drafts what they are without: {same} of {count}" if found else ""
