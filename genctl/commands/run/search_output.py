"""What `genctl beam` and `--stream` add to a job: the search tree, and text as soon as it is certain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.events import Event
from genctl.events.history import LaneHistory
from genctl.io import writers
from genctl.terminal import widgets
from genctl.terminal.console import Color, make_consoles
from genctl.terminal.departures import Certain
from genctl.terminal.run_history import RunHistory
from genctl.terminal.standard_streams import is_terminal
from genctl.terminal.text_width import terminal_wrap

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.pages.search_tree import SearchTrees


# -- write text as soon as it is certain, for pipes and other outputs that cannot be redrawn ---------------------------


def _recorded(lane: LaneHistory) -> tuple[str, bool]:
    """The prompt as the model reads it."""
    return (lane.began.prompt, lane.began.encoder_decoder) if lane.began else ("", False)


class StreamView:
    """Writes the certain part of each lane's first sequence; the lanes follow one another in the order they began.

    The certain part of a search is common to all live rows and to every finished sequence that could still be returned
    first. Further sequences follow when their lane is done, each on its own line. Failed lanes are skipped.

    `write` receives pieces of text, line ends included. `echo` writes the prompt first, with `write_prompt` if there
    is one; `prompt_of` says what it is, and whether `between` follows it, because its text answers it. `feed` raises
    InputError for an event that cannot follow the ones before it, and whatever `write` raises.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        echo: bool = False,
        between: str = "\t",
        write_prompt: Callable[[str], None] | None = None,
        prompt_of: Callable[[LaneHistory], tuple[str, bool]] = _recorded,
    ) -> None:
        self._out = write
        self._out_prompt = write_prompt or write
        self.echo = echo
        self.between = between
        self.prompt_of = prompt_of
        self._story = RunHistory()
        self._lane: str | None = None  # whose text has begun
        self._shown: list[str] = []  # its pieces, without the prompt
        self._chars = 0  # their characters
        self._line_open = False
        self._certain = Certain()

    @property
    def unfinished(self) -> int:
        """Lanes that began and did not end yet."""
        return len(self._story.lanes)

    def feed(self, event: Event) -> None:
        """Take in one event and write what it makes certain."""
        self._story.feed(event)
        while self._story.lanes:
            lane = next(iter(self._story.lanes.values()))
            if not lane.over:
                self._grow(lane)
                return
            self._finish(lane)
            self._story.forget(lane.lane)

    def close(self) -> None:
        """End the line that is open, if there is one."""
        if self._line_open:
            self._write("\n")

    def __enter__(self) -> StreamView:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not isinstance(error, OSError):  # else the stream is gone
            self.close()

    def _grow(self, lane: LaneHistory) -> None:
        path = self._certain(lane)
        if path.chars > self._chars:
            piece = path.text(self._chars)
            self._open(lane)
            self._shown.append(piece)
            self._chars = path.chars
            self._write(piece)

    def _open(self, lane: LaneHistory) -> None:
        if self._lane != lane.lane:
            self._lane = lane.lane
            self._write_prompt(lane)

    def _write_prompt(self, lane: LaneHistory) -> None:
        if self.echo:
            prompt, between = self.prompt_of(lane)
            self._write(prompt, self._out_prompt)
            self._write(self.between if between else "")

    def _finish(self, lane: LaneHistory) -> None:
        hypotheses = lane.finished.hypotheses if lane.finished else ()
        paths = lane.paths_of(hypotheses)
        texts = [one.text or (path.text() if path else "") for one, path in zip(hypotheses, paths, strict=True)]
        if texts:
            self._open(lane)
            shown = "".join(self._shown)
            if texts[0].startswith(shown):
                self._write(f"{texts[0][len(shown) :]}\n")
            else:  # inconsistent events: the result follows in full
                self._write("\n")
                self._write_prompt(lane)
                self._write(f"{texts[0]}\n")
        elif self._lane == lane.lane:
            self.close()  # it failed on the way
        for text in texts[1:]:
            self._write_prompt(lane)
            self._write(f"{text}\n")
        self._lane, self._shown, self._chars = None, [], 0

    def _write(self, text: str, out: Callable[[str], None] | None = None) -> None:
        if text:
            (out or self._out)(text)
            self._line_open = not text.endswith("\n")


def terminal_stream(color: Color, *, echo: bool, messages: bool) -> StreamView:
    """A view that writes to the terminal with word wrap and without control characters; prompts are dimmed.

    `echo` shows conversations only with `messages`.
    """
    console = make_consoles(color)[0]
    wrap = terminal_wrap(console)
    assert wrap is not None

    def write(text: str, *, dim: bool = False) -> None:
        wrap.write(widgets.visible(text), dim=dim)
        console.file.flush()

    def prompt_of(lane: LaneHistory) -> tuple[str, bool]:
        return ("", False) if lane.is_chat and not messages else (lane.prompt, bool(lane.between))

    def write_prompt(prompt: str) -> None:
        write(prompt, dim=True)

    return StreamView(write, echo=echo, between="\n", write_prompt=write_prompt, prompt_of=prompt_of)


class Search:
    """Listens to a run for `--stream`, `--tree` and `--tree-format`.

    With `live` the view on a terminal draws the tree; else it goes to `err` at the end, or replaces the texts.
    """

    def __init__(self, options: Any, err: Console | None, *, stream: bool, live: bool) -> None:
        self.options = options
        self.err = err
        self.trees: SearchTrees | None = None
        self.stream: StreamView | None = None
        if (options.tree and not live) or options.tree_format:
            from genctl.pages.search_tree import SearchTrees

            self.trees = SearchTrees()
        if stream:
            if not is_terminal(sys.stdout):
                sink = writers.open_output(None, sys.stdout)
                self.stream = StreamView(
                    lambda text: sink.write(text.encode("utf-8", "backslashreplace")), echo=bool(options.echo)
                )
            else:
                self.stream = terminal_stream(
                    options.color, echo=options.echo is not False, messages=options.echo is True
                )

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if self.trees is not None:
            self.trees.feed(event)
        if self.stream is not None:
            self.stream.feed(event)

    def records(self, lane: str) -> list[dict[str, Any]]:
        """The records of a finished lane's tree, which replace its texts; none without --tree-format."""
        if self.trees is None or self.options.tree_format is None:
            return []
        from genctl.commands.tree_formats import tree_record

        tree = self.trees.take(lane)
        return [] if tree is None else [tree_record(tree, self.options.tree_format)]

    def __enter__(self) -> Search:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):  # a stream is gone
            return
        if self.stream is not None:
            self.stream.close()
        if self.trees is not None and self.err is not None and self.options.tree_format is None:
            from genctl.commands.tree_formats import tree_lines

            for tree in self.trees.take_all():
                for line in tree_lines(tree, self.err.width if self.err.is_terminal else None):
                    self.err.print(line)
