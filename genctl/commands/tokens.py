"""`genctl tokens`: the ids and pieces of texts, as a checkpoint's tokenizer makes them. No weights are read."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.style import Style
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
from genctl.terminal import summary, theme, widgets
from genctl.terminal.console import make_consoles

if TYPE_CHECKING:
    from genctl.io.readers import Prompts
    from genctl.models.tokenizer_alone import TokenPiece, TokenReader, TokenReading

MODEL, SHOWN = OptionGroup("Model"), OptionGroup("What is shown")
KNOBS = frozenset({"revision", "chat", "system", *conflicts.CHAT_KNOBS})
COUNTS, TEXTS = ("id", "model", "tokens", "error"), ("id", "model", "text", "error")
COLUMNS = ("id", "model", "position", "token_id", "text", "bytes", "special", "error")
WIDEST = 24  # cells of a token's text before its remark
GUTTER = {True: " │ ", False: " ≠ "}  # between two checkpoints: whether they split a text at the same places


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
    # what prompts have elsewhere, and a tokenizer has no use for
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
        """The texts of the command line, or the ids; None if there is nothing."""
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
    """Of a row of --decode: its token_ids, as records have them, or prompt_ids. Raises RefusedRow."""
    key = next((key for key in IDS.prompts if key in own), "")
    if not key:
        raise RefusedRow("no token_ids")
    return jsonl.ROW.fields({"prompt_ids": own[key]}, ())


IDS = jsonl.RowShape(
    (*jsonl.KNOWN, "token_ids"), ("token_ids", "prompt_ids"), _ids, nested=frozenset(("token_ids", "prompt_ids"))
)


def ids_of(words: str) -> tuple[int, ...]:
    """The ids in a text, between spaces or commas, in brackets or not. Raises InputError."""
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
            job.shown = options.on_screen
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

            total = [0] * len(readers)
            read = partial(_readings, options, readers, early)
            for row, readings in usable(rows, read, job.fail):
                for one in readings:
                    for note in one.notes:
                        job.messages.note_once(note, job.row_label(row, *([one.model] if readings[1:] else [])))
                total = [sum(pair) for pair in zip(total, (len(one.pieces) for one in readings), strict=True)]
                if job.shown:
                    heading = "" if job.single_prompt else f"text {row.name}"
                    for line in _lines(options, row, readings, heading, out.width):
                        out.print(line)
                else:
                    output.put(row.index, list(_records(options, row, readings)))
            output.close(cut_short=bool(job.interrupt.status))
            if job.shown and options.count and not job.single_prompt:
                out.print(Text("  ".join(f"{number:>9,}" for number in total) + "  in all", style=theme.DIM))
        return job.status()


def _check_settings(options: TokensOptions, early: Resolved) -> None:
    """Raises UsageError for flags of settings that a tokenizer has no use for."""
    typed = {name for layer in options.flags for name in layer.values}
    if unused := sorted(typed - KNOBS - {"model", "backend"}):
        raise UsageError("\n".join(f"{key} ({early.origins[key]}) has no effect: nothing is written" for key in unused))
    if options.decode and typed & KNOBS - {"revision"}:
        raise UsageError("--decode reads ids, and a chat template makes prompts of texts: leave one of them out")


def _readings(
    options: TokensOptions, readers: Sequence[TokenReader], early: Resolved, row: InputRow
) -> list[TokenReading]:
    """A row as each tokenizer reads it. Raises GenctlError."""
    runtime = settings_of(row, early).runtime
    if row.prompt_ids is not None or options.decode:
        return [reader.decode(row.prompt_ids or ids_of(row.prompt or "")) for reader in readers]
    if row.messages is None and not runtime.is_chat:
        conflicts.check_is_chat(runtime)
        return [reader.read(row.prompt or "", align=len(readers) > 1) for reader in readers]
    messages = row.messages or ({"role": "user", "content": row.prompt or ""},)
    how = {"variables": conflicts.variables_of(runtime), "template": runtime.chat_template}
    return [reader.read_chat(messages, system=runtime.system, **how) for reader in readers]


# -- results -----------------------------------------------------------------------------------------------------------


def _records(options: TokensOptions, row: InputRow, readings: Sequence[TokenReading]) -> Iterator[dict[str, Any]]:
    """What is written for a row: its lines, cells or records."""
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
    """The lines of a row in a pipe, without the last line's end."""
    if options.decode:
        return readings[0].text
    if options.count:
        return "\t".join(str(len(one.pieces)) for one in readings)
    lines = [""] if row.index else []
    for one in readings:
        begin = f"{one.model}\t" if readings[1:] else ""
        lines += [f"{begin}{piece.id}\t{_shown(piece)}\t{_remark(piece)}".rstrip("\t") for piece in one.pieces]
    return "\n".join(lines)


