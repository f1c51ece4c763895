"""A recorded run, read back: every line checked before anything is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from genctl import events
from genctl.errors import InputError


def read_recording(name: str) -> list[events.Event]:
    """The events of a file (`-`: standard input), in order.

    Raises InputError, naming the line, where a line is no JSON, no event, or cannot follow the lines before it.
    """
    from genctl.render.story import Story, fold

    shown = "standard input" if name == "-" else name
    found = []
    story = Story()
    try:
        for number, line in enumerate(_lines(name), start=1):
            if not line.strip():
                continue
            event = _event(line, f"{shown}, line {number}")
            try:
                story = fold(story, event)
            except InputError as error:
                raise InputError(f"{shown}, line {number}: {error.message}", hint=error.hint) from error
            if isinstance(event, (events.Finished, events.Failed)):
                story = story.without(event.lane)
            found.append(event)
    except OSError as error:
        raise InputError(f"cannot read {shown}: {error.strerror or error}") from error
    if not any(isinstance(event, (events.Began, events.Stepped, events.Failed)) for event in found):
        raise InputError(f"{shown} holds no recorded run", hint="genctl run --events FILE records one")
    return found


def _lines(name: str) -> Iterator[bytes]:
    if name == "-":
        source: IO[bytes] = getattr(sys.stdin, "buffer", sys.stdin)
        yield from source
        return
    with Path(name).open("rb") as file:
        yield from file


def _event(line: bytes, place: str) -> events.Event:
    try:
        data = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: byte {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        if not line.endswith(b"\n"):
            raise InputError(f"{place}: the line is cut short", hint="the recording was interrupted") from error
        raise InputError(f"{place}: not JSON at column {error.colno} ({error.msg})") from error
    except RecursionError as error:
        raise InputError(f"{place}: nested too deeply") from error
    if not isinstance(data, dict):
        raise InputError(f"{place}: an event is a JSON object, this is not")
    try:
        return events.from_json(data)
    except ValueError as error:
        raise InputError(f"{place}: {error}") from error
