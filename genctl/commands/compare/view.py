"""A comparison on a screen: texts side by side or stacked, while they grow and when they are done."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from genctl.comparing.metrics import Divergence
from genctl.comparing.outputs import Measured
from genctl.events import Event, Failed, Finished, Stepped
from genctl.terminal import theme, widgets
from genctl.terminal.explain import number
from genctl.terminal.live_layout import Look, sections_of, text_lines
from genctl.terminal.live_region import LiveRegion, LoadingBar, RowsBar
from genctl.terminal.run_history import DOT, RunHistory, stop_words
from genctl.terminal.text_width import disambiguate, word_boundary

SIDE_BY_SIDE = 100  # least width of a terminal for texts side by side
NARROWEST = 24  # cells of a column
GAP = "   "
OTHERS = 3  # most samples that were not chosen to be shown
PLAIN_WIDTH = 80  # of a heading without a terminal
UNBROKEN = 10**7  # cells of a line without a terminal: never broken
MARK = "▸"  # stands before the token at which a text diverges from the text that it is compared with
_LOOK = Look()


class RunLines(NamedTuple):
    """The lines of one run, and its state, which is shown separately."""

    title: str
    state: str
    lines: list[Text]


def side_by_side(width: int, count: int) -> int:
    """The cells of each of `count` columns on a page of `width`; 0 if the texts are stacked instead."""
    cells = (width - len(GAP) * (count - 1)) // max(count, 1)
    return cells if width >= SIDE_BY_SIDE and count and cells >= NARROWEST else 0


def arrange(parts: Sequence[RunLines], width: int, cells: int) -> list[Text]:
    """The parts in columns of `cells` cells, each with its state at the end; stacked if `cells` is 0."""
    if not cells:
        return [line for title, state, body in parts for line in (widgets.header(width, title, state), *body)]
    columns = []
    for title, state, body in parts:
        head = Text(widgets.first_words(title, cells), style=theme.HEADING).append(f" {'─' * cells}", theme.DIM)
        foot = [Text(widgets.first_words(state, cells), style=theme.DIM)] if state else []
        columns.append([head, *body, *foot])
    lines = []
    for row in zip_longest(*columns, fillvalue=Text("")):
        line = Text(no_wrap=True)
        for cell in row:
            piece = cell.copy()
            piece.truncate(cells, pad=True)
            line.append_text(piece).append(GAP)
        line.rstrip()
        lines.append(line)
    return lines


# -- finished texts ----------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A run and its labelled texts for one prompt, or why there is none."""

    run: str
    texts: list[tuple[Measured, str]]
    failure: str = ""


def blocks_lines(blocks: Sequence[Block], console: Console, width: int | None) -> list[Text]:
    """All texts of one prompt in full: in columns if there is room, else stacked.

    Without `width`, lines are not broken.
    """
    cells = 0 if width is None else side_by_side(width, len(blocks))
    room, parts = cells or width or UNBROKEN, []
    for run, texts, failure in blocks:
        failed = Text(widgets.visible(f"failed: {failure}"), style=theme.ERROR)
        lines, before = wrapped(failed, console, room) if failure else [], ""
        state = "failed" if failure and not cells else ""
        for one, label in texts:
            ended = stop_words(one.sequence.finish_reason, one.sequence.hypothesis.cause)
            if len(texts) > 1:
                words = DOT.join(filter(None, (label, ended)))
                lines.append(Text(widgets.first_words(words, room), style=theme.DIM, no_wrap=True))
            elif not failure:
                state = ended
            lines += wrapped(marked_text(one, before), console, room) + others_lines(one, room)
            before = one.sequence.shown
        parts.append(RunLines(run, state, lines))
    return arrange(parts, width or PLAIN_WIDTH, cells)


def marked_text(one: Measured, before: str) -> Text:
    """The text with a mark where it diverges; the token after the mark is coloured by its probability.

    The beginning that it shares with the text `before` it, of the same run, is dimmed.
    """
    text, point = one.sequence.shown, one.divergence
    shared = word_boundary(text, before) if before else 0
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


def others_lines(one: Measured, width: int) -> list[Text]:
    """The best samples that best_of or mbr_samples did not choose, below the last text of a result: the score of each,
    and the words where its text diverges from the others.
    """
    others = one.result.others
    if not others or one.number + 1 < len(one.result.sequences):
        return []
    texts = [one.sequence.shown, *(other.shown for other in others[:OTHERS])]
    more = f", {len(others) - OTHERS} more are lower" if len(others) > OTHERS else ""
    lines = [Text(f"score {number(one.sequence.score)}; not chosen{more}:", style=theme.DIM)]
    for other, text in zip(others, disambiguate(texts, max(width - 12, 8))[1:], strict=False):
        lines.append(Text.assemble((f"  {number(other.score):>9} ", theme.DIM), text))
    return [widgets.fit(line, width) for line in lines]


