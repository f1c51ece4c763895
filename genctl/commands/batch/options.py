"""`genctl batch`: write the requests of OpenAI's batch interface, and read their results."""
# ruff: noqa: RUF009 — `option` returns a dataclass field, which is what a dataclass default may be

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import typer

from genctl import params
from genctl.cli.help import SETTINGS, CommandGroup
from genctl.cli.table import Color, Command, CommandOptions, given, needless_force
from genctl.commands.options import CHOOSING, IN_OUT, PICTURES, SHOWN, PresetOptions
from genctl.io.writers import Format

# Knobs that a request cannot say: where and how a checkpoint runs, and what only a process here can bound.
LOCAL = frozenset(
    name for name, item in params.knobs(params.Runtime).items() if item.metadata["group"] == params.MODEL
) - {"model"} | {"batch_size", "row_timeout", "prompt_cache", "truncate"}


@dataclass(frozen=True)
class ExportOptions(PresetOptions):
    """The command line of `genctl batch export`."""

    kind: Literal["openai", "vllm", "sglang"] = IN_OUT.option(
        "whose fields a request may have (default: openai)", default="openai"
    )
    top_logprobs: int | None = SHOWN.option("ask for log-probabilities, with K alternatives", "K", least=0)
    verbose: bool = False
    quiet: bool = False
    color: Color = "auto"
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False


@dataclass(frozen=True)
class ImportOptions(CommandOptions):
    """The command line of `genctl batch import`."""

    input: tuple[str, ...] = IN_OUT.repeated("a file of results or of errors; repeatable", "FILE", "--input", "-i")
    requests: str | None = IN_OUT.option("the exported file: its order, prompts and seeds", "FILE")
    rows: str | None = IN_OUT.option("the rows that were exported: their columns", "FILE")
    output: str | None = IN_OUT.option("write records to a file", "FILE", "--output", "-o")
    format: Format | None = IN_OUT.option("default: by the name of --output, else jsonl")
    force: bool = IN_OUT.switch("replace an existing --output file")


EXPORT = Command(
    "export",
    ExportOptions,
    "genctl.commands.batch.jobs:ExportJob",
    """Each row becomes a request for /v1/completions, or with --chat, --system or messages for
    /v1/chat/completions. The id of the row is its custom_id. A setting that no request can say is refused.""",
    (
        "genctl batch export -m NAME --chat -i a.jsonl -o b.jsonl",
        "genctl batch export -m NAME --kind vllm -i prompts.txt",
    ),
    {
        "Model and text": ("model", "max_new_tokens", "num_return_sequences", "chat", "stop_strings"),
        "How tokens are chosen": CHOOSING,
        IN_OUT: ("input", "template", "output", "kind"),
        "Settings": ("presets", "set"),
    },
    (needless_force("output", also=PICTURES),),
    without=LOCAL,
)
IMPORT = Command(
    "import",
    ImportOptions,
    "genctl.commands.batch.jobs:import_results",
    """The records are those of genctl run, with "backend": "openai:batch" and "exact": false. A request that failed,
    or that has no result, becomes an error record, and the exit status is 1. Without --requests the records have no
    prompt and no seed, which the results do not hold, and without --rows no columns.""",
    (
        "genctl batch import -i results.jsonl --requests b.jsonl",
        "genctl batch import -i results.jsonl -i errors.jsonl --rows a.jsonl",
    ),
    conflicts=(
        (given(input=[()]), "genctl batch import reads results: give them with --input FILE"),
        needless_force("output"),
    ),
    knobs=(),
    input="result",
)
TABLES: dict[str, tuple[Command, str]] = {
    "export": (EXPORT, "Write prompts as requests in OpenAI's batch format."),
    "import": (IMPORT, "Read the results of a batch as records."),
}


class BatchGroup(CommandGroup):
    """The commands of `genctl batch`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the help."""
        return list(TABLES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, or None."""
        if cmd_name not in TABLES:
            return None
        table, summary = TABLES[cmd_name]
        epilog: Sequence[str] | str = import_module("genctl.cli.app").EPILOG
        return table.build(str(epilog), summary)


app = typer.Typer(
    cls=BatchGroup,
    help="Write and read the batch files of OpenAI's interface.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
)


@app.callback()
def batch() -> None:
    """Write and read the batch files of OpenAI's interface."""
