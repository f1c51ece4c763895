"""`genctl parity`: its sides, which settings these and rows may have, its table, and what flags alone can get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from genctl import params
from genctl.commands.options import CHECKS, FORMAT, IN_OUT, PAGE, PLUGINS, SETTINGS, SHOWN, ModelOptions
from genctl.commands.table import (
    Command,
    Conflict,
    OptionGroup,
    argument,
    because,
    flag_of,
    given,
    needless_force,
    same_file,
)
from genctl.config import presets
from genctl.config.check import did_you_mean, known, named
from genctl.config.layers import Layer, Resolved, overlay, row_layer
from genctl.config.sides import FORM, LOADING, Kind, Side, check, exists, is_results, read, split
from genctl.errors import GenctlError, UsageError, hide_secrets
from genctl.io.rows import InputRow
from genctl.io.writers import Format
from genctl.params import Generation, Runtime

# -- sides -------------------------------------------------------------------------------------------------------------

KINDS: tuple[Kind, ...] = ("server", "file", "checkpoint", "mode", "preset")  # a name that is no other is a checkpoint
REFUSED: dict[Kind, str] = {
    "file": "a file of results is the reference: give one, first, as --expect does",
    "mode": "greedy texts are compared here; genctl compare --strategy compares ways to decode",
}

# Knobs of decoding that must not change what the model computes: with or without them greedy texts should be equal.
DECODING = (
    "assistant_model", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit",
    "num_assistant_tokens", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "use_cache", "cache_implementation",
)  # fmt: skip
FLAGS = frozenset({"max_new_tokens", *DECODING})  # knobs of generation that count here
FOR_ALL = ("offline", "truncate", "chat", "system")  # all sides read the same prompts
_OTHERS = ("seed", "backend", "tensor_parallel", "row_timeout", *FOR_ALL)
SIDE_SETTINGS = (*(key for key in LOADING if key not in _OTHERS), "batch_size", "prompt_cache", *DECODING)


def is_prompt(text: str) -> bool:
    """Whether an argument is a prompt: it has white space, and neither settings nor a file or folder of this name."""
    return any(letter.isspace() for letter in text) and not split(text)[1] and not exists(text)


def read_sides(texts: Sequence[str], beneath: Sequence[Layer]) -> tuple[Side, ...]:
    """The sides of the command line, above the layers of all sides. Raises UsageError or PresetError: all mistakes."""
    sides: list[Side] = []
    mistakes: list[GenctlError] = []
    for text in texts:
        try:
            sides.append(read_side(text, beneath))
        except GenctlError as error:
            mistakes.append(error)
    check(sides, mistakes)
    return tuple(sides)


def read_side(text: str, beneath: Sequence[Layer]) -> Side:
    """One side. Raises UsageError with all its mistakes."""
    side = read(text, "side", KINDS, refused=REFUSED, bare="checkpoint")
    place = side.origin
    if side.kind == "server":
        raise _no_server(place, side.what)
    wrong = [f"{place}: {sentence}" for key in side.settings if (sentence := refused(key))]
    if wrong:
        are_known = all(key in known() for key in side.settings)
        raise UsageError("\n".join(wrong), hint="" if are_known else f"a side takes {', '.join(SIDE_SETTINGS)}")
    side = replace(side, word="side", layers=(*beneath, *presets.load(side.presets), *side.own()))
    if layer := next((one for one in side.layers if one.values.get("backend") is not None), None):
        raise _no_server(f"{side.place}: backend ({layer.place('backend')})", "URL")
    return side


def _no_server(place: str, url: str) -> UsageError:
    return UsageError(
        f"{place}: a server cannot be a side: it reports only its most probable tokens",
        hint=f"genctl audit {hide_secrets(url)} -m MODEL compares what a server computes with a checkpoint",
    )


def refused(key: str) -> str:
    """Why a comparison takes no such knob of a side, or an empty string."""
    if key in SIDE_SETTINGS or key == "backend":  # of which the error has a hint
        return ""
    if key not in known():
        near = did_you_mean(key, SIDE_SETTINGS) or did_you_mean(key, known())
        return f"unknown setting {named(key)}" + (f"; did you mean {near}?" if near else "")
    reason = "greedy texts are compared, and it only changes which token is chosen"
    if key in FOR_ALL or {**params.knobs(Generation), **params.knobs(Runtime)}[key].metadata["group"] == params.LENGTH:
        reason = f"{flag_of(key if key in FOR_ALL else 'max_new_tokens')} holds for all sides"
    elif key == "tensor_parallel":
        reason = "a side is one process; compare the output of such a run with genctl compare"
    return f"{key} cannot matter to a comparison: {reason}"


# -- settings of single rows: a row has the length of its text, and nothing else; sides have the others ---------------

LENGTH = "max_new_tokens"
FIELDS = {"reference", "context", "target"}  # of other commands, and of --texts


def refused_settings(row: InputRow) -> str:
    """Why a row cannot have its settings, or an empty string."""
    keys = sorted({*row.params, *row.extra} - FIELDS - {LENGTH})
    if not keys:
        return ""
    return f"{row.where}: settings belong to a side (MODEL@setting=value), so a row has no {', '.join(keys)}"


def own_length(row: InputRow, base: Resolved) -> int | None:
    """The length that a row sets above the settings of all rows; None if it sets none. Raises PresetError."""
    if LENGTH not in row.params:
        return None
    return overlay(base, row_layer({LENGTH: row.params[LENGTH]}, row.where)).generation.max_new_tokens


# -- the table ---------------------------------------------------------------------------------------------------------

COMPARED = OptionGroup("What is compared")
LIMITS = ("max_kl", "max_regret", "min_agreement")


@dataclass(frozen=True)
class ParityCommandOptions(ModelOptions):
    """The command line of `genctl parity`. `arguments` are the prompts among the arguments, the others are sides."""

    arguments: tuple[str, ...] = argument(
        f"sides, the reference first: {FORM}; arguments with a space are prompts", "SIDE"
    )
    presets: tuple[str, ...] = SETTINGS.repeated("a preset for all sides; the last one wins", "NAME", "--preset", "-p")
    set: tuple[str, ...] = SETTINGS.repeated("any setting for all sides, as TOML or JSON", "KEY=VALUE")
    format: Format = FORMAT
    force: bool = IN_OUT.switch("replace existing files of --output, --save and --report")
    texts: str | None = COMPARED.option("compare on these texts instead of greedy ones: one per line, or JSONL", "FILE")
    show_layers: bool = COMPARED.switch("show the difference of two sides layer by layer", "--layers")
    max_kl: float | None = CHECKS.option("exit with 4 if the mean KL divergence is larger, in nats", "X", least=0)
    max_regret: float | None = CHECKS.option("exit with 4 if the largest regret is larger, in nats", "X", least=0)
    min_agreement: float | None = CHECKS.option("exit with 4 if fewer first choices agree (0 to 1)", "X", least=0)
    allow_defect: bool = CHECKS.option(
        "exit 0 even on a defect (default: 4)", None, "--allow-defect/--no-defect", default=False
    )
    allow_other_weights: bool = CHECKS.switch("exit 0 even if a side has other weights than the reference")
    save: str | None = CHECKS.option("write the reference's logits as a golden file, for --expect", "FILE")
    expect: str | None = CHECKS.option("compare with this golden file", "FILE")
    positions: bool = SHOWN.switch("add a record for each position")
    allow_plugins: bool = PLUGINS
    sides: tuple[str, ...] = ()  # as they are typed

    def __post_init__(self) -> None:
        """Sort the arguments into sides and prompts; a file of results is that of --expect. Raises UsageError."""
        if not self.sides:
            sides = [text for text in self.arguments if not is_prompt(text)]
            if sides and self.expect is None and is_results(sides[0]):
                object.__setattr__(self, "expect", sides.pop(0))
            object.__setattr__(self, "sides", tuple(sides))
            object.__setattr__(self, "arguments", tuple(filter(is_prompt, self.arguments)))
        super().__post_init__()

    def layers(self) -> list[Layer]:
        """The settings of all sides, lowest first."""
        return [*self.standing_layers(self.presets), *self.flags]


def sides_of(options: ParityCommandOptions) -> tuple[Side, ...]:
    """The sides. Raises UsageError and PresetError: all mistakes in them, or too few of them."""
    sides = read_sides(options.sides, options.layers())
    if options.expect is not None:
        if len(sides) != 1:
            have = ", ".join(side.name for side in sides) or "none"
            raise UsageError(
                f"--expect {options.expect} is the reference, and one side is compared with it, but there are: {have}",
                hint="give one side, such as ./model@dtype=bfloat16",
            )
    elif not sides or (len(sides) == 1 and options.save is None):
        have = f"there is only {sides[0].name}" if sides else "there is none"
        raise UsageError(
            f"genctl parity needs a reference and another side, but {have}",
            hint="such as genctl parity ./model ./model@dtype=bfloat16; an argument with a space is a prompt",
        )
    names = [side.name for side in sides]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None and len(names) > 2:
        raise UsageError(f"the side {twice} is given twice")
    return sides


CONFLICTS: tuple[Conflict, ...] = (
    *PAGE,
    needless_force("output", "save", also=("report",)),
    *(same_file("save", name) for name in ("output", "report", "expect")),
    *(same_file("expect", name) for name in ("output", "report")),
    (given(save=["-"]), "--save -: a golden file is a file; give it a name"),
    (given(expect=["-"]), "--expect -: a golden file is a file; give it a name"),
    (given("save", "expect"), "--save {save} and --expect {expect}: a file is written, or compared with"),
    (lambda options: options.min_agreement is not None and options.min_agreement > 1,
     "--min-agreement {min_agreement:g}: must be a share from 0 to 1"),
    (given("texts", "input"), "--texts {texts} and --input {input}: texts are read as they are, without a prompt"),
    (lambda options: options.texts is not None and options.arguments,
     "--texts {texts}: texts are read as they are, so there can be no prompt"),
    *because(
        given("expect"),
        "--expect {expect} has its prompts and texts, so there can be no ",
        (lambda options: options.arguments, "other prompt"),
        (given("input"), "--input {input}"),
        (given("texts"), "--texts {texts}"),
        (given("template"), "--template"),
        (given("input_format"), "--input-format {input_format}"),
        (lambda options: any("max_new_tokens" in layer.values for layer in options.flags), "--max-new-tokens"),
        (given("show_layers"), "--layers"),
    ),
    (given("positions", format=["text", "tsv"]),
     "--positions adds records of each position, which --format {format} has no place for; --format jsonl has"),
    (given("show_layers", format=["tsv"]),
     "--layers adds records of each part of the model, which --format tsv has no place for; --format jsonl has"),
)  # fmt: skip

PARITY = Command(
    "parity",
    ParityCommandOptions,
    "genctl.commands.parity.job:parity",
    """A side is [NAME=]WHAT[@setting=value,…]. WHAT is a checkpoint or a preset, and ends at the first @ followed by
    setting=. The first side is the reference, and may be a golden file. All sides read its greedy texts, so that every
    position can be compared. Each side also generates its own; the first difference is a tie, drift or a defect.""",
    (
        "genctl parity A A@quantize=int4 -i prompts.txt",
        "genctl parity A A@runtime=transformers --max-kl 1e-6",
        "genctl parity A@threads=2 --expect golden.jsonl",
    ),
    {
        COMPARED: ("texts", "show_layers", "max_new_tokens"),
        IN_OUT: ("input", "input_format", "output", "format"),
        CHECKS: ("max_kl", "max_regret", "min_agreement", "allow_defect", "save", "expect"),
        SHOWN: ("report", "positions"),
    },
    CONFLICTS,
    without=frozenset(params.knobs(params.Generation)) - FLAGS
    | {"backend", "tensor_parallel", "row_timeout", "tokenizer"},
)
