"""Ray: started on this machine, or joined at an address. It stays quiet, and installs no signal handlers."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genctl.decode.threads import cores, from_environment
from genctl.documents import reader
from genctl.documents.reader import Unreadable
from genctl.engines.pool.worker_env import worker_env
from genctl.errors import UsageError, count, extra

if TYPE_CHECKING:
    from genctl.engines.pool.processes import RayProcesses


# -- whether a Ray cluster answers at an address: Ray itself would wait for minutes, or for ever, and say little -------
# Ray's head (`HOST:PORT`) and its client server (`ray://HOST:PORT`) speak gRPC. Each has a call that only asks whether
# it is there; one such call, with a deadline, tells a cluster from a port that says nothing or speaks something else,
# and a token that is missing from one that is wrong.


ANSWER_S = 30.0  # until an address that accepts connections and does not answer is given up
CONNECT_S = 10.0  # until one that does not accept is
LONGEST_TOKEN = 1 << 16  # bytes
CLIENT = "ray://"
# The calls, and what is sent: "are you alive?" to a head, "ping" to a client server (ray/protobuf).
_HEAD = ("/ray.rpc.NodeInfoGcsService/CheckAlive", b"")
_CLIENT_SERVER = ("/ray.rpc.RayletDriver/ClusterInfo", b"\x08\x04")


def probe(address: str) -> None:
    """Raises UsageError where no Ray cluster answers at HOST:PORT, within `ANSWER_S`. `auto` is not looked at."""
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
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(request, timeout=ANSWER_S, metadata=_token())
        except grpc.RpcError as error:
            _judge(address, error, grpc.StatusCode)


def same_place(one: str, other: str) -> bool:
    """Whether two addresses HOST:PORT name the same place."""
    (host, _, port), (there, _, its) = one.rpartition(":"), other.rpartition(":")
    if port != its:
        return False
    try:
        found = [{entry[4][0] for entry in socket.getaddrinfo(name.strip("[]"), None)} for name in (host, there)]
    except (OSError, UnicodeError):
        return host == there
    return bool(found[0] & found[1])


def nothing_there(address: str, reason: str, hint: str = "") -> UsageError:
    """The error of an address at which there is no cluster to join."""
    return UsageError(f"--address {address}: there is no Ray cluster to join: {reason}", hint=hint)


def _judge(address: str, error: Any, codes: Any) -> None:
    """Raises UsageError for an answer that no cluster gives, or that asks for a token."""
    code, details = error.code(), str(error.details())
    if code == codes.UNAUTHENTICATED:
        if _token():
            raise UsageError(f"--address {address}: the cluster does not accept this token", hint=_WHERE)
        raise UsageError(
            f"--address {address}: the cluster asks for a token, and none is {'found' if _sends() else 'sent'}",
            hint=_WHERE if _sends() else f"RAY_AUTH_MODE=token sends it; {_WHERE}",
        )
    if code == codes.UNIMPLEMENTED:
        raise nothing_there(address, "what listens there speaks gRPC, but is not Ray's")
    if code == codes.DEADLINE_EXCEEDED or (code == codes.UNAVAILABLE and "timed out" in details):
        raise nothing_there(address, f"what listens there does not answer within {ANSWER_S:.0f} s")
    if code == codes.UNAVAILABLE:
        http = "HTTP/2" in details or "http1" in details
        raise nothing_there(address, "what listens there does not speak Ray's protocol" if http else "no answer")


_WHERE = "it is read from RAY_AUTH_TOKEN, from the file RAY_AUTH_TOKEN_PATH, or from ~/.ray/auth_token"


def _sends() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _token() -> tuple[tuple[str, str], ...]:
    """The header with the token that Ray sends, as Ray finds it; none unless RAY_AUTH_MODE is `token`."""
    environment = os.environ
    if not _sends():
        return ()
    token = environment.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")
        try:
            token = reader.text(path.expanduser(), LONGEST_TOKEN, regular=True)
        except (Unreadable, RuntimeError):
            return ()
    return (("authorization", f"Bearer {token.strip()}"),)


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
