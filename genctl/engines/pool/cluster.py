"""Ray: started on this machine, or joined at an address. It stays quiet, and installs no signal handlers."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genctl.decode.threads import cores, from_environment
from genctl.engines.pool.address import nothing_there, probe, same_place
from genctl.engines.pool.worker_env import worker_env
from genctl.errors import UsageError, count, extra

if TYPE_CHECKING:
    from genctl.engines.pool.processes import RayProcesses

# Read by Ray when it is imported or started. The messages of its daemons would go to standard output, between results.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "(?s).*",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # below `uv run` workers would import a copy of the working directory
}
JOIN_S = 120.0  # seconds until a cluster that answers, but cannot be joined, is given up
POLL_S = 0.02  # between two looks at whether Ray is there
ENDING = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
STORE = 256 << 20  # bytes for results on their way: a group's are a few MiB


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
        raise UsageError(f"{flag} needs Ray, which is not installed", hint=extra("ray"))


def check_cores(workers: int | None, address: str | None) -> None:
    """Raises UsageError for more workers than there are cores here. `start_cluster` checks those of a cluster."""
    number = cores()
    if workers is None or address is not None or is_running() or workers <= number:
        return
    there = f"there {'is' if number == 1 else 'are'} {count(number, 'core')}"
    raise UsageError(f"--workers {workers}: {there}, and each worker takes one", hint=f"--workers {number} fits")


def is_running() -> bool:
    """Whether this process uses a Ray already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def start_cluster(
    address: str | None, workers: int | None, *, gpu: bool, processes: RayProcesses | None = None
) -> RayCluster:
    """Start Ray here, or join the cluster at `address`. `gpu`: the checkpoint may go to GPUs.

    Without `workers` there is one for each GPU, or, where there is none, for each machine. `processes` learns what was
    started. A Ray that runs in this process is used as it is. Raises UsageError.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    ours = not ray.is_initialized()
    if ours:
        _init(address, max(workers or 0, cores()), processes)
    elif address not in (None, "auto"):
        here = str(ray.get_runtime_context().gcs_address)
        if not same_place(str(address), here):
            raise UsageError(
                f"--address {address}: this process uses the Ray cluster at {here} already",
                hint="without --address that one is used",
            )
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


def stop_cluster() -> None:
    """Leave the cluster; one that was started here ends."""
    if is_running():
        _apart(sys.modules["ray"].shutdown, None)


def _init(address: str | None, cpus: int, processes: RayProcesses | None) -> None:
    """`ray.init`. Raises UsageError where no cluster can be reached."""
    import ray

    if address is not None:
        probe(address)
    arguments: dict[str, Any] = {"address": "local" if address is None else address}
    if address is None:
        arguments |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE}
    if address is None or "://" not in address:
        arguments |= {"log_to_driver": False, "configure_logging": False, "logging_level": logging.CRITICAL}
    try:
        folder = "" if processes is None else processes.own_folder()
        with _hushed(), worker_env(folder, here=address is None) as arguments["runtime_env"]:
            _apart(lambda: ray.init(**arguments), None if address is None else JOIN_S)
    except TimeoutError as error:
        assert address is not None
        raise nothing_there(address, f"it cannot be joined within {JOIN_S:.0f} s") from error
    except (OSError, ValueError, RuntimeError, ImportError, ray.exceptions.RayError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if address is None:
            raise UsageError(f"Ray does not start: {reason}") from error
        hint = "ray start --head starts a cluster on this machine" if address == "auto" else ""
        raise nothing_there(address, reason, hint) from error
    finally:
        if processes is not None:
            processes.note()


def _apart(call: Callable[[], Any], limit_s: float | None) -> Any:
    """What `call` returns, in a thread of its own. Raises what it raises, and TimeoutError after `limit_s`.

    This thread stays free for signals: Ray would replace their handlers in the main thread, and swallow what they
    raise. The other thread is kept to the end, because on Linux Ray's daemons end with the thread that started them.
    """
    outcome: list[Any] = []
    done = threading.Event()

    def perform() -> None:
        _forking.add(threading.get_ident())
        try:
            outcome.append((call(), None))
        except BaseException as error:  # whatever it is, it is raised where it is waited for
            outcome.append((None, error))
        _forking.discard(threading.get_ident())
        done.set()
        threading.Event().wait()

    with _own_signals() as wait:
        threading.Thread(target=perform, name="ray", daemon=True).start()
        until = None if limit_s is None else time.monotonic() + limit_s
        while not done.is_set():
            wait(done)
            if until is not None and time.monotonic() > until:
                raise TimeoutError
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


_forking: set[int] = set()  # threads whose forks are Ray's daemons


def _leave_group() -> None:
    """In a daemon that Ray has just forked: a signal to the processes of a job (by a terminal, by `timeout`) ends the
    job. The daemons end after it: a job that loses them first is ended by Ray, with a status of Ray's.
    """
    if threading.get_ident() in _forking:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


if hasattr(os, "register_at_fork") and hasattr(os, "setsid"):
    os.register_at_fork(after_in_child=_leave_group)


@contextmanager
def _own_signals() -> Iterator[Callable[[threading.Event], None]]:
    """Gives a function that waits for an event, or a moment, and handles signals as Python's handlers say.

    Ray's C++ part replaces the handler of SIGTERM, unseen by Python: as it starts by one that prints a stack, as it
    ends by the default, which ends the process. So signals are blocked, here and in the threads that Ray starts, and
    this thread accepts them: that calls no handler. Python's handlers are put back at the end.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "sigtimedwait"):
        yield lambda done: (done.wait(POLL_S), None)[1]
        return

    def restored() -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:  # Python knows it
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(done: threading.Event) -> None:
        taken = signal.sigtimedwait(ENDING, POLL_S)
        if taken is not None:
            restored()
            signal.raise_signal(taken.si_signo)
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield wait
    finally:
        restored()


@contextmanager
def _hushed() -> Iterator[None]:
    """Nothing that Ray's C++ part says reaches the terminal: on why it finds no cluster, it raises as well; on a signal
    that comes before its handler is replaced, it prints a stack.
    """
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:  # a signal may raise at any moment
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def threads_for(cores: int, workers: int) -> int:
    """Threads of each worker: OMP_NUM_THREADS where it is set, else an equal share of the cores at most."""
    given = from_environment()
    return max(cores // workers, 1) if given is None else given[0]
