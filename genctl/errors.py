"""One family of errors: each has an exit status, a message of one line for each mistake, and sometimes a hint.

Exit codes: 0 done · 1 some rows failed · 2 usage, preset or input error · 3 model not found or unable · 4 a requested
check failed · 130 interrupted.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """Exit statuses of the process."""

    DONE = 0
    ROWS_FAILED = 1
    USAGE = 2
    MODEL = 3
    CHECK = 4
    INTERRUPTED = 130


def extra(name: str) -> str:
    """The hint to install an extra of genctl. Double quotes work in every shell, even on Windows."""
    return f'pip install "genctl[{name}]"'


SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GENCTL_API_KEY", "OPENAI_API_KEY")
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}")
_URL = re.compile(r"(?<=://)(?:(?!://)[^\s<>])+(?:(?<=@)\s+[A-Za-z_][\w-]*\s*=|\s+=)?")
_KNOBS = re.compile(r"@\s*[A-Za-z_][\w-]*\s*=[^@]*$")  # `host:80@name=…` is a server with knobs
_PLACE = re.compile(r"(?:\[[^\]\s/@]*\]|[^/\s@:]+)(?::\d+)?(?:/[^@]*)?")  # a server's address, without a password
_PAGE = re.compile(r"[^:@/]+/[^@]*")  # before an @: a host with a path, not a password
_KEYS = r"[\w.-]*(?:key|token|secret|passw(?:or)?d|pwd|credentials?|authorization|signature)"
_KEYS = rf"(?:{_KEYS}|(?:[\w.-]*[._-])?(?:sig|auth))"
_QUERY = re.compile(rf"([?&;]{_KEYS}=)[^&;#\s\"'<>]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """`text` without Hub tokens, keys of servers, and passwords and keys in URLs, since messages end up in logs.

    A password may contain unescaped @, / and :. In unclear cases, text is hidden.
    """
    for name in SECRETS:
        if len(token := os.environ.get(name, "").strip()) >= 4:
            text = text.replace(token, "(token)")
    text = _TOKEN.sub("(token)", text)
    return _URL.sub(lambda url: _without_password(url[0]), text) if "://" in text else text


def hide_secrets(value: Any) -> Any:
    """Settings without secrets. If a whole text is an address, its password may contain spaces."""
    if isinstance(value, str):
        scheme, there, rest = value.partition("://")
        return without_secrets(scheme + there + _without_password(rest) if there else value)
    if isinstance(value, Mapping):
        return {key: hide_secrets(one) for key, one in value.items()}
    return type(value)(map(hide_secrets, value)) if type(value) in (list, tuple) else value


def _without_password(rest: str) -> str:
    """The part of a URL after ://, with its secrets hidden."""
    knobs = _KNOBS.search(rest)
    end = knobs.start() if knobs else len(rest)
    place, more = rest[:end], rest[end:]
    user, at, host = place.rpartition("@")
    if at and not _PAGE.fullmatch(user):
        place = f"(secret)@{host}"
    elif knobs and not at and not _PLACE.fullmatch(place):
        place = "(secret)"
    return _QUERY.sub(r"\1(secret)", place + more)


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.65) -> str:
    """The choice with the spelling closest to `name`, or an empty string if none is close."""
    if len(name) > 64:  # the comparison is quadratic in the length
        return ""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)), "")


def is_one_edit(name: str, other: str) -> bool:
    """Whether one inserted, deleted or changed letter, or two swapped neighbours, turn `name` into `other`."""
    start = next((at for at, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), min(len(name), len(other)))
    a, b = name[start:], other[start:]
    return a != b and (a[1:] in (b, b[1:]) or a == b[1:] or (a[2:] == b[2:] and a[:2] == b[1::-1]))


def count(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun: `1 token`, `1,204 tokens`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def size(bytes: float, digits: int = 1, *, of: float = 0) -> str:
    """Bytes in the largest unit of 1024 that leaves a number of at least one: `12 bytes`, `3.6 MiB`.

    `of` is the total, for progress: `0.4/3.6 MiB`.
    """
    whole = of or bytes
    if whole < 1024:
        return (f"{round(bytes)}/" if of else "") + count(round(whole), "byte")
    units = ("KiB", "MiB", "GiB", "TiB")
    place = min(int(math.log2(whole)) // 10, len(units))
    numbers = [f"{number / 1024**place:.{digits}f}" for number in ((bytes, of) if of else (bytes,))]
    return f"{'/'.join(numbers)} {units[place - 1]}"


def percent(share: float, digits: int = 1, *, significant: int = 0) -> str:
    """A share as `75.2%`; `<0.1%` if it would round to 0; – for NaN. `significant`: digits to keep for small shares."""
    if math.isnan(share):
        return "–"
    if significant:
        return f"{share * 100:.{significant}g}%" if share >= 1e-5 or not share else f"{share * 100:.1e}%"
    least = 10.0**-digits
    return f"<{least:.{digits}f}%" if 0 < share < least / 200 else f"{share * 100:.{digits}f}%"


# Messages of Python's JSON parser, in plain words.
_JSON = {
    "Expecting value": "expected a value",
    "Expecting ',' delimiter": "expected a comma or a closing bracket",
    "Expecting ':' delimiter": "expected a colon",
    "Expecting property name enclosed in double quotes": "expected a key in double quotes",
    "Illegal trailing comma": "a comma before a closing bracket",
    "Unterminated string": "a string is not closed; it begins",
    "Invalid control character": "a control character in a string",
    "Invalid \\": "an invalid escape in a string",
    "Extra data": "text after the end of the value",
    "Unexpected UTF-8 BOM": "a byte order mark",
}


def cannot_read(name: str, error: Exception | str, option: str = "") -> str:
    """The message for a file that is missing or unreadable, with the option that names it."""
    if isinstance(error, (OSError, ValueError)):
        error = "no such file" if isinstance(error, FileNotFoundError) else reason_of(error)
    return f"{option and f'{option}: '}cannot read {name}: {error}"


def reason_of(error: Exception) -> str:
    """Why a file or a JSON text cannot be read, in a few words."""
    if isinstance(error, OSError):
        return error.strerror or _SYSTEM.get(type(error), "the system gives no reason")
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start + 1})"
    if isinstance(error, json.JSONDecodeError):
        reason = next((plain for start, plain in _JSON.items() if error.msg.startswith(start)), "not well-formed")
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        return f"not JSON: {reason} at {place}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, RuntimeError):  # of pathlib: circular links, ~ of an unknown user
        return "no such file"
    return "not a file name" if "null" in str(error) else "a number has too many digits"


