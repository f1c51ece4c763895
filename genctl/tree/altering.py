"""The commands that write no token: undo and redo, settings, bookmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from genctl.config import presets
from genctl.config.check import shown
from genctl.config.listed_knobs import processors_of
from genctl.config.presets import is_path
from genctl.errors import InputError, PresetError, UsageError
from genctl.params import Generation
from genctl.tree.changes import Redone, Undone
from genctl.tree.results import At, Bookmarked, Settings

if TYPE_CHECKING:
    from genctl.tree.explorer import Explorer


def undo(explorer: Explorer) -> Iterator[At]:
    """Take back the last step."""
    yield _back(explorer, Undone(), bool(explorer.tree.steps), "nothing is left to undo")


def redo(explorer: Explorer) -> Iterator[At]:
    """Do it again."""
    yield _back(explorer, Redone(), bool(explorer.tree.undone), "nothing is left to redo")


def _back(explorer: Explorer, change: Undone | Redone, possible: bool, note: str) -> At:
    if possible:
        explorer.space.change(change)
    return explorer.here("" if possible else note)


def set_knob(explorer: Explorer, key: str, value: Any) -> Iterator[Settings]:
    """A setting of what follows."""
    _name(explorer, {key: value})
    yield _settle(explorer, {**explorer.tree.knobs, key: value})


def preset(explorer: Explorer, name: str) -> Iterator[Settings]:
    """The settings of a preset, and no others."""
    if not explorer.typed and explorer.space.file.found == "unnamed" and is_path(name):
        raise InputError(
            f"the tree was cut short in {explorer.line!r:.80}: a file does not choose which files are read"
        )
    values = preset_values(name)
    _name(explorer, values)
    yield _settle(explorer, values)


def reset(explorer: Explorer) -> Iterator[Settings]:
    """The settings that the tree began with."""
    yield _settle(explorer, {})


def _name(explorer: Explorer, values: dict[str, Any]) -> None:
    if explorer.typed:
        explorer.space.file.name(values)


def _settle(explorer: Explorer, values: dict[str, Any]) -> Settings:
    space = explorer.space
    try:
        resolved = space.overlaid(values)
    except PresetError as error:
        raise UsageError(error.message, hint=error.hint) from None
    space.session.plan(resolved)
    notes = _drawing(space.resolved().generation, resolved.generation)
    with space.step(explorer.line):
        space.settle(settings=space.entry(values))
    return Settings(values, notes)


def preset_values(name: str) -> dict[str, Any]:
    """The knobs of a preset. Raises PresetError."""
    values: dict[str, Any] = {}
    for layer in presets.load([name]):
        for error in layer.broken:
            raise error
        values |= layer.values
    values.pop("about", None)
    return values


def _drawing(before: Generation, after: Generation) -> tuple[str, ...]:
    """What to say where other settings begin to draw tokens, with the knobs that act, or no longer draw."""
    if before.draws == after.draws:
        return ()
    if not after.draws:
        return ("sampling is off",)
    names = dict.fromkeys(
        ["temperature", *(row.knobs[0] for row in processors_of(after, healed=False) if row.sampling)]
    )
    values = ", ".join(f"{name} = {shown(getattr(after, name))}" for name in names)
    return (f"sampling is on: {values}",)


def bookmark(explorer: Explorer, name: str) -> Iterator[Bookmarked]:
    """Name the node at the cursor; without a name, one is made."""
    node, marks = explorer.tree.cursor, explorer.tree.bookmarks
    name = name or next(f"m{number}" for number in range(1, len(marks) + 2) if f"m{number}" not in marks)
    with explorer.space.step(explorer.line):
        explorer.space.settle(bookmarks={**marks, name: node})
    yield Bookmarked(name, node)
