"""The root command, and the error boundary: every failure becomes one clear line and an exit status."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import typer.main

from genctl.commands.help import SETTINGS, CommandGroup, option_hint, removed_flag, write_rows
from genctl.commands.values import WrongValue
from genctl.errors import Exit, GenctlError, printable, without_secrets
from genctl.process import __version__
from genctl.terminal.standard_streams import drop_stdout

EPILOG = (
    "Exit status: 0 done; 1 some rows failed; 2 usage, preset or input error; 3 model not found or cannot do this; "
    "4 a requested check failed; 130 interrupted (143 terminated, 129 hung up)."
)

# A command is imported when it is used: name -> (its location, a one-line description).
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("genctl.commands.run.options:RUN", "Generate text for prompts."),
    "beam": ("genctl.commands.run.options:BEAM", "Run a beam search, and watch the beams."),
    "chat": ("genctl.commands.chat.options:CHAT_COMMAND", "Chat with a checkpoint or a server."),
    "score": (
        "genctl.commands.score.options:SCORE",
        "Score texts: log-likelihood, perplexity, bits per byte, for each token.",
    ),
    "tokens": ("genctl.commands.tokens:TOKENS", "Show how texts are tokenised, or turn ids into text."),
    "compare": (
        "genctl.commands.compare.options:COMPARE",
        "Run the same prompts in several ways, and compare the results.",
    ),
    "parity": (
        "genctl.commands.parity.options:PARITY",
        "Check whether two ways of running a model agree, token by token.",
    ),
    "audit": (
        "genctl.commands.parity.audit_options:AUDIT",
        "Diagnose an engine from its logged tokens and log-probabilities.",
    ),
    "explore": (
        "genctl.commands.explore.options:EXPLORE",
        "Browse the tree of possible continuations.",
    ),
    "inspect-cache": (
        "genctl.commands.inspect.options:INSPECT_CACHE",
        "Measure the KV cache, pass by pass, or save the cache of a prompt.",
    ),
    "report": ("genctl.commands.run.report:REPORT", "Turn recorded events into an HTML page."),
    "models": ("genctl.commands.listings:MODELS", "List built-in and cached checkpoints."),
    "presets": ("genctl.commands.listings:app", "List, show and check presets: TOML files that hold any setting."),
}


# Errors of writing to a standard stream. Our own output files raise OutputError instead.
_UNWRITTEN = {
    number
    for name in ("EBADF", "EDQUOT", "EFBIG", "EIO", "ENOSPC", "ENXIO", "EROFS")
    if (number := getattr(errno, name, None)) is not None
}


@cache
def _command(name: str) -> Any:
    """A command by its name, cached because the root looks it up more than once."""
    module, _, variable = COMMANDS[name][0].partition(":")
    target = getattr(import_module(module), variable)
    is_group = isinstance(target, typer.Typer)
    command = typer.main.get_command(target) if is_group else target.build(EPILOG, COMMANDS[name][1])
    command.name = name
    return command


class Root(CommandGroup):
    """The root command. It has the names of all commands, but imports only the one that is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, or None. After `help`, shells complete command names too."""
        if cmd_name == "help" and ctx.resilient_parsing:
            return self
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands without importing them."""
        write_rows(formatter, "Commands", [(name, about) for name, (_, about) in COMMANDS.items()])


