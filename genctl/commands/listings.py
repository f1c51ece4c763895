"""`genctl models` lists the checkpoints on this machine; `genctl presets` lists presets, shows one, checks files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.padding import Padding
from rich.text import Text

from genctl.commands import values
from genctl.commands.help import SETTINGS, CommandGroup, TableCommand
from genctl.commands.options import COLOR
from genctl.commands.table import Color, Command, CommandOptions, option, switch
from genctl.commands.values import Reader, reader_of
from genctl.config import presets
from genctl.config.layers import resolve
from genctl.config.toml import decode, printable, read_bytes
from genctl.errors import Exit, PresetError, hide_secrets, size, without_secrets

if TYPE_CHECKING:
    from rich.console import Console


COLUMNS = ("name", "architecture", "bytes", "dtype", "runtime", "context", "why_not_native", "path", "error")

if TYPE_CHECKING:
    from genctl.models.resolve import ListedModel


@dataclass(frozen=True)
class ModelsOptions(CommandOptions):
    """The command line of `genctl models`."""

    format: Literal["text", "json", "jsonl", "tsv"] = option(
        "how the list is written (default: text)", "text|json|jsonl|tsv", default="text"
    )
    verbose: bool = switch("say why a checkpoint does not run natively, and where it is", "--verbose", "-v")
    color: Color = COLOR


MODELS = Command(
    "models",
    ModelsOptions,
    "genctl.commands.listings:perform",
    """Each with its architecture, size on disk, dtype, runtime (native, or transformers) and context length in
    tokens. A damaged one is listed with the reason. The network is not used, and no weights are read.""",
    ("genctl models", "genctl models -v", "genctl models --format jsonl"),
    knobs=(),
)


def perform(options: ModelsOptions) -> int:
    """Write the list. Returns the exit status."""
    import json

    from genctl.errors import printable
    from genctl.io.writers import escaped, tsv_cell
    from genctl.models.resolve import available
    from genctl.terminal.console import make_consoles

    out = make_consoles(options.color)[0]
    models = list(available())
    records = [model.record() for model in models]
    if options.format == "json":
        out.file.write(escaped(json.dumps(records, indent=2, ensure_ascii=False)) + "\n")
    elif options.format == "jsonl":
        out.file.write("".join(escaped(json.dumps(record, ensure_ascii=False)) + "\n" for record in records))
    elif options.format == "tsv":
        lines = [COLUMNS, *([tsv_cell(record[name]) for name in COLUMNS] for record in records)]
        out.file.write("".join("\t".join(line) + "\n" for line in lines))
    elif out.is_terminal:
        for model in models:
            facts = [cell for cell in _cells(model)[1:] if cell != "-"]
            if model.context is not None:
                facts[-1] += " tokens"
            below = [Text(" · ".join(facts)), *(Text(line, "dim") for line in _details(model, options.verbose))]
            out.print(Text(printable(model.name), "bold", overflow="fold"))
            for text in filter(None, below):
                out.print(Padding(Text(printable(text.plain), text.style, overflow="fold"), (0, 0, 0, 2), expand=False))
    else:
        rows = ([*_cells(model), *_details(model, options.verbose)] for model in models)
        out.file.write("".join("\t".join(map(tsv_cell, row)) + "\n" for row in rows))
    return int(Exit.DONE)


def _cells(model: ListedModel) -> list[str]:
    weights = "-" if model.bytes is None else size(model.bytes)
    context = "-" if model.context is None else str(model.context)
    return [model.name, model.architecture or "-", weights, model.dtype or "-", model.runtime or "-", context]


def _details(model: ListedModel, verbose: bool) -> list[str]:
    """The lines below a model."""
    lines = [] if model.error is None else [f"damaged: {model.error}"]
    if verbose and model.why_not_native is not None:
        lines.append(f"not native: {model.why_not_native}")
    return [*lines, model.path] if verbose else lines


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
    typer.Argument(metavar="NAME", help="a preset, by name or path", show_default=False, autocompletion=values.presets),
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
