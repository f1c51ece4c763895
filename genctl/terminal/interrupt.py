"""SIGINT, SIGTERM, SIGHUP: the first asks to stop, the second ends at once. SIGTSTP leaves the terminal usable.

Python handles signals only between two of its instructions, and one step of the model, a long prefill or loading
weights may take seconds. So a thread listens too (`signal.set_wakeup_fd`): if the main thread has not ended after a
quarter of a second, it saves the results and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from genctl.process import stays_ignored
from genctl.terminal import loading_line
from genctl.terminal.standard_streams import print_interrupted

GRACE_S = 0.25  # how long the main thread may take to end by itself
WRITE_S = 0.1  # and then to finish a write
SHOW_CURSOR = b"\x1b[?25h"
ENDING = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}


class Interrupt:
    """While decoding, a signal sets a reason to stop that the loop polls; before that it raises SystemExit.

    Use as a context manager. `status` is what the process should exit with: 130 after SIGINT, 143 after SIGTERM, 129
    after SIGHUP. Signals that the caller ignores stay ignored (`stays_ignored`), except SIGTERM.
    `hide` erases what is drawn on the terminal before SIGTSTP stops the process.
    """

    def __init__(self) -> None:
        self.status = 0
        self.gentle = False
        self.hide: Callable[[], object] = lambda: None
        self._rescue: Callable[[], object] | None = None
        self._bounded = False  # the deadline holds even after decoding, since results have been saved
        self._write_lock = threading.RLock()  # held by whoever writes or draws
        self._depth = 0  # how often the main thread holds it
        self._pause_due = False
        self._before: dict[int, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._listener: threading.Thread | None = None
        self._unraisable: Callable[[Any], object] | None = None

    def __enter__(self) -> Interrupt:
        wanted: dict[int, Any] = dict.fromkeys(ENDING, self._on_signal)
        if hasattr(signal, "SIGTSTP"):
            wanted[signal.SIGTSTP] = self._pause
        for number, handler in wanted.items():
            try:
                before = signal.getsignal(number)
                always = number == signal.SIGTERM or (number == signal.SIGINT and not stays_ignored(number))
                if always or before is signal.SIG_DFL or (number in ENDING and before is not signal.SIG_IGN):
                    self._before[number] = signal.signal(number, handler)
            except ValueError:  # not the main thread, which alone may handle signals
                return self
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._listen()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._unraisable is not None:
            sys.unraisablehook = self._unraisable
        if self._wakeup is not None and self._listener is not None:
            signal.set_wakeup_fd(self._woken_before)
            self._wakeup[1].close()
            self._listener.join()
            self._wakeup[0].close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.status and isinstance(error, SystemExit) and error.code != self.status:
            raise SystemExit(self.status) from error  # Ray passes our SystemExit on with a status of its own

    def __call__(self) -> str:
        """The reason for every live row to end now, or an empty string."""
        return "interrupted" if self.status else ""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Held while the main thread writes or draws: no other thread does, and SIGTSTP waits."""
        with self._write_lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
        if self._pause_due and not self._depth:
            self._stop()

    @contextmanager
    def rescued_by(self, rescue: Callable[[], object]) -> Iterator[None]:
        """While decoding: if the model does not return after a signal, another thread calls `rescue`."""
        self._rescue, self.gentle, self._bounded = rescue, True, True
        try:
            yield
        finally:
            with self._write_lock:
                self._rescue = None

    # -- in the main thread --------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.status = bool(self.status), 128 + number
        if again or (not self.gentle and _imports_torch(frame)):
            _leave(self.status)
        if not self.gentle:
            raise SystemExit(self.status)

    def _on_unraisable(self, unraisable: Any) -> None:
        """The handler ran where nothing can be raised (a finaliser, a callback of the import lock): Python drops its
        SystemExit, and would print it. `_deadline_passed` ends the process.
        """
        assert self._unraisable is not None
        if not (self.status and isinstance(unraisable.exc_value, SystemExit)):
            self._unraisable(unraisable)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._pause_due = True
        else:
            self._stop()

    def _stop(self) -> None:
        """Restore the terminal, stop the process, and continue on SIGCONT."""
        self._pause_due = False
        with contextlib.suppress(OSError):
            self.hide()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._pause)

    # -- in the listening thread ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._wakeup = socket.socketpair()
        for end in self._wakeup:
            end.setblocking(False)
        self._woken_before = signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._watch, args=(self._wakeup[0],), name="signals", daemon=True)
        self._listener.start()

    def _watch(self, wakeup: socket.socket) -> None:
        if hasattr(signal, "pthread_sigmask"):  # only the main thread accepts one (see `pool.cluster`)
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        deadline: float | None = None
        count = 0
        while True:
            wakeup.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            try:
                signals = wakeup.recv(64)
            except TimeoutError:
                deadline = None
                self._deadline_passed()
                continue
            if not signals:
                return
            for number in signals:
                if number in ENDING:
                    count += 1
                    if count > 1:
                        _leave(128 + number)
                    self._number = number
                    deadline = time.monotonic() + GRACE_S

    def _deadline_passed(self) -> None:
        """The main thread is stuck in a library: save results and end the process."""
        status = self.status or 128 + self._number
        if self.gentle and not self._bounded:
            return  # only the main thread can save results: it ends after this step
        if self.gentle and self._write_lock.acquire(timeout=WRITE_S):
            self.status = status
            if self._rescue is None:
                self._write_lock.release()
                time.sleep(WRITE_S)  # the main thread is closing its files
            else:
                with contextlib.suppress(Exception):
                    self._rescue()
        _leave(status)


def _imports_torch(frame: FrameType | None) -> bool:
    """Whether torch is being imported: its C++ code calls Python, and aborts if that raises an exception.

    Nothing is decoded yet, so nothing is lost by ending at once.
    """
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return any("importlib" in file for file in files) and any(f"{os.sep}torch{os.sep}" in file for file in files)


def _leave(status: int) -> None:
    """End the process now, with the terminal's cursor shown."""
    loading_line.clear()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            if os.isatty(stream.fileno()):
                os.write(stream.fileno(), SHOW_CURSOR)
                break
    if status == 128 + signal.SIGINT:
        print_interrupted()
    os._exit(status)
