"""The file of a tree (`genctl.io.sessions`): one line per change.

`events_of` converts a tree to the events of one search.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from genctl import events
from genctl.config.check import shown
from genctl.config.layers import Layer
from genctl.config.listed_knobs import LISTS
from genctl.config.settings import SavedLayer, objections
from genctl.errors import InputError, printable
from genctl.events import Began, Ended, Event, Finished, Hypothesis, Row, Stepped, Token
from genctl.io.sessions import continue_session, damaged, decoded
from genctl.io.sink import Sink
from genctl.params import Generation, knobs
from genctl.tree.token_tree import KINDS, ROOT, SCHEMA, Change, TokenTree, TreeOpened, TreeStep

ALLOWED = frozenset({*knobs(Generation), *LISTS})


def reopen(path: Path, note: Callable[[str], object]) -> tuple[TokenTree, Sink]:
    """The tree in a file, and the file opened to continue it. `note` is called for each setting that is dropped.

    Raises InputError if the file is not a tree or is damaged, and as `continue_session` does.
    """
    notes: list[str] = []
    tree, sink, _ = continue_session(path, lambda lines: tree_of_lines(lines, printable(str(path)), notes))
    for each in notes:
        note(each)
    return tree, sink


def changes_of(tree: TokenTree) -> Iterator[Change]:
    """The changes after the first line that rebuild the tree as it is now, without undone steps."""
    ends = [*(before.size for before in tree.steps[1:]), len(tree.nodes)]
    settings = [*(before.settings for before in tree.steps[1:]), tree.settings]
    for before, end, own in zip(tree.steps, ends, settings, strict=False):
        yield before.at
        yield TreeStep(before.line, tree.runs, own)
        yield from tree.nodes[before.size : end]
    if tree.steps:  # else only the root exists
        yield tree.at


def tree_of_lines(lines: Iterable[bytes], name: str, notes: list[str]) -> TokenTree:
    """Build the tree from the lines of a file, `name` in messages. `notes` gets an entry per dropped setting.

    Raises InputError.
    """
    whole = itertools.takewhile(lambda line: line.endswith(b"\n"), lines)
    tree = TokenTree(_opened(next(whole, b""), name, notes))
    for number, line in enumerate(whole, 2):
        try:
            change = events.from_json(decoded(line), KINDS)
            if isinstance(change, TreeStep) and change.settings is not None:
                change = replace(change, settings=allowed(change.settings, notes))
            tree.apply(change)
        except (InputError, ValueError) as error:
            raise damaged(name, number, error) from None
    return tree


def _opened(line: bytes, name: str, notes: list[str]) -> TreeOpened:
    """Parse the first line of a file. Raises InputError."""
    try:
        data = decoded(line)
    except ValueError:
        data = {}
    schema = data.get("schema")
    if not str(schema).startswith("genctl-tree/"):
        raise InputError(f"{name} is not the file of a tree", hint="genctl explore --save writes one")
    if schema != SCHEMA:
        other = f"{name} has the format {schema!r:.40} of another version of genctl"
        raise InputError(other, hint=f"this version reads {SCHEMA}")
    try:
        opened: TreeOpened = events.from_json(data, KINDS)
    except ValueError as error:
        raise InputError(f"{name} is damaged at line 1: {error}") from None
    layers = [SavedLayer(**{**layer, "values": allowed(layer["values"], notes)}) for layer in opened.layers]
    return replace(opened, layers=tuple(layers))


def layers_of(opened: TreeOpened) -> list[Layer]:
    """The settings that a tree began with."""
    return [Layer(each["origin"], each["values"], declared=each["kind"], typed=each["typed"]) for each in opened.layers]


def allowed(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The settings that a file is allowed to set; each other one is dropped with a note.

    A tree may hold generation settings, but name no files, no code and no other checkpoints.
    """
    refused = objections(values, ALLOWED)
    for key, why in refused.items():
        note = f"the tree's {printable(key)} = {shown(values[key])} is not used: it {why}"
        notes += [note] if note not in notes else []
    return {key: value for key, value in values.items() if key not in refused}


# -- a tree as the events of one search --------------------------------------------------------------------------------

LANE = "0"


def events_of(tree: TokenTree) -> Iterator[Event]:
    """The events by which viewers of recorded runs show a tree: a step for each depth, a result for each leaf.

    The current branch comes first; the other results are sorted by log-probability.
    """
    opened = tree.opened
    yield Began(LANE, opened.prompt, "explore", opened.model, None, {"length_penalty": 0.0}, 1, shown=opened.shown)
    leaves = sorted(set(tree.leaves) - {ROOT}, key=lambda leaf: (leaf != tree.tip, -tree.joints[leaf], leaf))
    results: dict[int, Hypothesis] = {}
    for leaf in leaves:
        nodes, joint = [tree.nodes[each] for each in tree.path(leaf)], tree.joints[leaf]
        ids, text = tuple(node.id for node in nodes), "".join(node.text for node in nodes)
        results[leaf] = Hypothesis(ids, joint, joint, "stop", joint, None, "end of the branch", text)
    level, step = [ROOT], 0
    while level:
        rows: list[tuple[int, Row]] = []
        ended: list[Ended] = []
        for place, parent in enumerate(level):
            for child in tree.children(parent):
                node, joint = tree.nodes[child], tree.joints[child]
                token = Token(node.id, node.logprob, node.text, node.rank, node.entropy)
                if child in results:
                    ended.append(Ended(LANE, place, (token,), results[child]))
                else:
                    rows.append((child, Row(LANE, place, (token,), joint, joint)))
        level = [child for child, _ in rows]
        if rows or ended:
            yield Stepped(LANE, step, tuple(row for _, row in rows), tuple(ended))
        step += 1
    yield Finished(LANE, tuple(results.values()), len(opened.prompt_ids))
