"""Each shared option, declared once. Flags for knobs are made from `params`, so they cannot drift from it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from genctl import params
from genctl.cli.strategy import layer as named_strategy
from genctl.config.layers import Layer, flags_layer
from genctl.errors import UsageError

# Knobs of Runtime that mean something only where texts are written.
WRITING = frozenset({"truncate", "row_timeout"})
SHORT = {"model": "-m", "max_new_tokens": "-n"}
PANELS = {params.RUN: "Run", params.MODEL: "Model"}

Function = TypeVar("Function", bound=Callable[..., Any])

Prompts = Annotated[
    list[str] | None, typer.Argument(help="Prompts; else --input; else standard input.", show_default=False)
]
Preset = Annotated[
    list[str] | None,
    typer.Option("--preset", "-p", help="A preset by name or path; several layer left to right.", show_default=False),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any preset key, as a TOML value.", show_default=False),
]
Stream = Annotated[bool, typer.Option("--stream", help="Write text as soon as it is certain, never taken back.")]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy", metavar="NAME", help="A decoding mode by name; other flags refine it.", show_default=False
    ),
]
Dry = Annotated[bool, typer.Option("--dry", help="Print the resolved job as TOML with the origin of every value.")]
Input = Annotated[
    str | None,
    typer.Option("--input", "-i", metavar="FILE", help="Prompts from a file; - is stdin.", show_default=False),
]
InputFormat = Annotated[
    Literal["lines", "text", "jsonl", "nul"] | None,
    typer.Option(
        "--input-format", help="How prompts are separated (default: lines; jsonl for *.jsonl).", show_default=False
    ),
]
Output = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write results to a file.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing --output file.")]
Format = Annotated[Literal["text", "json", "jsonl", "tsv"], typer.Option("--format", help="How results are written.")]
FormatByName = Annotated[
    Literal["text", "json", "jsonl", "tsv"] | None,
    typer.Option(
        "--format", help="How results are written (default: by the name of --output, else text).", show_default=False
    ),
]
Color = Annotated[Literal["auto", "always", "never"], typer.Option("--color", help="Judged for each stream.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary; results and errors stay.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what is loaded, and sum up even when piped.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Load pickle weights, which can run code.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that a checkpoint brings.")]
AllowPlugins = Annotated[bool, typer.Option("--allow-plugins", help="Let presets name processors by dotted path.")]


class End(str, Enum):
    """What --fail-on may look for."""

    LENGTH = "length"
    EMPTY = "empty"
    STOP = "stop"
    TIME = "time"
    UNMET = "unmet"


# What every command that generates takes: name -> (type, default).
GENERATING: dict[str, tuple[Any, Any]] = {
    "input": (Input, None),
    "input_format": (InputFormat, None),
    "output": (Output, None),
    "force": (Force, False),
    "resume": (
        Annotated[
            bool, typer.Option("--resume", help="Go on with an --output that was cut off; a journal stands beside it.")
        ],
        False,
    ),
    "strict": (Annotated[bool, typer.Option("--strict", help="Stop at the first row that fails.")], False),
    "format": (FormatByName, None),
    "raw": (
        Annotated[bool, typer.Option("--raw", help="Write texts to a terminal as they are, control characters too.")],
        False,
    ),
    "preset": (Preset, None),
    "set": (Set, None),
    "strategy": (Strategy, None),
    "echo": (Annotated[bool, typer.Option("--echo", help="Begin the text with the prompt.")], False),
    "scores": (
        Annotated[
            bool, typer.Option("--scores", help="Show each token's probability, rank, entropy and alternatives.")
        ],
        False,
    ),
    "top_logprobs": (
        Annotated[
            int | None,
            typer.Option(
                "--top-logprobs", metavar="K", help="Alternatives reported for each token.", show_default=False
            ),
        ],
        None,
    ),
    "explain": (
        Annotated[bool, typer.Option("--explain", help="Show what each logits processor did to each step.")],
        False,
    ),
    "fail_on": (
        Annotated[
            list[End] | None,
            typer.Option(
                "--fail-on",
                help="Exit with 4 if any sequence ended so, is empty, or lacks a forced word (unmet); repeatable.",
                show_default=False,
            ),
        ],
        None,
    ),
    "unordered": (Annotated[bool, typer.Option("--unordered", help="Write results as they finish.")], False),
    "stream": (Stream, False),
    "timing": (
        Annotated[bool, typer.Option("--timing", help="Add load, prefill and decode seconds to records.")],
        False,
    ),
    "check_batch": (
        Annotated[
            bool, typer.Option("--check-batch", help="Decode each prompt alone as well; exit with 4 if tokens differ.")
        ],
        False,
    ),
    "check_runtime": (
        Annotated[
            bool,
            typer.Option(
                "--check-runtime",
                help="Compare logits with transformers' on the first prompt and 16 steps; exit with 4 if far apart.",
            ),
        ],
        False,
    ),
    "dry": (Dry, False),
    "quiet": (Quiet, False),
    "verbose": (Verbose, False),
    "color": (Color, "auto"),
    "allow_pickle": (AllowPickle, False),
    "trust_remote_code": (TrustRemoteCode, False),
    "allow_plugins": (AllowPlugins, False),
}


def generating(function: Function) -> Function:
    """Give a command the options of `GENERATING`; they arrive together in its `common` argument."""
    signature = inspect.signature(function, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.name != "common"]
    placed = [p for p in kept if p.kind is not p.KEYWORD_ONLY]
    own = [p for p in kept if p.kind is p.KEYWORD_ONLY]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in GENERATING.items()
    ]

    def command(*args: Any, **given: Any) -> Any:
        common = {name: given.pop(name, default) for name, (_, default) in GENERATING.items()}
        return function(*args, common=common, **given)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = signature.replace(parameters=[*placed, *shared, *own])  # type: ignore[attr-defined]
    return command  # type: ignore[return-value]


def plain_type(hint: Any) -> Any:
    """A knob's type as a flag takes it. Bounds are checked later, with all layers; so are mixed types, as TOML."""
    if get_origin(hint) is Annotated:
        return plain_type(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        lists = [option for option in options if get_origin(option) is list]
        if lists and (len(options) == 1 or lists[0] == list[str]):
            return plain_type(lists[0])
        return plain_type(options[0]) if len(options) == 1 else Mixed
    return list[str] if get_origin(hint) is list else hint


METAVARS = {int: "N", float: "X"}


class Mixed(str):
    """The value of a flag as it is typed: TOML (`true`, 3, `["a"]`), or bare text."""


def _mixed(text: str) -> Mixed:
    return Mixed(text)


def with_knobs(
    *, exclude: frozenset[str] = frozenset(), kinds: tuple[type, ...] = (params.Generation, params.Runtime)
) -> Callable[[Function], Function]:
    """Give a command a flag for every knob of `kinds`; they arrive together in its `knobs` argument, the set ones."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        kept = [p for p in signature.parameters.values() if p.name != "knobs"]
        flags: dict[str, str] = {}
        made = []
        for kind in kinds:
            for name, item in params.knobs(kind).items():
                if name in exclude or not item.metadata["flag"]:
                    continue
                if name in WRITING and params.Generation not in kinds:
                    continue
                parameter = _flag(name, params.hints(kind)[name], item)
                flags[parameter.name] = name
                made.append(parameter)

        def command(*args: Any, **given: Any) -> Any:
            values = {flags[key]: given.pop(key) for key in list(given) if key in flags}
            knobs = {key: value for key, value in values.items() if value is not None and value != []}
            return function(*args, knobs=knobs, **given)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = signature.replace(parameters=[*kept, *made])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*kept, *made)}
        return command  # type: ignore[return-value]

    return decorate


def _flag(name: str, hint: Any, item: Any) -> inspect.Parameter:
    kind = plain_type(hint)
    spelled = params.spelled(name)
    names = [f"--{spelled}/--no-{spelled}"] if kind is bool else [f"--{spelled}"]
    if name in SHORT:
        names.append(SHORT[name])
    extra: dict[str, Any] = {}
    if kind is not bool and kind is not str and get_origin(kind) is not list:
        # read and checked with all other layers, so that every mistake is reported at once and in the same words
        choices = "|".join(map(str, get_args(kind)))
        extra = {"metavar": f"<{choices}>" if choices else METAVARS.get(kind, "VALUE"), "parser": _mixed}
        kind = Mixed
    default = item.default
    about = item.metadata["about"]
    if isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != "":
        about = f"{about} (default: {default})"
    option = typer.Option(*names, help=about, rich_help_panel=item.metadata["group"], show_default=False, **extra)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def knob_layers(knobs: dict[str, Any], sets: list[str] | None, strategy: str | None = None) -> list[Layer]:
    """The layers of flags, `--set` and `--strategy`."""
    from genctl.config.presets import parse_sets

    layers = []
    if knobs:
        layers.append(flags_layer({key: _bare(key, value) for key, value in knobs.items()}))
    if sets:
        layers += parse_sets(sets)
    if strategy is not None:
        layers.append(named_strategy(strategy, layers))
    return layers


def _bare(key: str, value: Any) -> Any:
    from genctl.config.presets import parse_value

    if isinstance(value, Mixed):
        return parse_value(key, value)
    return list(value) if isinstance(value, (list, tuple)) else value


def check_count(name: str, value: int | None, *, least: int) -> None:
    """Raises UsageError if a numeric option is below its bound."""
    if value is not None and value < least:
        raise UsageError(f"--{name} {value}: must be at least {least}")
