"""The result of a comparison: texts side by side, where they diverge, and tables of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from genctl.comparing.metrics import Divergence
from genctl.terminal import divergences, theme, widgets
from genctl.terminal.score_formula import number

SIDE_BY_SIDE = 100  # columns of a terminal from which texts stand side by side
NARROWEST = 24  # cells of a column
GAP = "   "
OTHERS = 3  # samples that were not chosen, shown at most
PROMPT = 6  # lines of a prompt that are shown at most
PLAIN_WIDTH = 80  # of a heading where there is no terminal
UNBROKEN = 10**7  # cells of a line there
MARK = "▸"  # stands before the token with which a text leaves the one that it is compared to


@dataclass(frozen=True)
class Passage:
    """One text of a run."""

    text: str
    state: str  # why it ended
    label: str = ""  # which of several
    divergence: Divergence | None = None  # from its reference
    chosen: float | None = None  # the score for which best_of or mbr_samples chose it, before `others`
    others: tuple[tuple[float, str], ...] = ()  # score and text of those not chosen, best first


@dataclass(frozen=True)
class Block:
    """A run and its texts for one prompt, or why there is none."""

    run: str
    passages: tuple[Passage, ...]
    failure: str = ""


def side_by_side(width: int, count: int) -> int:
    """The cells of each of `count` columns on a page of `width`; 0 where the texts stand in a stack instead."""
    if width < SIDE_BY_SIDE or not count:
        return 0
    cells = (width - len(GAP) * (count - 1)) // count
    return cells if cells >= NARROWEST else 0


def passage_text(passage: Passage, before: str = "") -> Text:
    """The text with a mark where it diverges; the token after the mark is coloured by its probability.

    What it shares with the text `before` it, of the same run, is dimmed.
    """
    text, point = passage.text, passage.divergence
    shared = divergences.word_boundary(text, before) if before else 0
    at = len(text) if point is None else min(point.character, len(text))
    line = Text(widgets.visible(text[:at]))
    if point is not None:
        token = point.token
        written = text[at : at + len(token.text)] if token else ""
        style = theme.colour(math.exp(min(token.logprob, 0.0))) + theme.CHOSEN if token else theme.PLAIN
        line.append(MARK, style=theme.WINNER)
        line.append(widgets.visible(written), style=style)
        line.append(widgets.visible(text[at + len(written) :]))
    line.stylize(theme.DIM, 0, len(widgets.visible(text[:shared])))
    return line


def prompt_lines(prompt: str, console: Console, width: int) -> list[Text]:
    """The prompt that all texts continue, dimmed; of a long one the first and the last lines."""
    lines = wrapped(Text(widgets.visible(prompt), style=theme.PROMPT), console, width)
    return lines if len(lines) <= PROMPT else [*lines[:2], Text("⋮", style=theme.DIM), *lines[3 - PROMPT :]]


def blocks_lines(blocks: Sequence[Block], console: Console, width: int | None) -> list[Text]:
    """All texts of one prompt in full: in columns if there is room, else stacked.

    Without a `width`, lines are not broken.
    """
    cells = 0 if width is None else side_by_side(width, len(blocks))
    bodies = [_block_lines(block, console, cells or width or UNBROKEN, headed=bool(cells)) for block in blocks]
    if cells:
        return join_columns(bodies, cells)
    lines: list[Text] = []
    for block, body in zip(blocks, bodies, strict=True):
        state = "failed" if block.failure else block.passages[0].state if len(block.passages) == 1 else ""
        lines.append(widgets.header(width or PLAIN_WIDTH, block.run, state))
        lines += body
    return lines


def _block_lines(block: Block, console: Console, width: int, *, headed: bool) -> list[Text]:
    lines = [column_title(block.run, width)] if headed else []
    if block.failure:
        lines += wrapped(Text(widgets.visible(f"failed: {block.failure}"), style=theme.ERROR), console, width)
    before = ""
    for passage in block.passages:
        words = " · ".join(word for word in (passage.label, passage.state) if word)
        several = len(block.passages) > 1
        if several and words:
            lines.append(Text(widgets.first_words(words, width), style=theme.DIM, no_wrap=True))
        lines += wrapped(passage_text(passage, before), console, width)
        before = passage.text
        if headed and not several and words:
            lines.append(Text(widgets.first_words(words, width), style=theme.DIM, no_wrap=True))
        lines += others_lines(passage, width)
    return lines


def others_lines(passage: Passage, width: int) -> list[Text]:
    """The best samples that were not chosen, a line each: the score, and the text from where it leaves the chosen."""
    if not passage.others or passage.chosen is None:
        return []
    texts = [passage.text, *(text for _, text in passage.others[:OTHERS])]
    found = divergences.divergences(texts, [()] * len(texts))
    left = len(passage.others) - OTHERS
    more = f", {left} more are lower" if left > 0 else ""
    lines = [Text(f"score {number(passage.chosen)}; not chosen{more}:", style=theme.DIM)]
    parts = divergences.parts(texts, found, max(width - 12, 8))
    for (score, _), part in zip(passage.others, parts[1:], strict=False):
        lines.append(Text(f"  {number(score):>9} ", style=theme.DIM).append_text(part))
    return [widgets.fit(line, width) for line in lines]


def column_title(title: str, width: int) -> Text:
    """The title of a column and a rule."""
    name = widgets.first_words(title, width)
    line = Text(name, style=theme.HEADING, no_wrap=True)
    line.append(" " + "─" * max(width - cell_len(name) - 1, 0) if width > cell_len(name) else "", style=theme.DIM)
    return line


def wrapped(text: Text, console: Console, width: int) -> list[Text]:
    """The lines of a text at a width; an empty text is one empty line."""
    text.expand_tabs(8)
    lines = list(text.wrap(console, width, tab_size=8)) or [Text("")]
    for line in lines:
        line.rstrip()
        line.no_wrap = True
    return lines


def join_columns(columns: Sequence[Sequence[Text]], cells: int) -> list[Text]:
    """Columns of lines as lines of the page, each column `cells` wide."""
    lines = []
    for row in range(max((len(column) for column in columns), default=0)):
        line = Text(no_wrap=True)
        for place, column in enumerate(columns):
            part = column[row].copy() if row < len(column) else Text("")
            part.truncate(cells)
            line.append_text(part)
            if place + 1 < len(columns):
                line.append(" " * (cells - part.cell_len) + GAP)
        line.rstrip()
        lines.append(line)
    return lines


def divergence_line(run: str, point: Divergence, *, one_model: bool = True) -> Text:
    """Where a run diverges from another: the token, and the probability of both continuations.

    `one_model`: both probabilities are of one model after the same tokens.
    """
    line = Text(f"{MARK} ", style=theme.WINNER)
    line.append(widgets.visible(run), style=theme.HEADING)
    line.append(f" leaves {widgets.visible(point.against)} at token {point.position + 1}: ")
    for between, token in (("", point.token), (" instead of ", point.other)):
        line.append(between)
        if token is None:
            line.append("the end")
            continue
        text = f"“{widgets.token_text(token.id, token.text)}”" if token.text else f"‹id {token.id}›"
        probability = math.exp(min(token.logprob, 0.0))
        line.append(f"{text} ", style=theme.CHOSEN)
        line.append(widgets.percent(probability).strip(), style=theme.colour(probability))
    if not one_model:
        line.append(" (each by its own model)", style=theme.DIM)
    return line


def hanging_indent(line: Text, console: Console, width: int | None) -> list[Text]:
    """A line broken between words, its later parts indented; without a `width` it is whole."""
    if width is None:
        return [line]
    first, *others = line.wrap(console, max(width - 2, 8))
    return [first, *(Text("  ").append_text(part) for part in others)]
