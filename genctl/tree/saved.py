"""The file of a tree: a line of JSON for each change, appended as it happens, so that a kill loses one token at most.

Each line is written whole. A half-written last line is cut off when the file is opened again. The file is readable by
its owner only, is never a link, and is locked while it is open.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from genctl import events
from genctl.config.check import shown
from genctl.config.layers import Layer
from genctl.config.listed_knobs import LISTS
from genctl.config.saved_files import objection
from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.errors import InputError, OutputError, printable
from genctl.io.file_lock import lock
from genctl.io.output import Sink, open_beside, unbuffered
from genctl.io.sessions import open_session
from genctl.params import Generation, knobs
from genctl.tree.token_tree import KINDS, SCHEMA, Change, TokenTree, TreeOpened, TreeStep

_ALLOWED = frozenset({*knobs(Generation), *LISTS})


def create(path: Path | Sink, opened: TreeOpened, changes: Iterable[Change] = ()) -> Sink:
    """A new file with these lines: at `path`, or in what `open_beside` has opened.

    Raises OutputError, if it exists or cannot be written; then nothing is left of it.
    """
    sink = path if isinstance(path, Sink) else open_beside(path)
    try:
        for change in (opened, *changes):
            append(sink, change)
        sink.put_in_place()
    except BaseException:  # a signal, too: no half of a file stays
        sink.abandon(keep=False)
        raise
    return sink


def reopen(path: Path) -> tuple[Sink, TokenTree, list[str]]:
    """The file of a tree, to be continued, the tree, and notes on settings that it may not bring along.

    Raises InputError if the file is not a tree or is damaged, OutputError if it cannot be written, UsageError if
    another process has it open.
    """
    descriptor, name = open_session(path, os.O_RDWR), printable(str(path))
    lock(descriptor, path)
    notes: list[str] = []
    try:
        with open(descriptor, "rb", closefd=False) as file:
            tree, whole = _read(_lines(file, name), name, notes)
        sink = Sink(unbuffered(descriptor), name, owned=descriptor, path=path, whole=whole)
    except BaseException:  # a signal, too: the lock goes with the descriptor
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    try:
        sink.cut_back()
    except OutputError:
        sink.leave()
        raise
    return sink, tree, notes


def append(file: Sink, change: Change) -> None:
    """Write a change as a line. Raises OutputError."""
    line = json.dumps(events.to_json(change), ensure_ascii=False)
    file.write(line.encode("utf-8", "surrogatepass") + b"\n")


def changes_of(tree: TokenTree) -> Iterator[Change]:
    """The changes after the first line that make a tree as it is now: what was undone is not among them."""
    ends = [*(before.size for before in tree.steps[1:]), len(tree.nodes)]
    settings = [*(before.settings for before in tree.steps[1:]), tree.settings]
    for before, end, own in zip(tree.steps, ends, settings, strict=False):  # without steps there is one end
        yield before.at
        yield TreeStep(before.line, tree.runs, own)
        yield from tree.nodes[before.size : end]
    yield tree.at


def read_tree(path: Path) -> TokenTree:
    """The tree in a file, to look at: another process may be writing it. Raises InputError."""
    name = printable(str(path))
    with os.fdopen(open_session(path, os.O_RDONLY), "rb") as file:
        return _read(_lines(file, name), name, [])[0]


def tree_of_lines(lines: Iterable[bytes], name: str) -> TokenTree:
    """The tree of the lines of a file, `name` in messages. Raises InputError."""
    return _read(itertools.takewhile(lambda line: line.endswith(b"\n"), lines), name, [])[0]


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The whole lines; what follows the last line end is left out. Raises InputError."""
    try:
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), reader.lines(file))
    except Unreadable as error:
        raise InputError(f"cannot read {name}: {error}") from None


def _read(lines: Iterator[bytes] | Iterable[bytes], name: str, notes: list[str]) -> tuple[TokenTree, int]:
    """The tree of the whole lines, and their bytes. `notes` receives what `allowed` leaves out."""
    lines = iter(lines)
    first = next(lines, b"")
    tree, whole = TokenTree(_opened(first, name, notes)), len(first)
    for number, line in enumerate(lines, 2):
        try:
            change = events.from_json(_object(line), KINDS)
            if isinstance(change, TreeStep) and change.settings is not None:
                change = replace(change, settings=allowed(change.settings, notes))
            tree.apply(change)
        except (InputError, ValueError) as error:
            raise InputError(
                f"{name} is damaged at line {number}: {error}",
                hint="the lines before it are whole: a copy that ends there can be opened",
            ) from None
        whole += len(line)
    return tree, whole


def _opened(line: bytes, name: str, notes: list[str]) -> TreeOpened:
    """The first line of a file. Raises InputError."""
    if not line:
        raise InputError(f"{name} is not the file of a tree: it has no whole line")
    try:
        data = _object(line)
        schema = data.get("schema")
        if not str(schema).startswith("genctl-tree/"):
            raise InputError(f"{name} is not the file of a tree", hint="genctl explore --save writes one")
        if schema != SCHEMA:
            other = f"{name} has the format {schema!r:.40} of another version of genctl"
            raise InputError(other, hint=f"this version reads {SCHEMA}")
        opened: TreeOpened = events.from_json(data, KINDS)
    except ValueError as error:
        if line.startswith(b'{"event": "treeopened"'):
            raise InputError(f"{name} is damaged at line 1: {error}") from None
        raise InputError(f"{name} is not the file of a tree", hint="genctl explore --save writes one") from None
    return replace(
        opened, layers=tuple({**layer, "values": allowed(layer["values"], notes)} for layer in opened.layers)
    )


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError."""
    found = reader.loads(line.decode("utf-8", "surrogatepass"))  # a file name in it may be no UTF-8
    if not isinstance(found, dict):
        raise reader.BadJson("a change is a JSON object, this is not")
    return found


# -- settings: a tree holds those of generation, and names neither files nor code nor other checkpoints ----------------


def saved_layers(layers: Iterable[Layer]) -> tuple[dict[str, Any], ...]:
    """Layers as `TreeOpened` has them: the settings of generation."""
    saved = []
    for layer in layers:
        values = {key: value for key, value in layer.values.items() if key in knobs(Generation) or key in LISTS}
        if values:
            saved.append({"origin": layer.origin, "kind": layer.kind, "typed": layer.typed, "values": values})
    return tuple(saved)


def layers_of(opened: TreeOpened) -> list[Layer]:
    """The settings that a tree began with."""
    return [Layer(each["origin"], each["values"], declared=each["kind"], typed=each["typed"]) for each in opened.layers]


def allowed(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The settings of a file without those that it may not bring along, each of which is a note."""
    held = {}
    for key, value in values.items():
        if why := objection(key, value, _ALLOWED):
            note = f"the tree's {printable(key)} = {shown(value)} is not used: it {why}"
            notes += [note] if note not in notes else []
        else:
            held[key] = value
    return held
