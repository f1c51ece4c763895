"""`genctl presets`: list them, show one, check files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from genctl.commands import completion
from genctl.commands.help import SETTINGS, CommandGroup, TableCommand
from genctl.commands.table import Color
from genctl.commands.values import Reader, reader_of
from genctl.config import presets
from genctl.config.layers import resolve
from genctl.config.toml import decode, printable, read_bytes
from genctl.errors import PresetError, hide_secrets, without_secrets

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    cls=CommandGroup,
    help="List, show and check presets: TOML files that hold any setting.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="a preset, by name or path", show_default=False, autocompletion=completion.presets
    ),
]
Format = Literal["text", "json"]
Listing = Annotated[Format, typer.Option("--format", help="how the list is written")]
Colored = Annotated[Color, typer.Option("--color", help="auto decides for each stream")]


class PresetCommand(TableCommand):
    """A command about presets."""

    readers: Mapping[str, Reader] = {"format": reader_of(Format), "color": reader_of(Color)}


def _out(color: Any) -> Console:
    from genctl.terminal.console import make_consoles

    return make_consoles(color)[0]


@app.command("list", cls=PresetCommand)
def list_presets(format: Listing = "text", color: Colored = "auto") -> None:
    """List every preset with its purpose. A broken one is listed with its mistake."""
    import json

    from rich.table import Table
    from rich.text import Text

    entries: list[dict[str, str]] = []
    for item in presets.available():
        entry = {"name": item.name, "where": item.where, "path": str(item.path)}
        try:
            entry["about"] = presets.about(item.path)
        except PresetError as error:
            entry["error"] = error.message.splitlines()[0]
        entries.append(hide_secrets(entry))
    out = _out(color)
    if format == "json":
        out.file.write(json.dumps(entries, indent=2) + "\n")
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for entry in entries:
        about = printable(f"broken: {entry['error']}" if "error" in entry else entry["about"])
        if out.is_terminal:
            yours = "" if entry["where"] == "shipped" else " (yours)"
            table.add_row(Text(entry["name"]), Text(about).append(yours, style="dim"))
        else:
            out.file.write("\t".join((entry["name"], entry["where"], about)) + "\n")
    if out.is_terminal:
        out.print(table)


@app.command(cls=PresetCommand)
def show(
    name: Name,
    raw: Annotated[bool, typer.Option("--raw", help="show the file as it is, without what it extends")] = False,
    color: Colored = "auto",
) -> None:
    """Show what a preset sets, with what it extends, as TOML; comments give the origin of each value.

    Passwords in addresses are hidden.
    """
    from genctl.config.settings import to_toml

    if not raw:
        resolved = resolve(presets.load([name]))
        _out(color).file.write(to_toml(resolved, defaults=False))
        return
    path = presets.find(name)
    text = without_secrets(decode(read_bytes(path), presets.short(path)))
    out = _out(color)
    if out.is_terminal:  # control characters in a file must not reach the terminal
        text = "".join(mark if mark in "\n\t" else printable(mark) for mark in text)
    out.file.write(text)


@app.command(cls=PresetCommand)
def check(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="presets, by path or name", show_default=False)],
    color: Colored = "auto",
) -> None:
    """Check presets, with what they extend. Prints every mistake of every file; exit status 2 if there is one."""
    mistakes: dict[str, None] = {}
    hints: dict[str, None] = {}
    right: list[str] = []
    for name in files:
        try:
            resolve(presets.load([name]))
        except PresetError as error:
            mistakes |= dict.fromkeys(error.message.splitlines())
            hints |= dict.fromkeys([error.hint] if error.hint else [])
        else:
            right.append(f"ok: {printable(name)}\n")
    _out(color).file.write("".join(right))
    if mistakes:
        raise PresetError("\n".join(mistakes), hint="; ".join(hints))


@app.command("path", cls=PresetCommand)
def path_of(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a preset", show_default=False)] = None,
    color: Colored = "auto",
) -> None:
    """Print the folders of presets, in order; with NAME, its file."""
    out = _out(color)
    if name is None:
        out.file.write("".join(f"{where}\t{printable(str(path), 4096)}\n" for where, path in presets.folders().items()))
        return
    path: Path = presets.find(name)
    read_bytes(path)
    out.file.write(f"{printable(str(path.absolute()), 4096)}\n")
