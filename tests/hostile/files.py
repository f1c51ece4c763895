"""Files of checkpoints and adapters, spoilt by a random number, and what must hold of a run on them.

`spoil` changes one file of a sound folder. `outcome` runs the program on it in a process of its own, with bounds on its
memory and time: it generates, or ends with one clear line; it never crashes, waits, or takes the memory that a file
merely claims. Equal numbers give equal files.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import corpus

GIGABYTE = 1 << 30
MEMORY = 3 * GIGABYTE  # above what the process has
SECONDS = 30  # of the processor, above what the process has used
PATIENCE = 600.0  # seconds until a process that only waits is ended
LONGEST = 1500  # characters of all messages
REFUSED, RAN = "refused", "ran"

_LONG = 20_000_000
VALUES: tuple[Callable[[], Any], ...] = (
    *(lambda value=value: value for value in (None, True, False, -1, 0, 1, 2, 3, 7, 64, 255, 65_535, 1_000_000)),
    *(lambda value=value: value for value in (2**31, 2**32, 2**63, 10**9, 10**60, 0.5, -0.0, 1e308, 1e-308, 1e999)),
    *(lambda value=value: value for value in ("", "x", "../../x", "\x1b[2J", "\ud800", "(a+)+$", "a" * 300)),
    *(lambda value=value: value for value in ([], {}, [[]], [0], [1, 2], ["a"], [None], {"": 1}, {"a": {"b": []}})),
    lambda: "x" * _LONG,
    lambda: [1] * 300_000,
    lambda: [2**60] * 50_000,
    lambda: ["x"] * 300_000,
    lambda: {str(n): n for n in range(100_000)},
    lambda: 10**4000,
)
_NUMBERS = (0, 1, 2, 3, 7, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_LARGE = (*_NUMBERS, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def spoil(folder: Path, random: Random) -> str:
    """Change one file of a folder; returns what was done."""
    path = random.choice(sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md"))
    data = path.read_bytes()
    if path.suffix == ".json" and random.random() < 0.9:
        parsed = json.loads(data)
        where = _change(parsed, random)
        path.write_text(json.dumps(parsed), encoding="utf-8")
    elif path.suffix == ".safetensors" and random.random() < 0.8:
        length = struct.unpack("<Q", data[:8])[0]
        parsed = json.loads(data[8 : 8 + length])
        where = _change(parsed, random)
        text = json.dumps(parsed).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    elif path.suffix == ".gguf" and random.random() < 0.8:
        place = random.randrange(4, min(len(data), 12_000))
        form, value = random.choice((("<I", random.choice(_NUMBERS)), ("<Q", random.choice(_LARGE))))
        path.write_bytes(data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :])
        where = f"byte {place} = {value}"
    else:
        path.write_bytes(corpus.spoilt(random, data))
        where = "bytes"
    return f"{path.name}: {where}"


def _change(parsed: Any, random: Random) -> str:
    """Replace, remove or double one value of a JSON tree, at any depth; returns where."""
    part, where = parsed, ""
    while True:
        keys: list[Any] = list(part) if isinstance(part, dict) else list(range(len(part)))
        if not keys:
            return f"{where} is empty"
        key = random.choice(keys)
        where += f".{key}"
        if isinstance(part[key], (dict, list)) and part[key] and random.random() < 0.8:
            part = part[key]
            continue
        how = random.random()
        if how < 0.1:
            del part[key]
            return f"{where} removed"
        if how < 0.2 and isinstance(part, list):
            part.extend([part[key]] * 300_000)
            return f"{where} 300,000 times"
        part[key] = random.choice(VALUES)()
        return f"{where} = {part[key]!r:.60}"


def outcome(arguments: list[str]) -> str:
    """REFUSED or RAN for a command line of the program; else what broke the contract."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run(arguments, writer)
    os.close(writer)
    data, end = b"", time.monotonic() + PATIENCE
    while (left := end - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        data += piece
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if time.monotonic() >= end:
        return f"waited for more than {PATIENCE:g} s"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"computed for more than {SECONDS} s"
    if not data:
        return f"ended without a word ({status})"
    return judged(**json.loads(data))


def judged(status: int, err: str) -> str:
    """What an exit status and the messages are: REFUSED, RAN, or a fault."""
    for fault in ("this is a bug", "Traceback", "not enough memory", "error: unexpected "):
        if fault in err:
            return f"{fault!r} in {err[:400]!r}"
    if status not in (0, 1, 2, 3):
        return f"exit status {status}: {err[:200]!r}"
    if len(err) > LONGEST:
        return f"{len(err)} characters: {err[:200]!r}…"
    if not err.replace("\n", "").isprintable():
        return f"cannot be shown: {err[:200]!r}"
    if status and not err.startswith(("error: ", "note: ")):
        return f"no error is said: {err[:200]!r}"
    return REFUSED if status else RAN


def _run(arguments: list[str], writer: int) -> None:
    try:
        import resource

        from tests.cli.tool import genctl

        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        spent = int(time.process_time()) + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (spent, spent + 5))
        done = genctl(*arguments)
        os.write(writer, json.dumps({"status": done.status, "err": done.err[:10_000]}).encode())
    finally:
        os._exit(0)