def wrapped(text: Text, console: Console, width: int) -> list[Text]:
    """The lines of a text at a width; an empty text is one empty line."""
    text.expand_tabs(8)
    lines = list(text.wrap(console, width, tab_size=8)) or [Text("")]
    for line in lines:
        line.rstrip()
        line.no_wrap = True
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


# -- growing texts -----------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A run on the screen: its name and the lanes of its texts."""

    title: str
    lanes: tuple[str, ...]


class CompareView:
    """Draws the texts of one prompt on `out` if `live`, else a progress bar on `err`.

    `begin` assigns lanes to columns. Redrawn at most every 50 ms; `hide` erases it before results are
    printed. Never taller than the terminal: the oldest lines of each text are omitted. `quiet`: no bars. `clock`
    returns seconds.
    """

    def __init__(
        self,
        out: Console,
        err: Console,
        *,
        live: bool,
        quiet: bool = False,
        total: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out
        self._live, self._quiet, self._clock = live and out.is_interactive, quiet, clock
        self._bar = LoadingBar(err, clock)
        self._err, self._total = err, 0 if live or quiet else total
        self._texts: RowsBar | None = None  # made at the first event after loading, so loading time does not count
        self._history = RunHistory()
        self._heading: Text | None = None
        self._columns: tuple[Column, ...] = ()
        self._region = LiveRegion(out, clock)

    def __enter__(self) -> CompareView:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with contextlib.suppress(OSError) if isinstance(error, OSError) else contextlib.nullcontext():
            self.hide()

    def begin(self, heading: Text | None, columns: Sequence[Column]) -> None:
        """Start the next texts: their heading, and a column for each run. Finished lanes remain until `forget`."""
        self._heading, self._columns = heading, tuple(columns)

    def feed(self, event: Event) -> None:
        """Process one event and update the screen. Raises InputError for one that cannot follow the earlier ones."""
        if self._bar.takes(event, quiet=self._quiet):
            return
        if self._texts is None and self._total > 1:
            self._texts = RowsBar(self._err, self._total, what="texts", clock=self._clock)
        if self._texts is not None:
            if isinstance(event, (Finished, Failed)):
                self._texts.row(failed=isinstance(event, Failed))
            else:
                self._texts.feed(event)
        if not self._live:
            return
        self._history.feed(event)
        due = isinstance(event, Stepped) and self._region.is_due(self._clock())
        if due or isinstance(event, (Finished, Failed)):
            height = max(self.out.height - 1, 1)
            above = [] if self._heading is None or height < 2 else [self._heading]
            drawn = picture(self._history, self._columns, self.out, self.out.width, height - len(above))
            self._region.draw([*above, *drawn])

    def forget(self) -> None:
        """Drop all texts."""
        self._history = RunHistory()

    def hide(self) -> None:
        """Erase the live region and every bar."""
        self._bar.close()
        if self._texts is not None:
            self._texts.hide()
        self._region.hide()


def picture(history: RunHistory, columns: Sequence[Column], console: Console, width: int, height: int) -> list[Text]:
    """The columns in at most `height` lines: side by side, or stacked if that is too narrow."""
    cells = side_by_side(width, len(columns))
    parts: list[RunLines] = []
    room = height
    for place, column in enumerate(columns):
        share = height - 2 if cells else room // (len(columns) - place) - 1  # below the title, and above the state
        parts.append(_growing(history, column, console, cells or width, max(share, 1)))
        room -= 1 + len(parts[-1].lines)
    lines = arrange(parts, width, cells)
    if len(lines) > height:
        lines[max(height - 1, 0) :] = [Text("…", style=theme.DIM)]
    return [widgets.fit(line, width) for line in lines[: max(height, 0)]]


def _growing(history: RunHistory, column: Column, console: Console, width: int, height: int) -> RunLines:
    """The ends of all texts of a column, in equal shares of its height; with several, each has its state above it."""
    lanes = [history.lanes[name] for name in column.lanes if name in history.lanes]
    sections = [section for lane in lanes for section in sections_of(lane, _LOOK)]
    share = max(height // max(len(sections), 1), 1)
    lines = [] if sections else [Text("waiting", style=theme.DIM)]
    state = ""
    for section in sections:
        began, failed = section.lane.began, section.lane.failed
        seed = f"seed {began.seed}" if len(column.lanes) > 1 and began and began.seed is not None else ""
        state = DOT.join(filter(None, (seed, *section.heading[2:])))
        above = [Text(widgets.first_words(state, width), style=theme.DIM)]
        above = above if len(sections) > 1 and state and share > 1 else []
        if failed is None:
            lines += above + text_lines(section, _LOOK, console, share - len(above), width)
        else:
            lines += [*above, Text(widgets.first_words(failed.message, width), style=theme.ERROR)]
    return RunLines(column.title, state if len(sections) == 1 else "", lines[:height])
