"""Small pure functions that return text for Rich: bars, headers, score lines.

Model output is untrusted: `visible` replaces control characters by visible signs, and text is always a
`rich.text.Text`, so that none of it is parsed as markup.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from genctl import errors
from genctl.events import Token
from genctl.terminal import theme

if TYPE_CHECKING:
    from rich.console import RenderableType


# C0 except tab and newline, DEL, C1, line and paragraph separators, direction marks and overrides, lone surrogates.
_HOSTILE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_EIGHTHS = " ▏▎▍▌▋▊▉"

BAR = 10  # cells
TOKEN = 16  # cells
WHOLE = 69  # cells of a score line with all its columns
SHORT_TOKEN = 13  # cells, in a line without the bar


def visible(text: str) -> str:
    """The text with every control character replaced by a sign; newlines and tabs stay."""
    return _HOSTILE.sub(_sign, text)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # ␀ ␛ and the other control pictures
    if code == 0x7F:
        return "␡"
    return f"⟨U+{code:04X}⟩"


def token_text(token_id: int, text: str) -> str:
    """A token on one line: spaces as ·, other white space escaped; its id if it has no text."""
    if not text:
        return f"‹id {token_id}›"
    shown = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return visible(shown).replace(" ", "·")


def first_words(text: str, width: int) -> str:
    """The beginning of a text on one line of at most `width` cells, with … if it is cut."""
    flat = visible(" ".join(text[: 4 * width].split()))
    if cell_len(flat) <= width:
        return flat
    return set_cell_size(flat, width - 1).rstrip() + "…"


def bar(probability: float, width: int = BAR) -> Text:
    """A bar of `width` cells with a resolution of 1/8 cell. Anything above zero shows at least the thinnest mark."""
    share = min(max(probability, 0.0), 1.0) if not math.isnan(probability) else 0.0
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    full, part = divmod(eighths, 8)
    marks = "█" * full + (_EIGHTHS[part] if part else "")
    return Text(marks.ljust(width), style=theme.colour(share), no_wrap=True)


def percent(probability: float) -> str:
    """A probability as a percentage in six cells, such as ` 75.2%` or ` <0.1%`; – for NaN."""
    return f"{errors.percent(probability):>6}"


def header(width: int, *words: str) -> Text:
    """A rule with a title, which is cut if it is too long."""
    title = first_words(" · ".join(filter(None, words)), max(width - 6, 8))
    line = Text("── ", style=theme.DIM, no_wrap=True)
    line.append(title, style=theme.HEADING)
    line.append(" " + "─" * max(width - 4 - cell_len(title), 2), style=theme.DIM)
    return line


def score_heading(width: int | None = None) -> Text:
    """The column heads of `score_line`."""
    token, bar_width = _columns(width)
    heads = f"{'step':>5}  {'token':<{token}}  {'probability' if bar_width else 'prob.':<{bar_width + 7}}"
    return Text(f"{heads}  {'logprob':>8}  {'rank':>6}  {'entropy':>7}", style=theme.DIM, no_wrap=True)


def score_line(step: int, token: Token, width: int | None = None) -> Text:
    """One token: text, probability (bar and number), log-probability in nats, rank, entropy in nats.

    `WHOLE` cells wide; below that without the bar, 56 cells wide. – for what was not recorded.
    """
    known = not math.isnan(token.logprob)
    probability = math.exp(min(token.logprob, 0.0)) if known else 0.0
    style = theme.colour(probability)
    cells_of_token, bar_width = _columns(width)
    line = Text(no_wrap=True).append(f"{step:>5}  ", style=theme.DIM)
    name = next((text for token_id, text, _ in token.top if token_id == token.id), "")  # such as </s>
    shown = token_text(token.id, token.text or ("" if "\ufffd" in name else name))
    line.append(cells(shown, cells_of_token), style=theme.CHOSEN)
    line.append("  ")
    if bar_width:
        line.append_text(bar(probability, bar_width)).append(" ")
    line.append(percent(probability if known else math.nan), style=style)
    if not bar_width:
        line.append(" ")
    rank = "–" if token.rank is None else str(token.rank)
    entropy = "–" if token.entropy is None else f"{token.entropy:.2f}"
    line.append(f"  {rounded(token.logprob) if known else '–':>8}  {rank:>6}  {entropy:>7}")
    return line


def _columns(width: int | None) -> tuple[int, int]:
    """Cells of the token and of the bar of a score line: in a narrow terminal there is no bar."""
    return (TOKEN, BAR) if width is None or width >= WHOLE else (SHORT_TOKEN, 0)


def rounded(value: float) -> str:
    """A number with three decimals; one that rounds to zero has no sign."""
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text


def token_rate(rate: float) -> str:
    """Tokens per second."""
    return f"{rate:,.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s"


def perplexity(value: float) -> str:
    """A perplexity in a few characters."""
    return f"{value:.4f}" if value < 1000 else f"{value:,.0f}" if value < 1e8 else f"{value:.2e}"


def alternative_lines(token: Token, width: int, top: int) -> list[Text]:
    """The most probable tokens, best first, `▸` before the chosen one; no entry is broken across lines."""
    indent = 7
    lines: list[Text] = []
    for place, (token_id, text, logprob) in enumerate(token.top[:top], start=1):
        probability = math.exp(min(logprob, 0.0))
        chosen = token_id == token.id
        shown = first_words(token_text(token_id, text), max(width - indent - 12, 8))
        entry = Text("▸" if chosen else " ", style=theme.CHOSEN if chosen else theme.DIM)
        entry.append(f"{place} ", style=theme.DIM)
        entry.append(f"{shown} ", style=theme.CHOSEN if chosen else theme.PLAIN)
        entry.append(percent(probability).strip(), style=theme.colour(probability))
        if not lines or lines[-1].cell_len + 2 + entry.cell_len > width:
            lines.append(Text(" " * (indent - 1), no_wrap=True))
        else:
            lines[-1].append("  ")
        lines[-1].append_text(entry)
    return lines


def watched_lines(token: Token, width: int) -> list[Text]:
    """The watched tokens, in the order in which they were named: probability, log-probability and rank of each."""
    lines: list[Text] = []
    for token_id, text, logprob, rank in token.watched:
        line = Text("      ◦ ", style=theme.DIM, no_wrap=True)
        line.append(f"{first_words(token_text(token_id, text), max(width - 48, 8))} ", style=theme.PLAIN)
        probability = math.exp(min(logprob, 0.0))
        line.append(percent(probability).strip(), style=theme.colour(probability))
        lines.append(line.append(f"  logprob {rounded(logprob)}  rank {rank}", style=theme.DIM))
    return [fit(line, width) for line in lines]


def cells(text: str, width: int) -> str:
    """The text in exactly `width` cells, padded or cut with …."""
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    return set_cell_size(text, width)


def fit(line: Text, width: int | None) -> Text:
    """The line itself, cut with … at `width` cells; None leaves it whole."""
    line.no_wrap = True
    if width is not None:
        line.truncate(width, overflow="ellipsis")
    return line


# -- tables ------------------------------------------------------------------------------------------------------------


def lines_of(renderable: RenderableType, width: int) -> list[Text]:
    """A table or another renderable as Rich lays it out in `width` cells, line by line."""
    from rich.console import Console  # slow to import
    from rich.segment import Segment

    renderer = Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)
    lines = []
    for segments in renderer.render_lines(renderable, pad=False):
        same = Segment.simplify(segments)  # one piece of each style
        line = Text.assemble(*((segment.text, segment.style or "") for segment in same), no_wrap=True)
        line.rstrip()
        lines.append(line)
    return lines


def drop_columns(columns: dict[str, list[Text]], width: int, least_first: Sequence[str], *, space: int) -> list[str]:
    """Take away the least important columns until the others fit `width` cells, `space` cells apart; returns them."""
    dropped = []
    for name in least_first:
        sizes = [max(map(cell_len, (*name.split("\n"), *(cell.plain for cell in columns[name])))) for name in columns]
        if sum(sizes) + space * len(sizes) <= width:
            break
        if name in columns:
            dropped.append(name)
            del columns[name]
    return dropped


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[Text]:
    """A table whose first column names the row; columns that do not fit go into a further table below."""
    columns = [[headings[place], *(row[place] for row in rows)] for place in range(len(headings))]
    sizes = [max(map(cell_len, map(visible, column))) for column in columns]
    room = 10**9 if width is None else width
    sizes[0] = min(sizes[0], first_column(room))
    lines: list[Text] = []
    for start, end in _shares(sizes, room):
        if lines:
            lines.append(Text(""))
        for row in range(len(rows) + 1):
            line = Text(style=theme.DIM if row == 0 else theme.PLAIN, no_wrap=True)
            line.append(cells(visible(columns[0][row]), sizes[0]), style=theme.HEADING if row else theme.DIM)
            for column in range(start, end):
                shown = visible(columns[column][row])
                line.append("  " + " " * (sizes[column] - cell_len(shown)) + shown)
            line.rstrip()
            lines.append(line)
    return lines


def first_column(width: int) -> int:
    """The cells that row names may take."""
    return max(width // 3, 8)


def _shares(sizes: Sequence[int], room: int) -> list[tuple[int, int]]:
    """The columns of each table, from `start` to `end`; all tables also have the first column. As few tables as fit, of
    widths as even as possible.
    """

    def split(room: int) -> list[tuple[int, int]]:
        shares, start = [], 1
        while start < len(sizes):
            end, used = start, sizes[0]
            while end < len(sizes) and (end == start or used + 2 + sizes[end] <= room):
                used += 2 + sizes[end]
                end += 1
            shares.append((start, end))
            start = end
        return shares or [(1, 1)]

    fewest, least = len(split(room)), room
    while fewest > 1 and least > 1 and len(split(least - 1)) == fewest:
        least -= 1
    return split(least)
