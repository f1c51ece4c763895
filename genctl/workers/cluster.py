"""Ray: started on this machine, or joined at an address. It stays quiet, and its signal handlers are not used."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from genctl.errors import UsageError
from genctl.plural import count

# Read by Ray when it is imported or started. The messages of its daemons would go to standard output, between results.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "(?s).*",
}
PROBE_S = 10.0  # seconds until an address that does not answer is given up
STORE = 256 << 20  # bytes for results on their way: a group's are a few MB


@dataclass(frozen=True)
class RayCluster:
    """What is there for workers."""

    workers: int
    gpus: int  # for each worker
    threads: int  # for each worker
    alone: bool  # it was started here, on this machine
    about: str  # in words
    ours: bool = True  # to be shut down at the end


def require_ray(flag: str) -> None:
    """Raises UsageError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"{flag} needs Ray, which is not installed: pip install 'genctl[ray]'")


def start_cluster(address: str | None, workers: int | None, *, gpu: bool) -> RayCluster:
    """Start Ray here, or join the cluster at `address`. `gpu`: the checkpoint may go to GPUs.

    Without `workers` there is one for each GPU, or, where there is none, for each machine. Raises UsageError.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    ours = not ray.is_initialized()
    if ours:
        _init(address, max(workers or 0, cores()))
    total = ray.cluster_resources()
    machines = [node for node in ray.nodes() if node.get("Alive")]
    cpus, gpus = int(total.get("CPU", 1)), int(total.get("GPU", 0)) if gpu else 0
    number = workers or gpus or len(machines)
    if gpus and number > gpus:
        raise UsageError(
            f"--workers {number}: there {'is' if gpus == 1 else 'are'} {count(gpus, 'GPU')}, and each worker takes one",
            hint="--device cpu computes on the CPU",
        )
    if address is not None and number > cpus:
        raise UsageError(f"--workers {number}: the cluster at {address} has {count(cpus, 'core')}, one for each worker")
    available = cpus if address is not None else cores()
    where = "on this machine" if address is None else f"at {address}, {count(len(machines), 'machine')}"
    return RayCluster(number, int(gpus > 0), threads_for(available, number), address is None, where, ours)


def _init(address: str | None, cpus: int) -> None:
    """`ray.init`. Raises UsageError where no cluster can be reached."""
    import ray

    _probe(address)
    arguments: dict[str, Any] = {"address": "local" if address is None else address}
    if address is None:
        arguments |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE}
    if address is None or "://" not in address:
        arguments |= {"log_to_driver": False, "configure_logging": False, "logging_level": logging.CRITICAL}
    try:
        with _own_signals(), _hushed(address is not None):
            ray.init(**arguments)
    except (OSError, ValueError, RuntimeError, ImportError, ray.exceptions.RayError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if address is None:
            raise UsageError(f"Ray does not start: {reason}") from error
        hint = "ray start --head starts a cluster on this machine" if address == "auto" else ""
        raise UsageError(f"--address {address}: there is no Ray cluster to join: {reason}", hint=hint) from error


def _probe(address: str | None) -> None:
    """Raises UsageError where nobody listens at HOST:PORT: Ray would try for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "no answer"
        raise UsageError(f"--address {address}: there is no Ray cluster to join: {reason}") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the signal handlers of this process: Ray replaces that of SIGTERM."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _hushed(wanted: bool) -> Iterator[None]:
    """Nothing that Ray's C++ part says while it looks for a cluster reaches the terminal; it raises as well."""
    if not wanted:
        yield
        return
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(cores: int, workers: int) -> int:
    """Threads of each worker: OMP_NUM_THREADS where it is set, else an equal share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdecimal() and int(given) else max(cores // workers, 1)
