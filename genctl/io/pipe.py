"""Standard input whose end may be known before it is read: `echo … | genctl` is one prompt, and is treated as one."""

from __future__ import annotations

import io
import os
import select
import stat
from typing import IO

LIMIT = 2**16  # bytes that are looked at


class Pipe(io.RawIOBase):
    """A binary stream that can be looked at without waiting. `read1` returns what there is, as that of a pipe does."""

    def __init__(self, source: IO[bytes]) -> None:
        # a thread that waits within a buffered stream holds its lock, without which Python cannot end
        self._source: IO[bytes] = getattr(source, "raw", source)
        self._ahead: list[bytes] = []
        self._ended = False

    def drained(self) -> bool:
        """Whether all that will ever come is here, or in a file."""
        try:
            descriptor = self._source.fileno()
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return True
            while not self._ended and sum(map(len, self._ahead)) < LIMIT:
                if not select.select([descriptor], [], [], 0)[0]:
                    break
                self._take()
        except (OSError, ValueError):  # no descriptor, or a system that cannot wait for this one
            return False
        return self._ended

    def read1(self, size: int = -1) -> bytes:
        """The next bytes; b"" at the end. `size` bounds what is read at once."""
        if not self._ahead and not self._ended:
            self._take()
        return self._ahead.pop(0) if self._ahead else b""

    def _take(self) -> None:
        read = getattr(self._source, "read1", self._source.read)
        data: bytes = read(LIMIT) or b""
        self._ended = not data
        if data:
            self._ahead.append(data)
