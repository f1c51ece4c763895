"""`genctl inspect-cache --plan`: the memory that a cache will take, from a config alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from genctl.cli.inspect_options import InspectOptions
from genctl.cli.table import check_count
from genctl.config.layers import Resolved
from genctl.errors import Exit, UsageError
from genctl.params import Generation, Runtime

COLUMNS = ("layer", "kind", "shape", "dtype", "device", "bytes")


def perform(
    runtime: Runtime,
    generation: Generation,
    *,
    batch: int,
    length: int | None,
    source_length: int | None,
    memory: str | None,
    format: str,
    color: str,
    allow_pickle: bool,
    trust_remote_code: bool,
) -> int:
    """Print the plan. Returns the exit status: 4 if `memory` is given and too small for it, else 0.

    `format` is text, json or tsv. Raises UsageError and ModelError before anything is printed.
    """
    if format not in ("text", "json", "tsv"):
        raise UsageError(f"--format {format} has no place for a plan: text, json and tsv have")
    for name, value in (("batch", batch), ("length", length), ("source-length", source_length)):
        check_count(name, value, least=1)
    from genctl.inspecting import cache_estimate as plans

    room = None if memory is None else plans.memory_bytes(memory)
    report = plans.plan(
        runtime,
        generation,
        batch=batch,
        length=length,
        source_length=source_length,
        memory=room,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    _write(report, format, color)
    return int(Exit.CHECK if report["plan"]["fits"] is False else Exit.DONE)


def perform_options(options: InspectOptions, early: Resolved) -> int:
    """The same for the options of `genctl inspect-cache` and the settings that they come to."""
    if early.runtime.prompt_cache is not None and early.settings["prompt_cache"].kind == "command":
        raise UsageError("--prompt-cache belongs to a measurement, and --plan decodes nothing")
    names = ("length", "source_length", "memory", "format", "color", "allow_pickle", "trust_remote_code")
    given = {name: getattr(options, name) for name in names}
    return perform(early.runtime, early.generation, batch=1 if options.batch is None else options.batch, **given)


def tsv_lines(report: Mapping[str, Any]) -> list[str]:
    """A header, and a line for each layer; shapes as in JSON."""
    return ["\t".join(COLUMNS), *("\t".join(str(layer[name]) for name in COLUMNS) for layer in report["layers"])]


def _write(report: Mapping[str, Any], format: str, color: str) -> None:
    from genctl.batch.writers import to_json
    from genctl.render.cache_plan import plan_lines
    from genctl.render.console import make_consoles
    from genctl.render.widgets import visible

    out, err = make_consoles(color)  # type: ignore[arg-type]
    if format == "json":
        print(to_json(report))
    elif format == "tsv":
        print("\n".join(tsv_lines(report)))
    else:
        for line in plan_lines(report, out.width if out.is_terminal else None):
            out.print(line)
    sys.stdout.flush()
    for note in report["plan"]["notes"]:
        err.print(visible(f"note: {note}"), style="dim")
