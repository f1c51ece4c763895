"""`genctl run` and `genctl beam`: their option tables, and conflicts that are known from the flags alone."""
# ruff: noqa: RUF009 — `option` returns a dataclass field, which is what a dataclass default may be

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from genctl.commands.engine_choice import ADDRESS, WORKERS, refused
from genctl.commands.help import ALSO
from genctl.commands.options import (
    CHECKS,
    CHOOSING,
    EVENTS,
    FORMAT,
    IN_OUT,
    PAGE,
    SHOWN,
    TIMING,
    WATCH,
    WATCH_TSV,
    PresetOptions,
    TreeFormat,
)
from genctl.commands.table import Command, Conflict, because, given, needless_force, same_file
from genctl.config.layers import Layer, Resolved
from genctl.errors import UsageError
from genctl.io.writers import FORMATS, Format

BEAMS = (Layer("genctl beam", {"num_beams": 5}, declared="user"),)

Ending = Literal["length", "context", "empty", "stop", "time", "unmet"]


@dataclass(frozen=True)
class RunOptions(PresetOptions):
    """The command line of a generating command."""

    resume: bool = IN_OUT.switch("continue an interrupted --output (progress is kept in FILE.journal)")
    strict: bool = IN_OUT.switch("stop at the first row that fails")
    format: Format = FORMAT
    force: bool = IN_OUT.switch("replace existing --output, --events and --report files")
    unordered: bool = IN_OUT.switch("write results as they finish, not in input order")
    stream: bool = IN_OUT.switch("print while generating")
    echo: bool | None = SHOWN.option(
        "print the prompt before the text (default: on a terminal, dimmed)", None, "--echo/--no-echo"
    )
    scores: bool = SHOWN.switch("show token probabilities and alternatives")
    top_logprobs: int | None = SHOWN.option("number of alternatives for each token", "K", least=0)
    watch: tuple[str, ...] = WATCH
    explain: bool = SHOWN.switch("show what each logits processor did to each token")
    events: str | None = EVENTS
    timing: bool = SHOWN.switch("add load, prefill and decode seconds to records")
    fail_on: tuple[Ending, ...] = CHECKS.repeated(
        "exit with 4 if a sequence ends for this reason, is empty, or lacks a forced word (unmet); repeatable",
        "length|context|empty|stop|time|unmet",
    )
    dry: bool = CHECKS.switch("show what is set, and stop; -v adds all defaults")
    workers: str | None = WORKERS
    address: str | None = ADDRESS
    view: Literal["run", "beam"] = "run"
    tree: bool = False
    tree_format: TreeFormat | None = None

    @property
    def named_output(self) -> str | None:
        """The output file that determines the format of records; None for trees, which have their own format option."""
        return None if self.tree_format is not None else self.output

    @property
    def with_tokens(self) -> bool:
        """Whether records have details of each token."""
        return self.scores or self.top_logprobs is not None or self.explain or bool(self.watch)


@dataclass(frozen=True)
class BeamOptions(RunOptions):
    """The command line of `genctl beam`: `RunOptions`, with views of a search."""

    tree: bool = SHOWN.switch("draw the search tree at the end")
    tree_format: TreeFormat | None = SHOWN.option("write the search tree instead of the texts")
    view: Literal["run", "beam"] = "beam"
    beneath: Sequence[Layer] = BEAMS


def check_search(early: Resolved) -> None:
    """Raises UsageError if the settings of `genctl beam` are not a search with competing rows."""
    if not early.generation.is_beam_search and not early.generation.penalty_alpha:
        raise UsageError(
            f"genctl beam shows a search, but num_beams = 1 ({early.origins['num_beams']})",
            hint="genctl run shows a single text",
        )


# options that need data that servers do not report -> the start of the error
NOT_REMOTE = {
    "explain": "--explain shows each logits processor at work",
    "watch": "--watch shows tokens that were not chosen",
    "tree": "--tree draws a search",
    "tree_format": "--tree-format writes a search",
}


