"""Recorded runs: write events as they happen; read them back, every line checked before anything is shown."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from genctl import events
from genctl.config import reader
from genctl.config.reader import Unreadable
from genctl.errors import InputError, OutputError, reason_of
from genctl.io.rows import SCHEMA
from genctl.io.writers import escaped, open_output


def read_recording(name: str, note: Callable[[str], object] | None = None) -> list[events.Event]:
    """The events of a file (`-`: standard input), in order. The file of a tree gives those of one search.

    `note` takes a sentence about what the events leave out: of a tree, and with it also a last line that is cut short,
    if anything is before it.

    Raises InputError, naming the line, where a line is no JSON, no event, or cannot follow the lines before it.
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
        if first.strip() == b"[":  # of --format json
            raise _no_events(shown, {})
        if first.startswith((b'{"event": "treeopened"', b'{"event": "opened"')):
            from genctl.tree.as_events import events_of, left_out
            from genctl.tree.saved import tree_of_lines

            tree = tree_of_lines(itertools.chain([first], lines), shown)
            if note is not None and (words := left_out(tree)):
                note(f"{shown}: {words}")
            return list(events_of(tree))
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


# what a file never has: `inspect-cache` alone shows it
_KINDS = {name: kind for name, kind in events.KINDS.items() if kind is not events.CacheRead}


def _no_events(shown: str, data: Mapping[str, Any]) -> InputError:
    """The error of a file with results in place of events. `data` is one of them."""
    kind = data.get("kind")
    command = "audit" if kind in ("audit", "hypothesis") else "parity" if kind else "score" if "nll" in data else ""
    hint = f"genctl {command} --report FILE writes its page"
    if not command:
        command = "compare" if "run" in data else "run" if "finish_reason" in data else ""
        hint = f"genctl {command or 'run'} --events FILE writes what a report needs"
    return InputError(f"{shown} holds results of genctl {command}".rstrip() + ", not the events of a run", hint=hint)


def _event(line: bytes, place: str, shown: str) -> events.Event | None:
    """The event of a line; None for a line that is cut short."""
    try:
        data = reader.loads(line)
        if not isinstance(data, dict):
            raise reader.BadJson("an event is a JSON object, this is not")
        if data.get("schema") == SCHEMA and "event" not in data:
            raise _no_events(shown, data)
        event: events.Event = events.from_json(data, _KINDS)
    except ValueError as error:
        if isinstance(error, reader.Incomplete) and not line.endswith(b"\n"):
            return None
        raise InputError(f"{place}: {error}") from None
    return event


def event_writer(stack: ExitStack, path: str, *, force: bool) -> Callable[[events.Event], None]:
    """A listener that writes every event as a JSON line: a file that `genctl report` makes a page of.

    It is opened as `--output` is: an existing file is refused, or replaced with `force`. `stack` closes it.
    """
    sink = open_output(path, sys.stdout, force=force)
    stack.push(lambda kind, *_: sink.close() if kind is None else sink.abandon())

    def write(event: events.Event) -> None:
        line = escaped(json.dumps(events.to_json(event), ensure_ascii=False)) + "\n"
        try:
            sink.write(line.encode("utf-8", "backslashreplace"))
        except BrokenPipeError as error:  # results are not to end quietly with the reader of the events
            raise OutputError(f"cannot write events to {path}: {reason_of(error)}") from error

    return write
