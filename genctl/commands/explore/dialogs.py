"""What opens above the panes, a text to read, help, an editor, and below them: the line that is typed into."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.suggester import SuggestFromList
from textual.widgets import Input, Static, TextArea

from genctl.commands.explore.keys import COLUMNS, KEYS
from genctl.config import presets
from genctl.config.check import known
from genctl.terminal import theme, widgets
from genctl.tree.commands import COMMANDS


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


def help_dialog() -> Dialog:
    """The keys, what the panes show, and the commands of `:`."""
    sections: dict[str, list[tuple[str, str]]] = {
        "": [(key.shown, key.about) for key in KEYS if key.shown],
        "columns": list(COLUMNS),
        "commands of : and of --script": [(row.usage, row.about) for row in COMMANDS.values()],
    }
    body: list[RenderableType] = []
    for title, rows in sections.items():
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for shown, about in rows:
            table.add_row(Text(shown, style="bold"), Text(about))
        body += [*([Text(f"\n{title}", style=theme.DIM)] if title else []), table]
    return Dialog("help", Group(*body))


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


class CommandLine(Input):
    """The line that is typed into, below the panes: hidden until it is opened for a purpose."""

    purpose = ""  # command, setting, expand or filter; "" while it is hidden

    def open(self, purpose: str, label: str, value: str) -> None:
        """Show the line with a value. It suggests what the purpose has."""
        settings = [f"{name}=" for name in sorted(known())]
        names = sorted({preset.name for preset in presets.available()})
        suggestions = {
            "setting": [*settings, *names],
            "command": [*COMMANDS, *(f"set {each}" for each in settings), *(f"preset {each}" for each in names)],
        }.get(purpose)
        self.purpose = purpose
        self.suggester = SuggestFromList(suggestions) if suggestions else None
        self.border_title = self.placeholder = label
        self.value, self.cursor_position = value, len(value)
        self.display = True

    def close(self) -> str:
        """Hide the line. Returns what it was for."""
        purpose, self.purpose = self.purpose, ""
        self.display = False
        return purpose
