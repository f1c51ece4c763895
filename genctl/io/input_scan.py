"""Scan an input file before it is read: its number of rows, and whether it has changed."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIECE = 2**20


@dataclass(frozen=True)
class InputScan:
    """A regular file: its rows as `readers.read` will number them, its bytes, and their digest in hex."""

    rows: int
    bytes: int
    digest: str

    def identity(self) -> dict[str, Any]:
        """The fields that must be equal for the same input."""
        return {"bytes": self.bytes, "digest": self.digest}


def scan(path: str | Path, kind: str) -> InputScan | None:
    """Read a regular file once, in pieces. None for anything else (a pipe can be read only once) and on any failure,
    which the reader will report.

    `kind` is an input format of `readers`.
    """
    separator = {"lines": b"\n", "jsonl": b"\n", "nul": b"\0"}.get(kind)
    blank = {"lines": b"\r\n", "jsonl": b" \t\r\n", "nul": b"\0"}.get(kind, b"")
    digest = hashlib.blake2b(digest_size=16)
    rows = size = seen = 0
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # before it is opened: opening a pipe would block
            return None
        with Path(path).open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
                if separator is None:
                    continue
                # empty rows at the end do not count: only rows up to the last byte that belongs to none of them
                if rest := piece.rstrip(blank):
                    rows = seen + rest.count(separator) + 1
                seen += piece.count(separator)
    except (OSError, ValueError):
        return None
    return InputScan(rows if separator is not None else 1, size, digest.hexdigest())
