"""Ray: started on this machine, or joined at an address. Silenced; processes started here end with this one.

Workers import installed packages, and nothing else from the driver's working directory than a checkout of genctl.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from genctl import process
from genctl.decode.step_costs import cores
from genctl.errors import UsageError, count
from genctl.kernels.build import PRODUCTS

# Environment variables that Ray reads when it is imported or started. Its daemons inherit them.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "(?s).*",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its C++ core writes errors about dead workers to standard error
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` workers would import a copy of the working directory
    "RAY_process_group_cleanup_enabled": "0",  # workers stay in the process group of the daemons
}
CONNECT_S = 10.0  # timeout of a connection to the address,
JOIN_S = 60.0  # and of joining the cluster there
POLL_S = 0.02  # between two checks of a call to Ray
STORE = 256 << 20  # bytes of Ray's object store: a group's results are a few MiB
LONGEST_TMP = 22  # characters in the path of the temporary folder: paths of Ray's sockets in it have 107 at most


@dataclass(frozen=True)
class RayCluster:
    """The workers that a cluster has room for."""

    workers: int
    gpus: int  # for each worker
    threads: int  # for each worker: its share of the cores
    alone: bool  # started here, on this machine
    about: str  # for messages
    reaper: Reaper | None = None  # of the processes started here

    def end(self, *, hurried: bool) -> None:
        """Leave the cluster and end what was started here. `hurried`: this process exits now, and they end with it."""
        if not hurried:
            _apart(sys.modules["ray"].shutdown)
            if self.reaper is not None:
                self.reaper.end()


def start_cluster(address: str | None, workers: int | None, *, gpu: bool) -> RayCluster:
    """Start Ray here, or join the cluster at `address`. `gpu`: the checkpoint may use GPUs.

    Without `workers` there is one for each GPU or, without GPUs, for each machine. Raises UsageError.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    room, where = cores(), "on this machine"
    if address is None:
        _check_room(workers or 1, room, "core")
    reaper = _init(address, room)
    total, machines = ray.cluster_resources(), sum(bool(node.get("Alive")) for node in ray.nodes())
    gpus = int(total.get("GPU", 0)) if gpu else 0
    number = workers or gpus or machines
    if gpus:
        _check_room(number, gpus, "GPU")
    if address is not None:
        room, where = int(total.get("CPU", 1)), f"at {address}, {count(machines, 'machine')}"
        _check_room(number, room, "core")
    return RayCluster(number, int(gpus > 0), max(room // number, 1), address is None, where, reaper)


def _check_room(workers: int, room: int, unit: str) -> None:
    if workers > room:
        there = f"there {'is' if room == 1 else 'are'} {count(room, unit)}"
        raise UsageError(f"--workers {workers}: {there}, and each worker takes one", hint=f"--workers {room} fits")


def _init(address: str | None, cpus: int) -> Reaper | None:
    """Call `ray.init`. Returns the reaper of the processes it starts, if any. Raises UsageError with Ray's reason."""
    global _daemon_group
    import ray

    arguments: dict[str, Any] = {"address": address or "local"}
    reaper = None
    if address is None:
        arguments |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE}
        usual = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="ray-", dir=usual if len(usual) <= LONGEST_TMP else "/tmp")
        if not os.environ.get("RAY_TMPDIR"):  # anyone can replace files in Ray's default folder
            arguments["_temp_dir"] = f"{folder}/r"  # Ray makes this world-writable, inside a private folder
        reaper = Reaper(folder) if hasattr(os, "register_at_fork") else None
    if "://" not in arguments["address"]:
        arguments |= {"log_to_driver": False, "configure_logging": False}
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if host and port.isdecimal():  # if nothing listens, Ray would wait for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        _daemon_group = reaper.process.pid if reaper is not None else 0
        os.dup2(null, 2)  # Ray's C++ core writes there
        with worker_env(here=address is None) as arguments["runtime_env"]:
            _apart(partial(ray.init, **arguments), math.inf if address is None else JOIN_S)
        return reaper
    except Exception as error:
        lines = [getattr(error, "strerror", None) or "", *str(error).splitlines(), type(error).__name__]
        reason = next(line.strip() for line in lines if line.strip())
        if reaper is not None:
            reaper.end()
        if address is None:
            raise UsageError(f"Ray does not start: {reason}") from error
        hint = "ray start --head starts a cluster on this machine" if address == "auto" else ""
        raise UsageError(f"--address {address}: there is no Ray cluster to join: {reason}", hint=hint) from error
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
        _daemon_group = 0


def _apart(call: Callable[[], Any], seconds: float = math.inf) -> None:
    """Make a call in another thread: in the main thread Ray would replace the handler of SIGTERM.

    The thread never ends, because on Linux Ray's daemons end with the thread that started them. Raises TimeoutError
    if the call takes longer than `seconds`.
    """
    outcome: Future[Any] = Future()

    def perform() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised again by `outcome.result()`
            outcome.set_exception(error)
        threading.Event().wait()

    handler, is_main = signal.getsignal(signal.SIGTERM), threading.current_thread() is threading.main_thread()
    until = time.monotonic() + seconds
    threading.Thread(target=perform, name="ray", daemon=True).start()
    while not outcome.done():
        if time.monotonic() > until:
            raise TimeoutError(f"no answer within {seconds:g} s")
        wait([outcome], POLL_S)
        if handler is not None and is_main:
            signal.signal(signal.SIGTERM, handler)  # Ray's C++ core replaces it, too
    outcome.result()


_daemon_group = 0  # the process group of Ray's daemons, while `ray.init` starts them


class Reaper:
    """A process whose group Ray's daemons and workers join. It kills them and removes `folder` once this process ends.

    Signals to the group of this process (by a terminal, by `timeout`) do not reach them: without its daemons Ray would
    end this process before it saves its results.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        command = ["/bin/sh", "-c", 'cat; sleep 1; rm -rf "$0"; kill -9 0', folder]  # `cat` ends with this process
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=null, stderr=null, process_group=0)

    def end(self) -> None:
        """Kill the group and remove `folder` now."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def _join_group() -> None:
    if _daemon_group:
        os.setpgid(0, _daemon_group)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_join_group)


@contextmanager
def worker_env(*, here: bool) -> Iterator[dict[str, Any]]:
    """The `runtime_env` for `ray.init`, to be called inside. `here`: the workers are on this machine.

    Ray puts the folder of the driver's script and its working directory first on the path of every worker, unless the
    job names a working directory. So this names an empty one, except under `ray job submit`, which may have set one.
    """
    variables = {process.SAFE: "1"}
    if os.environ.get(PRODUCTS):
        variables[PRODUCTS] = os.environ[PRODUCTS]
    if here:  # workers start in another folder, so paths are absolute
        entries = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        home = str(Path(__file__).absolute().parents[3])
        if home not in (*entries, *sys.path[1:]):  # a checkout, importable only from the working folder
            entries.append(home)
        if entries:
            variables["PYTHONPATH"] = os.pathsep.join(entries)
    with tempfile.TemporaryDirectory(prefix="genctl-") as empty:
        submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        yield {"env_vars": variables, **({} if submitted else {"working_dir": empty})}
