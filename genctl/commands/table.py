"""The option table of a command: each option is declared once, as a field of a frozen dataclass.

The Typer parameter, the help and the value for the command all come from that field. Flags of knobs come from
`genctl.params` in the same way. A conflict between options is a row `(when, sentence)`.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
import typer.main

from genctl import params
from genctl.commands.help import GENERAL, ORDER, SETTINGS, TableCommand, help_all
from genctl.commands.values import COMPLETIONS, Mixed, among, reader_of
from genctl.config.layers import Layer, flags_layer
from genctl.errors import Exit, UsageError

SHORT = {"model": "-m", "max_new_tokens": "-n"}
METAVARS = {int: "N", float: "X"}
FILES = ("json_schema", "grammar")  # settings that name a file

Conflict = tuple[Callable[[Any], object], str]
Color = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class CommandOptions:
    """A subclass is the table of a command: fields made by `option`, `switch` and the like are its options."""

    def with_knobs(self, knobs: Mapping[str, Any]) -> CommandOptions:
        """The same options, with the flags of knobs on the command line."""
        return self

    def in_order(self, order: Sequence[str]) -> CommandOptions:
        """The same options; `order` has the names of the given options in command-line order, with repeats."""
        return self


# -- rows of the table -------------------------------------------------------------------------------------------------


class OptionGroup(str):
    """A heading of the help. Its methods make the options under it: fields of the table of a command."""

    def option(
        self, help: str, metavar: str | None = None, *flags: str, default: Any = None, least: int | None = None
    ) -> Any:
        """A field that is an option. Without `flags`, its flag is its name. `least` is the lowest value it takes."""
        row = {"help": help, "flags": flags, "metavar": metavar, "group": str(self), "least": least}
        return dataclasses.field(default=default, metadata=row)

    def switch(self, help: str, *flags: str) -> Any:
        """A field that is an option without a value."""
        return self.option(help, None, *flags, default=False)

    def repeated(self, help: str, metavar: str, *flags: str) -> Any:
        """A field `tuple[T, ...]` that is an option and may be given several times."""
        return self.option(help, metavar, *flags, default=())


_GENERAL = OptionGroup(GENERAL)
option, switch, repeated = _GENERAL.option, _GENERAL.switch, _GENERAL.repeated


def argument(help: str, metavar: str, *, required: bool = False) -> Any:
    """A field that takes positional arguments."""
    row = {"help": help, "flags": (), "metavar": metavar, "argument": True, "required": required, "least": None}
    return dataclasses.field(default="" if required else (), metadata=row)


def _rows(options: type[CommandOptions]) -> Iterator[dataclasses.Field[Any]]:
    return (item for item in dataclasses.fields(options) if "flags" in item.metadata)


def _flags(item: dataclasses.Field[Any]) -> tuple[str, ...]:
    return item.metadata["flags"] or (flag_of(item.name),)


def _parameter(name: str, hint: Any, typer_info: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, typer_info]
    )


def _parameters(rows: Iterable[dataclasses.Field[Any]], hints: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    """The Typer parameters of a table, positional ones first."""
    for item in sorted(rows, key=lambda item: "argument" not in item.metadata):
        row, hint, default = item.metadata, hints[item.name], item.default
        complete = COMPLETIONS.get(item.name)
        if get_origin(hint) is tuple:  # of texts or of a Literal; Typer does not support lists of a Literal
            choices = get_args(get_args(hint)[0])
            hint, default, complete = list[str], None, among(choices) if choices else complete
        if default is None:
            hint = hint | None
        shared: dict[str, Any] = {"help": row["help"], "metavar": row["metavar"], "show_default": False}
        if "argument" in row:
            default = inspect.Parameter.empty if row["required"] else default
            yield _parameter(item.name, hint, typer.Argument(**shared), default)
        else:
            info = typer.Option(*_flags(item), rich_help_panel=row["group"], autocompletion=complete, **shared)
            yield _parameter(item.name, hint, info, default)


def check(options: CommandOptions, conflicts: Iterable[Conflict]) -> None:
    """Check the options for mistakes that are visible from the flags alone. Raises UsageError for the first one.

    A sentence is formatted with the values of the options: `--format {format} has no place for it`.
    """
    for item in _rows(type(options)):
        least, value = item.metadata["least"], getattr(options, item.name)
        if least is not None and value is not None and not value >= least:
            shown = value if isinstance(value, int) else f"{value:g}"
            raise UsageError(f"{_flags(item)[0]} {shown}: must be at least {least}")
        names = value if isinstance(value, tuple) else (value,)
        if "" in names and item.metadata["metavar"] in ("FILE", "EVENTS"):
            name = item.metadata["metavar"] if "argument" in item.metadata else _flags(item)[0]
            raise UsageError(f"{name} is empty, and an empty text names no file")
    for when, sentence in conflicts:
        if when(options):
            raise UsageError(sentence.format_map(vars(options)))


def given(*names: str, without: Sequence[str] = (), **values: Sequence[Any]) -> Callable[[Any], bool]:
    """Whether all of `names` are on the command line, none of `without`, and other options have one of `values`."""

    def holds(options: Any) -> bool:
        present = {name: getattr(options, name) for name in (*names, *without)}
        there = {name for name, value in present.items() if value is not None and value is not False and value != ()}
        return there == set(names) and all(getattr(options, name) in choices for name, choices in values.items())

    return holds


def because(when: Callable[[Any], object], start: str, *rows: Conflict) -> tuple[Conflict, ...]:
    """Conflicts of one option with others: `start` begins every sentence, and no row holds unless `when` does."""

    def both(other: Callable[[Any], object]) -> Callable[[Any], object]:
        return lambda options: when(options) and other(options)

    return tuple((both(other), f"{start}{sentence}") for other, sentence in rows)


def needless_force(*names: str, also: Sequence[str] = ()) -> Conflict:
    """--force without any of the files that it replaces: those of `names`, and `also` files written besides them."""
    flags = [flag_of(name) for name in names]
    absent = "there is neither" if flags[1:] else f"there is no {flags[0]}"
    listed = " or ".join([", ".join(flags[:-1]), flags[-1]] if flags[1:] else flags)
    beside = f" (nor {' or '.join(map(flag_of, also))})" if also else ""
    return given("force", without=(*names, *also)), f"--force replaces an existing {listed} file, but {absent}{beside}"


def same_file(name: str, other: str) -> Conflict:
    """The conflict of two options that name the same file. Streams may be shared."""

    def holds(options: Any) -> bool:
        path = getattr(options, name)
        return path is not None and path == getattr(options, other) and path != "-" and not path.startswith("/dev/")

    return holds, f"{flag_of(name)} {{{name}}}: {flag_of(other)} names the same file"


def flag_of(name: str) -> str:
    """The default flag of a field."""
    return f"--{name.replace('_', '-')}"


# -- flags of knobs ----------------------------------------------------------------------------------------------------


def _plain_type(hint: Any) -> Any:
    """The type of a knob's flag. Bounds, and mixed types (as TOML), are checked later, with all layers."""
    if get_origin(hint) is Annotated:
        return _plain_type(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        if list[str] in choices:
            return list[str]
        return _plain_type(choices[0]) if len(choices) == 1 else Mixed
    texts = get_origin(hint) is list and get_args(hint)[0] in (str, str | list[str])
    return list[str] if texts else hint


def _knob_parameters(kinds: Sequence[type], without: frozenset[str]) -> Iterator[inspect.Parameter]:
    """A parameter for every knob of `kinds`; help and completion leave out those that are rare."""
    for kind in kinds:
        for name, item in params.knobs(kind).items():
            if name in without:
                continue
            hint, spelled, default = _plain_type(params.hints(kind)[name]), params.spelled(name), item.default
            flags = [f"--{spelled}/--no-{spelled}" if hint is bool else f"--{spelled}"]
            flags += [SHORT[name]] if name in SHORT else []
            flags += [flag_of(name)] if item.metadata["flag"] else []
            extra: dict[str, Any] = {"metavar": "TEXT"} if hint in (str, list[str]) else {}
            if hint is not bool and not extra:
                # parsed and checked with all other layers, so that all mistakes are reported at once, in the same words
                choices = "|".join(map(str, get_args(hint)))
                extra = {"metavar": f"<{choices}>" if choices else METAVARS.get(hint, "VALUE"), "parser": Mixed}
                hint = Mixed
            about = item.metadata["about"]
            if isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != "":
                about = f"{about} (default: {default})"
            values = [str(value) for value in get_args(params.hints(kind)[name])]
            extra["autocompletion"] = COMPLETIONS.get(name, among(values))
            extra |= {"rich_help_panel": item.metadata["group"], "hidden": item.metadata["rare"]}
            info = typer.Option(*flags, help=about, show_default=False, **extra)
            yield _parameter(name, hint | None, info)


def knob_layers(knobs: Mapping[str, Any], sets: Sequence[str] = (), strategy: str | None = None) -> list[Layer]:
    """The layers of flags, `--set` and `--strategy`."""
    from genctl.config.presets import parse_sets, parse_texts, parse_value

    values: dict[str, Any] = {}
    for key, value in knobs.items():
        if key in FILES and isinstance(value, str) and value.startswith("@"):
            value = type(value)(value[1:])  # @FILE, as for --template; no schema or grammar begins with @
        if isinstance(value, Mixed):
            values[key] = parse_value(key, value)
        elif value is not None and value != []:
            values[key] = parse_texts(key, value) if isinstance(value, (list, tuple)) else value
    layers = [flags_layer(values)] if values else []
    layers += parse_sets(list(sets)) if sets else []
    if strategy is None:
        return layers
    from genctl.config.modes import layer

    return [*layers, layer(strategy, layers)]


# -- commands ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command: its option table, its conflicts, and the function that performs it.

    `perform` is `module:name` of a function, imported when the command runs, not for its help. It takes the options
    and returns the exit status, or None without input. `brief` is the short help: headings and names of
    options.
    """

    name: str
    options: type[CommandOptions]
    perform: str
    about: str = ""  # the help, without its first paragraph
    examples: tuple[str, ...] = ()
    brief: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    knobs: tuple[type, ...] = (params.Generation, params.Runtime)
    without: frozenset[str] = frozenset()
    input: str = "prompt"  # the word for a missing input

    def build(self, epilog: str, summary: str = "") -> Any:
        """The Typer command. `summary` is the first paragraph of its help."""

        def callback(ctx: typer.Context, help_all: bool = False, **given: Any) -> int:
            return self._run(ctx, given)

        hints, rows = get_type_hints(self.options), list(_rows(self.options))
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        knobs = list(_knob_parameters(self.knobs, self.without))
        about = "show every option, by group"
        long = typer.Option("--help-all", is_eager=True, callback=help_all, help=about, show_default=False)
        more = [_parameter("help_all", bool, long, default=False)] if self.brief else []
        callback.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [context, *_parameters(rows, hints), *knobs, *more]
        )
        app = typer.Typer(rich_markup_mode=None, context_settings=SETTINGS, add_completion=False)
        app.command(
            self.name, cls=TableCommand, help=f"{summary}\n\n{inspect.cleandoc(self.about)}".strip(), epilog=epilog
        )(callback)
        command = typer.main.get_command(app)
        assert isinstance(command, TableCommand)
        command.examples, command.brief = self.examples, self.brief
        command.readers = {item.name: reader_of(hints[item.name]) for item in rows}
        command.readers |= {knob.name: reader_of(get_args(knob.annotation)[0]) for knob in knobs}
        return command

    def _run(self, context: typer.Context, given: dict[str, Any]) -> int:
        own = {item.name: given.pop(item.name) for item in _rows(self.options)}
        own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        options = self.options(**{name: value for name, value in own.items() if value is not None})
        options = options.with_knobs(given).in_order(context.meta[ORDER])
        check(options, self.conflicts)
        module, _, name = self.perform.partition(":")
        target = getattr(import_module(module), name)
        status: int | None = target(options)
        if status is not None:
            return status
        print(context.get_usage(), file=sys.stderr)
        wanted = f"No {self.input}: give one as an argument, with --input FILE, or on standard input."
        print(f"{wanted}\nTry {context.command_path} --help.", file=sys.stderr)
        return int(Exit.USAGE)
