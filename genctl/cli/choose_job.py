"""Which job does a command: the one that computes here, or one that has workers or servers do it."""

from __future__ import annotations

import os
from typing import Any

from genctl.cli.worker_options import wanted
from genctl.errors import UsageError


def on_servers(options: Any) -> bool:
    """Whether any layer of settings names a server. Raises UsageError where workers are asked for, too."""
    layer = next((layer for layer in options.layers() if layer.values.get("backend") is not None), None)
    if layer is not None and (flag := wanted(options)):
        place = layer.place("backend")
        raise UsageError(f"{flag} computes in processes of this program, but {place} leaves that to a server")
    return layer is not None


def run(options: Any) -> int | None:
    """`genctl run` and `genctl beam`: here, as one of several processes that share a model, by workers, on servers."""
    if on_servers(options):
        from genctl.cli.run_servers import RunServersJob

        return RunServersJob.perform(options)
    if wanted(options):
        from genctl.cli.run_workers import RunWorkersJob

        return RunWorkersJob.perform(options)
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        if any(layer.values.get("fsdp") for layer in options.layers()):
            from genctl.ranks.own_rows import OwnRowsRun

            return OwnRowsRun.perform(options)
        from genctl.ranks.shared_run import SharedRun

        return SharedRun.perform(options)
    from genctl.cli.run_job import RunJob

    return RunJob.perform(options)


def score(options: Any) -> int | None:
    """`genctl score`: here, by workers, or on servers."""
    if on_servers(options):
        from genctl.cli.score_servers import ScoreServersJob

        return ScoreServersJob.perform(options)
    if wanted(options):
        from genctl.cli.score_workers import ScoreWorkersJob

        return ScoreWorkersJob.perform(options)
    from genctl.cli.score_job import ScoreJob

    return ScoreJob.perform(options)
