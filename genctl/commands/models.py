"""`genctl models`: list the checkpoints that are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from genctl.commands.options import COLOR
from genctl.commands.table import Color, Command, CommandOptions, option, switch
from genctl.errors import Exit, size

COLUMNS = ("name", "architecture", "bytes", "dtype", "runtime", "context", "why_not_native", "path", "error")
HEADS = ("model", "architecture", "size", "dtype", "runtime", "context")
NUMBERS = ("size", "context")  # columns to the right

if TYPE_CHECKING:
    from genctl.models.listing import ListedModel


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
    "genctl.commands.models:perform",
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
    from genctl.models.listing import available
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
        facts = [[printable(cell) for cell in _cells(model)] for model in models]
        beneath = [[printable(line) for line in _details(model, verbose=options.verbose)] for model in models]
        _print_models(facts, beneath, out)
    else:
        rows = ([*_cells(model), *_details(model, verbose=options.verbose)] for model in models)
        out.file.write("".join("\t".join(map(tsv_cell, row)) + "\n" for row in rows))
    return int(Exit.DONE)


def _print_models(rows: Sequence[Sequence[str]], beneath: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table where it fits, else each name with its facts under it; `beneath` has more lines for each row."""

    def write(text: str, style: str = "", indent: int = 0) -> None:
        for part in Text(text, style).wrap(console, console.width - indent, overflow="fold"):
            console.print(Text(" " * indent) + part)

    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    fits = sum(widths) + 2 * (len(widths) - 1) <= console.width
    for cells, details in zip([HEADS, *rows] if fits else rows, [[], *beneath] if fits else beneath, strict=True):
        if fits:
            columns = zip(HEADS, cells, widths, strict=True)
            padded = [cell.rjust(width) if head in NUMBERS else cell.ljust(width) for head, cell, width in columns]
            write("  ".join(padded).rstrip(), "dim" if cells is HEADS else "")
        else:
            write(cells[0], "bold")
            units = ("", "", "", "", " tokens")
            facts = [f"{cell}{unit}" for cell, unit in zip(cells[1:], units, strict=True) if cell != "-"]
            if facts:
                write(" · ".join(facts), indent=2)
        for detail in details:
            write(detail, "dim", indent=2)


def _cells(model: ListedModel) -> list[str]:
    weights = "-" if model.bytes is None else size(model.bytes)
    context = "-" if model.context is None else str(model.context)
    return [model.name, model.architecture or "-", weights, model.dtype or "-", model.runtime or "-", context]


def _details(model: ListedModel, *, verbose: bool) -> list[str]:
    """What is to be said beneath a model."""
    lines = [] if model.error is None else [f"damaged: {model.error}"]
    if verbose and model.why_not_native is not None:
        lines.append(f"not native: {model.why_not_native}")
    return [*lines, model.path] if verbose else lines