def _lines(
    options: TokensOptions, row: InputRow, readings: Sequence[TokenReading], heading: str, width: int
) -> Iterator[Text]:
    """The lines of a row on a terminal."""
    if options.count:
        numbers = "  ".join(f"{len(one.pieces):>9,}" for one in readings)
        room = max(width - cell_len(numbers) - 2, 8)
        yield Text(f"{numbers}  {widgets.first_words(readings[0].text, room)}", no_wrap=True)
        return
    if heading:
        yield widgets.header(width, heading, "" if options.decode else row.shown)
    if options.decode:
        yield Text(widgets.visible(readings[0].text))
        return
    yield from _table(readings, width)
    counts = [count(len(one.pieces), "token") for one in readings]
    if readings[1:]:
        counts = [f"{one.model}: {number}" for one, number in zip(readings, counts, strict=True)]
    else:
        counts += [count(len(readings[0].text), "character")]
    yield from summary.lines(Text(" · ".join(counts), style=theme.DIM), width)


def _shown(piece: TokenPiece) -> str:
    return widgets.token_text(piece.id, piece.text)


def _remark(piece: TokenPiece) -> str:
    """What is shown beside a token: its mark, or its bytes."""
    if piece.special:
        return f"special, {piece.special}"
    return piece.bytes.hex(" ") + (f" → {widgets.token_text(0, piece.completes)}" if piece.completes else "")


def _table(readings: Sequence[TokenReading], width: int) -> Iterator[Text]:
    """The tokens, a line each; of several checkpoints beside each other, where they cover the same characters."""
    share = (width - 3 * (len(readings) - 1)) // len(readings)
    cells = [_cells(one.pieces) for one in readings]
    widths = [
        min(share, max(cell_len(one.model), *(cell.cell_len for cell in column)))
        for one, column in zip(readings, cells, strict=True)
    ]
    if readings[1:]:
        heads = [
            widgets.cells(widgets.first_words(one.model, size), size)
            for one, size in zip(readings, widths, strict=True)
        ]
        yield Text(GUTTER[True].join(heads).rstrip(), style=theme.DIM, no_wrap=True)
    left = [iter(column) for column in cells]
    for group, alike in _groups(readings):
        for pieces in zip_longest(*group):
            line = Text(no_wrap=True)
            for side, piece in enumerate(pieces):
                cell = Text(no_wrap=True) if piece is None else next(left[side])
                cell.truncate(widths[side], overflow="ellipsis", pad=side < len(pieces) - 1)
                line.append(GUTTER[alike] if side else "", style=theme.DIM).append_text(cell)
            yield line


def _cells(pieces: Sequence[TokenPiece]) -> list[Text]:
    """The id, the text and the mark of each token, in columns."""
    digits = max(len(str(piece.id)) for piece in pieces)
    wide = min(max(cell_len(_shown(piece)) for piece in pieces), WIDEST)
    cells = []
    for piece in pieces:
        cell = Text(f"{piece.id:>{digits}}  ", style=theme.DIM, no_wrap=True)
        cell.append(_shown(piece), style=Style(dim=False) + (theme.WINNER if piece.special else theme.CHOSEN))
        if remark := _remark(piece):
            cell.append(" " * max(digits + 4 + wide - cell.cell_len, 2) + remark)
        cells.append(cell)
    return cells


def _groups(readings: Sequence[TokenReading]) -> Iterator[tuple[list[list[TokenPiece]], bool]]:
    """The tokens of each checkpoint that cover the same characters, and whether they end at the same places."""
    sides = [list(one.pieces) for one in readings]
    if not readings[1:] or not all(one.aligned and one.text == readings[0].text for one in readings):
        for pieces in zip_longest(*sides):
            yield [[] if piece is None else [piece] for piece in pieces], True
        return
    left = [deque(side) for side in sides]
    while any(left):
        if any(added := [bool(side) and side[0].special == "added" for side in left]):
            yield [[side.popleft()] if one else [] for side, one in zip(left, added, strict=True)], True
            continue
        group: list[list[TokenPiece]] = [[side.popleft()] if side else [] for side in left]
        while behind := [
            place for place, side in enumerate(left) if side and _end(group[place]) < max(map(_end, group))
        ]:
            for place in behind:
                group[place].append(left[place].popleft())
        for place, side in enumerate(left):  # more bytes of a character
            while side and side[0].special != "added" and side[0].end == _end(group[place]):
                group[place].append(side.popleft())
        ends = [[piece.end for piece in pieces] for pieces in group]
        yield group, all(one == ends[0] for one in ends)


def _end(pieces: Sequence[TokenPiece]) -> int:
    return pieces[-1].end if pieces else 0
