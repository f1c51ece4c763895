"""Options that several commands share."""
# ruff: noqa: RUF009 — `option` returns a dataclass field, which is what a dataclass default may be

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from genctl.commands.table import (
    Color,
    CommandOptions,
    Conflict,
    OptionGroup,
    argument,
    given,
    knob_layers,
    option,
    same_file,
    switch,
)
from genctl.config import settings
from genctl.config.layers import Layer
from genctl.errors import UsageError
from genctl.io import readers
from genctl.io.writers import FLAT, TEXTS, format_of
from genctl.terminal.standard_streams import is_terminal

if TYPE_CHECKING:
    from genctl.io.template import Template

IN_OUT, SETTINGS, SHOWN = OptionGroup("Input and output"), OptionGroup("Settings"), OptionGroup("What is shown")
CHECKS, TRUST = OptionGroup("Checks"), OptionGroup("Trust")
SHOWN_TOP = 3  # alternatives shown with --scores
CHOOSING = ("do_sample", "temperature", "top_p", "seed")  # under "How tokens are chosen" in --help
PROMPTS = "prompts; - reads them from standard input, {stdin} inserts its text"

TreeFormat = Literal["text", "json"]

FORMAT: Any = IN_OUT.option("default: by the name of --output, else text")
COLOR: Any = option("use colours; auto: on terminals (default: auto)", default="auto")
QUIET: Any = switch("show only results and errors", "--quiet", "-q")
EVENTS: Any = SHOWN.option("also write every event as JSON lines", "FILE")
PLUGINS: Any = TRUST.switch("let presets run your Python code")
WATCH: Any = SHOWN.repeated(
    "show log-probability and rank of this token (its text, or id:N) at each step; repeatable", "TOKEN", "--watch"
)
TIMING: Conflict = (
    given("timing", format=FLAT),
    "--timing adds seconds to records, but --format {format} has no place for them",
)
PAGE: tuple[Conflict, ...] = (
    (given(report=["-"]), "--report -: a page is a file that a browser opens; give it a name"),
    same_file("report", "output"),
)
WATCH_TSV: Conflict = (
    given("watch", without=["events"], format=["tsv"]),
    "--watch adds values to each step, which do not fit --format tsv; --format jsonl and --events have them",
)


def shown_top(options: Any) -> int:
    """The number of alternatives: --top-logprobs, else that of a page or of --scores in texts, else 0.

    A page does not change records: if records have tokens, the page has the same alternatives.
    """
    given: int | None = options.top_logprobs
    if given is not None:
        return given
    if options.report is not None and (options.format in TEXTS or not getattr(options, "with_tokens", options.scores)):
        return SHOWN_TOP
    return SHOWN_TOP if options.scores and options.format in TEXTS else 0


