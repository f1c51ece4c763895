"""The libraries that read a checkpoint: optional ones, their errors as ModelErrors, and their progress.

A panic of a Rust library also writes a report (with a backtrace if RUST_BACKTRACE is set) to file descriptor 2 before
Python sees the exception. It is kept off the terminal; replacing `sys.stderr` would not help.

Neither torch nor any of these packages is imported here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar
from unittest import mock

from genctl import errors
from genctl.errors import GenctlError, ModelError, is_shortage, without_secrets
from genctl.events import Loading

_T = TypeVar("_T")
_REPORT = re.compile(rb"\n?thread '[^\n]* panicked at .*", re.DOTALL)
_LOCK = threading.RLock()


def brief(error: BaseException, most: int = 240) -> str:
    """The message of a library's exception on one line, without control characters or a traceback."""
    text = " ".join("".join(char if char.isprintable() else " " for char in str(error)).split())
    text = text.partition("Traceback (most recent call last)")[0].strip() or type(error).__name__
    text = without_secrets(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def guarded(call: Callable[[], _T], what: str) -> _T:
    """Run a library's code; any exception becomes a ModelError of one line."""
    try:
        return call()
    except GenctlError:
        raise
    except BaseException as error:
        if not is_library_error(error):
            raise
        if isinstance(error, (MemoryError, RuntimeError)) and is_shortage(error):
            raise ModelError(f"{what}: not enough memory", hint="--dtype bfloat16 needs half of float32") from error
        raise ModelError(f"{what}: {brief(error)}") from error


def is_library_error(error: BaseException) -> bool:
    """Whether an error is a library's: an Exception, or a Rust panic, which is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def without_panic_reports() -> Iterator[None]:
    """Delay output to descriptor 2 until the end, and remove panic reports from it.

    One thread at a time; output of other threads is delayed too. Without a descriptor 2 this does nothing.
    """
    with _LOCK:
        _flush()
        try:
            before = os.dup(2)
        except OSError:
            yield
            return
        in_memory, failed = hasattr(os, "memfd_create"), True
        with os.fdopen(os.memfd_create("genctl"), "r+b") if in_memory else tempfile.TemporaryFile() as buffer:
            os.dup2(buffer.fileno(), 2)
            try:
                yield
                failed = False
            finally:
                _flush()
                os.dup2(before, 2)
                os.close(before)
                buffer.seek(0)
                left = _REPORT.sub(b"", buffer.read()) if failed else buffer.read()
                with contextlib.suppress(OSError):
                    while left:
                        left = left[os.write(2, left) :]


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


def is_missing(module: str) -> bool:
    """Whether a module is not installed."""
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


def require(what: str, modules: tuple[str, ...], extra: str) -> None:
    """Raises ModelError that names the missing packages and the extra `extra`."""
    missing = [name.replace("_", "-") for name in modules if is_missing(name)]
    if missing:
        are = "which is not" if len(missing) == 1 else "which are not"
        raise ModelError(f"{what} needs {' and '.join(missing)}, {are} installed", hint=errors.extra(extra))


# -- their loggers, warnings and progress bars are silenced; progress arrives as events instead ------------------------


OnEvent: TypeAlias = Callable[[Loading], None]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the loggers and warnings of transformers and huggingface_hub, and restore them afterwards."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "accelerate")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    # transformers sets its level when it is imported, perhaps in this context; none of its records is above CRITICAL
    verbosity = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.pop("TRANSFORMERS_VERBOSITY")
        if verbosity is not None:
            os.environ["TRANSFORMERS_VERBOSITY"] = verbosity
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def bar_class(on_event: OnEvent | None, what: str, unit: str) -> Any:
    """A tqdm class that shows nothing and reports to `on_event`: bytes of downloads if `unit` is "B"."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]  # it has no types

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no monitor thread

        def __init__(self, *args: Any, **keywords: Any) -> None:
            keywords.pop("name", None)
            keywords.update(file=io.StringIO(), disable=False, mininterval=0, miniters=1)
            self.reported = 0
            super().__init__(*args, **keywords)

        def display(self, *args: Any, **keywords: Any) -> None:
            is_wanted = unit != "B" or self.unit == "B"
            on_the_wire = str(self.desc).startswith("Downloading bytes")  # a second bar for the same bytes
            is_new = self.total and int(self.n) != self.reported
            if on_event is not None and is_new and is_wanted and not on_the_wire:
                self.reported = int(self.n)
                on_event(Loading(what, self.reported, int(self.total), unit))

    return Bar


@contextmanager
def weights_bar(on_event: OnEvent | None, what: str) -> Iterator[None]:
    """Route transformers' progress bars for weights to `on_event`; the one of its GGUF reader has no setting."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging as hf

    bar = bar_class(on_event, what, "tensors")
    before = hf.set_tqdm_hook(lambda factory, args, keywords: bar(*args, **keywords))
    try:
        with mock.patch.object(gguf_reader, "tqdm", bar):
            yield
    finally:
        hf.set_tqdm_hook(before)
