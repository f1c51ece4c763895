"""What `genctl beam` and `--stream` add to a job: the search tree, and text as soon as it is certain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.batch import writers
from genctl.cli.inputs import is_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.cli.replay import ReplayOptions
    from genctl.cli.run_options import RunOptions
    from genctl.cli.table import Color
    from genctl.render.search_tree import SearchTrees
    from genctl.render.stream_view import StreamView


class Search:
    """Listens to a run for `--stream`, `--tree` and `--tree-format`.

    With `live` the view on the terminal draws the tree; else it goes to `err` at the end, or replaces the texts.
    """

    def __init__(
        self, options: RunOptions | ReplayOptions, err: Console | None, *, stream: bool, raw: bool, live: bool
    ) -> None:
        self.options = options
        self.err = err
        self.trees: SearchTrees | None = None
        self.stream: StreamView | None = None
        if (options.tree and not live) or options.tree_format:
            from genctl.render.search_tree import SearchTrees

            self.trees = SearchTrees()
        if stream:
            from genctl.render.stream_view import StreamView

            if raw or not is_terminal(sys.stdout):
                self.stream = StreamView(pipe_writer(), echo=bool(options.echo))
            else:
                write, write_prompt = terminal_writers(options.color)
                echo = options.echo is not False
                self.stream = StreamView(write, echo=echo, between="\n", write_prompt=write_prompt)

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
        from genctl.render.tree_formats import tree_dot, tree_json, tree_lines

        tree = self.trees.take(lane)
        if tree is None:
            return []
        if self.options.tree_format == "json":
            return [tree_json(tree)]
        if self.options.tree_format == "dot":
            return [{"text": tree_dot(tree)}]
        return [{"text": "\n".join(line.plain for line in tree_lines(tree))}]

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
            from genctl.render.tree_formats import tree_lines

            for tree in self.trees.take_all():
                for line in tree_lines(tree, self.err.width if self.err.is_terminal else None):
                    self.err.print(line)


def pipe_writer() -> Callable[[str], None]:
    """Writes pieces of text to standard output at once, as they are."""
    sink = writers.open_output(None, sys.stdout, force=False)
    return lambda text: sink.write(text.encode("utf-8", "backslashreplace"))


def terminal_writers(color: Color = "auto") -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Write pieces of text, and of dimmed prompts, to the terminal with word wrap and without control characters."""
    from genctl.render.console import make_consoles
    from genctl.render.widgets import visible
    from genctl.render.word_wrap import terminal_wrap

    wrap = terminal_wrap(make_consoles(color)[0])
    assert wrap is not None

    def write(text: str, *, dim: bool = False) -> None:
        wrap.write(visible(text), dim=dim)
        sys.stdout.flush()

    return write, lambda prompt: write(prompt, dim=True)
