"""Removed names, and their replacements. Using one is a usage error (exit status 2)."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["command", "flag", "format", "setting", "explore"]


class Removed(NamedTuple):
    """A removed name. `instead` names the replacement; MODEL in it stands for the model of the command line.

    The name of a flag of one command has the command ("compare --save"), that of a format its flag ("--format md"). The
    row of a setting covers its flag too. "explore" is a command in its scripts and on its screen.
    """

    kind: Kind
    name: str
    instead: str


REMOVED = (
    Removed("command", "batch", "genctl run -i FILE reads the rows of OpenAI's batch files"),
    Removed("command", "presets schema", 'genctl run --dry -v "A PROMPT" lists the settings with their values'),
    Removed("command", "replay", "genctl report EVENTS makes a page of a recording"),
    Removed("flag", "--svg", "use --report FILE, a page that a browser opens"),
    Removed("flag", "inspect-cache --heatmap", "--inputs shows what each pass reads, --format json all figures"),
    Removed(
        "flag",
        "inspect-cache --diff",
        "use --save-cache FILE, then genctl run --prompt-cache FILE -v PROMPT, which says how much is reused",
    ),
    Removed("flag", "compare --save", "use genctl parity MODEL --save FILE PROMPT, which writes a golden file"),
    Removed("flag", "compare --expect", "use genctl parity MODEL --expect FILE, with a file that parity --save wrote"),
    Removed("flag", "compare --tolerance", "use genctl parity MODEL --expect FILE --max-kl X"),
    Removed("setting", "stochastic_beams", "use num_beams with do_sample = true, or best_of"),
    Removed("setting", "num_assistant_tokens_schedule", "num_assistant_tokens fixes how many are drafted"),
    Removed("setting", "draft_sampling", "leave it out: a seed writes the text that it writes without drafts"),
    Removed(
        "setting",
        "json_schema_unenforced",
        'in the schema, "x-guidance": {"lenient": true} leaves out what is not supported',
    ),
    Removed("setting", "ban_file", 'list the texts: ban = ["…", "…"] in a preset, or --ban for each'),
    Removed("format", "--format md", "use --format jsonl, or text for people"),
    Removed("format", "--format nul", "use --format jsonl, which keeps texts of several lines apart"),
    Removed("format", "--format dot", "use --format jsonl"),
    Removed("format", "--tree-format dot", "use --tree-format json"),
    Removed("format", "--input-format nul", "use --input-format jsonl"),
    Removed("flag", "explore --models", "use genctl compare --models A,B"),
    Removed("flag", "explore --max-nodes", "use --expand mass=0.9,depth=6,nodes=N"),
    Removed("flag", "explore --memory", "the caches take 1 GiB, or what the last two texts need"),
    Removed("flag", "chat --list", "file names in ~/.local/state/genctl/sessions have the time and the first words"),
    Removed("flag", "chat --memory", "the caches of earlier turns take 1GiB at most, or what the last turn needs"),
    Removed("flag", "explore --beside", "use genctl compare with two sides, or the command set KNOB=VALUE"),
    Removed("explore", "next", "goto NODE goes to any token; genctl run --scores lists their entropies"),
    Removed("explore", "previous", "goto NODE goes to any token; genctl run --scores lists their entropies"),
    Removed("explore", "redo", "give the command again"),
    Removed("explore", "reset", "use undo, or set KNOB=VALUE"),
    Removed("explore", "bookmark", "goto takes the number of a node, which every result has"),
    Removed("explore", "layers", "use show, which has what the whole model says"),
    Removed("explore", "compare", "use goto and text for each branch, or genctl compare"),
    Removed("explore", "beside", "use genctl compare, or set and show"),
    Removed("explore", "copy", "use text; the key c copies it"),
    Removed("explore", "repeat", "use genctl run with the seed and the settings of the tree"),
    Removed("flag", "parity --by-text", "use genctl score -m MODEL -i FILE for each, which gives bits per byte"),
    Removed("flag", "parity --update", "ties pass as they are; genctl parity MODEL --save FILE --force records again"),
    Removed("flag", "--check-batch", "use genctl parity MODEL MODEL@batch_size=1 -i FILE"),
    Removed("flag", "--check-runtime", 'use genctl parity MODEL MODEL@runtime=transformers "A PROMPT"'),
    Removed("flag", "--fsdp", "use --device-map auto, --tensor-parallel or --workers N"),
    Removed("flag", "--raw", "use `| cat`: a pipe gets texts as they are"),
    Removed("flag", "--trace", "use --events FILE"),
)


def sentence(kind: Kind, *names: str, shown: str = "") -> str:
    """The error for the first of `names` that was removed; "" if none was. `shown` is how the user wrote it."""
    rows = {row.name: row for row in REMOVED if row.kind == kind}
    row = next((rows[name] for name in names if name in rows), None)
    if row is None:
        return ""
    return f"{shown or row.name} was removed: {row.instead}"