_SYSTEM: dict[type, str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "a folder, not a file",
    PermissionError: "permission denied",
}


class GenctlError(Exception):
    """An error that the user can fix. `code` is its kind in error rows; `exit` is the exit status of a run it ends.

    Secrets are removed from the message and the hint. A line end in a file or model name does not split a message: only
    kinds with `several` have messages of several lines, one for each mistake.
    """

    exit: Exit = Exit.USAGE
    code: str = "error"
    several: bool = False  # whether a message may hold several mistakes, one per line

    def __init__(self, message: str, *, hint: str = "") -> None:
        message = without_secrets(message if self.several else message.replace("\n", "\\n"))
        super().__init__(message)
        self.message = message
        self.hint = without_secrets(hint)


class UsageError(GenctlError):
    """Flags or arguments that are wrong, alone or in combination."""

    code = "usage"
    several = True


class PresetError(GenctlError):
    """A wrong preset, settings file, environment variable or `--set`: all mistakes at once, one per line."""

    code = "preset"
    several = True


class InputError(GenctlError):
    """Prompts that cannot be read: a missing file, broken JSON, an empty prompt."""

    code = "input"


class ModelError(GenctlError):
    """A checkpoint that is missing, damaged, or does not support the settings."""

    exit = Exit.MODEL
    code = "model"


class BackendError(ModelError):
    """A server that cannot be used, or does not support the settings. It ends the run."""

    code = "backend"
    several = True


class ContractError(ModelError):
    """A model's code that does not use its cache correctly. It ends the whole job, not only one row."""


class OutputError(GenctlError):
    """A result that cannot be written."""

    code = "output"


class CheckError(GenctlError):
    """A requested check (`--fail-on`, `--expect`) failed."""

    exit = Exit.CHECK
    code = "check"


def joined(errors: Sequence[GenctlError]) -> GenctlError:
    """One error of the first error's kind, with all messages, one per line, and all hints."""
    error = errors[0]
    error.message = "\n".join(dict.fromkeys(one.message for one in errors))
    error.hint = "; ".join(dict.fromkeys(one.hint for one in errors if one.hint))
    error.args = (error.message,)
    return error


def raised(error: BaseException) -> str:
    """An exception raised by code outside genctl, in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """An exception's message in one line."""
    return " ".join(str(error).split()) or "no message"


def printable(text: str) -> str:
    """`text` with unprintable characters (controls, bidi overrides, surrogates) as escapes."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def quote(text: str, most: int = 60) -> str:
    """`text` in quotes, unprintable characters as escapes, cut after `most` characters."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def is_shortage(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: in Python, in torch or on an accelerator."""
    if isinstance(error, MemoryError) or type(error).__name__ in ("OutOfMemoryError", "OutOfMemory"):
        return True
    words = str(error).lower()
    return any(f"{lack} memory" in words for lack in ("out of", "can't allocate", "cannot allocate", "not enough"))


# -- changes between two jobs, in words -------------------------------------------------------------------------------

FINGERPRINT = "sha256:"  # fingerprints of the first version were bare hex, and covered only a sample of each tensor
_SHORT = 40  # characters of a value in a sentence


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The keys with different values, with both values; None for a missing one."""
    keys = dict.fromkeys([*old, *new])
    return ((key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key))


def change(name: str, old: Any, new: Any, place: str = "") -> str:
    """A change in words: `temperature 0.7 → 0.8 (flag --temperature)`, with the place of the new value."""
    return f"{name} {_words(old)} → {_words(new)}" + (f" ({place})" if place else "")


def checkpoint_change(name: str, old: object, new: str, *, before: str = "", what: str = "it") -> str:
    """How a checkpoint differs from the one that `what` was made with (named `before`), by fingerprints."""
    if not (isinstance(old, str) and old.startswith(FINGERPRINT)):  # an old one may be equal for different weights
        seen = "made by a version of genctl that did not look at all bytes of a checkpoint"
        return f"{what} was {seen}, so it is unknown whether {name} is still the same"
    then, now = (f"{fingerprint.removeprefix(FINGERPRINT):.12}…" for fingerprint in (old, new))
    if before not in ("", name):
        return f"{what} was made with {before} ({then}), and {name} is another checkpoint ({now})"
    return f"the checkpoint {name} has changed ({then} → {now})"


def _words(value: Any) -> str:
    if value is None:
        return "unset"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(value)
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"
