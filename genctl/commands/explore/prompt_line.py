"""One line of input at the bottom: a filter, a setting, a bound, a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.suggester import SuggestFromList
from textual.widgets import Input


class PromptLine(Input):
    """An input that is hidden while nothing is asked. Enter answers, Escape leaves, Up brings the last answer back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("up", "earlier", show=False),
    ]

    class Left(Message):
        """Escape was pressed."""

        def __init__(self, purpose: str) -> None:
            super().__init__()
            self.purpose = purpose

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, compact=True, select_on_focus=False)
        self.purpose = ""
        self.answers: dict[str, str] = {}
        self.display = False

    def ask(self, purpose: str, label: str, value: str = "", suggestions: Sequence[str] = ()) -> None:
        """Show the line, and take the focus."""
        self.purpose = purpose
        self.suggester = SuggestFromList(suggestions, case_sensitive=True) if suggestions else None
        self.placeholder = label
        self.border_title = label
        with self.prevent(Input.Changed):
            self.value = value
        self.cursor_position = len(value)
        self.display = True
        self.focus()

    def close(self) -> None:
        """Hide the line."""
        if self.value:
            self.answers[self.purpose] = self.value
        self.display = False

    def action_leave(self) -> None:
        """Hide the line without an answer."""
        self.close()
        self.post_message(self.Left(self.purpose))

    def action_earlier(self) -> None:
        """The last answer to the same question."""
        self.value = self.answers.get(self.purpose, self.value)
        self.cursor_position = len(self.value)
