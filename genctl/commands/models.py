"""`genctl models`: list the checkpoints that are at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.padding import Padding
from rich.text import Text

from genctl.commands.options import COLOR
from genctl.commands.table import Color, Command, CommandOptions, option, switch
from genctl.errors import Exit, size

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
    """What is to be said beneath a model."""
    lines = [] if model.error is None else [f"damaged: {model.error}"]
    if verbose and model.why_not_native is not None:
        lines.append(f"not native: {model.why_not_native}")
    return [*lines, model.path] if verbose else lines
