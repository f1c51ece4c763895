"""What a generating command is asked for, and what its flags alone can get wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from genctl.cli import beam_output
from genctl.cli.options import knob_layers
from genctl.config.layers import Layer
from genctl.errors import UsageError

BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".tsv": "tsv"}


@dataclass(frozen=True)
class RunOptions:
    """The command line of a generating command, parsed."""

    arguments: tuple[str, ...] = ()
    input: str | None = None
    input_format: str | None = None
    output: str | None = None
    force: bool = False
    resume: bool = False
    strict: bool = False
    format: str = "text"
    raw: bool = False
    presets: tuple[str, ...] = ()
    flags: Sequence[Layer] = ()
    echo: bool = False
    scores: bool = False
    top_logprobs: int | None = None
    explain: bool = False
    strategy: str = ""  # as named by --strategy
    events: str | None = None
    fail_on: tuple[str, ...] = ()
    unordered: bool = False
    timing: bool = False
    check_batch: bool = False
    check_runtime: bool = False
    dry: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_plugins: bool = False
    view: Literal["run", "beam"] = "run"
    beneath: Sequence[Layer] = ()  # what the command itself sets, below everything else
    stream: bool = False
    tree: bool = False
    tree_format: Literal["text", "dot", "json"] | None = None

    @property
    def to_file(self) -> bool:
        """Whether results go to a file of their own."""
        return self.output not in (None, "-")

    @property
    def with_tokens(self) -> bool:
        """Whether records say something of each token."""
        return self.scores or self.top_logprobs is not None or self.explain


def format_of(said: str | None, output: str | None, tree_format: str | None = None) -> str:
    """The format that results are written in: as said, else by the name of the output, else text."""
    if said is not None or output is None or tree_format is not None:
        return said or "text"
    return BY_SUFFIX.get(PurePath(output).suffix.lower(), "text")


def asked_for(
    prompts: Sequence[str] | None, common: Mapping[str, Any], knobs: dict[str, Any], **own: Any
) -> RunOptions:
    """The command line of a generating command, from the options that all share (`options.GENERATING`) and its own.

    Raises UsageError or PresetError for values that cannot be read.
    """
    given = dict(common)
    sets, strategy = given.pop("set"), given.pop("strategy")
    said = given.pop("format")
    return RunOptions(
        arguments=tuple(prompts or ()),
        presets=tuple(given.pop("preset") or ()),
        flags=knob_layers(knobs, sets, strategy),
        strategy=strategy or "",
        format=format_of(said, given["output"], own.get("tree_format")),
        fail_on=tuple(end.value for end in given.pop("fail_on") or ()),
        **given,
        **own,
    )


def check(asked: RunOptions) -> None:
    """Everything that flags alone can get wrong. Raises UsageError."""
    if asked.top_logprobs is not None and asked.top_logprobs < 0:
        raise UsageError(f"--top-logprobs {asked.top_logprobs}: must be at least 0")
    if asked.force and asked.output is None:
        raise UsageError("--force replaces an existing --output file, but there is no --output")
    if asked.timing and asked.format in ("text", "tsv"):
        raise UsageError(f"--timing adds seconds to records, but --format {asked.format} has no place for them")
    if asked.raw and asked.format != "text":
        raise UsageError(f"--raw writes texts as they are to a terminal, but --format {asked.format} writes records")
    if asked.raw and asked.tree_format is not None:
        raise UsageError(f"--raw writes texts as they are, but --tree-format {asked.tree_format} writes trees")
    if asked.raw and asked.tree:
        raise UsageError("--raw writes only texts as they are, but --tree draws them on the terminal")
    if asked.resume:
        _check_resume(asked)
    beam_output.check_asked(asked)


def _check_resume(asked: RunOptions) -> None:
    for wrong, why in (
        (asked.output is None, "there is no --output FILE to go on with"),
        (asked.output == "-", "--output - is standard output, which cannot be gone on with"),
        (asked.force, "--force replaces it"),
        (asked.format == "json", "--format json is an array, which is whole only at its end: use jsonl"),
        (asked.unordered, "--unordered writes rows as they finish, so that none of them marks how far it has come"),
        (asked.events is not None, "--events records one run from its beginning"),
        (asked.timing, "--timing writes seconds, which are others each time"),
        (asked.check_batch, "--check-batch compares the batches of one run"),
        (asked.tree, "--tree draws the searches of one run"),
        (asked.tree_format is not None, f"--tree-format {asked.tree_format} writes trees instead of texts"),
    ):
        if wrong:
            raise UsageError(f"--resume goes on with an output where it was cut off, but {why}")
