"""Which engine `run` and `beam` compute with: this process, servers, workers, or ranks that share a model."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from genctl.commands.engine_choice import LOCAL, SERVERS, EngineChoice, engine_of, shared
from genctl.config.layers import Resolved
from genctl.errors import UsageError


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
    if options.resume:
        raise UsageError("--tensor-parallel and --resume: only one process can do that")
