"""`genctl audit`: its options, and the mistakes that its flags alone can show."""

from __future__ import annotations

from dataclasses import dataclass

from genctl import params
from genctl.commands.options import CHECKS, FORMAT, IN_OUT, PAGE, SHOWN, ModelOptions
from genctl.commands.table import Command, Conflict, OptionGroup, argument, given, needless_force, same_file
from genctl.config.sides import SERVER, read_settings, split
from genctl.errors import UsageError, nearest
from genctl.io.writers import Format
from genctl.parity.causes import CAUSES

AUDITED = OptionGroup("What is audited")
DECLARED = ("dtype", "quantize")  # facts about the engine, not settings
UNEXPLAINED = "unexplained"
WITHOUT = "backend tensor_parallel row_timeout tokenizer prompt_cache compile truncate src_lang tgt_lang"


@dataclass(frozen=True)
class AuditOptions(ModelOptions):
    """The command line of `genctl audit`."""

    arguments: tuple[str, ...] = argument(
        "a log of an engine, or a server (openai:URL) to query", "TRACE", required=False
    )
    input: str | None = IN_OUT.option("prompts for a server", "FILE", "--input", "-i")
    prompts_file: str | None = AUDITED.option("the prompts, if the log lacks them", "FILE", "--prompts")
    field: tuple[str, ...] = AUDITED.repeated(
        "the path of a field in each row, such as completion_ids=out.ids", "NAME=PATH"
    )
    rows: int = AUDITED.option("rows to read, spread over the file (default: 64)", "N", default=64, least=1)
    also: tuple[str, ...] = AUDITED.repeated("a checkpoint that may have run instead of --model", "MODEL")
    format: Format = FORMAT
    allow: tuple[str, ...] = CHECKS.repeated("exit 0 if this is the cause (or unexplained)", "CAUSE")
    positions: bool = SHOWN.switch("add a record for each position")

    def __post_init__(self) -> None:
        """Read standard input for `-`."""
        if self.arguments == ("-",):
            object.__setattr__(self, "arguments", ("/dev/stdin",))
        super().__post_init__()

    @property
    def trace(self) -> str:
        """The file or the server, without the declarations after it."""
        return split(self.arguments[0])[0]

    @property
    def declared(self) -> dict[str, object]:
        """What the user declares about the engine, after @. Raises UsageError."""
        name, rest = split(self.arguments[0])
        values = read_settings(rest, f"trace {name}")
        for key in values:
            if key not in DECLARED:
                raise UsageError(f"trace {name}: {key}: only {' and '.join(DECLARED)} are declared of an engine")
        return values

    @property
    def is_server(self) -> bool:
        """Whether the trace is requested from a server now."""
        return self.trace.startswith(SERVER)


def check_words(options: AuditOptions) -> None:
    """Raises UsageError for no trace or several, and for unknown causes."""
    if len(options.arguments) != 1:
        have = ", ".join(options.arguments) or "none"
        raise UsageError(
            f"genctl audit reads one trace, and there are: {have}", hint="such as rollouts.jsonl -m ./model"
        )
    _ = options.declared
    known = (*CAUSES, UNEXPLAINED)
    for name in options.allow:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"causes: {', '.join(known)}"
            raise UsageError(f"--allow {name}: no such cause", hint=hint)


CONFLICTS: tuple[Conflict, ...] = (
    *PAGE,
    needless_force("output", also=("report",)),
    same_file("prompts_file", "output"),
    (lambda options: options.input is not None and options.arguments and not options.is_server,
     "--input {input} has prompts for a server; --prompts gives those of a file that was written"),
    (lambda options: options.prompts_file is not None and options.arguments and options.is_server,
     "--prompts {prompts_file} belongs to a log; the prompts for a server come from --input"),
    (lambda options: options.field and options.arguments and options.is_server,
     "--field names the fields of a file, and the trace is a server"),
    (given("positions", format=["text", "tsv"]),
     "--positions adds records of each position, which --format {format} has no place for; --format jsonl has"),
)  # fmt: skip

AUDIT = Command(
    "audit",
    AuditOptions,
    "genctl.commands.parity.audit:audit",
    """TRACE has an engine's tokens with their log-probabilities: rollouts of a trainer, answers of a server, logs. The
    checkpoint of --model reads the same tokens. If rounding does not explain the difference, causes are tried: which
    number was logged, which prompt was read, which arithmetic, which model. TRACE@dtype=bfloat16 or @quantize=int8
    declares the engine's precision. The exit status is 4 unless the verdict is same.""",
    (
        "genctl audit rollouts.jsonl -m ./model",
        "genctl audit out.json -m ./model --prompts prompts.jsonl",
        "genctl audit openai:http://host:8080 -m model -i in.txt",
    ),
    {
        AUDITED: ("prompts_file", "field", "rows", "also", "max_new_tokens"),
        IN_OUT: ("input", "output", "format"),
        CHECKS: ("allow",),
        SHOWN: ("report", "positions"),
    },
    CONFLICTS,
    without=frozenset(params.knobs(params.Generation)) - {"max_new_tokens"} | frozenset(WITHOUT.split()),
    input="trace",
)
