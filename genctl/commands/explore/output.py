"""Where the results of a tree's commands go: records, lines for people, or the tree itself at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from genctl.commands.explore import formats
from genctl.io import writers
from genctl.tree.results import Continuation, Covered

if TYPE_CHECKING:
    from genctl.events import Event
    from genctl.tree.results import Result


class TreeOutput:
    """Writes results as they come, to a sink in a format, or with `show` on a terminal, a line at a time.

    `expanding`: the results are those of --expand, whose continuations are rows.
    """

    def __init__(
        self, format: str, sink: writers.Sink | None, show: Callable[[str], object], *, expanding: bool
    ) -> None:
        self.format, self.expanding = format, expanding
        self.covered: Covered | None = None  # what the newest expansion came to
        self._sink, self._show = sink, show
        self._rows = 0
        self._writer: writers.Writer | None = None
        if sink is not None and format == "tsv":
            self._writer = writers.TsvWriter(sink, formats.COLUMNS)
        elif sink is not None and format in ("json", "jsonl"):
            self._writer = writers.open_writer(format, sink, on_error=lambda record: None)

    def put(self, result: Result) -> None:
        """Write or show one result. Raises OutputError."""
        if isinstance(result, Covered):
            self.covered = result
        if self.format == "dot" or (self.expanding and not isinstance(result, Continuation)):
            return
        if self._writer is not None:
            self._writer.write(self._record(result))
        elif isinstance(result, Continuation) and self.expanding:
            self._lines([formats.continuation_line(result, tabs=self._sink is not None)])
        else:
            self._lines(list(formats.lines_of(result)))

    def close(self, events: Sequence[Event]) -> None:
        """Complete the output; `events` are those of the tree."""
        if self.format == "dot":
            from genctl.commands.run.tree_formats import tree_dot
            from genctl.pages.search_tree import SearchTrees

            trees = SearchTrees()
            for event in events:
                trees.feed(event)
            self._lines([tree_dot(tree) for tree in trees.take_all()])
        if self._writer is not None:
            self._writer.close()
        elif self._sink is not None:
            self._sink.close()

    def _record(self, result: Result) -> dict[str, object]:
        if self.expanding and isinstance(result, Continuation):
            self._rows += 1
            return formats.continuation_record(self._rows - 1, result)
        return formats.result_record(result)

    def _lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            if self._sink is None:
                self._show(line)
            else:
                self._sink.write(f"{line}\n".encode("utf-8", "backslashreplace"))
