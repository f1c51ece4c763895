"""The journal of a resumable batch: its settings, and how much of the output is complete.

`OUTPUT.journal` holds JSON lines. The first is the header: the settings, so that a later run can check that its own are
equal. Every further line is a mark: the output's first `bytes` bytes are the whole records of the first `rows` input
rows. See `resumable` for when a mark may be written.

The file is readable by its owner only, is never a link, and is locked during a run. It holds digests and settings, but
no prompts and no texts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from genctl.errors import UsageError, printable
from genctl.io.file_lock import CLOEXEC, JOURNAL, NOFOLLOW, lock
from genctl.io.output import Sink, sync_folder, unbuffered, unwritable

KIND = "genctl-journal/1"
DIGEST = 8  # hex digits of a row's own digest: `Mark.input` is what is relied on
LONGEST = 64 * 2**20  # bytes in one line; far more than any settings need


@dataclass(frozen=True)
class Mark:
    """The first `rows` input rows are done; their records are the first `bytes` bytes of the output."""

    rows: int
    bytes: int
    input: str = ""  # digest of these rows, each chained to those before it; hex
    output: str = ""  # digest of these bytes; hex
    tally: dict[str, Any] = field(default_factory=dict)  # what the command counts
    done: bool = False  # whether there are no more rows
    digests: str = ""  # of each of the rows since the mark before, `DIGEST` hex digits; to name one that has changed


class Journal:
    """The journal of one output, locked. `header` is None if none was written yet.

    Raises UsageError for an unusable journal, and OutputError for errors of the system.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + JOURNAL)
        self.name = printable(str(self.path))
        self.header: dict[str, Any] | None = None
        self.marks: list[Mark] = []  # those in the file
        self._sink: Sink | None = None
        self._whole = 0  # bytes of whole lines; the rest is half a line
        self._descriptor, self._made = self._open()
        lock(self._descriptor, output)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _open(self) -> tuple[int, bool]:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC, 0o600), True
        except FileExistsError:
            pass
        except (OSError, ValueError) as error:
            raise unwritable(error, self.path) from None
        try:
            # opening a pipe under this name must not block
            descriptor = os.open(self.path, os.O_RDWR | NOFOLLOW | CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise UsageError(f"{self.name} is a link, and links are not followed") from None
            raise unwritable(error, self.path) from None
        state = os.fstat(descriptor)
        wrong = ""
        if not stat.S_ISREG(state.st_mode):
            wrong = "is not a regular file"
        elif hasattr(os, "geteuid") and state.st_uid != os.geteuid():
            wrong = "belongs to another user"
        if wrong:
            os.close(descriptor)
            raise UsageError(f"{self.name} {wrong}, so it is no journal to go by")
        return descriptor, False

    def _read(self) -> None:
        with open(self._descriptor, "rb", closefd=False) as file:
            number = 0
            while (line := file.readline(LONGEST)).endswith(b"\n"):
                number += 1
                self._take(line, number)
                self._whole += len(line)

    def _take(self, line: bytes, number: int) -> None:
        try:
            data = json.loads(line)
            if number == 1:
                if data.pop("journal") != KIND:
                    raise ValueError
                self.header = data
                return
            self.marks.append(_mark(data, self.marks[-1] if self.marks else Mark(0, 0)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            what = "is no journal of this version" if number == 1 else f"is damaged at line {number}"
            raise UsageError(
                f"{self.name} {what}, so nothing can be resumed by it",
                hint="give another --output; or remove the journal and its output to start anew",
            ) from None

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header and flush it to the disk. Only if there is none yet."""
        if self.header is not None:
            raise RuntimeError("the journal has a header")
        self._whole = 0
        self.resume()
        assert self._sink is not None
        self._sink.write(_line({"journal": KIND, **header}))
        self._sink.sync()
        sync_folder(self.path)
        self.header = dict(header)

    def resume(self) -> None:
        """Cut off a half-written line; marks follow."""
        self._sink = Sink(
            unbuffered(self._descriptor), self.name, owned=self._descriptor, path=self.path, whole=self._whole
        )
        self._sink.cut_back()

    def add(self, mark: Mark) -> None:
        """Write a mark. The output must be on the disk already."""
        assert self._sink is not None
        self._sink.write(_line(asdict(mark)))

    def sync(self) -> None:
        """Flush the marks to the disk."""
        assert self._sink is not None
        self._sink.sync()

    def close(self) -> None:
        """Close the file. A journal that was created and never begun is removed."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            mine = os.fstat(self._descriptor)
            if self._made and mine.st_size == 0 and os.path.samestat(mine, self.path.lstat()):
                self.path.unlink()
        with contextlib.suppress(OSError):
            if self._sink is not None:
                self._sink.leave()
            else:
                os.close(self._descriptor)
        self._descriptor = -1


def _line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data).encode() + b"\n"


def _mark(data: Mapping[str, Any], before: Mark) -> Mark:
    """The mark on a line. Raises ValueError or TypeError if it cannot follow `before`."""
    mark = Mark(**data)
    kinds = [type(getattr(mark, name)) for name in ("rows", "bytes", "input", "output", "tally", "done", "digests")]
    if kinds != [int, int, str, str, dict, bool, str] or mark.rows < before.rows or mark.bytes < before.bytes:
        raise ValueError("not a mark")
    return mark
