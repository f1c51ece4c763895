"""Where the figures come from: the machine, the versions, and the environment that every side is started with."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = {
    "genctl": "genctl",
    "torch": "torch",
    "transformers": "transformers",
    "CTranslate2": "ctranslate2",
    "llama-cpp-python": "llama-cpp-python",
}


def physical_cores() -> int:
    """Cores that this process may use, hyperthreads not counted."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    seen = set()
    for cpu in allowed:
        place = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            seen.add(place.read_text().strip())
        except OSError:
            seen.add(str(cpu))
    return max(len(seen), 1)


def environment(threads: int) -> dict[str, str]:
    """What every side is started with: threads pinned to cores, no network."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": "cores",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cpu_model() -> str:
    """The processor's name and, where it says so, what its vector units know."""
    name, flags = platform.processor() or platform.machine(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    except OSError:
        pass
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return " ".join([name, *(flag for flag in known if flag in flags)])


def gpu_model(device: str) -> str:
    """The GPU's name; asked in a process of its own, because it takes torch."""
    import subprocess
    import sys

    asked = f"import torch; print(torch.cuda.get_device_name({device!r}))"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    return found.stdout.strip() or device


def versions() -> dict[str, str]:
    """Installed versions of everything that takes part; absent packages are left out."""
    found = {"Python": platform.python_version()}
    for name, package in PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


def header(threads: int, rounds: int, device: str) -> dict[str, object]:
    """Everything that the figures depend on besides the work."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": physical_cores(),
        "threads": threads,
        "device": device if device == "cpu" else gpu_model(device),
        "rounds": rounds,
        "environment": {key: value for key, value in environment(threads).items() if key.startswith("OMP")},
        "versions": versions(),
    }


def sentence(found: Mapping[str, object]) -> str:
    """The header in words."""
    packages, pinned = found["versions"], found["environment"]
    assert isinstance(packages, dict)
    assert isinstance(pinned, dict)
    device = "" if found["device"] == "cpu" else f", {found['device']}"
    return (
        f"{found['date']}; {found['cpu']}, {found['cores']} cores, {found['threads']} threads for every side{device}; "
        f"{', '.join(f'{key}={value}' for key, value in pinned.items())} for all; "
        f"{', '.join(f'{key} {value}' for key, value in packages.items())}; median of {found['rounds']} rounds, in "
        "which the sides take turns; in brackets the least and the greatest ratio within a round"
    )
