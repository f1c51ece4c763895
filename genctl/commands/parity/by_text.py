"""`--by-text`: sides with different tokenizers, compared by the bits that they need for each byte of the same texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text as Line

from genctl.commands.parity.view import signed
from genctl.comparing.statistics import LEAST, Interval, bootstrap
from genctl.engines.protocol import Scored
from genctl.errors import GenctlError, InputError, count
from genctl.terminal.text_width import hanging, last_cells
from genctl.terminal.widgets import first_column, table_lines

Outcomes = dict[str, "Scored | GenctlError"]  # by the id of a row


@dataclass(frozen=True)
class TextParity:
    """Both sides on the same texts. `texts` of them were scored by both; `bytes` are those of the reference."""

    reference: str
    other: str
    texts: int
    bytes: int
    bpb_reference: float  # bits per byte of UTF-8
    bpb_other: float
    difference: Interval  # other - reference, in bits per byte; texts are drawn again with replacement


def compared(names: tuple[str, str], reference: Outcomes, other: Outcomes) -> TextParity:
    """Both sides. Raises InputError where no text has a score by both."""
    pairs = [(one, other[id]) for id, one in reference.items()]
    scored = [(a, b) for a, b in pairs if isinstance(a, Scored) and isinstance(b, Scored) and a.bytes and b.bytes]
    if not scored:
        raise InputError(f"no text has a score by both {names[0]} and {names[1]}")
    size, other_size = (sum(pair[place].bytes for pair in scored) for place in (0, 1))
    # a first token without a score may be longer on one side: bits are compared for each side's own bytes
    rates = [(a.bits / size, b.bits / other_size) for a, b in scored]
    changes = bootstrap([(theirs - mine) * len(rates) for mine, theirs in rates])
    mine, theirs = (math.fsum(rate[place] for rate in rates) for place in (0, 1))
    return TextParity(*names, len(scored), size, mine, theirs, changes)


def lines(found: Sequence[TextParity], width: int | None) -> list[Line]:
    """A table of all sides, the reference first."""
    rows = [[found[0].reference, f"{found[0].bpb_reference:.4f}", "", ""]]
    for one in found:
        change = one.difference
        between = " to ".join(map(signed, change.ends)) or "–"
        rows.append([one.other, f"{one.bpb_other:.4f}", signed(change.mean), between])
    words = (
        f"{count(found[0].texts, 'text')} of {found[0].bytes:,} bytes; "
        f"the interval is that of the texts drawn again, from {LEAST} texts on"
    )
    rows = [[row[0] if width is None else last_cells(row[0], first_column(width)), *row[1:]] for row in rows]
    return [*table_lines(("side", "bits/byte", "difference", "95%"), rows, width), *hanging("", words, width)]
