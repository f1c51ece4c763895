"""What opens above the panes: a text to read, such as two branches side by side, an editor; and below them a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from genctl.commands.explore import marks
from genctl.commands.explore.flow import TextFlow, TextPiece
from genctl.terminal import theme, widgets


class Dialog(ModalScreen[None]):
    """A text to read: arrows scroll, Escape, Enter or q closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, "app.pop_screen", show=False) for key in ("escape", "enter", "q", "question_mark")
    ]

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
        Binding("escape", "leave", show=False),  # without priority: what is typed before comes first
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

    def action_leave(self) -> None:
        """Close without."""
        self.dismiss(None)


def side_by_side(
    heads: Sequence[str],
    pieces: Sequence[Sequence[TextPiece]],
    shared: str,
    width: int,
    *,
    coloured: bool,
) -> RenderableType:
    """What two branches share, and below it each from where they part, in two columns; narrow: one below the other."""
    top = Text("… " + widgets.visible(shared[-200:]) if len(shared) > 200 else widgets.visible(shared), style=marks.DIM)
    half = width if width < 60 else (width - 3) // 2
    columns = [_column(each, half, coloured) for each in pieces]
    titles = [Text(widgets.first_words(head, half), style=marks.BOLD) for head in heads]
    rule = Text("▸ they part here", style=marks.DIM)
    if width < 60:
        return Group(top, rule, titles[0], *columns[0], Text(), titles[1], *columns[1])
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(width=half)
    table.add_column(width=half)
    table.add_row(*titles)
    longest = max(map(len, columns))
    for line in range(longest):
        table.add_row(*(column[line] if line < len(column) else Text() for column in columns))
    return Group(top, rule, table)


def _column(pieces: Sequence[TextPiece], width: int, coloured: bool) -> list[Text]:
    flow = TextFlow(width)
    flow.update(list(pieces))
    lines = []
    for number in range(len(flow)):
        line, digits = Text(no_wrap=True), Text(no_wrap=True, style=marks.DIM)
        for run in flow.line(number):
            piece = flow.pieces[run.piece]
            share = piece.probability
            line.append(run.text, style=theme.colour(share) if coloured and share is not None else theme.PLAIN)
            digits.append(marks.tenth(share).ljust(run.cells)[: run.cells])
        lines += [line] if coloured else [line, digits]
    return lines


# -- one line of input at the bottom: a filter, a setting, a bound, a command ------------------------------------------

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
