"""Fast help that fits the terminal: a short page with examples, and a long one with every option by group."""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from genctl.commands.values import Reader
from genctl.errors import UsageError, nearest, printable

GENERAL, ALSO = "General", "Also"
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")
ORDER = "genctl.order"  # context key: the names of the given options in command-line order, with repeats
_BARE = "genctl.bare"  # context key: the group that is being parsed, if no options are given to it
_NUMBER = re.compile(r" \(default: [\d.]+\)$")


class TableCommand(TyperCommand):
    """A command with help that lists its options by group.

    `brief` is the content of the short help: headings, and the names of the options under them. Under `ALSO` only the
    flags are listed. Without `brief`, the short help is the long one.
    """

    examples: Sequence[str] = ()
    brief: Mapping[str, Sequence[str]] = {}
    readers: Mapping[str, Reader] = {}  # converters of option values; other values stay as typed
    whole = False  # show the long help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Raises UsageError for `--flag false`, where `false` would become a prompt."""
        args = list(args)
        rest: list[str]
        parameter: Any
        with _parser_errors(self, ctx):
            found, rest, order = self._parsed(ctx, args)
        ctx.meta[ORDER] = tuple(str(parameter.name) for parameter in order)
        if ctx.resilient_parsing or any(parameter.is_eager for parameter in order):
            return list(super().parse_args(ctx, args))
        ctx.params.update({one.name: one.default for one in self.params})
        for parameter in dict.fromkeys([*order, *(one for one in self.params if one.required)]):
            typed = found.get(parameter.name)
            if typed is None and parameter.required:
                raise UsageError(f"{parameter.metavar} is missing", hint=f"see {ctx.command_path} --help")
            try:
                if typed is not None:
                    ctx.params[parameter.name] = self.readers.get(parameter.name, lambda value: value)(typed)
            except typer.BadParameter as error:
                error.ctx, error.param = ctx, parameter
                raise
        if rest:
            raise UsageError(f"unexpected: {printable(' '.join(rest))}", hint=f"see {ctx.command_path} --help")
        ctx.args = rest
        return rest

    def _parsed(self, ctx: Any, args: list[str]) -> Any:
        """The parser's result. Flags with underscores, or of other tools, are replaced by ours in `args`."""
        while True:
            refuse_boolean_words(args, self.get_params(ctx))
            if clustered := next(
                (word for word in _before(args, "--") if word[:1] == "-" and word[1:] in CLUSTERS), ""
            ):
                raise UsageError(f'no such option "{clustered}"', hint=option_hint(ctx, f"-{clustered}"))
            try:
                return self.make_parser(ctx).parse_args(list(args))
            except typer.TyperException as error:
                flag = str(vars(error).get("option_name", ""))
                ours = _alias(flag, _flags(self, ctx)) if type(error).__name__ == "NoSuchOption" else ""
                place = next((place for place, word in enumerate(args) if word.partition("=")[0] == flag), None)
                if not ours or place is None:
                    raise
                args[place] = ours + args[place].removeprefix(flag)

    @property
    def _is_brief(self) -> bool:
        return bool(self.brief) and not self.whole

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description of the command (in the short help its first paragraph), and examples."""
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        for text in paragraphs[:1] if self._is_brief else paragraphs:
            formatter.write("\n" + _wrapped(text, formatter.width, "  "))
        if self.examples:
            formatter.write("\nExamples:\n" + "".join(f"  {line}\n" for line in self.examples))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, group by group."""
        rows: dict[str, tuple[str, str]] = {}
        groups: dict[str, list[str]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_argument = parameter.param_type_name == "argument"
            if is_argument:
                record = (parameter.metavar or "", record[1])
            rows[parameter.name] = record
            group = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or GENERAL
            groups.setdefault(group, []).append(parameter.name)
        general = groups.pop(GENERAL)
        if not self._is_brief:
            only_arguments = set(groups) <= {"Arguments"}
            for heading, names in {**groups, "Options" if only_arguments else GENERAL: general}.items():
                write_rows(formatter, heading, [rows[name] for name in names])
            return
        for heading, shown in self.brief.items():
            if heading != ALSO:
                # without the --no- flag, and without a numeric default
                short = [(rows[name][0].split(" / ")[0], _NUMBER.sub("", rows[name][1])) for name in shown]
                write_rows(formatter, heading, short)
        also = ", ".join(rows[name][0].split(" ")[0].rstrip(",") for name in self.brief.get(ALSO, ()))
        common = "common " if any(getattr(one, "hidden", False) for one in self.get_params(ctx)) else ""
        every = f"{ctx.command_path} --help-all shows all {len(rows)} {common}options."
        formatter.write("\n" + (_wrapped(f"{ALSO}: {also}.", formatter.width) if also else ""))
        formatter.write(_wrapped(every, formatter.width))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the exit statuses, only in the long help."""
        if self.epilog and not self._is_brief:
            formatter.write("\n" + _wrapped(self.epilog, formatter.width))


class CommandGroup(TyperGroup):
    """A group that suggests the nearest command for an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command; without any, do not use Typer's (which import Pydantic)."""
        ctx.meta[_BARE] = self if args and not args[0].startswith("-") else None
        try:
            with _parser_errors(self, ctx):
                rest: list[str] = super().parse_args(ctx, args)
        finally:
            del ctx.meta[_BARE]
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the group."""
        found: list[Any] = [] if ctx.meta.get(_BARE) is self else super().get_params(ctx)
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, each with the first paragraph of its help."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, (command.help or "").split("\n\n")[0]) for name, command in commands.items() if command]
        write_rows(formatter, "Commands", rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a command line. Raises UsageError."""
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            from genctl.config import removed

            full = f"{ctx.info_name} {name}" if ctx.parent else name
            if error := removed.sentence("command", full, shown=f"genctl {full}"):
                raise UsageError(error)
            near = closest(name, self.list_commands(ctx), cutoff=0.6)
            shown = name if name.isprintable() else ascii(name)[1:-1]
            hint = f'did you mean "{near}"?' if near else f"see {ctx.command_path} --help"
            if (
                " " in name.strip() and name.isprintable() and not near and not ctx.parent
            ):  # a prompt without its command
                quoted = shlex.quote(shown) if set('"$`\\!') & set(shown) else f'"{shown}"'
                hint += f"; {ctx.command_path} run {quoted} continues it as a prompt"
            raise UsageError(f'no such command "{shown}"', hint=hint)
        return super().resolve_command(ctx, args)


# our flag, or a sentence -> flags of llama.cpp, mlx-lm, ollama, vLLM and similar tools
_CONTEXT = "the context is the checkpoint's; --max-length N counts the prompt too, and --truncate shortens it"
_SERVER = "a server that runs already is --backend openai:URL"
_PROMPT = 'prompts and texts are arguments: genctl run "Once upon a time"; --input FILE reads them from a file'
_FOREIGN: Mapping[str, str] = {
    "--model": "hf-repo hf checkpoint pretrained",
    "--adapter": "adapter-path adapter-file lora lora-path lora-modules",
    "--assistant-model": "model-draft draft-model speculative-model",
    "--num-assistant-tokens": "draft-max num-draft-tokens num-speculative-tokens",
    "--input": "prompt-file file file-name input-file -f",
    "--chat": "conversation cnv apply-chat-template instruct interactive",
    "--no-chat": "no-conversation ignore-chat-template no-chat-template",
    "--chat-template-kwargs": "chat-template-args chat-template-config",
    "--enable-thinking": "think thinking",
    "--no-enable-thinking": "no-think nothink",
    "--strategy greedy": "greedy",
    "--mirostat-tau": "mirostat",
    "--penalty-last-n": "repeat-last-n repetition-context-size",
    "--dry-sequence-breakers": "dry-sequence-breaker",
    "--logit-bias": "logits-bias",
    "--seed": "-s",
    "--stop-strings": "reverse-prompt -r",
    "--num-beams": "use-beam-search",
    "--top-logprobs": "logprobs n-probs",
    "--grammar": "guided-grammar gbnf",
    "--echo": "display-prompt echo-prompt verbose-prompt",
    "--batch-size": "max-batch-size max-num-seqs parallel np -b",
    "--quantize": "quantization load-in-4bit load-in-8bit",
    "--cache quantized": "kv-bits kv-cache-dtype cache-type-k cache-type-v ctk ctv",
    "--dtype": "precision fp16 bf16",
    "--device cuda, or --device-map auto": "n-gpu-layers gpu-layers ngl num-gpu",
    "--format jsonl for records, --json-schema true for a text that is JSON": "json",
    "--threads, --temperature or --template": "-t",
    "no EOS comes before --min-new-tokens N": "ignore-eos",
    _CONTEXT: "ctx ctx-size n-ctx num-ctx context context-length context-size max-model-len max-kv-size -c",
    _SERVER: "url base-url api-base host endpoint server",
    _PROMPT: "prompt prompts text",
}
# our flag -> flags of other tools with the same meaning and the same values, which are accepted here too
_ALIASES: Mapping[str, str] = {
    "--model": "model-path model-id model-name",
    "--output": "output-file out out-file",
    "--system": "system-prompt sys",
    "--max-new-tokens": "max-tokens max-completion-tokens max-output-tokens max-gen-len n-predict num-predict predict",
    "--min-new-tokens": "min-tokens",
    "--num-return-sequences": "n num-sequences num-samples num-outputs",
    "--temperature": "temp",
    "--do-sample": "sample",
    "--no-do-sample": "no-sample",
    "--typical-p": "typical",
    "--top-n-sigma": "top-nsigma",
    "--mirostat-tau": "mirostat-ent",
    "--mirostat-eta": "mirostat-lr",
    "--dynatemp-exponent": "dynatemp-exp",
    "--repetition-penalty": "repeat-penalty",
    "--stop-strings": "stop stop-sequence stop-sequences stop-words",
    "--keep-stop": "include-stop-str-in-output",
    "--num-beams": "beams beam-size beam-width",
    "--json-schema": "json-schema-file guided-json",
    "--regex": "guided-regex",
    "--grammar": "grammar-file",
    "--no-echo": "no-display-prompt",
    "--dtype": "torch-dtype",
}
ALIASES = {foreign: ours for ours, names in _ALIASES.items() for foreign in names.split()}
CLUSTERS = ("ngl", "hf", "cnv", "np", "sys", "fa", "ctk", "ctv")  # flags of llama.cpp with one dash
ELSEWHERE = ALIASES | {foreign: ours for ours, names in _FOREIGN.items() for foreign in names.split()}


def closest(name: str, names: Iterable[str], cutoff: float = 0.7) -> str:
    """The one of `names` that `name` abbreviates or misspells, else an empty string."""
    names = sorted(names, key=len)
    longer = [known for known in names if name and known.startswith(name)]
    return longer[0] if longer else nearest(name, names, cutoff)


def _alias(flag: str, flags: Sequence[str]) -> str:
    """The one of `flags` that `flag` certainly means: the same with dashes, or its alias; else ""."""
    dashed = flag.replace("_", "-")
    ours = ALIASES.get(dashed[2:], "")
    return next((known for known in (dashed, ours) if known != flag and known in flags), "")


def option_hint(context: Any, flag: str) -> str:
    """A hint for an unknown `flag`: a similar flag of the command, ours for another tool's, or another command's."""
    hint = f"see {context.command_path} --help"
    flags = _flags(context.command, context)
    name = flag.removeprefix("--").replace("_", "-").lower()
    ours = ELSEWHERE.get(name, "")
    if ours and set(re.findall(r"--[a-z-]+", ours)) <= {*flags}:
        return ours if ours[0] != "-" else f"did you mean {ours}?" if "," in ours else f'did you mean "{ours}"?'
    if not flag.startswith("--"):
        return hint
    if near := closest(name, [known[2:] for known in flags]):
        return f'did you mean "--{near}"?'
    root = context.find_root().command
    wanted = ours or flag
    for command in root.list_commands(context):
        if wanted in _flags(root.get_command(context, command), context):
            return f"genctl {command} has {wanted}; {hint}"
    return hint


def removed_flag(context: Any, flag: str, words: Sequence[str]) -> str:
    """The error for a removed `flag` of the command line `words`; "" for other flags."""
    from genctl.config import removed

    names = [f"{context.command.name} {flag}"]
    if "--set" in _flags(context.command, context):  # flags of all commands with settings
        names.append(flag)
    setting = flag.removeprefix("--").replace("-", "_")
    error = removed.sentence("flag", *names) or removed.sentence("setting", setting, shown=flag)
    if "MODEL" not in error:
        return error
    import argparse

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--model", nargs="?", const="MODEL", default="MODEL")
    return error.replace("MODEL", shlex.quote(parser.parse_known_args(words)[0].model))


def _flags(command: Any, context: Any) -> list[str]:
    """The long flags of a command."""
    flags = [flag for option in command.get_params(context) for flag in (*option.opts, *option.secondary_opts)]
    return [flag for flag in flags if flag.startswith("--")]


@contextmanager
def _parser_errors(command: Any, context: Any) -> Iterator[None]:
    """Raises UsageError for an option without its value, or with a value that it does not take."""
    try:
        yield
    except typer.TyperException as error:
        if type(error).__name__ != "BadOptionUsage":
            raise
        flag = vars(error)["option_name"]
        options = [one for one in command.get_params(context) if flag in (*one.opts, *one.secondary_opts)]
        raise UsageError(f"{flag} takes no value" if options[0].is_flag else f"{flag} needs a value") from None


def _before(words: Sequence[str], mark: str) -> Sequence[str]:
    return words[: words.index(mark)] if mark in words else words


def refuse_boolean_words(words: Sequence[str], parameters: Iterable[Any]) -> None:
    """Raises UsageError if a switch is followed by true, false or similar, as if it took a value."""
    switches = [parameter for parameter in parameters if getattr(parameter, "is_flag", False)]
    opposites = {on: off for switch in switches for on, off in zip(switch.opts, switch.secondary_opts, strict=False)}
    known = {flag for switch in switches for flag in (*switch.opts, *switch.secondary_opts)}
    for flag, word in pairwise(_before(words, "--")):
        if flag in known and word.lower() in (*TRUE, *FALSE):
            other = opposites.get(flag) if word.lower() in FALSE else flag
            instead = f"write {other}" if other else f"leave {flag} out"
            raise UsageError(
                f"{flag} takes no value, but {word} follows it", hint=f"{instead}; a prompt goes before it or after --"
            )


def help_all(ctx: typer.Context, wanted: bool) -> None:
    """Show the long help and end, as `--help-all`."""
    if wanted:
        command: Any = ctx.command
        command.whole = True
        try:
            typer.echo(command.get_help(ctx))
        finally:
            command.whole = False
        raise typer.Exit


def write_rows(formatter: Any, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    """Write a section of two columns; long flags get their own line."""
    with formatter.section(heading):
        formatter.write_dl(rows, col_max=30, col_spacing=2)


def _wrapped(text: str, width: int, indent: str = "") -> str:
    wrapper = textwrap.TextWrapper(width, indent, indent, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in wrapper.wrap(" ".join(text.split())))
