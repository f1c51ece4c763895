"""The full screen of `genctl explore`. Its keys are commands of the tree, or move the screen's own cursor.

The model runs in a thread of its own, one command after another, and looks at a distribution between two tokens. This
thread only reads the tree, so that every key is answered at once; `frame` draws what has arrived.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeAlias

from rich.console import Console
from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import ModalScreen
from textual.suggester import SuggestFromList
from textual.widgets import Input, Static

from genctl.commands.explore import formats
from genctl.commands.explore.keys import COLUMNS, KEYS
from genctl.commands.explore.panes import Alternatives, TextPane, TreePane
from genctl.config import presets
from genctl.config.check import known
from genctl.errors import GenctlError, count
from genctl.io.writers import escaped
from genctl.terminal import theme, widgets
from genctl.terminal.message import print_message
from genctl.tree import token_tree
from genctl.tree.commands import COMMANDS, parse
from genctl.tree.distribution import Distribution
from genctl.tree.explorer import Explorer
from genctl.tree.results import BranchText, Result, Searching, Shown, TokenWritten, Why, Wrote
from genctl.tree.token_tree import At

FRAME_S = 0.05  # between two drawings of what the model has written
NARROW = 76  # columns below which the panes stand one below the other


class Started(NamedTuple):
    """A command begins."""

    line: str


class LineDone(NamedTuple):
    """A command is done, or failed with an error."""

    line: str
    error: str


class Looked(NamedTuple):
    """What may follow a node, or why that is not known."""

    node: int
    distribution: Distribution | None
    error: str = ""


Arrival: TypeAlias = Started | Result | LineDone | Looked


class Dialog(ModalScreen[None]):
    """Lines to read: arrows scroll, Escape, Enter or q closes them."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,question_mark", "app.pop_screen", show=False)]

    def __init__(self, title: str, lines: Sequence[Text]) -> None:
        super().__init__()
        self.heading, self.lines = title, lines

    def compose(self) -> ComposeResult:
        """A frame with the lines."""
        with VerticalScroll(classes="dialog") as frame:
            frame.border_title, frame.border_subtitle = self.heading, "Escape closes"
            yield Static(Text("\n").join(self.lines), id="body", markup=False)


def help_lines() -> list[Text]:
    """The keys, the columns, and the commands of `:`."""
    sections = {
        "keys": [(key.shown, key.about) for key in KEYS if key.shown],
        "columns": list(COLUMNS),
        "commands of : and of --script": [(row.usage, row.about) for row in COMMANDS.values()],
    }
    lines: list[Text] = []
    for title, rows in sections.items():
        width = max(len(name) for name, _ in rows)
        lines.append(Text(title, theme.DIM))
        lines += [Text.assemble((f"{name:<{width}}", theme.HEADING), f"  {about}") for name, about in rows]
    return lines


