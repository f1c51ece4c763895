"""What `genctl beam` and `--stream` add to a job: checks, the tree, and text as it becomes certain."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from genctl import events
from genctl.batch import writers
from genctl.config.layers import Layer, Resolved
from genctl.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.cli.run_options import RunOptions
    from genctl.render.search_tree import SearchTrees
    from genctl.render.stream_view import StreamView

COMMAND = "genctl beam"
BENEATH = (Layer(COMMAND, {"num_beams": 5}, said="user"),)


def check_search(early: Resolved) -> None:
    """Raises UsageError where `genctl beam` is asked for something that keeps no rows in competition."""
    generation = early.generation
    if generation.num_beams == 1 and not generation.penalty_alpha:
        place = early.origins["num_beams"]
        raise UsageError(
            f"genctl beam shows a search, but num_beams = 1 ({place})", hint="genctl run shows a single text"
        )


def check_asked(asked: RunOptions) -> None:
    """What the flags of a search can get wrong. Raises UsageError."""
    if asked.stream:
        for wrong, why in (
            (asked.format != "text", f"--format {asked.format} writes whole records"),
            (asked.output not in (None, "-"), "--output keeps results until they are whole"),
            (asked.unordered, "--unordered writes results as they finish"),
            (asked.tree_format is not None, f"--tree-format {asked.tree_format} writes trees instead of texts"),
        ):
            if wrong:
                raise UsageError(f"--stream writes text as soon as it is certain, in input order, but {why}")
    if asked.tree_format is not None:
        if asked.format != "text":
            raise UsageError(
                f"--tree-format {asked.tree_format} writes trees instead of texts, which contradicts "
                f"--format {asked.format}"
            )
        if asked.echo:
            raise UsageError("--echo begins texts with their prompt, but --tree-format writes trees instead of texts")


class Search:
    """Watches a run's events for what was asked beyond texts: `--stream`, `--tree`, `--tree-format`.

    With `live` the view on the terminal draws the tree; else it goes to `err` at the end, or in place of the texts.
    """

    def __init__(self, asked: RunOptions, err: Console | None, *, live: bool) -> None:
        self.asked = asked
        self.err = err
        self.trees: SearchTrees | None = None
        self.stream: StreamView | None = None
        if (asked.tree and not live) or asked.tree_format:
            from genctl.render.search_tree import SearchTrees

            self.trees = SearchTrees()
        if asked.stream:
            from genctl.render.stream_view import StreamView

            self.stream = StreamView(stream_writer(asked.raw), echo=asked.echo)

    def begin(self, encoder_decoder: bool) -> None:
        """The checkpoint is known: a prompt that is not continued but answered is set off by a tab."""
        if self.stream is not None:
            self.stream.between = "\t" if encoder_decoder else ""

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if self.trees is not None:
            self.trees.feed(event)
        if self.stream is not None:
            self.stream.feed(event)

    def records(self, lane: str) -> list[dict[str, Any]]:
        """What is written of a finished lane in place of its texts; nothing where its texts are."""
        if self.trees is None or self.asked.tree_format is None:
            return []
        from genctl.render.tree_formats import tree_dot, tree_json, tree_lines

        tree = self.trees.take(lane)
        if tree is None:
            return []
        if self.asked.tree_format == "json":
            return [tree_json(tree)]
        if self.asked.tree_format == "dot":
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
        if self.trees is not None and self.err is not None and self.asked.tree_format is None:
            from genctl.render.tree_formats import tree_lines

            for tree in self.trees.take_all():
                for line in tree_lines(tree, self.err.width if self.err.is_terminal else None):
                    self.err.print(line)


class StreamWriter:
    """Pieces of text to standard output at once: to a pipe as they are, to a terminal with controls shown."""

    def __init__(self) -> None:
        self.sink = writers.open_output(None, sys.stdout, force=False)

    def __call__(self, text: str) -> None:
        self.sink.write(text.encode("utf-8", "backslashreplace"))


class TerminalWriter:
    """The same for a person, whose terminal must not be given control characters by a model."""

    def __call__(self, text: str) -> None:
        from genctl.render.widgets import visible

        sys.stdout.write(visible(text))
        sys.stdout.flush()


def stream_writer(raw: bool = False) -> StreamWriter | TerminalWriter:
    """Where streamed text goes; `raw` gives a terminal too the text itself."""
    return TerminalWriter() if sys.stdout.isatty() and not raw else StreamWriter()
