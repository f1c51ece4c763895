"""A Python with torch already imported: `[*python(), "-m", "genctl", "run", …]` starts in a tenth of the time.

`python()` starts a server, once in each test process. The command that it returns is a client: it hands its arguments,
environment, folder and standard streams to the server, which forks a child with them. Signals are passed on to the
child, and the client exits with the child's status. Unlike a new process, the child has the server's imports (nothing
of transformers), ignores the environment's options of Python, and runs no `atexit` function. Tests of how a process
starts and ends, by a signal above all, use `sys.executable`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MODULES = (
    *("torch", "numpy", "safetensors.torch", "tokenizers", "pydantic_core", "regex"),
    *(
        "genctl.commands.app", "genctl.commands.run.options", "genctl.commands.run.job", "genctl.engines.session",
        "genctl.engines.planner",
    ),
    *("genctl.models.hub", "genctl.models.check", "genctl.native.load", "genctl.native.runtime"),
    *("genctl.strategies.factory", "genctl.decode.loop"),
)  # fmt: skip
_command: list[str] = []


def python() -> list[str]:
    """The beginning of a command line, for `-m MODULE ARGUMENTS…` or `-c CODE ARGUMENTS…`."""
    if not _command:
        import atexit
        import shutil
        import subprocess
        import tempfile
        from pathlib import Path

        root = Path(__file__).resolve().parents[1]
        folder = tempfile.mkdtemp(prefix="warm")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = str(Path(folder) / "socket")
        server = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests import warm; warm.serve(sys.argv[1])", path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        atexit.register(server.communicate)  # closes its standard input, which ends it
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        _command.extend([sys.executable, "-I", "-S", __file__, path])
    return list(_command)


def client(path: str, arguments: list[str]) -> NoReturn:
    opened = [descriptor for descriptor in range(3) if is_open(descriptor)]  # before the socket takes a free number
    connection = socket.socket(socket.AF_UNIX)
    ignored = [int(number) for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    for number in PASSED_ON:  # ignored ones, too: the child begins by ignoring them, and may handle them later
        signal.signal(number, lambda number, frame: pass_on(connection, number))
    connection.connect(path)
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 (`pathlib` takes a while)
        "open": opened,
        "ignored": ignored,
    }
    data = json.dumps(request).encode()
    if opened:
        socket.send_fds(connection, [b"+"], opened)
    else:
        connection.sendall(b"+")
    connection.sendall(len(data).to_bytes(4, "big") + data)
    for descriptor in opened:
        os.close(descriptor)
    status = int(connection.makefile().read() or 256)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def pass_on(connection: socket.socket, number: int) -> None:
    try:  # noqa: SIM105 (`contextlib` takes a while)
        connection.sendall(bytes([number]))
    except OSError:  # the child has ended
        pass


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def serve(path: str) -> NoReturn:
    """Fork a process for each client, until standard input ends."""
    import gc
    import importlib
    import select

    for name in MODULES:
        importlib.import_module(name)
    assert not {"transformers", "huggingface_hub"} & set(sys.modules)  # the latter reads the environment
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            attend(connection)
        connection.close()


def attend(connection: socket.socket) -> NoReturn:
    """Run a child for one client: pass signals on, end it when the client is gone, send its status."""
    import select

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    stream = connection.makefile("rb", buffering=0)
    request = json.loads(exactly(stream, int.from_bytes(exactly(stream, 4), "big")))
    reader, writer = os.pipe()  # end of file means that the child has ended
    child = os.fork()
    if child == 0:
        os.close(reader)
        connection.close()
        become(request, descriptors)
    os.close(writer)
    for descriptor in descriptors:
        os.close(descriptor)
    while reader not in (ready := select.select([connection, reader], [], [])[0]):
        if ready:
            number = connection.recv(1)
            os.kill(child, number[0] if number else signal.SIGKILL)
            if not number:
                break
    _, status = os.waitpid(child, 0)
    try:
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(64):  # a signal that came too late; closing before it is read would lose the status
            pass
    finally:
        os._exit(0)


def exactly(stream: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += stream.read(count - len(data))
    return data


def become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Take over streams, environment and folder, run the code, and end as Python does."""
    import runpy
    import traceback

    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    opened = dict(zip(request["open"], descriptors, strict=True))
    for place in range(3):
        if place in opened:
            os.dup2(opened[place], place)
        else:
            os.close(place)
    for descriptor in descriptors:
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        open(place, mode, encoding=encoding, errors=faults, closefd=False) if place in opened else None  # type: ignore[assignment] # noqa: SIM115
        for place, mode, faults in ((0, "r", errors), (1, "w", errors), (2, "w", "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    option, what, *sys.argv[1:] = request["arguments"]
    status: Any = 0
    try:
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = "-c"
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ending:
        status = ending.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            status = status or 120  # as Python does
    os._exit(status or 0)


if __name__ == "__main__":
    client(sys.argv[1], sys.argv[2:])
