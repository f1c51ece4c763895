"""The view of a beam search on a terminal: live rows, the n-best table, the score formula, the tree."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from genctl.commands.run.beam_picture import Turn, picture, table
from genctl.commands.run.run_view import RunView
from genctl.commands.tree_formats import tree_lines
from genctl.events import Event, Finished, Stepped
from genctl.events.history import LaneHistory
from genctl.pages.search_tree import SearchTrees
from genctl.terminal import theme, widgets
from genctl.terminal.live_layout import best_path, names, place_words, returned
from genctl.terminal.score_formula import formula, meaning, searches
from genctl.terminal.text_width import wrap


class BeamView(RunView):
    """Draws a search from its events, one prompt after the other in the order in which they began.

    If `out` is interactive, the stable part of the best text is printed line by line and the live rows below it are
    redrawn, at most every 50 ms; otherwise the stable text is streamed. When a prompt is done, its returned texts
    follow in full, then the table of all finished sequences, the formula of the score (unless `formula` is False; once,
    with `verbose`, what length_penalty does) and, with `tree`, the search tree. `options` are those of `RunView`.
    """

    def __init__(self, out: Console, err: Console, *, tree: bool = False, formula: bool = True, **options: Any) -> None:
        super().__init__(out, err, candidates=False, **options)
        self._formula = formula
        self._explained = False  # what length_penalty does is on the screen
        self._trees = SearchTrees() if tree else None
        self._turns: dict[str, Turn] = {}
        self._widths: dict[str, int] = {}  # most rows that a lane has had
        self._opening = ""  # of the visible text, the line that is not settled yet
        self._dim = 0  # characters of it that belong to the prompt

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
            self._text.write(self._text.take(self._stable(lane)))
        elif self._region.is_due(now):
            self._open(lane)
            self._opening += _shown(self._text.take(self._stable(lane)))
            width, height = self.out.width, max(self.out.height - 1, 1)
            *full, self._opening = wrap(self._opening, width)
            settled = []
            for part in full:
                line = Text(part.rstrip(), no_wrap=True)
                line.stylize(theme.PROMPT, 0, min(self._dim, len(line)))
                self._dim = max(self._dim - len(part), 0)
                settled.append(line)
            counts = {"beams": self._beams(lane), "hidden": len(self.history.lanes) - 1, "prompt": self._dim}
            turn = self._turns.get(lane.lane)
            drawn = picture(lane, turn, self._opening, self._text.path, width, height, **counts)
            self._region.draw(drawn, settled=settled)

    def _open(self, lane: LaneHistory) -> None:
        """Begin the text of a lane, unless it has begun. In the live region its prompt is a part of the open line."""
        if self._text.lane == lane.lane:
            return
        self._opening, self._dim = "", 0
        heading = *names(lane, self.look, settled=True), place_words(0, returned(lane))
        if not self.out.is_interactive:
            self._begin_block(lane, *heading)
        else:
            self._region.hide()
            self._begin_heading(*heading)
            if self.look.echoes(lane):
                self._opening = _shown(lane.prompt + lane.between)
                self._dim = len(self._opening)
        self._text.begin(lane.lane)

    def _close_region(self) -> None:
        """Print the open line, which was a part of the live region."""
        self._region.hide()
        opening, self._opening = self._opening, ""
        self._text.write(opening[: self._dim], dim=True)
        self._text.write(opening[self._dim :])

    # -- finished text -------------------------------------------------------------------------------------------------

    def _has_begun(self, lane: LaneHistory) -> bool:
        self._open(lane)
        self._close_region()
        return True

    def _settle_lane(self, lane: LaneHistory) -> None:
        if self._text.lane == lane.lane and not (lane.finished and lane.finished.hypotheses):
            self._close_region()  # it failed on the way
        super()._settle_lane(lane)
        self._forget(lane)

    def _print_texts(self, lane: LaneHistory, finished: Finished) -> None:
        super()._print_texts(lane, finished)
        if finished.hypotheses and searches(lane):
            self._text.end_line()
            self.out.print()
            self._print_table(lane)
            if self._formula:
                self.out.print()
                best = finished.hypotheses[0]
                self.out.print(Text(widgets.visible(formula(lane, best))), soft_wrap=False)
                if self._verbose and not self._explained:
                    self._explained = True
                    self.out.print(Text(meaning(lane, best), style=theme.DIM), soft_wrap=False)
        self._draw_tree(lane)

    def _settle_unfinished(self, lane: LaneHistory) -> int:
        if not lane.steps:
            return 0
        path = best_path(lane)
        if self._has_begun(lane):
            self._complete(path.text(), path)
        if searches(lane):
            self._print_table(lane)
        self._draw_tree(lane)
        self._forget(lane)
        return path.length

    def _print_table(self, lane: LaneHistory) -> None:
        for line in table(lane, self._beams(lane), self.out.width):
            self.out.print(line)

    def _draw_tree(self, lane: LaneHistory) -> None:
        tree = self._trees.take(lane.lane) if self._trees is not None else None
        if tree is not None:
            self._text.end_line()
            self.out.print()
            for line in tree_lines(tree, self.out.width):
                self.out.print(line)

    def _forget(self, lane: LaneHistory) -> None:
        self._turns.pop(lane.lane, None)
        self._widths.pop(lane.lane, None)


def _shown(text: str) -> str:
    """The text without control characters and tabs."""
    return widgets.visible(text).replace("\t", "    ")
