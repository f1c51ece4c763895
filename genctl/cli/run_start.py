"""Where `genctl run` and `genctl beam` begin: as one process, or as one of several that share a model."""

from __future__ import annotations

import os

from genctl.cli.run_options import RunOptions


def start(options: RunOptions) -> int | None:
    """Do what the options say. Returns the exit status, or None if there is no input."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        from genctl.ranks.shared_run import SharedRun

        return SharedRun.perform(options)
    from genctl.cli.run_job import RunJob

    return RunJob.perform(options)
