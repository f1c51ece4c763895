"""The view of a run on a terminal: text while it is generated, and the final output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console, Group
from rich.text import Text

from genctl.commands.messages import RepeatedErrors
from genctl.commands.run.beam_picture import table
from genctl.events import Began, Event, Failed, Finished, Hypothesis, Prefilled, Stepped, Token
from genctl.events.history import LaneHistory, Path
from genctl.terminal import theme, widgets
from genctl.terminal.departures import leaves
from genctl.terminal.explain import explain_summary
from genctl.terminal.live_layout import Look, names, no_room, place_words, returned, sections_of, step_lines, tail
from genctl.terminal.live_region import LiveRegion
from genctl.terminal.progress_bars import LoadingBar
from genctl.terminal.run_history import RunHistory
from genctl.terminal.summary import failure, lane_summary, put, put_words, stop_words, summary
from genctl.terminal.text_width import terminal_wrap


class RunView:
    """Draws a run from its events: results on `out`, everything else on `err`.

    A single text is streamed. With several, finished texts are printed in input order and only the live region below
    them is redrawn, at most every 50 ms; if `out` is not interactive, the first unfinished text is streamed and the
    others follow in turn. After `close` everything is printed in full, in input order.

    `live`: show text before it is finished. `echo`: the prompt before its continuation; that of a conversation with
    `messages` alone. `candidates`: a table of the samples among which one was chosen. `scores`, `explain`: lines for
    each token under the text, with `top` alternatives. `labels`: a heading above each text, which with `numbered` says
    which prompt it continues. `quiet`: no progress bar and no summary; failures are always shown. `clock` gives
    seconds.

    `feed` raises InputError for an event that cannot follow the ones before it, and whatever writing to the streams
    raises.
    """

    def __init__(
        self,
        out: Console,
        err: Console,
        *,
        live: bool = True,
        echo: bool = False,
        messages: bool = False,
        candidates: bool = True,
        scores: bool = False,
        top: int = 0,
        labels: bool = False,
        numbered: bool = True,
        quiet: bool = False,
        verbose: bool = False,
        explain: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out
        self.err = err
        self.history = RunHistory()
        self.load_s: float | None = None  # what loading took; the summary says so
        look = Look(echo=echo, scores=scores, explain=explain, top=top, labels=labels, numbered=numbered)
        self.look = replace(look, messages=messages)
        self._with_candidates = candidates
        self._live = live
        self._quiet = quiet
        self._verbose = verbose
        self._clock = clock
        self._bar = LoadingBar(err, clock)
        self._region = LiveRegion(out, clock)
        self._wrap = terminal_wrap(out)
        self._errors = RepeatedErrors(lambda line: put_words(err, Text(line, style=theme.ERROR)))
        self._streaming: str | None = None  # the lane whose text is streamed
        self._shown: list[str] = []  # its pieces
        self._forked = False  # the streamed lane has several rows now; the rest follows when it finishes
        self._line_open = False
        self._blocks = 0
        self._stepped = False  # lines of steps were printed
        self._closed = False
        self._started: float | None = None
        self._read: float | None = None
        self._first: float | None = None
        self._last = 0.0

    def feed(self, event: Event) -> None:
        """Take in one event and show what it changes."""
        if isinstance(event, Stepped):
            self._last = now = self._clock()
            self._first = now if self._first is None else self._first
            self._started = now if self._started is None else self._started
            self.history.feed(event)
            if event.lane == self._streaming:
                self._stream(event)
            elif self._streaming is None and self._live:
                self._show(now)
            return
        self.history.feed(event)
        if self._bar.takes(event, quiet=self._quiet or self._line_open or self._region.visible):
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
        """Print everything, unfinished texts included; then tables and summary. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._bar.close()
        self._region.hide()
        self._settle()
        unfinished, left = 0, 0
        for lane in self.history.lanes.values():
            if lane.over:
                self._settle_lane(lane)
            else:
                unfinished += 1
                left += self._settle_unfinished(lane)
        self._end_line()
        self._errors.close()
        if self._stepped and (left_out := no_room(self.look, self.out.width)):
            put_words(self.out, Text(f"no room for {', '.join(left_out)}", style=theme.DIM))
        if self.look.explain and self.history.tallies:
            width = self.err.width if self.err.is_terminal else None
            self.err.print(explain_summary(self.history, width), soft_wrap=False)
        if not self._quiet:
            self._sum_up(unfinished, left)

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):  # a stream is closed: restore the terminal, write nothing more
            with contextlib.suppress(OSError):
                self._bar.close()
                self._region.hide()
            self._closed = True
        else:
            self.close()

    # -- streamed text -----------------------------------------------------------------------------------------------

    def _show(self, now: float) -> None:
        self._bar.close()
        head = next(iter(self.history.lanes.values()))
        if self._may_stream(head):
            self._begin_stream(head)
        elif self.out.is_interactive and self._region.is_due(now):
            self._redraw([*self.history.lanes.values()])

    def _may_stream(self, head: LaneHistory) -> bool:
        texts = len(head.rows) + (head.endings.count if head.endings else 0)
        if not head.steps or texts != 1:
            return False
        return not self.out.is_interactive or not (len(self.history.lanes) > 1 or self.look.steps)

    def _begin_stream(self, lane: LaneHistory) -> None:
        self._region.hide()
        self._streaming, self._shown, self._forked = lane.lane, [], False
        self._begin_block(lane, *names(lane, self.look, settled=True), place_words(0, returned(lane)))
        self._add(sections_of(lane, self.look)[0].path.text())

    def _stream(self, event: Stepped) -> None:
        if len(event.rows) + len(event.ended) != 1:
            self._forked = True
        if not self._forked:
            written: tuple[Token, ...] = (event.rows or event.ended)[0].written
            self._add(written[0].text if len(written) == 1 else "".join(token.text for token in written))

    def _add(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._write(text)
            self.out.file.flush()

    def _write(self, text: str) -> None:
        # Straight to the stream: rendering would cost more than the token.
        # Text on the same stream as the messages is made visible too: a log is read on a terminal.
        as_it_is = not self.out.is_terminal and self.out is not self.err
        if self._wrap is not None:
            self._wrap.write(widgets.visible(text))
        else:
            self.out.file.write(text if as_it_is else widgets.visible(text))
        self._line_open = not text.endswith("\n") if text else self._line_open

    # -- the live region ---------------------------------------------------------------------------------------------

    def _redraw(self, lanes: list[LaneHistory]) -> None:
        lines = tail([lane for lane in lanes if lane.steps or lane.over], self.look, self.out)
        if lines:
            self._region.draw(lines)

    # -- finished text -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Print the lanes that are over, up to the first that is not."""
        while self.history.lanes:
            lane = next(iter(self.history.lanes.values()))
            if not lane.over:
                break
            self._region.hide()
            self._settle_lane(lane)
            self.history.forget(lane.lane)
        self.out.file.flush()

    def _settle_lane(self, lane: LaneHistory) -> None:
        streaming = self._streaming == lane.lane
        if lane.finished:
            hypotheses, before = lane.finished.hypotheses, ""
            for place, (hypothesis, path) in enumerate(zip(hypotheses, lane.paths_of(hypotheses), strict=True)):
                text = hypothesis.text or (path.text() if path else "")
                if streaming and place == 0:
                    self._complete(text, path)
                else:
                    heading = self._heading(lane, hypothesis, place, len(hypotheses))
                    self._block(lane, text, path, heading, before=before)
                before = text
            self._candidates(lane, lane.finished)
        self._end_line()
        if streaming:
            self._streaming = None
        self.out.file.flush()
        if lane.failed:
            if self._errors.is_new(lane.failed.message):
                self._say_failed(lane, lane.failed)
        elif self._verbose and self.look.labels and not self._quiet:
            put(self.err, lane_summary(lane))

    def _say_failed(self, lane: LaneHistory, failed: Failed) -> None:
        put_words(self.err, failure(lane, numbered=self.look.numbered))
        if failed.hint:
            put_words(self.err, Text(f"hint: {widgets.visible(failed.hint)}"))

    def _candidates(self, lane: LaneHistory, finished: Finished) -> None:
        """A table of all samples, where best_of or mbr_samples chose among them."""
        if finished.others and self._with_candidates:
            self._end_line()
            self.out.print()
            for line in table(lane, 0, self.out.width):
                self.out.print(line)

    def _heading(self, lane: LaneHistory, hypothesis: Hypothesis, place: int, of: int) -> tuple[str, ...]:
        return (
            *names(lane, self.look, settled=True),
            place_words(place, of),
            stop_words(hypothesis.reason, hypothesis.cause),
        )

    def _settle_unfinished(self, lane: LaneHistory) -> int:
        sections = sections_of(lane, self.look) if lane.steps else []
        for section in sections:
            if self._streaming == lane.lane:
                self._complete(section.path.text(), section.path)
                self._streaming = None
            else:
                heading = (*names(lane, self.look, settled=True), *section.heading[2:], "not finished")
                self._block(lane, section.path.text(), section.path, heading)
        self._end_line()
        return sum(section.path.length for section in sections)

    def _complete(self, text: str, path: Path | None) -> None:
        """Complete a streamed text: usually nothing is missing, sometimes an incomplete character."""
        shown = "".join(self._shown)
        if text.startswith(shown):
            self._write(text[len(shown) :])
        elif not shown.startswith(text):  # another row was returned than the one shown
            self._end_line()
            self._write(text)
        if not (text or shown or self._line_open):
            self._write("\n")
        self._end_line()
        self._steps(path)

    def _block(
        self, lane: LaneHistory, text: str, path: Path | None, heading: tuple[str, ...], *, before: str = ""
    ) -> None:
        """Print a text in full. What it shares with the text `before` it, of the same prompt, is dimmed."""
        self._begin_block(lane, *heading)
        shared = leaves(text, before) if before else 0
        self._write_dimmed(text[:shared])
        self._write(text[shared:])
        if not (text or self._line_open):
            self._write("\n")  # an empty text is a line too
        self._end_line()
        self._steps(path)

    def _begin_block(self, lane: LaneHistory, *heading: str) -> None:
        self._end_line()
        if self.look.labels:
            if self._blocks:
                self._write("\n")
            self.out.print(widgets.header(self.out.width, *heading))
        self._blocks += 1
        if self.look.echoes(lane):
            self._write_dimmed(lane.prompt)
            self._write(lane.between)

    def _write_dimmed(self, text: str) -> None:
        """Write a prompt, or what a text shares with the one before it."""
        if not text or not (self._wrap is not None or self.out.is_terminal):
            self._write(text)
            return
        if self._wrap is not None:
            self._wrap.write(widgets.visible(text), dim=True)
        else:  # colours are forced in a pipe
            self.out.print(Text(widgets.visible(text), style=theme.DIM), end="")
        self._line_open = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._line_open:
            self._write("\n")

    def _steps(self, path: Path | None) -> None:
        if not self.look.steps:
            return
        if path is None:
            self.out.print(Text("the steps of this text were not recorded", style=theme.DIM))
            return
        self._stepped = True
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
            verbose=self._verbose,
        )
        put(self.err, line)
