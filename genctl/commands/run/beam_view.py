"""The view of a beam search on a terminal: live rows, the n-best table, the score formula, the tree."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from genctl.commands.run.beam_picture import Turn, picture, table
from genctl.commands.run.run_view import RunView
from genctl.commands.tree_formats import tree_lines
from genctl.events import Event, Finished, Hypothesis, Stepped
from genctl.events.history import LaneHistory, Path
from genctl.pages.search_tree import SearchTrees
from genctl.terminal import theme, widgets
from genctl.terminal.departures import Certain
from genctl.terminal.live_layout import best_path, names, place_words, returned
from genctl.terminal.score_formula import formula, meaning, searches
from genctl.terminal.summary import lane_summary, put, stop_words
from genctl.terminal.text_width import wrap


class BeamView(RunView):
    """Draws a search from its events, one prompt after the other in the order in which they began.

    If `out` is interactive, the certain part of the best text is printed line by line and the live rows below it are
    redrawn, at most every 50 ms; otherwise the certain text is streamed. When a prompt is done, its returned texts
    follow in full, then the table of all finished sequences, the formula of the score (unless `formula` is False) and,
    with `tree`, the search tree. `options` are those of `RunView`.
    """

    def __init__(
        self,
        out: Console,
        err: Console,
        *,
        tree: bool = False,
        formula: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(out, err, **options)
        self._formula = formula
        self._trees = SearchTrees() if tree else None
        self._turns: dict[str, Turn] = {}
        self._widths: dict[str, int] = {}  # most rows that a lane has had
        self._head: str | None = None  # the lane whose text has begun
        self._opening = ""  # of its visible text, the line that is not settled yet
        self._dim = 0  # characters of it that belong to the prompt
        self._path = Path()  # up to where the text is shown
        self._certain = Certain()

    def feed(self, event: Event) -> None:
        """Take in one event and show what it changes."""
        if isinstance(event, Stepped):
            lane = self.history.lanes.get(event.lane)
            self._turns[event.lane] = Turn(lane.rows if lane else (), event)
            self._widths[event.lane] = max(self._widths.get(event.lane, 1), len(event.rows))
        if self._trees is not None:
            self._trees.feed(event)
        super().feed(event)

    def _beams(self, lane: LaneHistory) -> int:
        beams = lane.began.settings.get("num_beams") if lane.began else None
        return beams if isinstance(beams, int) and beams > 0 else self._widths.get(lane.lane, 1)

    # -- the live search -----------------------------------------------------------------------------------------------

    def _show(self, now: float) -> None:
        self._bar.close()
        lane = next(iter(self.history.lanes.values()))
        if not lane.steps:
            return
        if not self.out.is_interactive:
            self._open(lane)
            self._advance(self._certain(lane))
        elif self._region.is_due(now):
            self._paint(lane, len(self.history.lanes) - 1)

    def _open(self, lane: LaneHistory) -> None:
        if self._head == lane.lane:
            return
        self._head, self._shown, self._path, self._dim, self._opening = lane.lane, [], Path(), 0, ""
        if not self.out.is_interactive:
            self._begin_block(lane, *names(lane, self.look, settled=True), place_words(0, returned(lane)))
            return
        self._region.hide()
        self._end_line()
        if self.look.labels:
            if self._blocks:
                self._write("\n")
            self.out.print(
                widgets.header(self.out.width, *names(lane, self.look, settled=True), place_words(0, returned(lane)))
            )
        self._blocks += 1
        if self.look.echoes(lane):
            self._opening = _shown(lane.prompt + lane.between)
            self._dim = len(self._opening)

    def _advance(self, path: Path) -> None:
        """Show the text that became certain: on the stream, or in the line above the live rows."""
        if path.length <= self._path.length:
            return
        piece = path.text(self._path.chars)
        self._path = path
        if self.out.is_interactive:
            self._shown.append(piece)
            self._opening += _shown(piece)
        else:
            self._add(piece)

    def _paint(self, lane: LaneHistory, hidden: int) -> None:
        self._open(lane)
        self._advance(self._certain(lane))
        width, height = self.out.width, max(self.out.height - 1, 1)
        *settled, self._opening = wrap(self._opening, width)
        lines = [self._dimmed(line) for line in settled]
        turn = self._turns.get(lane.lane)
        counts = {"beams": self._beams(lane), "hidden": hidden, "prompt": self._dim}
        drawn = picture(lane, turn, self._opening, self._path, width, height, **counts)
        self._region.draw(drawn, settled=lines)

    def _dimmed(self, line: str) -> Text:
        text = Text(line.rstrip(), no_wrap=True)
        text.stylize(theme.PROMPT, 0, min(self._dim, len(text)))
        self._dim = max(self._dim - len(line), 0)
        return text

    # -- finished text -------------------------------------------------------------------------------------------------

    def _settle_lane(self, lane: LaneHistory) -> None:
        self._streaming = None
        if lane.finished and lane.finished.hypotheses:
            self._settle_texts(lane, lane.finished)
            if searches(lane):
                self._report(lane, lane.finished.hypotheses[0])
            self._draw_tree(lane)
        elif self._head == lane.lane:  # it failed on the way
            self._close_line()
        self._forget(lane)
        self._end_line()
        self.out.file.flush()
        if lane.failed:
            self._say_failed(lane, lane.failed)
        elif self._verbose and self.look.labels and not self._quiet:
            put(self.err, lane_summary(lane))

    def _settle_texts(self, lane: LaneHistory, finished: Finished) -> None:
        hypotheses, before = finished.hypotheses, ""
        for place, (hypothesis, path) in enumerate(zip(hypotheses, lane.paths_of(hypotheses), strict=True)):
            text = hypothesis.text or (path.text() if path else "")
            if place == 0:
                self._open(lane)
                self._close_line(end=False)
                self._complete(text, path)
            else:
                heading = (place_words(place, returned(lane)), stop_words(hypothesis.reason, hypothesis.cause))
                self._block(lane, text, path, (*names(lane, self.look, settled=True), *heading), before=before)
            before = text

    def _settle_unfinished(self, lane: LaneHistory) -> int:
        if not lane.steps:
            return 0
        path = best_path(lane)
        self._open(lane)
        self._close_line(end=False)
        self._complete(path.text(), path)
        if searches(lane):
            for line in table(lane, self._beams(lane), self.out.width):
                self.out.print(line)
        self._draw_tree(lane)
        self._forget(lane)
        return path.length

    def _close_line(self, *, end: bool = True) -> None:
        """Print the incomplete line that was part of the live region."""
        self._region.hide()
        if self._opening:
            opening, self._opening = self._opening, ""
            prompt, rest = opening[: self._dim], opening[self._dim :]
            self._write_dimmed(prompt)
            self._write(rest)
            self._line_open = True
        if end:
            self._end_line()

    def _report(self, lane: LaneHistory, best: Hypothesis) -> None:
        self._end_line()
        self.out.print()
        for line in table(lane, self._beams(lane), self.out.width):
            self.out.print(line)
        if self._formula:
            self.out.print()
            self.out.print(Text(widgets.visible(formula(lane, best))), soft_wrap=False)
            self.out.print(Text(meaning(lane, best), style=theme.DIM), soft_wrap=False)

    def _draw_tree(self, lane: LaneHistory) -> None:
        tree = self._trees.take(lane.lane) if self._trees is not None else None
        if tree is None:
            return
        self._end_line()
        self.out.print()
        for line in tree_lines(tree, self.out.width):
            self.out.print(line)

    def _forget(self, lane: LaneHistory) -> None:
        self._turns.pop(lane.lane, None)
        self._widths.pop(lane.lane, None)
        if self._head == lane.lane:
            self._head = None


def _shown(text: str) -> str:
    """The text without control characters and tabs."""
    return widgets.visible(text).replace("\t", "    ")
