"""`genctl inspect-cache --plan`: the memory that a cache will take, from a config alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from genctl.commands.inspect.options import InspectOptions
from genctl.commands.memory_size import memory_bytes
from genctl.config.layers import Resolved
from genctl.errors import Exit, UsageError

COLUMNS = ("layer", "kind", "shape", "dtype", "device", "bytes")


def perform(options: InspectOptions, early: Resolved) -> int:
    """Print the plan. Returns the exit status: 4 if --memory is given and too small for it, else 0.

    Raises UsageError and ModelError before anything is printed.
    """
    from genctl.commands.inspect import cache_estimate as plans

    if early.runtime.prompt_cache is not None and early.settings["prompt_cache"].kind == "command":
        raise UsageError("--prompt-cache belongs to a measurement, and --plan decodes nothing")
    report = plans.plan(
        early.runtime,
        early.generation,
        batch=options.batch or 1,
        length=options.length,
        source_length=options.source_length,
        memory=None if options.memory is None else memory_bytes(options.memory),
        **options.trust,
    )
    _write(report, options)
    return int(Exit.CHECK if report["plan"]["fits"] is False else Exit.DONE)


def _write(report: Mapping[str, Any], options: InspectOptions) -> None:
    from genctl.commands.inspect.plan_view import plan_lines
    from genctl.io.writers import report_text
    from genctl.terminal.console import make_consoles
    from genctl.terminal.widgets import visible

    out, err = make_consoles(options.color)
    if options.format == "text":
        for line in plan_lines(report, out.width if out.is_terminal else None):
            out.print(line)
    else:
        rows = [[layer[name] for name in COLUMNS] for layer in report["layers"]]
        sys.stdout.write(report_text(report, options.format, COLUMNS, rows))
    sys.stdout.flush()
    for note in report["plan"]["notes"]:
        err.print(visible(f"note: {note}"), style="dim")