class ExploreApp(App[int]):
    """Three panes, a line of input and a status line."""

    CSS_PATH = "screen.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, show=False, priority=True) for key in KEYS if key.keys),
        Binding("enter", "enter", show=False, priority=True),  # of the line, when it is open
    ]

    def __init__(self, explorer: Explorer, *, coloured: bool = True, signalled: Callable[[], int] = lambda: 0) -> None:
        super().__init__(ansi_color=True)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (NARROW, "-middle"), (100, "-wide")]
        self.explorer, self.shown_tree = explorer, explorer.tree
        self.coloured, self.signalled = coloured, signalled
        self._at = self.shown_tree.at  # the screen's own cursor
        self.follows = False  # whether the cursor moves with the tokens that are written
        self.answer, self.failed = "? shows the keys", False
        self.written = 0  # tokens of the command that runs
        self.lines: list[Text] = []  # of the command that runs, for a dialog
        self.stale = False  # whether the panes lack something that was written
        self.waiting: deque[str] = deque()  # commands, the one that runs first
        self.arrived: deque[Arrival] = deque()  # from the model's thread
        self.model = ThreadPoolExecutor(1, "model")
        self.stopping = False
        self._look: int | None = None  # a node whose distribution is wanted

    def compose(self) -> ComposeResult:
        """The panes."""
        with Container(id="panes"):
            with TextPane(id="text") as text:
                text.border_title = "text"
            self.choices = Alternatives(id="alternatives", cursor_type="row", cell_padding=0)
            self.choices.border_title = "next token"
            yield self.choices
            self.tree_pane = TreePane(coloured=self.coloured, id="tree")
            self.tree_pane.border_title = "tree: probability, tokens"
            yield self.tree_pane
        settings = [f"set {name}=" for name in sorted(known())]
        names = [f"preset {name}" for name in sorted({preset.name for preset in presets.available()})]
        suggester = SuggestFromList([*COMMANDS, *settings, *names])
        self.line = Input(id="line", compact=True, select_on_focus=False, suggester=suggester)
        self.line.border_title, self.line.display = "a command; help lists them", False
        yield self.line
        yield Static(id="status", markup=False)

    def on_mount(self) -> None:
        """Begin to draw."""
        self.screen.set_focus(self.choices)
        self.set_interval(FRAME_S, self.frame)

    def on_resize(self) -> None:
        """Fit the panes to the new width."""
        self.call_after_refresh(self.show_all)

    @property
    def at(self) -> At:
        """Where the person is; where the tree is, once an undo has taken that away."""
        with self.explorer.lock:
            is_undone = max(self._at.cursor, self._at.tip) >= len(self.shown_tree.nodes)
            return self.shown_tree.at if is_undone else self._at

    # -- the model's thread --------------------------------------------------------------------------------------------

    def run_command(self, line: str, at: At | None = None) -> bool:
        """Do a command next; with `at`, from there. False while another one writes."""
        if any(_kind(each) in ("write", "fork") for each in self.waiting):
            self.report("one command at a time: Space stops what runs", failed=True)
            return False
        self.waiting.append(line)
        self.stopping = False
        self.model.submit(self._do, line, at)
        return True

    def _do(self, line: str, at: At | None) -> None:
        self.arrived.append(Started(line))
        error = ""
        try:
            if at is not None:
                self.explorer.move(at.cursor, at.tip)
            for result in self.explorer.do(line):
                self.arrived.append(result)
                self._answer_look()
                if self.stopping:  # it may have come before the command began
                    self.explorer.pause()
        except Exception as failed:
            error = in_words(failed)
        self.arrived.append(LineDone(line, error))

    def _answer_look(self) -> None:
        node, self._look = self._look, None
        if node is None or node >= len(self.explorer.tree.nodes):
            return
        try:
            found = self.explorer.distribution(node)
            _ = found.ranks, found.entropy  # here, and not where keys are answered
            self.arrived.append(Looked(node, found))
        except Exception as failed:
            self.arrived.append(Looked(node, None, in_words(failed)))

    def stop(self) -> None:
        """Stop what runs at its next token."""
        self.stopping = True
        self.explorer.pause()

    # -- what is shown -------------------------------------------------------------------------------------------------

    def frame(self) -> None:
        """Take in everything that has arrived, and draw once."""
        if status := self.signalled():
            self.exit(status)
        changed = bool(self.arrived)
        while self.arrived:
            self._take_in(self.arrived.popleft())
        if self.stale:
            self.stale = False
            self.show_all()
        elif changed:
            self.show_status()

    def show_all(self) -> None:
        """Show the place of the cursor in all panes."""
        with self.explorer.lock:
            self.tree_pane.show(self.shown_tree, self.at)
        self.show_place()

    def show_place(self) -> None:
        """Show the branch, and the tokens that may follow the cursor once the model has scored them."""
        with self.explorer.lock:
            self.query_one("#text", TextPane).show(self.shown_tree, self.at, coloured=self.coloured)
        if not (self.waiting and self.follows):
            self._look = self.at.cursor
            self.model.submit(self._answer_look)
        self.show_status()

    def show_status(self) -> None:
        """Show what is going on, and figures of the place."""
        state = self.answer
        if self.waiting and not self.failed:
            state = f"{self.waiting[0].split()[0]}: {count(self.written, 'token')} · Space stops"
        with self.explorer.lock:
            figures = [f"logprob {widgets.rounded(self.shown_tree.joints[self.at.cursor])}"]
        if self.choices.distribution is not None:
            figures.insert(0, f"entropy {self.choices.distribution.entropy:.2f}")
        figures += [f"{key}={value}" for key, value in self.shown_tree.settings.items()]
        width = max(self.size.width, 20)
        style = "bold red" if self.failed and self.coloured else "bold"
        lines = Text(widgets.first_words(state, width), style).append("\n")
        lines.append(widgets.first_words(" · ".join(figures), width), theme.DIM)
        self.query_one("#status", Static).update(lines)

    def report(self, words: str, *, failed: bool = False) -> None:
        """Answer in the status line."""
        self.answer, self.failed = words, failed
        self.show_status()

    def _take_in(self, arrival: Arrival) -> None:
        """A result of a command: in the panes, in the status line, on the clipboard, or in a dialog at its end."""
        if isinstance(arrival, Started):
            self.written, self.lines, self.answer, self.failed = 0, [], "", False
            self.follows = _kind(arrival.line) == "write"
        elif isinstance(arrival, LineDone):
            self._end(arrival)
        elif isinstance(arrival, Looked):
            self._show_distribution(arrival)
        elif isinstance(arrival, TokenWritten):
            self.written += 1
            self.stale = True
            if self.follows:
                self._at = At(arrival.token.node, arrival.token.node)
        elif isinstance(arrival, Searching):
            self.written += 1
        elif isinstance(arrival, BranchText):
            self.copy_to_clipboard(arrival.text)
            self.answer = f"copied {len(arrival.text)} characters"
        elif isinstance(arrival, (Shown, Why)):
            self.lines += formats.drawn(arrival, coloured=self.coloured)
        elif not isinstance(arrival, Wrote):
            self.answer = " ".join(formats.lines_of(arrival)) or self.answer

    def _end(self, done: LineDone) -> None:
        self.waiting.popleft()
        self.stale = True
        if self.follows or _kind(done.line) in ("move", "back", "fork"):
            self._at = self.shown_tree.at
        self.follows = False
        name = done.line.split()[0]
        if done.error:
            self.answer, self.failed = done.error, True
        elif not self.answer:
            self.answer = "stopped" if self.stopping else f"{name}: done"
        if self.lines and not done.error:
            self.push_screen(Dialog(f"{done.line}: {COMMANDS[name].about}", self.lines))

    def _show_distribution(self, looked: Looked) -> None:
        found = looked.distribution
        with self.explorer.lock:
            if looked.node != self.at.cursor:
                return
            if found is None:
                self.report(looked.error, failed=True)
                return
            self.choices.border_title = f"next token{' (after EOS)' if found.after_eos else ''}"
            self.choices.show(found, self.shown_tree, self.at, coloured=self.coloured)

    # -- keys ----------------------------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        """Type into the line at once, so that Enter comes after all of it, however fast the keys arrive."""
        typed = isinstance(event, events.Key) and event.is_printable and self.screen_stack and self.focused is self.line
        if typed and isinstance(event, events.Key) and event.character is not None:
            self.line.insert_text_at_cursor(event.character)
        else:
            await super().on_event(event)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key acts: not while a dialog is open, and few while a line is typed."""
        if action not in {key.action.partition("(")[0] for key in KEYS if key.keys} | {"enter"}:
            return True
        if len(self.screen_stack) > 1:
            return False
        typing = self.focused is self.line
        return action in ("enter", "let_go", "stop_or_leave") if typing else action != "enter"

    def _go(self, at: At) -> None:
        if at.note:
            self.report(at.note)
            return
        is_other = at.tip != self.at.tip
        self._at, self.follows = at, False
        if is_other:
            self.show_all()
        else:
            self.show_place()

    def action_move(self, name: str) -> None:
        """The move that the command of this name makes."""
        with self.explorer.lock:
            self._go(COMMANDS[name].function(self.shown_tree, self.at, **parse(name).arguments))

    def action_run(self, line: str, place: str = "") -> None:
        """A command: from the `cursor` or the `tip` of the branch, or from wherever the tree is."""
        self.run_command(line, {"cursor": self.at, "tip": At(self.at.tip, self.at.tip)}.get(place))

    def action_pause(self) -> None:
        """Stop what runs; else generate on from the end of the branch."""
        if self.waiting:
            self.stop()
        elif self.run_command("generate", At(self.at.tip, self.at.tip)):
            self.action_move("end")

    @on(Alternatives.RowSelected)
    def _take(self) -> None:
        if self.choices.selected is not None:
            self.run_command(f"take id:{self.choices.selected}", self.at)

    @on(TreePane.NodeSelected)
    def _open_branch(self, event: TreePane.NodeSelected[Any]) -> None:
        if event.node.data is not None:
            with self.explorer.lock:
                self._go(token_tree.goto(self.shown_tree, self.at, event.node.data))

    def action_type(self, value: str) -> None:
        """Open the line of input."""
        self.line.value, self.line.cursor_position = value, len(value)
        self.line.display = True
        self.screen.set_focus(self.line)

    def action_edit(self) -> None:
        """Open the line with the text of the branch from here."""
        with self.explorer.lock:
            path = self.shown_tree.path(self.at.tip, self.at.cursor)
            rest = "".join(self.shown_tree.nodes[node].text for node in path)
        self.action_type(edit_line(rest))
        self.line.cursor_position -= 1  # before the quote

    def _close_line(self) -> None:
        self.line.display = False
        if self.focused in (self.line, None):
            self.screen.set_focus(self.choices)

    @on(Input.Blurred)
    def _left_line(self) -> None:
        if self.line.display and self.app_focus and self.focused is not self.line:
            self._close_line()  # another pane was clicked

    def action_enter(self) -> None:
        """Do what was typed."""
        text = self.line.value.strip()
        self._close_line()
        if text.lower() in ("help", "?"):
            self.action_help()
        elif text.lower() in ("quit", "q", "exit"):
            self.action_leave()
        elif text:
            self.run_command(self.line.value.lstrip(), self.at)

    def action_let_go(self) -> None:
        """Close the line; else stop what runs."""
        if self.line.display:
            self._close_line()
        elif self.waiting:
            self.stop()

    def action_help(self) -> None:
        """The keys, the columns, and the commands of `:`."""
        self.push_screen(Dialog("help", help_lines()))

    def action_stop_or_leave(self) -> None:
        """Stop what runs, else leave."""
        if self.waiting:
            self.stop()
        elif self.line.display:
            self.report("Escape leaves the line")
        else:
            self.action_leave()

    def action_leave(self) -> None:
        """Leave."""
        self.exit(0)


def edit_line(text: str) -> str:
    """The command that writes a text. Its control characters are escapes."""
    return f"edit {escaped(json.dumps(text, ensure_ascii=False))}"


def in_words(failed: Exception) -> str:
    """What failed, for the status line."""
    if isinstance(failed, GenctlError):
        return f"{failed.message}{f' ({failed.hint})' if failed.hint else ''}"
    return f"unexpected {type(failed).__name__}: {failed} (this is a bug)"


def _kind(line: str) -> str:
    """The kind of a command, as its row has it."""
    name = line.split()[0]
    return COMMANDS[name].kind if name in COMMANDS else ""


def run_screen(explorer: Explorer, *, coloured: bool = True, signalled: Callable[[], int] = lambda: 0) -> int:
    """Show a tree until the person leaves. Returns the exit status.

    `signalled` is the status to exit with once a signal has come, else 0; whoever calls handles signals. Raises
    GenctlError after the terminal is restored, if the screen itself fails.
    """
    app = ExploreApp(explorer, coloured=coloured, signalled=signalled)
    errors = io.StringIO()
    app.error_console = Console(file=errors, width=200, color_system=None)
    status = app.run()
    app.stop()
    app.model.shutdown(cancel_futures=True)
    if explorer.file is not None:
        command = f"genctl explore --open {shlex.quote(str(explorer.file.path))}"
        print_message(f"saved: {command} continues this tree", whole=command)
    if app.return_code:
        raised = errors.getvalue()
        last = next(iter(re.findall(r"^\w+(?:Error|Exception|Exit|Matches)\b.*$", raised, re.MULTILINE)), "no message")
        hint = "this is a bug; --debug shows where"
        raise ScreenError(f"the screen failed: {last}", hint=hint) from RuntimeError(raised)
    return signalled() or int(status or 0)


class ScreenError(GenctlError):
    """The screen failed, not the model."""
