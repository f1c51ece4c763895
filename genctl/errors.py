"""One family of errors; each has its exit code, its one-line message and, if possible, a hint.

Exit codes: 0 done · 1 some rows failed · 2 usage, preset or input error · 3 model not found or unable · 4 a requested
check failed · 130 interrupted.
"""

from __future__ import annotations

import os
import re
from enum import IntEnum


class Exit(IntEnum):
    """The exit status of a process."""

    DONE = 0
    ROWS_FAILED = 1
    USAGE = 2
    MODEL = 3
    CHECK = 4
    INTERRUPTED = 130


SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def without_secrets(text: str) -> str:
    """`text` without Hub tokens and credentials of addresses: messages may end up in logs."""
    for name in SECRETS:
        if len(token := os.environ.get(name, "").strip()) >= 4:
            text = text.replace(token, "(token)")
    return _CREDENTIALS.sub("(secret)", _TOKEN.sub("(token)", text))


class GenctlError(Exception):
    """An error that the user can fix. `code` names the kind in error rows; `exit` is the exit status of a run that it
    ends.

    Neither the message nor the hint contains a secret. Kinds with a single error have a message of one line, whatever
    the names of files or models in it.
    """

    exit: Exit = Exit.USAGE
    code: str = "error"
    several: bool = False  # whether a message may hold several mistakes, one on each line

    def __init__(self, message: str, *, hint: str = "") -> None:
        message = without_secrets(message if self.several else message.replace("\n", "\\n"))
        super().__init__(message)
        self.message = message
        self.hint = without_secrets(hint)


class UsageError(GenctlError):
    """Flags or arguments that are invalid or conflict."""

    code = "usage"
    several = True


class PresetError(GenctlError):
    """An invalid preset, settings file or `--set`; all errors at once, one per line."""

    code = "preset"
    several = True


class InputError(GenctlError):
    """Prompts that cannot be read: a missing file, broken JSON, an empty prompt."""

    code = "input"


class ModelError(GenctlError):
    """A checkpoint that is missing, damaged, or unable to do the task."""

    exit = Exit.MODEL
    code = "model"


class OutputError(GenctlError):
    """The result could not be written."""

    code = "output"


class CheckError(GenctlError):
    """A requested check (`--fail-on`, `--expect`) failed."""

    exit = Exit.CHECK
    code = "check"


class Interrupted(GenctlError):
    """The user or the system asked us to stop."""

    exit = Exit.INTERRUPTED
    code = "interrupted"
