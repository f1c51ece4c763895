"""Files that a run writes besides results: events as they happen (`--events`), and a page at the end (`--report`).

`genctl report` reads recorded events back; every line is checked before anything is shown.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from genctl import events
from genctl.comparing.side_by_side import SideBySide
from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.engines.protocol import Engine
from genctl.errors import InputError, OutputError, reason_of, without_secrets
from genctl.io import writers
from genctl.io.rows import SCHEMA
from genctl.io.writers import escaped, open_output
from genctl.pages.page import PageData, facts_of, page
from genctl.process import versions

FILES = ("--report", "--output", "-o", "--events")  # options for files that a run writes


def repeating() -> str:
    """The current command line, without the files that it writes and without --force."""
    words, left = ["genctl"], iter(sys.argv[1:])
    for word in left:
        if word == "--":
            words += [word, *left]
        elif word in FILES:
            next(left, None)
        elif word != "--force" and not word.startswith(tuple(f"{name}=" for name in FILES)):
            words.append(word)
    return shlex.join(words)


def versions_used() -> str:
    """The versions on which the numbers depend, as text."""
    return ", ".join(f"{name} {version}" for name, version in versions("torch", "transformers").items())


Self = TypeVar("Self", bound="PageFile")


class PageFile:
    """Collects a page: `data` has the events and what a command adds to them, `facts` more lines of the summary.

    A context manager: the file is opened like --output, and written at the end unless an error occurs.
    """

    def __init__(self, path: str, *, force: bool, live: bool = True) -> None:
        self._sink = writers.open_output(path, None, force=force, at_once=True)
        self.data = PageData()
        self.runs = SideBySide()
        self.baseline: str | None = None  # a run of `compare`
        self.live = live  # events arrive as they happen, so that time can be measured
        self.facts: list[tuple[str, str]] = []
        self.seed: int | None = None  # chosen by the run if the command line has none
        self._checkpoints: set[str] = set()
        self._clock: list[float] = []  # times of the first and the last event that begins or ends a lane

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
            self._sink.abandon()  # does nothing once closed

    def feed(self, event: events.Event) -> None:
        """A listener: add one event."""
        if isinstance(event, (events.Began, events.Finished)):
            self._clock[1:] = [time.perf_counter()]
        self.runs.feed(event)
        self.data.feed(event)

    def scored(
        self, lane: str, prompt: str, tokens: Sequence[events.Token], *, model: str, figures: str = "", **began: Any
    ) -> None:
        """Add a scored text as if the model had generated it in one step. `began`: more fields of `Began`."""
        if figures:
            self.data.figures[lane] = {"": figures}
        total, ids = math.fsum(token.logprob for token in tokens), tuple(token.id for token in tokens)
        text = "".join(token.text for token in tokens)
        one = events.Hypothesis(ids, total, total, "scored", total / max(len(ids), 1), text=text)
        self.feed(events.Began(lane, prompt, "score", model, **began))
        self.feed(events.Stepped(lane, 0, (), (events.Ended(lane, 0, tuple(tokens), one),)))
        self.feed(events.Finished(lane, (one,)))

    def failed(self, id: str, code: str, message: str) -> None:
        """Add a failed row, unless an event has reported it."""
        lane = self.data.lanes.get(id)
        if lane is None or not lane.history.over:
            self.data.feed(events.Failed(id, code, message))

    def loaded(self, engine: Engine) -> None:
        """Add the facts of an engine. A second checkpoint's digest is labelled; a known local one adds nothing."""
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
        """Add the settings as TOML; the seed, the baseline of a comparison, or the report of a cache."""
        self.data.job, self.data.cache = job, cache
        self.seed, self.baseline = seed, baseline

    def content(self) -> bytes:
        """The page, with its summary."""
        self._complete()
        return page(self.data)

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
        data.command = without_secrets(command)
        facts = dict(facts_of(data)) | dict(self.facts)
        if self.live and len(self._clock) == 2 and not data.is_scored:
            facts["speed"] = f"{data.tokens / (self._clock[1] - self._clock[0]):,.1f} tokens/s, prompts included"
        facts["versions"] = versions_used()
        data.facts = list(facts.items())


