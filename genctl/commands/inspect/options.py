"""`genctl inspect-cache`: its options, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genctl.commands.options import FORMAT, IN_OUT, PAGE, PresetOptions
from genctl.commands.table import Command, Conflict, OptionGroup, flag_of, given, needless_force, same_file
from genctl.config.layers import Resolved
from genctl.errors import UsageError

STEPS = 8
MEASURED, PLAN, FILES = OptionGroup("What is shown"), OptionGroup("A plan instead"), OptionGroup("Prompt cache on disk")


@dataclass(frozen=True)
class InspectOptions(PresetOptions):
    """The command line of `genctl inspect-cache`."""

    steps: int | None = MEASURED.option("passes after the prompt, of one token each (default: 8)", "N", least=0)
    inputs: bool = MEASURED.switch("show the input of each pass, with and without a cache")
    save_cache: str | None = FILES.option("save the prompt's cache, for --prompt-cache", "FILE")
    plan: bool = PLAN.switch("predict the size from the checkpoint's config, without decoding")
    batch: int | None = PLAN.option("with --plan: prompts at once (default: 1)", "N", least=1)
    length: int | None = PLAN.option("with --plan: tokens per row (default: the context)", "N", least=1)
    source_length: int | None = PLAN.option("with --plan: tokens that an encoder reads", "N", least=1)
    memory: str | None = PLAN.option("with --plan: memory for weights and cache, such as 24GiB", "SIZE")
    force: bool = IN_OUT.switch("replace existing --output, --save-cache and --report files")
    format: Literal["text", "json", "tsv"] = FORMAT


CONFLICTS: tuple[Conflict, ...] = (
    *(
        (given(name, without=["plan"]), f"{flag_of(name)} {{{name}}} belongs to --plan; here bytes are measured")
        for name in ("batch", "length", "source_length", "memory")
    ),
    (given("plan", "arguments"), "a prompt belongs to a measurement, and --plan decodes nothing"),
    *(
        (given(name, plan=[True]), f"{flag_of(name)} belongs to a measurement, and --plan decodes nothing")
        for name in ("input", "input_format", "template", "steps", "inputs", "save_cache", "output", "report")
    ),
    needless_force("output", "save_cache", also=("report",)),
    *PAGE,
    same_file("save_cache", "report"),
    (given(save_cache=["-"]), "--save-cache -: a prompt cache is a file that is read again; give it a name"),
    same_file("save_cache", "output"),
    (given("inputs", format=["tsv"]), "--inputs has no place in --format tsv; --format json has it"),
)

INSPECT_CACHE = Command(
    "inspect-cache",
    InspectOptions,
    "genctl.commands.inspect.job:inspect_cache",
    """The prompt is prefilled (step 0), then --steps passes of one token each follow. Bytes and shapes are measured on
    the tensors in memory. Several prompts are decoded as one batch.

    --format json writes one object: `layers`, `total_bytes` and derived figures of the last pass, and in `steps` every
    pass with its input. Several prompts are listed in `prompts`, and `rows` of a step maps rows to prompts. --format
    tsv has a line for each layer of each pass.""",
    (
        'genctl inspect-cache "Once upon a time"',
        "genctl inspect-cache --plan -m gpt2 --memory 24GiB",
        'genctl inspect-cache --save-cache F "A long prompt"',
    ),
    {
        MEASURED: ("steps", "inputs"),
        PLAN: ("plan", "batch", "length", "memory"),
        FILES: ("save_cache",),
        "Model and settings": ("model", "cache_implementation", "presets", "set"),
        IN_OUT: ("input", "output", "format"),
    },
    CONFLICTS,
    without=frozenset({"batch_size", "backend", "tokenizer", "draft", "draft_corpus"}),
)


def steps_of(options: InspectOptions, early: Resolved) -> int:
    """The number of passes after the prompt. Raises UsageError if an option sets new tokens, length or batch size."""
    steps = STEPS if options.steps is None else options.steps
    for name in ("max_new_tokens", "max_length", "batch_size"):
        setting = early.settings.get(name)
        if setting is None or setting.kind != "command" or setting.value is None:
            continue
        what = f"{name} = {setting.value} ({setting.place})"
        if name == "batch_size":
            raise UsageError(f"{what}: prompts given together are decoded in one batch")
        hint = f"--steps {max(setting.value - 1, 0)} writes {setting.value} tokens" if name == "max_new_tokens" else ""
        default = "" if options.steps is not None else ", the default,"
        raise UsageError(f"{what} contradicts --steps {steps}{default} which writes {steps + 1} tokens", hint=hint)
    return steps
