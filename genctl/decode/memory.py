"""Free memory, and how many prompts fit into it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane

SHARE = 0.5  # of free memory; activations and growing buffers need the rest
MOST = {"cpu": 32, "cuda": 256}  # beyond this the time of a pass grows in proportion to its rows


def available(device: torch.device) -> int | None:
    """Free bytes on a device; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
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
    prefix = forward.prefill(lane.tokens[:1], source, use_cache=lane.use_cache)
    parts = [] if prefix.cache is None else prefix.cache.describe()
    bytes_of_row = sum(_grown(part, columns) for part in parts)
    if not bytes_of_row:  # without a cache every pass reads all tokens, so activations grow with the length
        width = int(getattr(forward.config.get_text_config(decoder=True), "hidden_size", 1024))
        bytes_of_row = columns * width * 16
    fits = int(free * SHARE / (bytes_of_row * max(int(lane.strategy.rows), 1)))
    return max(1, min(int(most), fits))


def _grown(part: dict[str, Any], columns: int) -> int:
    if part["kind"] == "recurrent state":
        return int(part["bytes"])
    return int(part["bytes"]) * min(columns, int(part.get("window", columns)))