@dataclass(frozen=True)
class ModelOptions(CommandOptions):
    """The options of every command that reads prompts and loads a checkpoint."""

    arguments: tuple[str, ...] = argument(PROMPTS, "PROMPT")
    input: str | None = IN_OUT.option("read prompts from a file; - is stdin", "FILE", "--input", "-i")
    input_format: readers.Format | None = IN_OUT.option(
        "lines, text, jsonl, csv, tsv or parquet (default: by the file name; JSON lines in a pipe are recognised)",
        "FORMAT",
    )
    template: str | None = IN_OUT.option("make each prompt from a text with {prompt} or a row's {fields}", "TEXT|@FILE")
    output: str | None = IN_OUT.option("write results to a file", "FILE", "--output", "-o")
    report: str | None = SHOWN.option("also write an HTML page with all details", "FILE")
    force: bool = IN_OUT.switch("replace existing --output and --report files")
    format: str = "text"
    quiet: bool = QUIET
    verbose: bool = switch("show details; show the summary even in a pipe", "--verbose", "-v")
    color: Color = COLOR
    allow_pickle: bool = TRUST.switch("load pickle weights, which can run code")
    trust_remote_code: bool = TRUST.switch("run Python code that comes with a checkpoint")
    allow_plugins: bool = False
    config: str | None = SETTINGS.option(
        "a settings file that overrides your own config.toml; or set GENCTL_CONFIG", "FILE"
    )
    flags: Sequence[Layer] = ()  # flags of knobs, `--set` and `--strategy`

    def __post_init__(self) -> None:
        """`-` as the only prompt means `--input -`; --format defaults to the suffix of --output. Raises UsageError."""
        if self.format is None:
            formats = get_args(get_type_hints(type(self))["format"])
            object.__setattr__(self, "format", format_of(self.named_output, formats))
        if "-" not in self.arguments:
            return
        if len(self.arguments) > 1 or self.input is not None:
            other = (
                "another prompt is given" if self.input is None else f"prompts are also given with --input {self.input}"
            )
            raise UsageError(
                f"- as a prompt reads prompts from standard input, but {other}",
                hint="{stdin} in a prompt is replaced by the text of standard input",
            )
        object.__setattr__(self, "arguments", ())
        object.__setattr__(self, "input", "-")

    def with_knobs(self, knobs: Mapping[str, Any]) -> ModelOptions:
        """The same options with their `flags`. Raises UsageError or PresetError."""
        values = vars(self)  # not every command takes --set and --strategy
        return replace(self, flags=knob_layers(knobs, values.get("set", ()), values.get("strategy")))

    def layers(self) -> list[Layer]:
        """The layers of settings, lowest first, without the checkpoint's."""
        return [*self.standing_layers(), *self.flags]

    @cached_property
    def config_layers(self) -> list[Layer]:
        """The layers of the user's config.toml and of --config, read once."""
        return settings.config_layers(self.config)

    def standing_layers(self, presets: Sequence[str] = ()) -> list[Layer]:
        """The layers from outside the command line, and those of `presets`."""
        return settings.standing_layers(self.config_layers, presets)

    @cached_property
    def prompt_template(self) -> Template | None:
        """The template of --template; None without it. Raises UsageError or InputError."""
        if self.template is None:
            return None
        from genctl.io.template import read

        return read(self.template)

    @property
    def named_output(self) -> str | None:
        """The output file that determines the default format."""
        return self.output

    @property
    def to_file(self) -> bool:
        """Whether results go to a file."""
        return self.output not in (None, "-")

    @property
    def on_screen(self) -> bool:
        """Whether results go to a terminal as text."""
        return self.output is None and self.format == "text" and is_terminal(sys.stdout)

    @property
    def input_kind(self) -> str:
        """How the prompts of a file or of standard input are separated."""
        return readers.format_of(self.input_format, self.input or "")

    @property
    def are_texts(self) -> bool:
        """Whether every prompt is text, which needs a tokenizer; rows of values may have token ids instead."""
        return bool(self.arguments) or self.template is not None or not self.has_rows

    @property
    def has_rows(self) -> bool:
        """Whether the input has rows of named values, as JSONL and tables do."""
        return not self.arguments and self.input_kind in readers.ROWS

    @property
    def trust(self) -> dict[str, bool]:
        """Whether a checkpoint's pickles and its own Python code may run."""
        return {name: self.allows(name) for name in ("allow_pickle", "trust_remote_code")}

    def allows(self, name: str) -> bool:
        """Whether a trust flag is on the command line, or in the user's own config.toml."""
        own = (layer.values.get(name) is True for layer in self.config_layers if layer.is_user_file)
        return bool(getattr(self, name)) or any(own)

    def prompts(self, report: Callable[[str], object], **how: Any) -> readers.Prompts | None:
        """The prompts of the command line, or None if there are none. `how` goes to `readers.open_prompts`.

        `report` gets remarks on the input, except with --quiet.
        """
        return readers.open_prompts(
            self.arguments,
            self.input,
            sys.stdin,
            stdin_is_terminal=sys.stdin is None or is_terminal(sys.stdin),
            format=self.input_format,
            template=self.prompt_template,
            report=(lambda line: None) if self.quiet else report,
            **how,
        )


@dataclass(frozen=True)
class PresetOptions(ModelOptions):
    """`ModelOptions` with the settings of one run."""

    presets: tuple[str, ...] = SETTINGS.repeated(
        "a preset by name or path; the last one wins", "NAME", "--preset", "-p"
    )
    set: tuple[str, ...] = SETTINGS.repeated("any setting, as TOML or JSON; or --KEY VALUE", "KEY=VALUE")
    strategy: str | None = SETTINGS.option("greedy, beam, sample …", "NAME")
    allow_plugins: bool = PLUGINS
    beneath: Sequence[Layer] = ()  # settings of the command itself, below everything else

    def layers(self) -> list[Layer]:
        return [*self.beneath, *self.standing_layers(self.presets), *self.flags]


# -- memory sizes as text ----------------------------------------------------------------------------------------------

_MEMORY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,12})?)\s*([a-zA-Z]*)")
_UNITS: dict[str, int] = {"": 1, "b": 1, "bytes": 1} | {
    f"{letter}{middle}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for middle, base in (("i", 1024), ("", 1000))
}


def memory_bytes(text: str) -> int:
    """Parse `24GiB`, `80 GB`, `1.5TiB` or bytes. KiB … TiB are powers of 1024, KB … TB of 1000. Raises UsageError."""
    from fractions import Fraction

    match = _MEMORY.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"--memory: {text!r:.60} is not a size: use bytes or, for example, 24GiB")
    amount = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if amount < 1:
        raise UsageError(f"--memory: {text!r:.60} is less than one byte")
    return amount
