"""Models larger than memory: each pass reads the weights that `--device-map` leaves on the disk. That bounds the speed.

The bound is reported before the run: bytes to read for each token over the measured speed of the disk.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genctl.errors import UsageError, reason_of
from genctl.models.weights import shown

_PROBE = 1 << 16  # bytes written to check that a folder is writable
_SAMPLE = 64 << 20  # bytes read to measure the disk
_PIECE = 4 << 20  # bytes read at once


def check_folder(name: str) -> None:
    """Make the folder of --offload-folder and write a file there. Raises UsageError if that fails."""
    try:
        folder = Path(name).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--offload-folder {shown(name)}: it is a file, not a folder") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--offload-folder {shown(name)} cannot be written to: {reason_of(error)}") from error


def bound(model: Any, files: Sequence[Path]) -> str:
    """The least time for a token, in a sentence; "" if no weight of `model` is on the disk.

    `files` are the weight files, from which offloaded weights are read.
    """
    places = getattr(model, "hf_device_map", None) or {}
    away = [name for name, place in places.items() if place == "disk"]
    size = sum(
        weight.numel() * weight.element_size()
        for name, weight in model.named_parameters()
        if any(not part or name == part or name.startswith(f"{part}.") for part in away)
    )
    if not size:
        return ""
    speed = disk_speed(max(files, key=lambda path: path.stat().st_size))
    return (
        f"{size / 1e6:,.1f} MB of the weights stay on the disk and are read for each token: at {speed / 1e6:,.0f} MB/s "
        f"a token takes at least {size / speed:.2g} s"
    )


def disk_speed(path: Path) -> float:
    """Bytes per second read from the beginning of a file, without the system's cache if possible."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, _SAMPLE, os.POSIX_FADV_DONTNEED)
        done, began = 0, time.perf_counter()
        while done < _SAMPLE and (piece := file.read(_PIECE)):
            done += len(piece)
        return max(done, 1) / max(time.perf_counter() - began, 1e-9)
