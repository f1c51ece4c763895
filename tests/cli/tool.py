"""Run the whole program in process: `genctl("run", "hello")` returns its output, its stderr and its exit status."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genctl.commands.app import run

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """The result of a run of the program."""

    status: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode("utf-8")

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON lines of standard output."""
        return [json.loads(line) for line in self.out.splitlines()]


class _Stream(io.TextIOWrapper):
    def __init__(self, content: bytes = b"", *, terminal: bool = False) -> None:
        self.bytes = io.BytesIO(content)
        self.terminal = terminal
        super().__init__(self.bytes, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return self.terminal


def genctl(*arguments: str, stdin: str | bytes | None = None, terminal: bool = False, color: str = "") -> Done:
    """Run the command line. Without `stdin`, standard input is a terminal; with `terminal` the outputs are one too."""
    before = sys.stdin, sys.stdout, sys.stderr
    content = stdin.encode() if isinstance(stdin, str) else stdin or b""
    out, err = _Stream(terminal=terminal), _Stream(terminal=terminal)
    sys.stdin, sys.stdout, sys.stderr = _Stream(content, terminal=stdin is None), out, err
    try:
        try:
            status = run([*arguments, "--color", color] if color else list(arguments))
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 1
        out.flush()
        err.flush()
        return Done(status, out.bytes.getvalue(), err.bytes.getvalue().decode())
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def ok(*arguments: str, **how: Any) -> Done:
    """Run the command line, and assert that it succeeds."""
    done = genctl(*arguments, **how)
    assert done.status == 0, done.err
    return done
