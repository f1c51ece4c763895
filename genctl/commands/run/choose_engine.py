"""Which engine `run` and `beam` compute with: this process, servers, workers, or ranks that share a model."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from genctl.commands.engine_choice import LOCAL, SERVERS, EngineChoice, engine_of, shared
from genctl.config.layers import Resolved
from genctl.errors import UsageError

ALONE = ("resume", "check_batch", "check_runtime")  # options that read what one process has


def run(options: Any) -> int | None:
    """`genctl run` and `genctl beam`."""
    from genctl.commands.run.job import RunJob

    choice = engine_of(options)
    if choice is SERVERS:
        from genctl.commands.run.options import check_backend

        choice = replace(SERVERS, check=check_backend)
    elif choice is LOCAL and os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        choice = EngineChoice(shared, _check_ranks, ranks=True)
    return RunJob.perform(options, choice)


def _check_ranks(options: Any, early: Resolved) -> None:
    for name in ALONE:
        if getattr(options, name):
            raise UsageError(f"--tensor-parallel and --{name.replace('_', '-')}: only one process can do that")
