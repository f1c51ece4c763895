"""What a worker has done, for the progress bar."""

from __future__ import annotations


class WorkerProgress:
    """What a worker has done since it began. The task counts here while it works on a group."""

    def __init__(self) -> None:
        self.group = -1
        self.rows = 0  # of that group, finished
        self.tokens = 0  # of all groups
