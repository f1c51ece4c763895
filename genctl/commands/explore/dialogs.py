"""What opens above the panes: a text to read, and an editor."""

from __future__ import annotations

from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static, TextArea

from genctl.terminal import widgets


class Dialog(ModalScreen[None]):
    """A text to read: arrows scroll, Escape, Enter or q closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,question_mark", "app.pop_screen", show=False)]

    def __init__(self, title: str, body: RenderableType) -> None:
        super().__init__()
        self.heading, self.body = title, body

    def compose(self) -> ComposeResult:
        """A frame with the text."""
        with VerticalScroll(classes="dialog") as frame:
            frame.border_title = self.heading
            frame.border_subtitle = "Escape closes"
            yield Static(self.body, id="body", markup=False)


class EditedText(TextArea):
    """An editor that shows control characters as signs; the text keeps them."""

    def get_line(self, line_index: int) -> Text:
        """A line as it is shown."""
        return Text(widgets.visible(self.document.get_line(line_index), one=True), end="", no_wrap=True)


class Editor(ModalScreen[str | None]):
    """A text to change. The answer is the text, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", show=False),
        Binding("ctrl+s,f2", "take", show=False),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        """A frame with the text in it."""
        with Vertical(classes="dialog editor") as frame:
            frame.border_title = "Another text from here"
            frame.border_subtitle = "Ctrl+S or F2 takes it · Escape leaves"
            yield EditedText(self.text, soft_wrap=True, id="edited", compact=True)

    def action_take(self) -> None:
        """Close with the text."""
        self.dismiss(self.query_one("#edited", TextArea).text)
