"""Ray: started on this machine, or joined at an address. It is quiet, installs no signal handlers and leaves nothing.

Workers import what is installed, and nothing from the driver's working directory.
"""

from __future__ import annotations

import json
import logging
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genctl import process
from genctl.decode.threads import cores, from_environment
from genctl.errors import UsageError, count
from genctl.kernels.variant import VARIABLE

# Read by Ray when it is imported or started. The messages of its daemons would go to standard output, between results.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "(?s).*",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # below `uv run` workers would import a copy of the working directory
    "RAY_process_group_cleanup_enabled": "0",  # workers stay in the group of `RayGroup`
}
JOIN_S = 60.0  # seconds until a cluster that answers, but cannot be joined, is given up
POLL_S = 0.02  # between two looks at whether Ray is there
ENDING = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
STORE = 256 << 20  # bytes for results on their way: a group's are a few MiB
LONGEST = 22  # characters of a folder for temporary files: the names of Ray's sockets in it have 107 at most


@dataclass(frozen=True)
class RayCluster:
    """What is there for workers."""

    workers: int
    gpus: int  # for each worker
    threads: int  # for each worker
    alone: bool  # it was started here, on this machine
    about: str  # in words
    ours: bool = True  # to be left at the end
    group: RayGroup | None = None  # of what was started here

    def end(self, *, keep_logs: bool) -> None:
        """Leave the cluster, with all that runs for this process; what was started here ends."""
        _end(self.group, keep_logs=keep_logs)


def start_cluster(address: str | None, workers: int | None, *, gpu: bool) -> RayCluster:
    """Start Ray here, or join the cluster at `address`. `gpu`: the checkpoint may go to GPUs.

    Without `workers` there is one for each GPU, or, where there is none, for each machine. A Ray that runs in this
    process is used as it is. Raises UsageError.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    ours = not ray.is_initialized()
    group = RayGroup() if ours and address is None else None
    try:
        if ours:
            _init(address, max(workers or 0, cores()), group)
        elif address not in (None, "auto") and address != (here := ray.get_runtime_context().gcs_address):
            raise UsageError(
                f"--address {address}: this process uses the Ray cluster at {here} already",
                hint="without --address that one is used",
            )
        return replace(_found(address, workers, gpu), ours=ours, group=group)
    except Exception:  # after a signal, which raises SystemExit, all ends with this process
        if ours:
            _end(group, keep_logs=True)
        raise


def _found(address: str | None, workers: int | None, gpu: bool) -> RayCluster:
    """What the cluster has for workers. Raises UsageError for too many of them."""
    import ray

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
    return RayCluster(number, int(gpus > 0), threads_for(available, number), address is None, where)


def _end(group: RayGroup | None, *, keep_logs: bool) -> None:
    if is_running():
        apart(sys.modules["ray"].shutdown)
    if group is not None:
        group.end(keep_logs=keep_logs)


def _init(address: str | None, cpus: int, group: RayGroup | None) -> None:
    """`ray.init`. Raises UsageError where no cluster can be reached."""
    import ray

    if address is not None:
        probe(address)
    arguments: dict[str, Any] = {"address": "local" if address is None else address}
    if address is None:
        arguments |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE}
        if group is not None and not os.environ.get("RAY_TMPDIR"):
            arguments["_temp_dir"] = f"{group.folder}/r"  # Ray lets everybody write to this one
    if address is None or "://" not in address:
        arguments |= {"log_to_driver": False, "configure_logging": False, "logging_level": logging.CRITICAL}
    try:
        with _hushed(), worker_env(here=address is None) as arguments["runtime_env"]:
            apart(lambda: ray.init(**arguments), None if address is None else JOIN_S, group)
    except (OSError, ValueError, RuntimeError, ImportError, ray.exceptions.RayError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if address is None:
            raise UsageError(f"Ray does not start: {reason}") from error
        hint = "ray start --head starts a cluster on this machine" if address == "auto" else ""
        if sends_token() and not hint:
            hint = f"the token may be wrong or missing: {TOKEN}"
        raise nothing_there(address, reason, hint) from error


def is_running() -> bool:
    """Whether this process uses a Ray already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def threads_for(cores: int, workers: int) -> int:
    """Threads of each worker: OMP_NUM_THREADS where it is set, else an equal share of the cores at most."""
    given = from_environment()
    return max(cores // workers, 1) if given is None else given[0]


# -- whether a Ray cluster answers at an address: Ray itself would wait for minutes, or for ever, and report little ----

ANSWER_S = 15.0  # until an address that accepts connections and does not answer is given up
CONNECT_S = 10.0  # until one that does not accept is
CLIENT = "ray://"
TOKEN = "Ray reads it from RAY_AUTH_TOKEN, from the file RAY_AUTH_TOKEN_PATH, or from ~/.ray/auth_token"
# Ray's head (`HOST:PORT`) and its client server (`ray://HOST:PORT`) speak gRPC. Each has a call that only asks whether
# it is there, with what is sent: "are you alive?" to a head, "ping" to a client server (ray/protobuf).
_HEAD = ("/ray.rpc.NodeInfoGcsService/CheckAlive", b"")
_CLIENT_SERVER = ("/ray.rpc.RayletDriver/ClusterInfo", b"\x08\x04")


def probe(address: str) -> None:
    """Raises UsageError where no Ray cluster answers at HOST:PORT, or where it asks for a token and Ray sends none.

    `auto` is not probed.
    """
    host, colon, port = address.removeprefix(CLIENT).rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise nothing_there(address, getattr(error, "strerror", None) or "no answer") from error
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return  # Ray has the certificates
    try:
        import grpc
    except ImportError:  # Ray without its client
        return
    method, request = _CLIENT_SERVER if address.startswith(CLIENT) else _HEAD
    reasons = {
        grpc.StatusCode.UNIMPLEMENTED: "what listens there speaks gRPC, but is not Ray's",
        grpc.StatusCode.DEADLINE_EXCEEDED: f"what listens there does not answer within {ANSWER_S:.0f} s",
        grpc.StatusCode.UNAVAILABLE: "what listens there does not speak Ray's protocol",
    }
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(request, timeout=ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()
            if code in reasons:
                raise nothing_there(address, reasons[code]) from error
            if code == grpc.StatusCode.UNAUTHENTICATED and not sends_token():
                message = f"--address {address}: the cluster asks for a token, and none is sent"
                raise UsageError(message, hint=f"RAY_AUTH_MODE=token sends it; {TOKEN}") from error


def sends_token() -> bool:
    """Whether Ray sends a token. It does not report a missing or wrong one."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def nothing_there(address: str, reason: str, hint: str = "") -> UsageError:
    """The error of an address at which there is no cluster to join."""
    return UsageError(f"--address {address}: there is no Ray cluster to join: {reason}", hint=hint)


# -- signals -----------------------------------------------------------------------------------------------------------


def apart(call: Callable[[], Any], limit_s: float | None = None, group: RayGroup | None = None) -> Any:
    """What `call` returns, in a thread of its own. Raises what it raises, and TimeoutError after `limit_s`.

    Ray would replace the signal handlers of the main thread, and swallow what they raise. The other thread never
    ends, because on Linux Ray's daemons end with the thread that started them. They join the `group`.
    """
    outcome: Future[Any] = Future()

    def perform() -> None:
        if group is not None:
            _starting[threading.get_ident()] = group.number
        try:
            outcome.set_result(call())
        except BaseException as error:  # whatever it is, it is raised where it is waited for
            outcome.set_exception(error)
        _starting.pop(threading.get_ident(), None)
        threading.Event().wait()

    with _own_signals():
        threading.Thread(target=perform, name="ray", daemon=True).start()
    until = None if limit_s is None else time.monotonic() + limit_s
    while not outcome.done():
        with _own_signals():
            wait([outcome], POLL_S)
        if until is not None and time.monotonic() > until:
            raise TimeoutError(f"it cannot be joined within {limit_s:.0f} s")
    return outcome.result()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Signals that come inside are handled at the end, by Python's handlers.

    Ray's C++ part replaces the handler of SIGTERM, unseen by Python: as it starts by one that prints a stack, as it
    ends by the default, which ends the process. So signals are blocked, in threads that start inside, too, and Python's
    handler is put back before they are let through.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:  # Python knows it
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep output of Ray's C++ part off the terminal: why it finds no cluster (it raises as well), and the stack that
    it prints on a signal before its handler is replaced.
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


# -- what Ray starts here ----------------------------------------------------------------------------------------------

# Standard input ends with the process that has its other end. The one that kills may not be in the group; until it is
# done, standard output is open.
_REAPER = """
import os, shutil, signal, sys
keep_logs = sys.stdin.buffer.read()
group = os.getpgrp()
if os.fork() == 0:
    os.setsid()
    os.killpg(group, signal.SIGKILL)
    if not keep_logs:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class RayGroup:
    """A process group of all that Ray starts here, and a folder for its sockets and logs. Both end with this process.

    Signals to the processes of a job (by a terminal, by `timeout`) do not reach the group: Ray ends a process that
    loses its daemons with a status of its own, so they end after it.
    """

    def __init__(self) -> None:
        # Ray's usual folder is everybody's, and everybody may replace files in it
        usual = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="ray-", dir=usual if len(usual) <= LONGEST else "/tmp")
        self.number = 0  # of the group; 0 where there are none
        if hasattr(os, "setpgrp"):
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REAPER, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=os.setpgrp,
            )
            self.number = self._reaper.pid

    def end(self, *, keep_logs: bool) -> None:
        """End all that is left, and remove the folder. Ray is not used any more."""
        if self.number:
            self._reaper.communicate(b"yes" if keep_logs else b"")
        elif not keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)


