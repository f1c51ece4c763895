"""One family of errors; each knows its exit code, its one line for the user and, where there is one, a hint.

Exit codes: 0 done · 1 some rows failed · 2 usage, preset or input error · 3 model not found or cannot do this ·
4 a requested check failed · 130 interrupted.
"""

from __future__ import annotations

import os
import re
from enum import IntEnum


class Exit(IntEnum):
    """What a process says when it ends."""

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
    """`text` with Hub tokens and the credentials of addresses left out. What we say may end up in anybody's log."""
    for name in SECRETS:
        if len(token := os.environ.get(name, "").strip()) >= 4:
            text = text.replace(token, "(token)")
    return _CREDENTIALS.sub("(secret)", _TOKEN.sub("(token)", text))


class GenctlError(Exception):
    """Something a user can mend. `code` names the kind in error rows; `exit` is the exit status of a run it ends.

    No secret is in the message or the hint. Where a kind tells one thing only, its message is one line, whatever names
    of files or models are in it.
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
    """Flags or arguments that make no sense, alone or together."""

    code = "usage"
    several = True


class PresetError(GenctlError):
    """A preset, a settings file or `--set` that is wrong; all mistakes at once, one per line."""

    code = "preset"
    several = True


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
