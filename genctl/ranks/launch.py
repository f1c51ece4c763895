"""What `torchrun` and `accelerate launch` say of the processes they start: read from the environment, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from genctl.errors import UsageError


@dataclass(frozen=True)
class Launch:
    """One of several processes that were started together."""

    rank: int  # 0 … size - 1
    size: int


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """The place of this process among those started with it; None if it was started alone. Raises UsageError."""
    size, rank = environment.get("WORLD_SIZE"), environment.get("RANK")
    if size is None or rank is None or size == "1":
        return None
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise UsageError(f"RANK={rank:.40} and WORLD_SIZE={size:.40} in the environment are no place among processes")
    return Launch(int(rank), int(size))


def refuse_copies(launch: Launch) -> None:
    """Raises UsageError: without an option that shares the work, every process would do all of it."""
    raise UsageError(
        f"{launch.size} processes were started (WORLD_SIZE), and each would decode every prompt and write the same "
        "outputs",
        hint="add --tensor-parallel to share out one model, or leave out the launcher (and see --workers)",
    )
