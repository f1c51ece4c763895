"""What `genctl beam` and `--stream` add to a job: the search tree, and text as soon as it is certain."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from genctl import events
from genctl.io import writers
from genctl.terminal.standard_streams import is_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.cli.table import Color
    from genctl.commands.options import TreeFormat
    from genctl.commands.run.stream_view import StreamView
    from genctl.pages.search_tree import SearchTrees


class ShownSearch(Protocol):
    """What the options of `run`, `beam` and `replay` have in common here."""

    @property
    def tree(self) -> bool:
        """Draw the search tree."""

    @property
    def tree_format(self) -> TreeFormat | None:
        """Write the search tree in place of the texts."""

    @property
    def echo(self) -> bool | None:
        """Begin the text with the prompt."""

    @property
    def color(self) -> Color:
        """When to color."""


class Search:
    """Listens to a run for `--stream`, `--tree` and `--tree-format`.

    With `live` the view on the terminal draws the tree; else it goes to `err` at the end, or replaces the texts.
    """

    def __init__(self, options: ShownSearch, err: Console | None, *, stream: bool, raw: bool, live: bool) -> None:
        self.options = options
        self.err = err
        self.trees: SearchTrees | None = None
        self.stream: StreamView | None = None
        if (options.tree and not live) or options.tree_format:
            from genctl.pages.search_tree import SearchTrees

            self.trees = SearchTrees()
        if stream:
            from genctl.commands.run.stream_view import StreamView, terminal_stream

            if raw or not is_terminal(sys.stdout):
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
        from genctl.commands.run.tree_formats import tree_record

        tree = self.trees.take(lane)
        return [] if tree is None else [tree_record(tree, self.options.tree_format)]

    def __enter__(self) -> Search:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):  # a stream is gone
            return
        if self.stream is not None:
            self.stream.close()
        if self.trees is not None and self.err is not None and self.options.tree_format is None:
            from genctl.commands.run.tree_formats import tree_lines

            for tree in self.trees.take_all():
                for line in tree_lines(tree, self.err.width if self.err.is_terminal else None):
                    self.err.print(line)