def check_backend(options: RunOptions, early: Resolved) -> None:
    """Raises UsageError if the options need data that servers do not report."""
    if early.runtime.backend is None:
        return
    wanted = [NOT_REMOTE[name] for name in NOT_REMOTE if getattr(options, name)]
    if options.view == "beam":
        wanted.insert(0, "genctl beam shows the beams of a search")
    if wanted:
        place = early.origins["backend"]
        raise UsageError("\n".join(f"{words}; servers do not report this (backend, {place})" for words in wanted))


WHOLE = tuple(name for name in FORMATS if name != "text")  # formats that are written once a result is complete
TREE_ECHO: Conflict = (
    lambda options: options.tree_format is not None and bool(options.echo),
    "--echo begins texts with their prompt, but --tree-format writes trees instead of texts",
)
TREES = "--tree-format {tree_format} writes trees instead of texts"
CONFLICTS: tuple[Conflict, ...] = (
    needless_force("output", "events", also=("report",)),
    same_file("events", "output"),
    same_file("events", "report"),
    *PAGE,
    TIMING,
    *because(
        given("resume"),
        "--resume continues an interrupted output, but ",
        (given(without=["output"]), "there is no --output FILE to continue"),
        (given(output=["-"]), "--output - is standard output, which cannot be continued"),
        (given("force"), "--force replaces it"),
        (given(format=["json"]), "--format json is an array, which is whole only at its end: use jsonl"),
        (given("unordered"), "--unordered writes rows as they finish, so that none of them marks how far it has come"),
        (given("events"), "--events records one run from its beginning"),
        (given("report"), "--report shows one run from its beginning"),
        (given("timing"), "--timing writes seconds, which are others each time"),
        (given("tree"), "--tree draws the searches of one run"),
        (given("tree_format"), TREES),
    ),
    *because(
        given("stream"),
        "--stream writes text as soon as it is certain, in input order, but ",
        (given(format=WHOLE), "--format {format} writes whole records"),
        (given(to_file=[True]), "--output keeps results until they are whole"),
        (given("unordered"), "--unordered writes results as they finish"),
        (given("tree_format"), TREES),
    ),
    (given("tree_format", format=WHOLE), f"{TREES}, which contradicts --format {{format}}"),
    TREE_ECHO,
    WATCH_TSV,
    *refused((given("stream"), "decodes groups of rows elsewhere, but --stream writes text while it is decoded")),
    (given("watch", "tree_format", without=["events"]), f"{TREES}, which have no place for --watch; --events has"),
)

BRIEF: dict[str, tuple[str, ...]] = {
    "Model and text": ("model", "max_new_tokens", "num_return_sequences", "chat", "stop_strings"),
    "How tokens are chosen": ("strategy", *CHOOSING),
    "Input and output": ("input", "template", "output", "format", "scores"),
    "Settings": ("presets", "set", "dry"),
    ALSO: ("top_k", "json_schema", "watch", "explain", "report", "quiet", "verbose"),
}
RUN = Command(
    "run",
    RunOptions,
    "genctl.commands.run.job:run",
    """Prompts come from the arguments, else from --input, else from standard input, one per line. A terminal streams
    the text; a pipe gets plain text.""",
    (
        'genctl run -m Qwen/Qwen3-0.6B --chat "What is a prime?"',
        'genctl run --do-sample --temperature 0.8 -n 40 "The sea"',
        "genctl run -i prompts.txt -o results.jsonl --resume",
    ),
    BRIEF,
    CONFLICTS,
)
BEAM = Command(
    "beam",
    BeamOptions,
    "genctl.commands.run.job:run",
    """Like genctl run, with num_beams = 5 by default. A terminal shows the beams while they evolve, then all finished
    hypotheses and the formula of the score. A pipe gets the best text, or with --num-return-sequences N and --format
    tsv or jsonl the N best with their scores (in jsonl also `parents`: the beam that each token continued).""",
    (
        'genctl beam "Once upon a time"',
        'genctl beam --num-beams 8 --tree "The sea"',
        'genctl beam --events run.jsonl "The sea"',
    ),
    {
        "Model and text": ("model", "max_new_tokens", "num_return_sequences"),
        "Search": ("num_beams", "length_penalty", "early_stopping", "seed"),
        "Input and output": ("input", "output", "format", "scores", "tree", "tree_format", "events"),
        "Settings": ("presets", "set", "dry"),
    },
    CONFLICTS,
    without=frozenset({"backend", "tokenizer"}),
)
