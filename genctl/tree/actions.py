"""The commands that write no token: undo and settings, and those that only look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from genctl.config import presets
from genctl.config.check import shown
from genctl.config.listed_knobs import processors_of
from genctl.errors import PresetError, UsageError
from genctl.params import Generation
from genctl.tree import saved
from genctl.tree.distribution import Distribution
from genctl.tree.explorer import Explorer
from genctl.tree.results import Alternative, BranchText, Saved, Settings, Shown, Why
from genctl.tree.token_tree import At, StepUndone

FOUND = 20  # tokens that `find` lists


def undo(explorer: Explorer) -> Iterator[At]:
    """Take back the last step."""
    note = "" if explorer.tree.steps else "nothing is left to undo"
    if not note:
        explorer.change(StepUndone())
        explorer.forget()
    yield replace(explorer.tree.at, note=note)


def set_knob(explorer: Explorer, key: str, value: Any) -> Iterator[Settings]:
    """A setting of what follows."""
    yield _set(explorer, {**explorer.tree.settings, key: value})


def preset(explorer: Explorer, name: str) -> Iterator[Settings]:
    """The settings of a preset, and no others."""
    values: dict[str, Any] = {}
    for layer in presets.load([name]):
        for error in layer.broken:
            raise error
        values |= layer.values
    values.pop("about", None)
    yield _set(explorer, values)


def _set(explorer: Explorer, values: dict[str, Any]) -> Settings:
    before = explorer.resolved()
    try:
        resolved = explorer.resolved(values)
    except PresetError as error:
        raise UsageError(error.message, hint=error.hint) from None
    explorer.session.plan(resolved)
    explorer.begin_step(settings=values)
    return Settings(values, _drawing(before.generation, resolved.generation))


def _drawing(before: Generation, after: Generation) -> tuple[str, ...]:
    """What to say where other settings begin to draw tokens, with the knobs that act, or no longer draw."""
    if before.draws == after.draws:
        return ()
    if not after.draws:
        return ("sampling is off",)
    rows = processors_of(after, healed=False)
    names = dict.fromkeys(["temperature", *(row.knobs[0] for row in rows if row.sampling)])
    values = ", ".join(f"{name} = {shown(getattr(after, name))}" for name in names)
    return (f"sampling is on: {values}",)


def show(explorer: Explorer, n: int) -> Iterator[Shown]:
    """The n most probable tokens at the cursor."""
    found = explorer.distribution(explorer.tree.cursor)
    yield _shown(explorer, found, found.top(n), found.mass(n))


def find(explorer: Explorer, text: str) -> Iterator[Shown]:
    """The tokens at the cursor that have this text, FOUND at most."""
    found = explorer.distribution(explorer.tree.cursor)
    listed = list(islice(found.containing(text), FOUND))
    yield _shown(explorer, found, listed, float(sum(each.probability for each in listed)))


def _shown(explorer: Explorer, found: Distribution, listed: Sequence[Alternative], mass: float) -> Shown:
    """Tokens of a distribution, each with the node where the tree has it."""
    placed = (replace(each, node=explorer.tree.child(found.node, each.id)) for each in listed)
    return Shown(found.node, found.entropy, mass, tuple(placed), found.effects, found.after_eos)


def why(explorer: Explorer) -> Iterator[Why]:
    """What each processor did to the token under the cursor; at the end of a branch, to the most probable one."""
    distribution, under = explorer.distribution(explorer.tree.cursor), explorer.tree.under()
    id = distribution.at(1).id if under is None else explorer.tree.nodes[under].id
    yield Why(distribution.of(id), distribution.why(id), distribution.after_eos)


def text(explorer: Explorer) -> Iterator[BranchText]:
    """The text of the branch."""
    tip = explorer.tree.tip
    yield BranchText(tip, explorer.text(tip), explorer.tree.opened.prompt)


def save(explorer: Explorer, name: str) -> Iterator[Saved]:
    """Save the tree in a new file, without what was undone; what follows goes there. Raises OutputError."""
    if name == "-":
        raise UsageError("a tree is a file that is read again; give it a name")
    file = saved.create(Path(name), explorer.tree.opened, saved.changes_of(explorer.tree))
    explorer.close()
    explorer.file = file
    yield Saved(name)
