"""Which job does a command: the one that computes here, or the one that has workers do it."""

from __future__ import annotations

from typing import Any

from genctl.cli.worker_options import wanted


def run(options: Any) -> int | None:
    """`genctl run` and `genctl beam`, here or by workers."""
    if wanted(options):
        from genctl.cli.run_workers import RunWorkersJob

        return RunWorkersJob.perform(options)
    from genctl.cli.run_job import RunJob

    return RunJob.perform(options)


def score(options: Any) -> int | None:
    """`genctl score`, here or by workers."""
    if wanted(options):
        from genctl.cli.score_workers import ScoreWorkersJob

        return ScoreWorkersJob.perform(options)
    from genctl.cli.score_job import ScoreJob

    return ScoreJob.perform(options)
