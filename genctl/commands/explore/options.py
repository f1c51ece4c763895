"""`genctl explore`: its table of options, and the checks before anything is loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from genctl.commands.options import FORMAT, IN_OUT, PAGE, PresetOptions
from genctl.commands.table import Command, Conflict, OptionGroup, because, given, needless_force, same_file
from genctl.errors import UsageError
from genctl.io.writers import Format
from genctl.params import Generation, knobs
from genctl.terminal.standard_streams import is_dumb, is_terminal
from genctl.tree import commands

TREE, SCREENLESS = OptionGroup("The tree"), OptionGroup("Without a screen")


@dataclass(frozen=True)
class ExploreOptions(PresetOptions):
    """The command line of `genctl explore`."""

    expand: str | None = SCREENLESS.option(
        "list continuations by joint probability, until they cover the mass or reach the depth; nodes: 1000 at most",
        "mass=SHARE,depth=N,nodes=N",
    )
    script: str | None = SCREENLESS.option("run commands, one per line; - is standard input", "FILE")
    save: str | None = TREE.option("save the tree to a new file", "FILE")
    open: str | None = TREE.option("continue a saved tree", "FILE")
    format: Format = FORMAT

    @property
    def has_screen(self) -> bool:
        """Whether the tree is shown on a screen, for a person to go through."""
        return self.expand is None and self.script is None


CONFLICTS: tuple[Conflict, ...] = (
    needless_force("output", also=("report",)),
    *PAGE,
    (given("expand", "script"), "--expand and --script exclude each other: expand is a command of a script, too"),
    (given("open", "save"), "--open {open} continues that file, and --save {save} names another one"),
    *because(
        given("open"),
        "--open continues a tree, which has its prompt and its settings: ",
        (given("arguments"), "leave out the prompt"),
        (given("input"), "leave out --input"),
        (given("presets"), "leave out --preset; preset NAME is a command"),
        (given("set"), "leave out --set; set KNOB=VALUE is a command"),
        (given("strategy"), "leave out --strategy"),
    ),
    (given("script", format=["tsv"]), "--format tsv has a line for each continuation, and --script has none"),
    (given(save=["-"]), "--save -: a tree is a file that is read again; give it a name"),
    (given(open=["-"]), "--open -: a tree is a file that is continued; give its name"),
    same_file("save", "output"),
    same_file("save", "report"),
    same_file("open", "output"),
    same_file("open", "report"),
    *because(
        lambda options: options.has_screen,
        "the screen shows what it finds: ",
        *((given(name), f"--{name} is for --expand and --script") for name in ("output", "report")),
    ),
)

EXPLORE = Command(
    "explore",
    ExploreOptions,
    "genctl.commands.explore.job:explore",
    """See the probable tokens at each position, take another one, sample or search from there, undo. --expand and
    --script work without a terminal.

    --expand lists the continuations of the prompt in the order of their joint probability: exact, not sampled, after
    all processors. A continuation ends with EOS or has the depth. Each row has token_ids, text, logprob (the model's
    own, in nats), total (after the processors) and mass: the probability of this row and all before it.

    --script runs the commands behind the keys of the screen: take, generate, sample, beams, edit, undo, set, show, why
    … docs/explore.md lists them.""",
    (
        'genctl explore "Hello"',
        'genctl explore "Hello" --expand mass=0.9,depth=4',
        'genctl explore "Hello" --script FILE --save tree.jsonl',
    ),
    {
        SCREENLESS: ("expand", "script"),
        TREE: ("save", "open"),
        "Model and settings": ("model", "presets", "set", "do_sample", "seed"),
        IN_OUT: ("output", "format"),
    },
    CONFLICTS,
    without=frozenset({"batch_size", "draft", "draft_corpus", "tokenizer", "prompt_cache", "truncate", "row_timeout"}),
)


def check_screen(options: ExploreOptions) -> None:
    """Raise UsageError if the command needs a screen (no --expand, no --script) and there is none."""
    if not options.has_screen:
        return
    streams = ((sys.stdin, "input"), (sys.stdout, "output"), (sys.stderr, "error"))
    reasons = [f"standard {name} is no terminal" for stream, name in streams if not is_terminal(stream)]
    if is_dumb():
        reasons.insert(0, "TERM=dumb: this terminal cannot be drawn on")
    if reasons:
        raise UsageError(
            f"{reasons[0]}, and going through a tree by keys needs one",
            hint="--expand mass=0.9,depth=6 writes the continuations, --script FILE does commands",
        )


def check_opened(options: ExploreOptions) -> None:
    """Raise UsageError for flags that the tree's own settings exclude, and for trust flags without --model."""
    own = {*knobs(Generation), "seed", "chat", "system"}
    flags = {key: layer.place(key).removeprefix("flag ") for layer in options.flags for key in layer.values}
    for key in flags:
        if key in own:
            hint = f"the command `set {key}=VALUE` changes them" if key in knobs(Generation) else ""
            words = f"{flags[key]}: --open {options.open} continues a tree, which has its own settings"
            raise UsageError(words, hint=hint)
    if any(options.trust.values()) and "model" not in flags:
        flag = next(name for name, value in options.trust.items() if value).replace("_", "-")
        raise UsageError(f"--{flag}: --open {options.open} names the checkpoint", hint="--model names one you trust")


def expansion(options: ExploreOptions) -> dict[str, Any] | None:
    """The limits of --expand; None without it. Raises UsageError."""
    if options.expand is None:
        return None
    try:
        return commands.expansion(options.expand)
    except ValueError as error:
        raise UsageError(f"--expand {options.expand}: {error}", hint="--expand mass=0.9,depth=6") from None