def read_recording(name: str, note: Callable[[str], object] | None = None) -> list[events.Event]:
    """The events of a file (`-`: standard input), in order. A saved tree yields those of one search.

    With `note`, a last line that is cut short is left out, and `note` is called with a sentence about it.

    Raises InputError, naming the line, if a line is not JSON, not an event, or cannot follow the lines before it.
    """
    from genctl.terminal.run_history import RunHistory

    shown = "standard input" if name == "-" else name
    recorded: list[events.Event] = []
    cut_short = ""
    history = RunHistory()
    try:
        if name == "-" and sys.stdin is None:
            raise InputError("cannot read standard input: it is closed")
        lines = reader.lines(sys.stdin.buffer if name == "-" else name)
        first = next(lines, b"")
        if first.startswith((b'{"event": "treeopened"', b'{"event": "opened"')):
            from genctl.tree.saved import events_of, tree_of_lines

            return list(events_of(tree_of_lines(itertools.chain([first], lines), shown, [])))
        for number, line in enumerate(itertools.chain([first], lines), start=1):
            place = f"{shown}, line {number}"
            if not line.strip():
                continue
            event = _event(line, place, shown)
            if event is None:
                cut_short = f"{place}: the line is cut short"
                if note is None or not recorded:
                    raise InputError(cut_short, hint="the recording was interrupted")
                break
            try:
                history.feed(event)
            except InputError as error:
                raise InputError(f"{place}: {error.message}", hint=error.hint) from error
            if isinstance(event, (events.Finished, events.Failed)):
                history.forget(event.lane)
            recorded.append(event)
    except Unreadable as error:
        raise InputError(f"cannot read {shown}: {error}") from None
    if not any(isinstance(event, (events.Began, events.Stepped, events.Failed)) for event in recorded):
        raise InputError(f"{shown} holds no recorded run", hint="genctl run --events FILE records one")
    if note is not None and cut_short:
        note(f"{cut_short}: the recording was interrupted here")
    return recorded


# CacheRead is never in a file: only `inspect-cache` uses it
_KINDS = {name: kind for name, kind in events.KINDS.items() if kind is not events.CacheRead}


def _event(line: bytes, place: str, shown: str) -> events.Event | None:
    """The event of a line; None for a line that is cut short."""
    try:
        data = reader.loads(line)
        if not isinstance(data, dict):
            raise reader.BadJson("an event is a JSON object, this is not")
        if data.get("schema") == SCHEMA and "event" not in data:
            hint = "genctl run --events FILE writes what a report needs"
            raise InputError(f"{shown} holds results, not the events of a run", hint=hint)
        event: events.Event = events.from_json(data, _KINDS)
    except ValueError as error:
        if isinstance(error, reader.Incomplete) and not line.endswith(b"\n"):
            return None
        raise InputError(f"{place}: {error}") from None
    return event


def event_writer(stack: ExitStack, path: str, *, force: bool) -> Callable[[events.Event], None]:
    """A listener that writes every event as a JSON line, to a file for `genctl report`.

    The file is opened like `--output`: an existing one is refused, or replaced with `force`. `stack` closes it.
    """
    sink = open_output(path, sys.stdout, force=force)
    stack.push(lambda kind, *_: sink.close() if kind is None else sink.abandon())

    def write(event: events.Event) -> None:
        line = escaped(json.dumps(events.to_json(event), ensure_ascii=False)) + "\n"
        try:
            sink.write(line.encode("utf-8", "backslashreplace"))
        except BrokenPipeError as error:  # if the reader of the events is gone, results must not end quietly
            raise OutputError(f"cannot write events to {path}: {reason_of(error)}") from error

    return write
