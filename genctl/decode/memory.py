"""Memory: a shortage is recognised, what is unused is freed, and the number of lanes to decode at once is estimated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from genctl import events
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane
from genctl.errors import is_shortage as is_shortage

SHARE = 0.5  # of free memory; activations and growing buffers need the rest
MOST = {"cpu": 32, "cuda": 256}  # beyond this the time of a pass grows in proportion to its rows


class OutOfMemory(Exception):
    """A step or a prompt did not fit."""

    def without_frames(self) -> OutOfMemory:
        """A copy without the traceback, whose frames hold tensors of what did not fit."""
        return OutOfMemory(str(self))


def raise_shortage(error: BaseException) -> None:
    """Raises OutOfMemory in the place of an exception for a shortage of memory. Another one is left to the caller."""
    if isinstance(error, (MemoryError, RuntimeError)) and is_shortage(error):
        error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold tensors of the pass
        raise OutOfMemory(str(error)) from None


@contextmanager
def shortages() -> Iterator[None]:
    """`raise_shortage` for whatever is raised within: around what is not done for each token."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise_shortage(error)
        raise


def too_large(lane: Lane, rows: int, shortage: Exception) -> events.Failed:
    """The failure of a lane that does not fit alone."""
    tokens = len(lane.tokens) + len(lane.source or ())
    many = f"{rows} rows of it" if rows > 1 else "it alone"
    why = f" ({str(shortage).splitlines()[0][:120]})" if str(shortage) else ""
    return events.Failed(lane.name, "memory", f"not enough memory for a prompt of {tokens} tokens, {many}{why}")


def available(device: torch.device) -> int | None:
    """Free bytes on a device, with those that torch holds and does not use; None if unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def fitting(forward: ModelRuntime, lane: Lane, columns: int) -> int:
    """How many lanes like this one should be decoded at once, if each grows to `columns` tokens.

    One token is read to measure a row's cache.
    """
    most = MOST.get(forward.device.type, 16)
    free = available(forward.device)
    if free is None:
        return min(16, most)
    source = None if lane.source is None else forward.encode(lane.source[:1])
    cache = forward.prefill(lane.tokens[:1], source, use_cache=lane.use_cache).cache
    bytes_of_row = 0 if cache is None else sum(_grown(part, columns) for part in cache.describe())
    if not bytes_of_row:  # without a cache every pass reads all tokens, so activations grow with the length
        bytes_of_row = columns * int(getattr(forward.config.get_text_config(decoder=True), "hidden_size", 1024)) * 16
    fits = int(free * SHARE / (bytes_of_row * max(int(lane.strategy.max_rows), 1)))
    return max(1, min(int(most), fits))


def _grown(part: dict[str, Any], columns: int) -> int:
    """Bytes of a part with so many columns; the free ones of a buffer are measured with the one that was read."""
    if part["kind"] == "recurrent state":
        return int(part["bytes"])
    return int(part["bytes"]) * min(columns, int(part.get("window", columns))) // int(part["shape"][2])
