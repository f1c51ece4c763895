"""Text that is written as soon as it is certain and never taken back, for a pipe or anything else that cannot move."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from genctl.events import Event
from genctl.render.stems import certain
from genctl.render.story import LaneStory, Story, fold


class StreamView:
    """Writes what is certain of each lane's first sequence; the lanes come one after another, in the order they began.

    What is written of a search is the part on which all live rows agree, and every finished sequence that could still
    be returned first. Further sequences follow when their lane is done, each on a line of its own. Lanes that failed
    are passed over.

    `write` is given pieces of text, line ends included. `echo` puts the prompt first, and `between` after it.
    `feed` raises InputError for an event that cannot follow the ones before it, and whatever `write` raises.
    """

    def __init__(self, write: Callable[[str], None], *, echo: bool = False, between: str = "") -> None:
        self._out = write
        self.echo = echo
        self.between = between
        self._story = Story()
        self._lane: str | None = None  # whose text has begun
        self._shown: list[str] = []  # its pieces, without the prompt
        self._chars = 0  # their characters
        self._line_open = False

    @property
    def unfinished(self) -> int:
        """Lanes that began and of which no end is known yet."""
        return len(self._story.lanes)

    def feed(self, event: Event) -> None:
        """Take in one event and write what it makes certain."""
        self._story = fold(self._story, event)
        while self._story.lanes:
            lane = next(iter(self._story.lanes.values()))
            if not lane.over:
                self._grow(lane)
                return
            self._finish(lane)
            self._story = self._story.without(lane.lane)

    def close(self) -> None:
        """End the line that is open, if there is one."""
        if self._line_open:
            self._write("\n")

    def __enter__(self) -> StreamView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError):  # else the stream is gone
            self.close()

    def _grow(self, lane: LaneStory) -> None:
        path = certain(lane)
        if path.chars > self._chars:
            piece = path.text(self._chars)
            self._open(lane)
            self._shown.append(piece)
            self._chars = path.chars
            self._write(piece)

    def _open(self, lane: LaneStory) -> None:
        if self._lane != lane.lane:
            self._lane = lane.lane
            self._write(self._prompt(lane))

    def _prompt(self, lane: LaneStory) -> str:
        return f"{lane.prompt}{self.between}" if self.echo else ""

    def _finish(self, lane: LaneStory) -> None:
        texts = []
        for hypothesis in lane.finished.hypotheses if lane.finished else ():
            path = None if hypothesis.text else lane.path_of(hypothesis)
            texts.append(hypothesis.text or (path.text() if path else ""))
        if texts:
            self._open(lane)
            shown = "".join(self._shown)
            if texts[0].startswith(shown):
                self._write(f"{texts[0][len(shown) :]}\n")
            else:  # the events contradict themselves: what is out stays, and the result is there in full
                self._write(f"\n{self._prompt(lane)}{texts[0]}\n")
        elif self._lane == lane.lane:
            self.close()  # it failed on the way
        for text in texts[1:]:
            self._write(f"{self._prompt(lane)}{text}\n")
        self._lane, self._shown, self._chars = None, [], 0

    def _write(self, text: str) -> None:
        if text:
            self._out(text)
            self._line_open = not text.endswith("\n")
