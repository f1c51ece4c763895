"""A small model of a terminal that rewraps its lines when the window changes, as most terminals do; pyte cuts them.

A paragraph is what was written between two line ends. It takes as many rows as its cells need at the width of now.
"""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


class ReflowingTerminal:
    """Takes what a program writes. Its characters have one cell each. Raises ValueError for a sequence it lacks."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.paragraphs = [""]
        self.at, self.row, self.column = 0, 0, 0  # the cursor: a paragraph, and its place in it

    def resize(self, width: int) -> None:
        """Another width: the cursor stays at its character."""
        place = self.row * self.width + self.column
        self.width = width
        self.row, self.column = divmod(place, width)
        if self.row and not self.column and place == len(self.paragraphs[self.at]):  # after the last cell of a row
            self.row, self.column = self.row - 1, width

    def feed(self, text: str) -> None:
        """Take in text and control sequences."""
        for match in _PART.finditer(text):
            part, number, kind = match[0], match[1], match[2]
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self._down()
            elif kind is None:
                self._write(part)
            elif kind == "A":
                for _ in range(int(number or 1)):
                    self._up()
            elif kind == "K":
                self._erase(everything=number == "2")
            elif kind not in "mhl":
                raise ValueError(f"{part!r}")

    def _count(self, paragraph: str) -> int:
        return max(-(-len(paragraph) // self.width), 1)

    def _write(self, text: str) -> None:
        place = self.row * self.width + self.column
        old = self.paragraphs[self.at].ljust(place)
        self.paragraphs[self.at] = old[:place] + text + old[place + len(text) :]
        self.row, self.column = divmod(place + len(text), self.width)
        if self.row and not self.column:
            self.row, self.column = self.row - 1, self.width

    def _down(self) -> None:
        self.column = 0
        if self.row + 1 < self._count(self.paragraphs[self.at]):
            self.row += 1
            return
        if self.at + 1 == len(self.paragraphs):
            self.paragraphs.append("")
        self.at, self.row = self.at + 1, 0

    def _up(self) -> None:
        if self.row:
            self.row -= 1
        elif self.at:
            self.at -= 1
            self.row = self._count(self.paragraphs[self.at]) - 1

    def _erase(self, *, everything: bool) -> None:
        start = self.row * self.width + (0 if everything else min(self.column, self.width))
        end = (self.row + 1) * self.width
        old = self.paragraphs[self.at]
        rest = old[end:]
        self.paragraphs[self.at] = old[:start] + (" " * (end - start) + rest if rest else "")
