"""One family of errors; each knows its exit code, its one line for the user and, where there is one, a hint.

Exit codes: 0 done · 1 some rows failed · 2 usage, preset or input error · 3 model not found or cannot do this ·
4 a requested check failed · 130 interrupted.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a process says when it ends."""

    DONE = 0
    ROWS_FAILED = 1
    USAGE = 2
    MODEL = 3
    CHECK = 4
    INTERRUPTED = 130


class GenctlError(Exception):
    """Something a user can mend. `code` names the kind in error rows; `exit` is the exit status of a run it ends."""

    exit: Exit = Exit.USAGE
    code: str = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(GenctlError):
    """Flags or arguments that make no sense, alone or together."""

    code = "usage"


class PresetError(GenctlError):
    """A preset, a settings file or `--set` that is wrong; all mistakes at once, one per line."""

    code = "preset"


class InputError(GenctlError):
    """Prompts that cannot be read: a missing file, broken JSON, an empty prompt."""

    code = "input"


class ModelError(GenctlError):
    """A checkpoint that is missing, damaged, or unable to do what was asked."""

    exit = Exit.MODEL
    code = "model"


class OutputError(GenctlError):
    """The result could not be written."""

    code = "output"


class CheckError(GenctlError):
    """A check that the user asked for (`--fail-on`, `--expect`) did not hold."""

    exit = Exit.CHECK
    code = "check"


class Interrupted(GenctlError):
    """The user or the system asked us to stop."""

    exit = Exit.INTERRUPTED
    code = "interrupted"