_starting: dict[int, int] = {}  # threads whose forks are Ray's daemons, and the group of these


def _join_group() -> None:
    """In a daemon that Ray has just forked."""
    number = _starting.get(threading.get_ident(), 0)
    if number:
        os.setpgid(0, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_join_group)


# -- what workers import -----------------------------------------------------------------------------------------------


@contextmanager
def worker_env(*, here: bool) -> Iterator[dict[str, Any]]:
    """`runtime_env` of `ray.init`, which is called inside. `here`: the workers are on this machine.

    Ray puts the folder of the driver's script and its working directory on the path of every worker, before that of
    Python, unless the job names a working directory of its own. So it names an empty one.
    """
    variables = {process.SAFE: "1"}
    if os.environ.get(VARIABLE):
        variables[VARIABLE] = os.environ[VARIABLE]
    if here and (path := _python_path()):
        variables["PYTHONPATH"] = path
    with tempfile.TemporaryDirectory(prefix="genctl-") as empty:
        yield {"env_vars": variables, **({} if _job_names_one() else {"working_dir": empty})}


def _python_path() -> str:
    """PYTHONPATH with whole paths, since workers start elsewhere. It leads to genctl where nothing else does."""
    entries = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    home = str(Path(__file__).absolute().parents[3])
    if home not in (*entries, *sys.path[1:]):  # a checkout, found because it is the working folder
        entries.append(home)
    return os.pathsep.join(entries)


def _job_names_one() -> bool:
    """Whether this process is a job of `ray job submit --working-dir`, which names the working directory of workers."""
    try:
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
        return bool(job["runtime_env"]["working_dir"])
    except (ValueError, KeyError, TypeError):
        return False
