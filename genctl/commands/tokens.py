"""`genctl tokens`: the ids and pieces of texts, from a checkpoint's tokenizer. No weights are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from genctl import params
from genctl.commands.help import ALSO
from genctl.commands.job import settings_of, started, usable
from genctl.commands.options import FORMAT, IN_OUT, SETTINGS, PresetOptions
from genctl.commands.table import Command, Conflict, OptionGroup, argument, given, needless_force
from genctl.config import conflicts
from genctl.config.layers import Resolved
from genctl.errors import InputError, UsageError, count, quote
from genctl.io import jsonl, writers
from genctl.io.record_output import RecordOutput
from genctl.io.records import SCHEMA
from genctl.io.rows import InputRow, RefusedRow
from genctl.terminal import theme, widgets
from genctl.terminal.console import make_consoles

if TYPE_CHECKING:
    from rich.console import Console

    from genctl.io.readers import Prompts
    from genctl.models.tokenizer_alone import TokenPiece, TokenReader, TokenReading

MODEL, SHOWN = OptionGroup("Model"), OptionGroup("What is shown")
KNOBS = frozenset({"revision", "chat", "system", *conflicts.CHAT_KNOBS})
COUNTS, TEXTS = ("id", "model", "tokens", "error"), ("id", "model", "text", "error")
COLUMNS = ("id", "model", "position", "token_id", "text", "bytes", "special", "error")


@dataclass(frozen=True)
class TokensOptions(PresetOptions):
    """The command line of `genctl tokens`."""

    arguments: tuple[str, ...] = argument("texts, or the ids of one with --decode; - is standard input", "TEXT")
    model: tuple[str, ...] = MODEL.repeated(
        "builtin:NAME, a folder, a GGUF file, or a cached Hub id; repeat to compare",
        "MODEL",
        "--model",
        "-m",
    )
    decode: bool = SHOWN.switch("turn ids into text")
    count: bool = SHOWN.switch("print only the number of tokens")
    format: writers.Format = FORMAT
    force: bool = IN_OUT.switch("replace an existing --output file")
    set: tuple[str, ...] = SETTINGS.repeated("any setting, as TOML or JSON", "KEY=VALUE")
    # options of other commands with prompts, which a tokenizer does not use
    report: str | None = None
    strategy: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False

    def __post_init__(self) -> None:
        """The arguments of --decode are one sequence of ids."""
        super().__post_init__()
        if self.decode and self.arguments:
            object.__setattr__(self, "arguments", (" ".join(self.arguments),))

    def prompts(self, report: Callable[[str], object], **how: Any) -> Prompts | None:
        """The texts or ids of the command line; None if there are none."""
        return super().prompts(report, **{**how, **({"shape": IDS} if self.decode else {})})


CONFLICTS: tuple[Conflict, ...] = (
    needless_force("output"),
    (given("decode", "count"), "--count counts the tokens of texts, and --decode reads ids"),
    (given("decode", "template"), "--template makes prompts of texts, and --decode reads ids"),
    (lambda options: options.decode and options.model[1:], "--decode: ids are those of one --model"),
)
TOKENS = Command(
    "tokens",
    TokensOptions,
    "genctl.commands.tokens:tokens",
    """Spaces are shown as ·, control characters as escapes, and parts of a character as bytes. Special tokens are
    marked: `added` by the tokenizer, `written` in the text or by the chat template, or `unknown`. A pipe gets a line
    per token: id, text, and bytes or mark, separated by tabs. --format jsonl has unescaped texts.

    Notes warn about a doubled or missing BOS, special tokens in a text, and a trailing space that would belong to the
    next token. With --chat, and for rows with messages, the chat template is applied.

    --decode turns ids into text: all arguments are one sequence, each line of a file is one, and JSONL rows have
    token_ids or prompt_ids. No weights are read. Hub ids are looked up in the cache.""",
    (
        'genctl tokens -m gpt2 -m Qwen/Qwen3-0.6B "naïve 🦊"',
        'genctl tokens --chat -m Qwen/Qwen3-0.6B "Hello"',
        "genctl tokens --decode 57 60 7",
    ),
    {
        "Model": ("model", "chat", "system"),
        SHOWN: ("decode", "count"),
        IN_OUT: ("input", "input_format", "output", "format"),
        ALSO: ("presets", "set", "revision", "quiet", "verbose"),
    },
    CONFLICTS,
    knobs=(params.Runtime,),
    without=frozenset(params.knobs(params.Runtime)) - KNOBS,
    input="text",
)


def _ids(own: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """The ids of a row for --decode: its token_ids, the key in our records, or prompt_ids. Raises RefusedRow."""
    key = next((key for key in IDS.prompts if key in own), "")
    if not key:
        raise RefusedRow("no token_ids")
    return jsonl.ROW.fields({"prompt_ids": own[key]}, ())


IDS = jsonl.RowShape(
    (*jsonl.KNOWN, "token_ids"), ("token_ids", "prompt_ids"), _ids, nested=frozenset(("token_ids", "prompt_ids"))
)


def ids_of(words: str) -> tuple[int, ...]:
    """The ids in a text, separated by spaces or commas, with or without brackets. Raises InputError."""
    found = [word for word in re.split(r"[\s,]+", words.strip().removeprefix("[").removesuffix("]")) if word]
    wrong = next((word for word in found if not re.fullmatch("[0-9]{1,10}", word)), None)
    if wrong is not None or not found:
        raise InputError(f"{quote(wrong or words)} is no token id, and --decode reads ids")
    return tuple(map(int, found))


def tokens(options: TokensOptions) -> int | None:
    """`genctl tokens`."""
    from genctl.models.chat import check_template
    from genctl.models.tokenizer_alone import TokenReader

    with started(options, row="text") as job:
        out, _ = make_consoles(options.color)
        _, early = job.early_settings()
        _check_settings(options, early)
        rows = job.read()
        if rows is None:
            return None
        with job.outputs() as stack:
            job.shown = options.on_screen and not options.count
            writer: writers.Writer = writers.Unclosed()
            if not job.shown:
                sink = job.sink(stack, options.output)
                if options.format == "tsv":
                    writer = writers.TsvWriter(sink, COUNTS if options.count else TEXTS if options.decode else COLUMNS)
                else:
                    escape, on_error = widgets.visible if sink.is_terminal else str, job.messages.failure
                    writer = writers.open_writer(options.format, sink, on_error=on_error, shown=escape)
            output = job.output = RecordOutput(writer)

            runtime = early.runtime
            if runtime.backend is not None:
                job.messages.note(f"backend ({early.origins['backend']}) is not used: tokens queries no server")
            readers = [TokenReader(name, runtime.revision) for name in options.model or (runtime.model,)]
            for reader in readers:
                if runtime.is_chat and not options.decode:
                    template = runtime.chat_template
                    source = check_template(reader.tokenizer, reader.name, template, tools=bool(runtime.tools))
                    unused = conflicts.unused_variables(source, runtime)
                    job.messages.note(*(f"the chat template of {reader.name} does not use {name}" for name in unused))
                if reader.found.left_to:
                    job.messages.detail(f"tokenizer of {reader.name}: {reader.found.left_to}")

            read = partial(_readings, options, readers, early)
            for row, readings in usable(rows, read, job.fail):
                for one in readings:
                    for note in one.notes:
                        job.messages.note_once(note, job.row_label(row, *([one.model] if readings[1:] else [])))
                if job.shown:
                    _show(options, out, row, readings, "" if job.single_prompt else f"text {row.name}")
                else:
                    output.put(row.index, list(_records(options, row, readings)))
            output.close(cut_short=bool(job.interrupt.status))
        return job.status()


def _check_settings(options: TokensOptions, early: Resolved) -> None:
    """Raises UsageError for flags of settings that a tokenizer does not use."""
    typed = {name for layer in options.flags for name in layer.values}
    if unused := sorted(typed - KNOBS - {"model", "backend"}):
        raise UsageError("\n".join(f"{key} ({early.origins[key]}) has no effect: nothing is written" for key in unused))
    if options.decode and typed & KNOBS - {"revision"}:
        raise UsageError("--decode reads ids, and a chat template makes prompts of texts: leave one of them out")


def _readings(
    options: TokensOptions, readers: Sequence[TokenReader], early: Resolved, row: InputRow
) -> list[TokenReading]:
    """The reading of a row by each tokenizer. Raises GenctlError."""
    runtime = settings_of(row, early).runtime
    if row.prompt_ids is not None or options.decode:
        return [reader.decode(row.prompt_ids or ids_of(row.prompt or "")) for reader in readers]
    if row.messages is None and not runtime.is_chat:
        conflicts.check_is_chat(runtime)
        return [reader.read(row.prompt or "") for reader in readers]
    messages = row.messages or ({"role": "user", "content": row.prompt or ""},)
    how = {"variables": conflicts.variables_of(runtime), "template": runtime.chat_template}
    return [reader.read_chat(messages, system=runtime.system, **how) for reader in readers]


# -- results -----------------------------------------------------------------------------------------------------------


def _records(options: TokensOptions, row: InputRow, readings: Sequence[TokenReading]) -> Iterator[dict[str, Any]]:
    """The records written for a row: its lines as one text, cells of a table, or JSON records."""
    if options.format == "text":
        yield {"text": _plain(options, row, readings)}
        return
    for one in readings:
        cells: dict[str, Any] = {"id": row.id, "model": one.model}
        if options.format != "tsv":
            record: dict[str, Any] = {"schema": SCHEMA, "id": row.id}
            if not options.count:
                record["text" if options.decode else "prompt"] = one.text
                record |= {"token_ids": one.ids, "tokens": [piece.record() for piece in one.pieces]}
            record |= {"model": one.model, "usage": {"prompt_tokens": len(one.pieces)}}
            yield {**record, "notes": list(one.notes)} if one.notes else record
        elif options.count:
            yield {**cells, "tokens": len(one.pieces)}
        elif options.decode:
            yield {**cells, "text": one.text}
        else:
            for place, piece in enumerate(one.pieces):
                token = {"token_id": piece.id, "text": piece.text, "bytes": piece.bytes.hex(" ")}
                yield {**cells, "position": place, **token, "special": piece.special}


def _plain(options: TokensOptions, row: InputRow, readings: Sequence[TokenReading]) -> str:
    """The lines of a row in a pipe, without the final line end."""
    if options.decode:
        return readings[0].text
    if options.count:
        return "\t".join(str(len(one.pieces)) for one in readings)
    lines = [""] if row.index else []
    for one in readings:
        begin = f"{one.model}\t" if readings[1:] else ""
        lines += [f"{begin}{piece.id}\t{_shown(piece)}\t{_remark(piece)}".rstrip("\t") for piece in one.pieces]
    return "\n".join(lines)


def _show(options: TokensOptions, out: Console, row: InputRow, readings: Sequence[TokenReading], heading: str) -> None:
    """Print a row on a terminal."""
    if heading:
        out.print(widgets.header(out.width, heading, "" if options.decode else row.shown))
    if options.decode:
        out.print(Text(widgets.visible(readings[0].text)))
        return
    for one in readings:
        if readings[1:]:
            out.print(Text(one.model, style=theme.HEADING))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(justify="right", style=theme.DIM, no_wrap=True)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for piece in one.pieces:
            style = theme.WINNER if piece.special else theme.CHOSEN
            table.add_row(str(piece.id), Text(_shown(piece), style=style), _remark(piece))
        out.print(table)
        counts = [count(len(one.pieces), "token"), count(len(one.text), "character")]
        out.print(Text(" · ".join(counts), style=theme.DIM))


def _shown(piece: TokenPiece) -> str:
    return widgets.token_text(piece.id, piece.text)


def _remark(piece: TokenPiece) -> str:
    """The text beside a token: its mark, or its bytes."""
    if piece.special:
        return f"special, {piece.special}"
    return piece.bytes.hex(" ") + (f" → {widgets.token_text(0, piece.completes)}" if piece.completes else "")
