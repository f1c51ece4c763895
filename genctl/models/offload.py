"""Models larger than memory: each pass reads the weights that `--device-map` leaves on the disk. That bounds the speed.

The bound is reported before the run: bytes to read for each token over the measured speed of the disk.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genctl import errors
from genctl.errors import UsageError, reason_of
from genctl.models.weights import shown
from genctl.params import Runtime

_MEMORY = re.compile(r"(cpu|disk|mps|\d+)\s*=\s*(\d+(?:\.\d+)?\s*[KMGT]i?B)", re.IGNORECASE)
_PROBE = 1 << 16  # bytes written to check that a folder is writable
_SAMPLE = 64 << 20  # bytes read to measure the disk
_PIECE = 4 << 20  # bytes read at once


def max_memory(text: str) -> dict[int | str, str]:
    """`0=20GiB,cpu=64GiB` in accelerate's form. Raises UsageError."""
    limits: dict[int | str, str] = {}
    for item in text.split(","):
        match = _MEMORY.fullmatch(item.strip())
        if match is None:
            raise UsageError(f"--max-memory {text!r}: {item.strip()!r} is not like 0=20GiB or cpu=64GiB")
        where = match[1].lower()
        key = int(where) if where.isdigit() else where
        if key in limits:
            raise UsageError(f"--max-memory {text!r} names {where} twice")
        limits[key] = match[2].replace(" ", "")
    return limits


def placement(runtime: Runtime) -> dict[str, Any]:
    """Arguments for accelerate's big-model loading; {} without --device-map. Raises UsageError."""
    if runtime.device_map is None:
        for name, value in (("--max-memory", runtime.max_memory), ("--offload-folder", runtime.offload_folder)):
            if value is not None:
                raise UsageError(f"{name} needs --device-map")
        return {}
    if runtime.device != "auto":
        raise UsageError(f"--device-map {runtime.device_map} and --device {runtime.device} both say where weights go")
    kinds = ("auto", "balanced", "balanced_low_0", "sequential")
    if runtime.device_map not in kinds:
        raise UsageError(f"--device-map {runtime.device_map!r} is none of {', '.join(kinds)}")
    arguments: dict[str, Any] = {"device_map": runtime.device_map}
    if runtime.max_memory is not None:
        arguments["max_memory"] = max_memory(runtime.max_memory)
    if runtime.offload_folder is not None:
        if not runtime.offload_folder:
            raise UsageError("--offload-folder is empty, and an empty text names no folder")
        check_folder(runtime.offload_folder)
        arguments["offload_folder"] = str(Path(runtime.offload_folder).expanduser())
    return arguments


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
        f"{errors.size(size)} of the weights stay on the disk and are read for each token: at {errors.size(speed)}/s "
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
