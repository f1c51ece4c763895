"""What is refused before workers start, addresses at which there is no cluster, and what is left when a run ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from genctl.engines.pool import cluster, engine
from genctl.engines.pool.engine import own_weights
from genctl.errors import UsageError
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.engines.pool.fake_ray import FakeRay

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
ROOT = Path(__file__).parents[3]
NO_TRUST = {"allow_pickle": False, "trust_remote_code": False}


# -- too many ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray does not run in this process, and is not started."""
    monkeypatch.setattr(engine, "is_running", lambda: False)
    monkeypatch.setattr(cluster, "_init", lambda *arguments: pytest.fail("Ray was started"))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("command", ["run", "beam", "score"])
def test_more_workers_than_cores_are_refused_with_the_number_that_fits(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, there in ((2, "there are 2 cores"), (1, "there is 1 core")):
        monkeypatch.setattr(engine, "cores", lambda number=number: number)
        done = genctl(command, "hi", "--workers", "200", stdin="")
        message = f"error: --workers 200: {there}, and each worker takes one\nhint: --workers {number} fits\n"
        assert (done.status, done.out, done.err) == (2, "", message)


def test_a_cluster_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "is_running", lambda: False)
    monkeypatch.setattr(engine, "cores", lambda: 2)
    engine.check_cores(200, "auto")
    engine.check_cores(None, None)
    engine.check_cores(2, None)
    with pytest.raises(UsageError):
        engine.check_cores(3, None)


def test_weights_that_every_worker_copies_must_fit_into_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(path.stat().st_size for path in llama.glob("*.safetensors"))
    stored = Runtime(model=str(llama))
    copied = Runtime(model=str(llama), runtime="transformers")
    assert own_weights(stored, NO_TRUST) == 0  # mapped from the file, so that all share them
    assert 0.8 * size < own_weights(copied, NO_TRUST) <= size
    halves = Runtime(model=str(llama), dtype="bfloat16")
    assert own_weights(halves, NO_TRUST) == own_weights(copied, NO_TRUST) // 2
    assert own_weights(Runtime(model="nobody/nothing"), NO_TRUST) == 0
    each = own_weights(copied, NO_TRUST) + engine.PROCESS
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(2.5 * each)))
    engine.check_memory(2, copied, NO_TRUST)
    with pytest.raises(UsageError, match=r"^--workers 3: each needs .* MiB of memory .* are free$") as caught:
        engine.check_memory(3, copied, NO_TRUST)
    assert caught.value.hint == "--workers 2 fits"


# -- addresses ---------------------------------------------------------------------------------------------------------


@contextmanager
def silent() -> Iterator[int]:
    """A port that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def http() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_server(answer: str) -> Iterator[int]:
    """Speaks gRPC: a cluster that is `alive`, one that asks for a `token`, or something else (`other`)."""
    import grpc

    def call(request: bytes, context: Any) -> bytes:
        if answer == "token":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    class Methods(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return None if answer == "other" else grpc.unary_unary_rpc_method_handler(call)

    server = grpc.server(ThreadPoolExecutor(2), handlers=(Methods(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize(
    ("listens", "sentence"),
    [
        (silent, "what listens there does not answer within 1 s"),
        (http, "what listens there does not speak Ray's protocol"),
        (lambda: grpc_server("other"), "what listens there speaks gRPC, but is not Ray's"),
    ],
)
def test_an_address_without_a_cluster_is_given_up_in_one_sentence(
    listens: Any, sentence: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ANSWER_S", 1.0)
    monkeypatch.setattr(engine, "is_running", lambda: False)
    with listens() as port:
        there = f"{scheme}127.0.0.1:{port}"
        with pytest.raises(UsageError) as caught:
            cluster.probe(there)
    assert caught.value.message == f"--address {there}: there is no Ray cluster to join: {sentence}"


def test_a_port_that_is_closed_is_one_sentence() -> None:
    with silent() as port:
        pass
    # in a process of its own: one that uses a Ray already, as after other tests here, refuses every other address
    command = [sys.executable, "-m", "genctl", "run", "hi", "--workers", "1", "--address", f"127.0.0.1:{port}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=90)
    message = f"error: --address 127.0.0.1:{port}: there is no Ray cluster to join: Connection refused\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_cluster_that_asks_for_a_token_is_said_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with grpc_server("token") as port:
        with pytest.raises(UsageError, match="the cluster asks for a token, and none is sent") as caught:
            cluster.probe(f"127.0.0.1:{port}")
        assert "RAY_AUTH_MODE=token" in caught.value.hint
        monkeypatch.setenv("RAY_AUTH_MODE", "token")  # then it is Ray's to send, and joining has a limit
        cluster.probe(f"127.0.0.1:{port}")
        cluster.probe(f"ray://127.0.0.1:{port}")


def test_another_cluster_than_the_one_that_this_process_uses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address was ignored."""
    fake = FakeRay(lambda number, method, arguments: None)
    fake.get_runtime_context = lambda: SimpleNamespace(gcs_address="127.0.0.1:6379")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    for same in ("127.0.0.1:6379", "auto", None):
        assert cluster.start_cluster(same, 1, gpu=False).workers == 1
    for other in ("127.0.0.1:6380", "192.0.2.7:6379", "ray://127.0.0.1:10001"):
        with pytest.raises(UsageError) as caught:
            cluster.start_cluster(other, 1, gpu=False)
        assert caught.value.message == f"--address {other}: this process uses the Ray cluster at 127.0.0.1:6379 already"


