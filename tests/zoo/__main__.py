"""`python -m tests.zoo [NAME ...]`: compare the checkpoints whose names hold one of these words, and print a table."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.zoo import recipes
from tests.zoo.compare import Report, compare


def main(words: list[str]) -> int:
    """The exit status: 1 if something differs or crashes."""
    torch.set_num_threads(1)
    names = [name for name in recipes.NAMES if not words or any(word in name for word in words)]
    totals: Counter[str] = Counter()
    began = time.monotonic()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                report = compare(name, Path(folder))
            except Exception as error:
                print(f"{name}: cannot be built: {type(error).__name__}: {error}", flush=True)
                totals["not built"] += 1
                continue
        totals[report.word] += 1
        print(table(report), flush=True)
    print("\n" + ", ".join(f"{count} {word}" for word, count in totals.most_common()), end="")
    print(f", of {len(names)} in {time.monotonic() - began:.0f} s")
    for name, why in recipes.NOT_TEXT.items() if not words else ():
        print(f"not in the zoo: {name}: {why}")
    return int(bool(totals["different"] or totals["crash"] or totals["not built"]))


def table(report: Report) -> str:
    """A line for the checkpoint, and one for each of its cases that is not simply equal."""
    lines = [f"{report.name:32} {report.word}"]
    cases_of: dict[str, list[str]] = {}
    for case, verdict in report.cases.items():
        if str(verdict) != "equal":
            cases_of.setdefault(str(verdict), []).append(case)
    for what, cases in cases_of.items():
        lines.append(f"    {', '.join(cases)}: {what}")
    return "\n".join([*lines, *(f"    {note}" for note in report.notes)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
