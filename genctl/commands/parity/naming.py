"""What tokens and rows are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from genctl.errors import printable
from genctl.terminal.widgets import token_text


@dataclass(frozen=True)
class Naming:
    """`text_of` gives the text of a token; `rows` what a row is called: its own id, else its place in the input."""

    text_of: Callable[[int], str] = lambda token: ""
    rows: Mapping[str, str] = field(default_factory=dict)
    golden: str = ""  # the file that has the reference

    def token(self, token: int | None) -> str:
        """A token in quotes; None is the end of a text."""
        return "the end" if token is None else f"“{token_text(token, self.text_of(token))}”"

    def reference(self, name: str) -> str:
        """The reference, which may have the name of the side that is compared with it."""
        return f"{printable(self.golden)} ({name})" if self.golden else name

    def row(self, id: str) -> str:
        """A row."""
        return printable(self.rows.get(id, id))
