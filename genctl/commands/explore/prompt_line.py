"""One line of input at the bottom: a filter, a setting, a bound, a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.suggester import SuggestFromList
from textual.widgets import Input

Told = Callable[[str, str], object]  # is given the purpose and the text


class PromptLine(Input):
    """An input that is hidden while nothing is asked.

    Enter answers, Escape leaves, Tab completes, Up brings the last answer back. `answered` and `left` are called at
    once, and not by a message, which would come after the keys that follow.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("up", "earlier", show=False),
        Binding("tab", "complete", show=False),
        Binding("shift+tab", "stay", show=False),
    ]

    def __init__(self, *, answered: Told, left: Told, id: str | None = None) -> None:
        super().__init__(id=id, compact=True, select_on_focus=False)
        self.purpose = ""
        self.answers: dict[str, str] = {}
        self.suggestions: Sequence[str] = ()
        self.display = False
        self._answered, self._left = answered, left

    def ask(self, purpose: str, label: str, value: str = "", suggestions: Sequence[str] = ()) -> None:
        """Show the line, and take the focus."""
        self.purpose, self.suggestions = purpose, suggestions
        self.suggester = SuggestFromList(suggestions, case_sensitive=True) if suggestions else None
        self.placeholder = label
        self.border_title = label
        with self.prevent(Input.Changed):
            self.value = value
        self.cursor_position = len(value)
        self.display = True
        self.screen.set_focus(self)

    def close(self) -> None:
        """Hide the line."""
        if self.value:
            self.answers[self.purpose] = self.value
        self.display = False

    def write(self, text: str) -> None:
        """Type a text, in the place of what is selected."""
        self.replace(text, *self.selection)

    async def action_submit(self) -> None:
        """Hide the line and tell what was typed."""
        self.close()
        self._answered(self.purpose, self.value)

    def action_leave(self) -> None:
        """Hide the line without an answer."""
        self.close()
        self._left(self.purpose, self.value)

    def action_earlier(self) -> None:
        """The last answer to the same question."""
        self.value = self.answers.get(self.purpose, self.value)
        self.cursor_position = len(self.value)

    def action_complete(self) -> None:
        """Take the first suggestion that begins with what is typed."""
        if self.value and self.cursor_at_end:
            self.value = next((each for each in self.suggestions if each.startswith(self.value)), self.value)
            self.cursor_position = len(self.value)

    def action_stay(self) -> None:
        """Do nothing: the line is not left by accident."""

    def on_blur(self) -> None:
        """Leave the line when another pane is clicked, but not when the terminal loses the focus."""
        if self.display and self.app.app_focus and self.screen.focused not in (self, None):
            self.close()
            self._left("filtered" if self.purpose == "filter" else self.purpose, self.value)
