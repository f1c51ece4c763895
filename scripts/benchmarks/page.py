"""The block of docs/performance.md that holds the table: rewritten as a whole, never by hand."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def update(path: Path, text: str) -> None:
    """Put `text` between the two marks. Raises ValueError where they are not there once each, in order."""
    whole = path.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1 or whole.index(BEGIN) > whole.index(END):
        raise ValueError(f"{path.name} does not have {BEGIN} and, after it, {END}, once each")
    before, _, rest = whole.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}", encoding="utf-8")
