"""What is written when a run ends: its page (`--report`), and what a command finds."""

from __future__ import annotations

import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from genctl import events
from genctl.comparing.side_by_side import SideBySide
from genctl.engines.protocol import Engine
from genctl.errors import without_secrets
from genctl.identity import versions
from genctl.io import writers
from genctl.pages.page import PageData, digest, facts_of, file_text, filled, page
from genctl.terminal.widgets import visible

SHORT = 200  # letters of prompts that a command quotes
FILES = ("--report", "--output", "-o", "--events")  # where a run also writes


def repeating() -> str:
    """The command line that is done, without the files that it writes."""
    kept, left = ["genctl"], iter(sys.argv[1:])
    for word in left:
        if word == "--":
            kept += [word, *left]
        elif word in FILES:
            next(left, None)
        elif word != "--force" and not word.startswith(tuple(f"{name}=" for name in FILES)):
            kept.append(word)
    return shlex.join(kept)


Self = TypeVar("Self", bound="FileAtEnd")


def versions_used() -> str:
    """The versions that numbers depend on, in words."""
    return ", ".join(f"{name} {version}" for name, version in versions("torch", "transformers").items())


class FileAtEnd(ABC):
    """A context that is opened as --output is, and written at the end unless an error comes."""

    def __init__(self, path: str, *, force: bool) -> None:
        self._sink = writers.open_output(path, None, force=force, at_once=True)

    @abstractmethod
    def content(self) -> bytes:
        """The whole file."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self._sink.abandon()
            return
        try:
            self._sink.write(self.content())
            self._sink.close()
        finally:
            self._sink.abandon()  # does nothing to what is closed


def plain_page(template: str, title: str, facts: Sequence[tuple[str, str]], **values: Any) -> bytes:
    """A page without a script: a template with its values, the command, facts and style."""
    style = file_text("page.css") + file_text("parity.css")
    text = filled(
        template,
        title=title,
        command=visible(without_secrets(repeating())),
        facts=[*((label, visible(value)) for label, value in facts), ("versions", versions_used())],
        style=style,
        style_digest=digest(style),
        **values,
    )
    return text.encode("utf-8", "backslashreplace")


class ReportOutput(ABC):
    """What a command finds, in a format: records as they come, or lines of text at the end.

    `sink` receives them; where there is none, the lines are printed on the console.
    """

    def __init__(
        self,
        format: str,
        console: Console,
        sink: writers.Sink | None,
        tsv: Callable[[writers.Binary], writers.Writer],
    ) -> None:
        """`tsv` makes the writer of `--format tsv`."""
        self._console, self._sink = console, sink
        self._writer: writers.Writer | None = None
        if format != "text" and sink is not None:
            formats = writers.FORMATS | {"tsv": writers.OutputFormat(lambda sink, setup: tsv(sink))}
            self._writer = writers.open_writer(format, sink, on_error=lambda record: None, formats=formats)

    @abstractmethod
    def lines(self, width: int | None) -> Sequence[Text]:
        """What is found, in lines of at most `width` cells; none where there is nothing."""

    def records(self, records: Iterable[writers.Record]) -> None:
        """Write records, in the formats that have them."""
        if self._writer is not None:
            for record in records:
                self._writer.write(record)

    def finish(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
        elif self._sink is None:
            self.draw(self._console)
        elif lines := self.lines(None):
            self._sink.write("".join(f"{line.plain}\n" for line in lines).encode("utf-8", "backslashreplace"))
            self._sink.close()

    def draw(self, console: Console) -> None:
        """Print the lines."""
        for line in self.lines(console.width if console.is_terminal else None):
            console.print(line)


class PageFile(FileAtEnd):
    """A page in the making: `data` has what a command knows beyond the events, `facts` more lines of the summary."""

    def __init__(self, path: str, *, force: bool, live: bool = True, piped: str = "") -> None:
        super().__init__(path, force=force)
        self.data = PageData()
        self.runs = SideBySide()
        self.baseline: str | None = None  # a run of `compare`
        self.live = live  # the events come as they happen, so that time can be measured
        self.piped = piped  # the format of prompts that came from a pipe
        self.facts: list[tuple[str, str]] = []
        self.seed: int | None = None  # that the run chose, where the command line has none
        self._checkpoints: set[str] = set()
        self._clock: list[float] = []  # when events came that begin or end a lane

    def feed(self, event: events.Event) -> None:
        """A listener: take one event."""
        if isinstance(event, (events.Began, events.Finished)):
            self._clock[1:] = [time.perf_counter()]
        self.runs.feed(event)
        self.data.feed(event)

    def failed(self, id: str, code: str, message: str) -> None:
        """Take a row that failed, if no event says so."""
        lane = self.data.lanes.get(id)
        if lane is None or not lane.history.over:
            self.data.feed(events.Failed(id, code, message))

    def loaded(self, engine: Engine) -> None:
        """Take the facts of an engine. Those of a second checkpoint are named, those of a known one are left out."""
        about = engine.about
        if about.name not in self._checkpoints and (digests := engine.fingerprints()):
            label = f"digest of {about.name}" if self._checkpoints else "digest"
            self.facts.append((label, ", ".join(digests.values())))
        if about.name not in self._checkpoints or about.remote:
            self.facts += about.facts
        self._checkpoints.add(about.name)

    def settled(
        self,
        job: str,
        *,
        seed: int | None = None,
        baseline: str | None = None,
        cache: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the settings as TOML; the seed, the baseline of a comparison, or the report of a cache."""
        self.data.job, self.data.cache = job, cache
        self.seed, self.baseline = seed, baseline

    def figures(self, lane: str, figures: dict[str, Any]) -> None:
        """Take more numbers of a lane."""
        self.data.figures[lane] = figures

    def content(self) -> bytes:
        """The page, with its summary."""
        self._complete()
        return page(self.data)

    def _fed(self, command: str) -> str:
        """The command with its prompts, which came from a pipe: in quotes if they are short lines."""
        prompts = [began.shown or began.prompt for began in self.data.begun]
        lines = self.piped == "lines" and self.data.comparison is None and not any("\n" in text for text in prompts)
        if prompts and lines and sum(map(len, prompts)) <= SHORT:
            return f"{shlex.join(['printf', '%s' + chr(92) + 'n', *prompts])} | {command}"
        return f"{command} < PROMPTS  # standard input: the prompts of this page"

    def _complete(self) -> None:
        data = self.data
        data.comparison = self.runs.part(self.baseline)
        if data.comparison is not None:
            data.lanes = {
                name: data.lanes[name] for name in data.comparison["lanes"] if name in data.lanes
            } | data.lanes
        command = repeating()
        draws = any(began.seed is not None for began in data.begun)
        if self.seed is not None and draws and not any(word.split("=")[0] == "--seed" for word in sys.argv):
            command += f" --seed {self.seed}"
        if self.piped:
            command = self._fed(command)
        data.command = without_secrets(command)
        facts = dict(facts_of(data)) | dict(self.facts)
        if self.live and len(self._clock) == 2 and not data.is_scored:
            facts["speed"] = f"{data.tokens / (self._clock[1] - self._clock[0]):,.1f} tokens/s, prompts included"
        facts["versions"] = versions_used()
        data.facts = list(facts.items())
