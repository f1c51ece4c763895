"""Where the figures come from: the machine, the versions, and the environment that every side is started with."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import llama_side

PACKAGES = {
    "genctl": "genctl",
    "torch": "torch",
    "transformers": "transformers",
    "CTranslate2": "ctranslate2",
}


_READ = 1 << 29  # bytes summed to measure the bandwidth: beyond any processor's cache
_BANDWIDTH = f"""
import time
import torch

numbers = torch.ones({_READ // 4})
best = float("inf")
for _ in range(9):
    began = time.perf_counter()
    numbers.sum()
    best = min(best, time.perf_counter() - began)
print({_READ} / best)
"""
_PRODUCTS = """
from genctl.kernels.ops import library, why_not

found = library()
print(f"torch's ({why_not()})" if found is None else f"its own, {found.variant}")
"""


def cores() -> tuple[int, ...]:
    """A logical CPU of each physical core of this machine or of its cpuset.

    The mask of this process does not count: whatever started it may have been pinned to a core.
    """
    seen: dict[str, int] = {}
    for cpu in sorted(_allowed()):
        place = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            seen.setdefault(place.read_text().strip(), cpu)
        except OSError:
            seen[str(cpu)] = cpu
    return tuple(seen.values())


def _allowed() -> set[int]:
    every = range(os.cpu_count() or 1)
    if not hasattr(os, "sched_setaffinity"):
        return set(every)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, every)  # the kernel keeps those of the cpuset
        return os.sched_getaffinity(0)
    except OSError:
        return before
    finally:
        os.sched_setaffinity(0, before)


def pin(chosen: Sequence[int]) -> None:
    """Let this process, and what it starts, run on these CPUs; nothing where the system cannot."""
    if chosen and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)


@contextmanager
def pinned(chosen: Sequence[int]) -> Iterator[None]:
    """Within it, processes are started on these CPUs."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    pin(chosen)
    try:
        yield
    finally:
        pin(sorted(before))


def read_bandwidth() -> float:
    """Bytes a second that a plain sum over 512 MiB reads with all threads, best of nine.

    Measured in a process of its own, which inherits the environment and the CPUs of this one.
    """
    done = subprocess.run([sys.executable, "-c", _BANDWIDTH], capture_output=True, text=True, check=True)
    return float(done.stdout)


def environment(threads: int) -> dict[str, str]:
    """What every side is started with: pinned threads, no network, compiled modules kept as pip leaves them."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": "cores",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "",  # where it is set, a checkout of genctl is compiled anew by each process
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
    asked = f"import torch; print(torch.cuda.get_device_name({device!r}))"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    return found.stdout.strip() or device


def products() -> str:
    """What computes genctl's matrix products; asked in a process of its own, because it takes torch."""
    found = subprocess.run([sys.executable, "-c", _PRODUCTS], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def versions(llama: Path | None = None) -> dict[str, str]:
    """Versions of everything that takes part; what is absent is left out. `llama`: llama.cpp's programs."""
    found = {"Python": platform.python_version()}
    for name, package in PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    if llama is not None:
        found["llama.cpp"] = f"{llama_side.version(llama)}, llama-bench without flags but -p, -n and -t"
    return found


def header(
    chosen: Sequence[int], rounds: int, device: str, bandwidth: float | None, llama: Path | None = None
) -> dict[str, object]:
    """Everything that the figures depend on besides the work. One thread for each of the `chosen` CPUs."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": len(cores()),
        "threads": len(chosen),
        "pinned_to": list(chosen),
        "read_gib_s": None if bandwidth is None else bandwidth / 2**30,
        "device": device if device == "cpu" else gpu_model(device),
        "rounds": rounds,
        "environment": {key: value for key, value in environment(len(chosen)).items() if key.startswith("OMP")},
        "products": products(),
        "versions": versions(llama),
    }


def sentence(found: Mapping[str, object]) -> str:
    """The header in words."""
    packages, pinned_by, chosen = found["versions"], found["environment"], found["pinned_to"]
    assert isinstance(packages, dict)
    assert isinstance(pinned_by, dict)
    assert isinstance(chosen, list)
    device = "" if found["device"] == "cpu" else f", {found['device']}"
    reads = "" if found["read_gib_s"] is None else f", reads {found['read_gib_s']:.1f} GiB/s"
    return (
        f"{found['date']}; {found['cpu']}, {found['cores']} cores{reads}{device}; every side has {found['threads']} "
        f"threads and its affinity is set to CPU {', '.join(map(str, chosen))} when it starts, with "
        f"{', '.join(f'{key}={value}' for key, value in pinned_by.items())}; "
        f"{', '.join(f'{key} {value}' for key, value in packages.items())}; genctl's products: {found['products']}; "
        f"median of {found['rounds']} rounds, in "
        "which the sides take turns; in brackets the least and the greatest ratio within a round"
    )
