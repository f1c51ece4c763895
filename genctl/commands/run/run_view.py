"""The view of a run on a terminal: text or beams while they are generated, and the final output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from genctl.commands.messages import RepeatedErrors
from genctl.commands.run.beam_picture import picture, table
from genctl.commands.run.text_stream import TextStream, console_writer
from genctl.events import Began, Event, Failed, Finished, Prefilled, Stepped
from genctl.events.history import LaneHistory, Path, StablePrefix
from genctl.terminal import theme, widgets
from genctl.terminal.explain import explain_summary, formula, searches
from genctl.terminal.live_layout import Look, names, place_words, returned, sections_of, step_lines, tail
from genctl.terminal.live_region import LiveRegion, LoadingBar
from genctl.terminal.run_history import RunHistory, failure, put, put_words, stop_words, summary
from genctl.terminal.text_width import word_boundary


class RunView:
    """Draws a run from its events: results on `out`, everything else on `err`.

    A single text is streamed. With several, finished texts are printed in input order and only the live region below
    them is redrawn, at most every 50 ms; if `out` is not interactive, the first unfinished text is streamed and the
    others follow in turn. After `close` everything is printed in full, in input order.

    `live`: show text before it is finished. `beams`: show the rows of a search while it runs (if `out` is not
    interactive, stream its stable text), and all finished sequences below the returned texts. `details`: the formula of
    the score, or a table of the samples from which one was chosen. `quiet`: no progress bar and no summary; failures
    are always shown. `clock` returns seconds. `look`: the fields of `Look`.

    `feed` raises InputError for an event that cannot follow the earlier ones, and passes on errors of writing to the
    streams.
    """

    def __init__(
        self,
        out: Console,
        err: Console,
        *,
        live: bool = True,
        beams: bool = False,
        details: bool = True,
        quiet: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
        **look: Any,
    ) -> None:
        self.out, self.err, self.look = out, err, Look(**look)
        self.history = RunHistory()
        self.load_s: float | None = None  # seconds of loading, for the summary
        self.seed: int | None = None  # of the run, if it has several prompts
        self.passes: Callable[[], int] | None = None  # returns the number of forward passes
        self._live, self._beams, self._details = live, beams, details
        self._quiet, self._verbose, self._clock = quiet, verbose, clock
        self._bar = LoadingBar(err, clock)
        self._region = LiveRegion(out, clock)
        # text on the same stream as messages gets no control characters, because logs are read on terminals
        self._text = TextStream(console_writer(out, as_it_is=out is not err))
        self._stable = StablePrefix()
        self._errors = RepeatedErrors(lambda line: put_words(err, Text(line, style=theme.ERROR)))
        self._blocks = 0
        self._closed = False
        self._started: float | None = None
        self._read: float | None = None
        self._first: float | None = None
        self._last = 0.0

    def feed(self, event: Event) -> None:
        """Process one event and show what it changes."""
        self.history.feed(event)
        if isinstance(event, Stepped):
            self._last = now = self._clock()
            self._first = now if self._first is None else self._first
            self._started = now if self._started is None else self._started
            if self._live and self._text.lane in (None, event.lane):
                self._show(now)
            return
        if self._bar.takes(event, quiet=self._quiet or self._text.line_open or self._region.visible):
            return
        if isinstance(event, (Began, Prefilled)):
            self._started = self._clock() if self._started is None else self._started
            if isinstance(event, Prefilled) and self._read is None:
                self._read = self._clock()
        elif isinstance(event, (Finished, Failed)):
            self._last = self._clock()
            self._settle()

    def begin(self) -> None:
        """Decoding starts now in another process: events arrive late."""
        self._started = self._read = self._clock()

    def pause(self) -> None:
        """Erase the live region and the bar; the next event draws them again."""
        self._bar.close()
        self._region.hide()

    def close(self) -> None:
        """Print everything, unfinished texts included, then tables and the summary. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.pause()
        self._settle()
        unfinished, left = 0, 0
        for lane in self.history.lanes.values():
            if lane.over:
                self._settle_lane(lane)
            else:
                unfinished += 1
                left += self._settle_unfinished(lane)
        self._text.end_line()
        self._errors.close()
        if self.look.explain and self.history.tallies:
            width = self.err.width if self.err.is_terminal else None
            self.err.print(explain_summary(self.history, width), soft_wrap=False)
        if not self._quiet:
            self._sum_up(unfinished, left)

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):  # a stream is closed: restore the terminal and write nothing more
            with contextlib.suppress(OSError):
                self.pause()
            self._closed = True
        else:
            self.close()

    def _show(self, now: float) -> None:
        """Stream the first lane, or draw the live region."""
        self._bar.close()
        lane = next(iter(self.history.lanes.values()))
        if self._text.lane is None and self._may_stream(lane):
            self._region.hide()
            self._begin_block(lane, *self._heading(lane, 0))
            self._text.begin(lane.lane)
        if self._text.lane is not None:
            self._text.write(self._text.take(self._stable(lane)))
        elif self.out.is_interactive and self._region.is_due(now):
            if self._beams and lane.steps:
                lines = picture(lane, self._stable(lane), self.look, self.out, beams=_kept(lane))
            else:
                lanes = [lane for lane in self.history.lanes.values() if lane.steps or lane.over]
                lines = tail(lanes, self.look, self.out)
            if lines:
                self._region.draw(lines)

    def _may_stream(self, lane: LaneHistory) -> bool:
        if not lane.steps or self._beams:
            return lane.steps > 0 and not self.out.is_interactive
        texts = len(lane.rows) + (lane.endings.count if lane.endings else 0)
        alone = len(self.history.lanes) == 1 and not self.look.steps
        return texts == 1 and (alone or not self.out.is_interactive)

    # -- finished text -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Print the finished lanes, up to the first unfinished one."""
        while self.history.lanes:
            lane = next(iter(self.history.lanes.values()))
            if not lane.over:
                break
            self._region.hide()
            self._settle_lane(lane)
            self.history.forget(lane.lane)
        self.out.file.flush()

    def _settle_lane(self, lane: LaneHistory) -> None:
        if lane.finished:
            self._print_texts(lane, lane.finished)
        self._text.end_line()
        self._text.begin(None)
        self.out.file.flush()
        if lane.failed and self._errors.is_new(lane.failed.message):
            put_words(self.err, failure(lane, numbered=self.look.numbered))
            if lane.failed.hint:
                put_words(self.err, Text(f"hint: {widgets.visible(lane.failed.hint)}"))

    def _print_texts(self, lane: LaneHistory, finished: Finished) -> None:
        """Print the texts of a lane, and tables of sequences. Text shared with the previous one is dimmed."""
        hypotheses, before = finished.hypotheses, ""
        for place, (one, path) in enumerate(zip(hypotheses, lane.paths_of(hypotheses), strict=True)):
            text = one.text or (path.text() if path else "")
            heading = *self._heading(lane, place), stop_words(one.reason, one.cause)
            self._print_text(lane, text, path, heading, shared=word_boundary(text, before) if before else 0)
            before = text
        if self._beams and hypotheses and searches(lane):
            self._print_table(lane)
            if self._details:
                self.out.print()
                self.out.print(Text(widgets.visible(formula(lane, hypotheses[0]))), soft_wrap=False)
        elif finished.others and self._details and not self._beams:
            self._print_table(lane)

    def _print_table(self, lane: LaneHistory) -> None:
        """Print the n-best table of a lane below its texts."""
        self._text.end_line()
        self.out.print()
        for line in table(lane, _kept(lane) if self._beams else 0, self.out.width):
            self.out.print(line)

    def _settle_unfinished(self, lane: LaneHistory) -> int:
        """Print an unfinished lane as it is. Returns its number of tokens."""
        sections = sections_of(lane, self.look) if lane.steps else []
        for section in sections:
            heading = (*names(lane, self.look, settled=True), *section.heading[2:], "not finished")
            self._print_text(lane, section.path.text(), section.path, heading)
        if self._beams and lane.endings and searches(lane):
            self._print_table(lane)
        return sum(section.path.length for section in sections)

    def _heading(self, lane: LaneHistory, place: int) -> tuple[str, ...]:
        """The name of a lane, and the place of one of its sequences."""
        return *names(lane, self.look, settled=True), place_words(place, returned(lane))

    def _begin_block(self, lane: LaneHistory, *heading: str) -> None:
        """Print a heading, if headings are on, and the prompt."""
        self._text.end_line()
        if self.look.labels:
            if self._blocks:
                self._text.write("\n")
            self.out.print(widgets.header(self.out.width, *heading))
        self._blocks += 1
        if self.look.echoes(lane):
            self._text.write(lane.prompt + lane.between, dim=True)

    def _print_text(
        self, lane: LaneHistory, text: str, path: Path | None, heading: tuple[str, ...], *, shared: int = 0
    ) -> None:
        """Print a text in full, the first `shared` characters dimmed, or the rest of the one being streamed; then the
        lines of its steps.
        """
        if self._text.lane == lane.lane:
            self._text.complete(text)
            text = text or self._text.path.text()
            self._text.begin(None)
        else:
            self._begin_block(lane, *heading)
            self._text.write(text[:shared], dim=True)
            self._text.write(text[shared:])
        if not text and not self._text.line_open:
            self._text.write("\n")  # an empty text is a line, too
        self._text.end_line()
        if self.look.steps and path is None:
            self.out.print(Text("the steps of this text were not recorded", style=theme.DIM))
        elif self.look.steps and path is not None:
            self.out.print(Group(*step_lines(path, self.look, self.out.width)))

    def _sum_up(self, unfinished: int, left: int) -> None:
        totals = self.history.totals
        if not totals.finished and not unfinished:
            return
        started, read = self._started or 0.0, self._read or self._started or 0.0
        alone = totals.lanes == 1 and totals.finished == 1
        first = None if self._first is None else self._first - started
        line = summary(
            totals,
            decode_s=totals.seconds if alone and totals.seconds > 0 else self._last - read,
            first_s=totals.first_token_s if totals.finished and totals.first_token_s > 0 else first,
            load_s=self.load_s,
            unfinished=unfinished,
            left_tokens=left,
            seed=self.seed,
            passes=None if self.passes is None else self.passes(),
            verbose=self._verbose,
        )
        put(self.err, line)


def _kept(lane: LaneHistory) -> int:
    """How many finished sequences a search keeps: its num_beams."""
    beams = lane.began.settings.get("num_beams") if lane.began else None
    return beams if isinstance(beams, int) else 1