def test_a_cluster_that_cannot_be_joined_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers the first question, and nothing after that."""
    monkeypatch.setattr(cluster, "JOIN_S", 0.3)
    pause = threading.Event()
    fake = SimpleNamespace(init=lambda **arguments: pause.wait(), exceptions=SimpleNamespace(RayError=OSError))
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    fake.is_initialized = lambda: False
    try:
        with grpc_server("alive") as port, pytest.raises(UsageError, match=r"cannot be joined within 0 s"):
            cluster.start_cluster(f"127.0.0.1:{port}", 1, gpu=False)
    finally:
        pause.set()


# -- what is left ------------------------------------------------------------------------------------------------------


STARTED = """
import os, subprocess, sys, time
from genctl.engines.pool.cluster import RayGroup, apart
group = RayGroup()
def start():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    subprocess.Popen([sys.executable, "-c", code], preexec_fn=lambda: None)
apart(start, None, group)
print(group.number, group.folder, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "setpgid"), reason="process groups are POSIX")
@pytest.mark.parametrize("end", ["group.end(keep_logs=False)", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_processes_that_were_started_end_with_the_run(end: str) -> None:
    """A child, and its own child, which would outlive it, whatever the end of the run is."""
    code = f"{STARTED}\nsys.stdin.read()\n{end}\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        number, folder = process.stdout.readline().split()
        until = time.monotonic() + 20
        while len(below := in_group(int(number))) < 3:
            assert time.monotonic() < until
        process.stdin.close()
        assert not psutil.wait_procs(below, timeout=20)[1]
    while Path(folder).exists():
        assert time.monotonic() < until


def in_group(number: int) -> list[psutil.Process]:
    """The processes of a group."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            found += [process] if os.getpgid(process.pid) == number else []
    return found


STAND_IN = """
import ctypes, os, signal, subprocess, sys, time, types
def shutdown():
    {}
sys.modules["ray"] = types.SimpleNamespace(is_initialized=lambda: True, shutdown=shutdown)
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
from genctl.engines.pool.cluster import RayCluster
RayCluster(1, 0, 1, True, '').end(keep_logs=False)
"""


def test_a_signal_while_ray_ends_finds_our_handler() -> None:
    """Ray's C++ part puts the default in its place, which Python does not see: no moment of that is ours."""
    replaced = "ctypes.CDLL(None).signal(signal.SIGTERM, None); os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)"
    code = STAND_IN.format(replaced)
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(not hasattr(os, "setpgid"), reason="process groups are POSIX")
def test_a_signal_to_all_processes_of_a_job_does_not_reach_what_ray_starts() -> None:
    """Ray ends a process whose daemons are gone, with exit status 1. A daemon can be ended by itself."""
    child = "import os, signal; print(os.getpgid(0) == os.getpgid(os.getppid()), signal.pthread_sigmask(0, []))"
    code = f"""
import subprocess, sys
from genctl.engines.pool.cluster import RayGroup, apart
group = RayGroup()
apart(lambda: subprocess.run([sys.executable, "-c", {child!r}], preexec_fn=lambda: None), None, group)
group.end(keep_logs=False)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.stdout == "False set()\n"
