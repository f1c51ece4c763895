"""`genctl batch`: write the requests of OpenAI's batch interface, and read their results."""
# ruff: noqa: RUF009 — `option` returns a dataclass field, which is what a dataclass default may be

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import typer

from genctl import params
from genctl.commands.help import SETTINGS, CommandGroup
from genctl.commands.job import Job, seed_of, start_seed
from genctl.commands.messages import Messages
from genctl.commands.options import CHOOSING, IN_OUT, SHOWN, PresetOptions
from genctl.commands.table import Color, Command, CommandOptions, given, needless_force
from genctl.config.layers import resolve
from genctl.errors import Exit, UsageError, count, quote
from genctl.io import readers, writers
from genctl.io.rows import InputRow
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
    "genctl.commands.batch:ExportJob",
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
    (needless_force("output", also=("report",)),),
    without=LOCAL,
)
IMPORT = Command(
    "import",
    ImportOptions,
    "genctl.commands.batch:import_results",
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
        epilog: Sequence[str] | str = import_module("genctl.commands.app").EPILOG
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


class ExportJob(Job[ExportOptions]):
    """Rows to requests. A row that cannot be one is said, and left out."""

    def prepare(self) -> int | None:
        """The settings, which hold for every row that does not have its own."""
        super().prepare()
        self.base = resolve(self.layers)
        if not self.base.names_model:
            raise UsageError("a request names its model: give it with --model")
        from genctl.engines.server import batch_files

        problems, note = batch_files.checked(self.base, self.options.kind)
        if problems:
            raise UsageError("\n".join(problems))
        self.messages.note(*([note] if note else []))
        self.seed = start_seed(self.base)
        return None

    def open(self, stack: ExitStack) -> None:
        """Open the output."""
        self.requests = self.sink(stack, self.options.output)
        self.columns: dict[str, None] = {}  # of the rows, beside what is sent

    def deliver(self, stack: ExitStack) -> None:
        """Write a line for each row."""
        from genctl.engines.server.batch_files import MOST

        options, written = self.options, 0
        for _, line in self.usable(self.input, self._line):
            self.requests.write(line.encode())
            written += 1
        self.requests.close()
        if self.columns:
            names = ", ".join(map(quote, itertools.islice(self.columns, 4))) + (", …" if len(self.columns) > 4 else "")
            self.messages.remark(f"a request has no place for columns ({names}): import --rows brings them back")
        if options.kind == "openai" and written > MOST:
            self.messages.remark(f"{count(written, 'request')}: OpenAI takes at most {MOST:,} in one file")

    def _line(self, row: InputRow) -> str:
        from genctl.engines.server.batch_files import request_line

        self.columns |= dict.fromkeys(row.columns)
        resolved, options = self.settings_of(row, self.base), self.options
        seed = seed_of(row, resolved, self.seed)
        request = request_line(row, resolved, seed, options.kind, options.top_logprobs)
        return f"{writers.to_json(request)}\n"


def import_results(options: ImportOptions) -> int:
    """Write the records of a batch. Returns the exit status."""
    from genctl.engines.server import batch_files

    form: Any = options.format or writers.format_of(options.output, get_args(writers.Format), "jsonl")
    messages = Messages()
    records = list(batch_files.imported(options.input, options.requests, messages.remark))
    if options.rows is not None:
        prompts = readers.open_prompts((), options.rows, sys.stdin, stdin_is_terminal=False) or ()
        batch_files.add_columns(records, {row.id: row.columns for row in prompts}, options.rows)
    sink = writers.open_output(options.output, sys.stdout, force=options.force)
    failed = 0
    with ExitStack() as stack:
        stack.callback(sink.abandon)
        writer = writers.open_writer(
            form, sink, on_error=lambda record: messages.error(record["error"]["message"], f"{record['id']}: ")
        )
        for rows in records:
            failed += any("error" in one for one in rows)
            for one in rows:
                writer.write(one)
        writer.close()
        messages.close()
    return int(Exit.ROWS_FAILED if failed else Exit.DONE)
