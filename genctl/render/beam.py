"""What a person sees of a search while it goes on, and what stays on the screen after it."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from genctl.events import Event, Finished, Hypothesis, Stepped
from genctl.render import parts, theme
from genctl.render.formula import formula, meaning, searches
from genctl.render.lanes import Turn, picture
from genctl.render.lines import wrap
from genctl.render.live import FRAME_S, RunView
from genctl.render.nbest_table import table
from genctl.render.stems import certain
from genctl.render.story import LaneStory, Path
from genctl.render.summary import failure, lane_summary, put, stop_words
from genctl.render.tail import best_path, names, place_words
from genctl.render.tree import Trees
from genctl.render.tree_text import tree_lines


class BeamView(RunView):
    """Draws a search from its events. One prompt after the other, in the order in which they began.

    Where `out` may be animated, what is certain of the best text settles above line by line, and below it the rows that
    live evolve, repainted at most every 50 ms; where it may not, the text streams as far as it is certain.
    When a prompt is done its returned texts stand in full, and under them the table of all that the search finished,
    the formula of the score (unless `formula` is False) and, with `tree`, the search tree.
    """

    def __init__(
        self,
        out: Console,
        err: Console,
        *,
        echo: bool = False,
        scores: bool = False,
        top: int = 0,
        labels: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        explain: bool = False,
        tree: bool = False,
        formula: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            out,
            err,
            live=True,
            echo=echo,
            scores=scores,
            top=top,
            labels=labels,
            quiet=quiet,
            verbose=verbose,
            explain=explain,
            clock=clock,
        )
        self._formula = formula
        self._trees = Trees() if tree else None
        self._turns: dict[str, Turn] = {}
        self._widths: dict[str, int] = {}  # most rows that a lane has had
        self._head: str | None = None  # the lane whose text has begun
        self._opening = ""  # of its visible text, the line that is not settled yet
        self._dim = 0  # characters of it that belong to the prompt
        self._path = Path()  # up to where the text is shown

    def feed(self, event: Event) -> None:
        """Take in one event and show what it changes."""
        if isinstance(event, Stepped):
            lane = self.story.lanes.get(event.lane)
            self._turns[event.lane] = Turn(lane.rows if lane else (), event)
            self._widths[event.lane] = max(self._widths.get(event.lane, 1), len(event.rows))
        if self._trees is not None:
            self._trees.feed(event)
        super().feed(event)

    def _kept(self, lane: LaneStory) -> int:
        told = lane.began.settings.get("num_beams") if lane.began else None
        return told if isinstance(told, int) and told > 0 else self._widths.get(lane.lane, 1)

    # -- while it goes on ----------------------------------------------------------------------------------------------

    def _show(self, now: float) -> None:
        self._bar.close()
        lane, *others = self.story.lanes.values()
        if not lane.steps:
            return
        if not self.out.is_interactive:
            self._open(lane)
            self._advance(certain(lane))
        elif now - self._drawn >= FRAME_S:
            self._drawn = now
            self._paint(lane, len(others))

    def _open(self, lane: LaneStory) -> None:
        if self._head == lane.lane:
            return
        self._head, self._shown, self._path, self._dim, self._opening = lane.lane, [], Path(), 0, ""
        if not self.out.is_interactive:
            self._begin_block(lane, *names(lane))
            return
        self._hide()
        self._end_line()
        if self.look.labels:
            if self._blocks:
                self._write("\n")
            self.out.print(parts.header(self.out.width, *names(lane)))
        self._blocks += 1
        if self.look.echo:
            self._opening = _shown(lane.prompt)
            self._dim = len(self._opening)

    def _advance(self, path: Path) -> None:
        """Take what has become certain: to the stream, or into the line above what moves."""
        if path.length <= self._path.length:
            return
        piece = path.text(self._path.chars)
        self._path = path
        if self.out.is_interactive:
            self._shown.append(piece)
            self._opening += _shown(piece)
        else:
            self._add(piece)

    def _paint(self, lane: LaneStory, hidden: int) -> None:
        self._open(lane)
        self._advance(certain(lane))
        width, height = self.out.width, max(self.out.height - 1, 1)
        *settled, self._opening = wrap(self._opening, width)
        lines = [self._dimmed(line) for line in settled]
        turn = self._turns.get(lane.lane)
        drawn = picture(lane, turn, self._opening, self._path, width, height, kept=self._kept(lane), hidden=hidden)
        if self._lines.outdated:
            self._hide()
        if self._picture is None:
            for line in lines:
                self.out.print(line)
            lines = []
            self._picture = Live(
                console=self.out,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._picture.start()
        self._picture.update(Group(*drawn), refresh=not lines)
        if lines:
            self.out.print(Group(*lines))  # above the picture, which is drawn again with it
        self._lines.note([line.cell_len for line in drawn])

    def _dimmed(self, line: str) -> Text:
        made = Text(line.rstrip(), no_wrap=True)
        made.stylize(theme.PROMPT, 0, min(self._dim, len(made)))
        self._dim = max(self._dim - len(line), 0)
        return made

    # -- what stays ----------------------------------------------------------------------------------------------------

    def _settle_lane(self, lane: LaneStory) -> None:
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
            self.err.print(failure(lane.failed))
        elif self._verbose and self.look.labels and not self._quiet:
            put(self.err, lane_summary(lane))

    def _settle_texts(self, lane: LaneStory, finished: Finished) -> None:
        hypotheses = finished.hypotheses
        for place, hypothesis in enumerate(hypotheses):
            path = lane.path_of(hypothesis)
            text = hypothesis.text or (path.text() if path else "")
            if place == 0:
                self._open(lane)
                self._close_line(end=False)
                self._complete(text, path)
            else:
                heading = (place_words(place, len(hypotheses)), stop_words(hypothesis.reason, hypothesis.cause))
                self._block(lane, text, path, (*names(lane), *heading))

    def _settle_unfinished(self, lane: LaneStory) -> int:
        if not lane.steps:
            return 0
        path = best_path(lane)
        self._open(lane)
        self._close_line(end=False)
        self._complete(path.text(), path)
        if searches(lane):
            for line in table(lane, self._kept(lane), self.out.width):
                self.out.print(line)
        self._draw_tree(lane)
        self._forget(lane)
        return path.length

    def _close_line(self, *, end: bool = True) -> None:
        """Write out the line that was still part of the picture."""
        self._hide()
        if self._opening:
            opening, self._opening = self._opening, ""
            prompt, rest = opening[: self._dim], opening[self._dim :]
            self.out.print(Text(prompt, style=theme.PROMPT), end="")
            self._write(rest)
            self._line_open = True
        if end:
            self._end_line()

    def _report(self, lane: LaneStory, best: Hypothesis) -> None:
        self._end_line()
        self.out.print()
        for line in table(lane, self._kept(lane), self.out.width):
            self.out.print(line)
        if self._formula:
            self.out.print()
            self.out.print(Text(parts.visible(formula(lane, best))), soft_wrap=False)
            self.out.print(Text(meaning(lane, best), style=theme.DIM), soft_wrap=False)

    def _draw_tree(self, lane: LaneStory) -> None:
        tree = self._trees.take(lane.lane) if self._trees is not None else None
        if tree is None:
            return
        self._end_line()
        self.out.print()
        for line in tree_lines(tree, self.out.width):
            self.out.print(line)

    def _forget(self, lane: LaneStory) -> None:
        self._turns.pop(lane.lane, None)
        self._widths.pop(lane.lane, None)
        if self._head == lane.lane:
            self._head = None


def _shown(text: str) -> str:
    """The text as a terminal may have it, in a way that does not depend on what comes before it."""
    return parts.visible(text).replace("\t", "    ")