app = typer.Typer(
    name="genctl",
    cls=Root,
    help="Generate text with transformer checkpoints, and see why each token was chosen.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"genctl {__version__}")
        raise typer.Exit


def _skill(wanted: bool) -> None:
    if wanted:
        typer.echo(Path(__file__).with_name("skill.md").read_text(encoding="utf-8"), nl=False)
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", "-V", callback=_version, is_eager=True, help="show the version"),
    skill: bool = typer.Option(False, "--skill", callback=_skill, is_eager=True, help="show a page for agents"),
    debug: bool = typer.Option(False, "--debug", help="show the traceback of an error"),
) -> None:
    """Generate text with transformer checkpoints, and see why each token was chosen."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status; nothing but `--debug` shows a traceback."""
    if os.environ.get("_GENCTL_COMPLETE"):
        app(prog_name="genctl")  # answers the shell, and ends the process
    status = _run(list(sys.argv[1:] if arguments is None else arguments))
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = unwritten(error)
        return status or failed
    return status


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        words = [word for word in arguments if word != "--debug"]
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        root = typer.main.get_command(app)
        with root.make_context("genctl", words) as context:
            result = root.invoke(context)  # Typer's `main` would turn a BrokenPipeError into exit status 1
        return int(result) if isinstance(result, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return int(Exit.INTERRUPTED)  # reported when the process ends
    except BrokenPipeError:  # the reader is gone: end quietly
        drop_stdout()
        return int(Exit.DONE)
    except typer.TyperException as error:
        return _usage(error, arguments)
    except BaseException as error:
        message, hint, status = _explained(error)
        if debug:  # escape control characters in messages of libraries here too
            from traceback import format_exception

            from genctl.terminal.widgets import visible

            trace = visible(without_secrets("".join(format_exception(error))))
            with contextlib.suppress(BrokenPipeError):
                print(trace, end="", file=sys.stderr, flush=True)
            return int(status)
        if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITTEN:
            return unwritten(error)
        return _print_error(message, hint, status, color=_color(arguments))


def _color(arguments: Sequence[str]) -> str:
    """The --color of a command line that may be faulty."""
    words = " ".join(arguments).replace("--color=", "--color ")
    return next((choice for choice in ("never", "always") if f"--color {choice}" in words), "auto")


def _usage(error: typer.TyperException, arguments: Sequence[str]) -> int:
    """Report a command line that Typer cannot parse. Returns the exit status."""
    context, message = vars(error).get("ctx"), error.format_message()
    hint = f"see {context.command_path} --help" if context else ""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return int(Exit.USAGE)
    gone = ""
    if type(error).__name__ == "NoSuchOption":
        flag = vars(error)["option_name"]
        gone = removed_flag(context, flag, arguments)
        message, hint = f'no such option "{printable(flag)}"', option_hint(context, flag)
    elif isinstance(error, WrongValue):
        from genctl.config import removed

        gone = removed.sentence("format", f"{error.flag} {error.value}")
    return _print_error(gone or message, "" if gone else hint, int(Exit.USAGE), color=_color(arguments))


def _explained(error: BaseException) -> tuple[str, str, Exit | int]:
    """The message, hint and exit status of an error. Re-raises SystemExit and its like."""
    if isinstance(error, GenctlError):
        return error.message, error.hint, error.exit
    if isinstance(error, RecursionError):
        return "the input is nested too deeply", "", Exit.USAGE
    if isinstance(error, MemoryError):
        return "not enough memory", "a smaller --batch-size or --dtype bfloat16 needs less", Exit.MODEL
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"cannot use {printable(os.fsdecode(error.filename))}: {error.strerror}", "", Exit.USAGE
    first = next(iter(str(error).strip().splitlines()), "no message")
    if isinstance(error, Exception):
        return f"unexpected {type(error).__name__}: {first}", "this is a bug; --debug shows where", 1
    if type(error).__name__ == "PanicException":  # from a library written in Rust; no subclass of `Exception`
        return f"a library gave up: {first}", "the checkpoint's tokenizer is the usual reason", Exit.MODEL
    raise error


def unwritten(error: OSError) -> int:
    """Report that standard output cannot be written (a full disk, a closed descriptor); a closed pipe ends quietly."""
    drop_stdout()
    if isinstance(error, BrokenPipeError):
        return int(Exit.DONE)
    return _print_error(f"the output could not be written: {error.strerror} (stdout)", "", int(Exit.USAGE))


def _print_error(message: str, hint: str, status: int, *, color: str = "auto") -> int:
    from genctl.terminal.standard_streams import print_message

    try:
        for line in without_secrets(message).split("\n"):
            print_message(f"error: {line}", color=color)
        if hint:
            print_message(f"hint: {' '.join(hint.split())}")
    except BrokenPipeError:
        pass
    return int(status)
