"""The full screen of `genctl explore`. A key runs a command of the tree, or moves the screen's own cursor.

The model runs in a thread of its own, one command after another; between two tokens it computes the distribution that
the screen needs. The UI thread only reads the tree, so every key is handled at once; `frame` draws what has arrived.
"""

from __future__ import annotations

import io
import shlex
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.suggester import SuggestFromList
from textual.widgets import Input, Static

from genctl.commands.explore import formats
from genctl.commands.explore.panes import KEYS, Alternatives, Dialog, TextPane, TreePane, edit_line, help_text
from genctl.config import presets
from genctl.config.check import known
from genctl.errors import GenctlError, count
from genctl.terminal import theme, widgets
from genctl.terminal.standard_streams import print_message
from genctl.tree import token_tree
from genctl.tree.commands import COMMANDS, BranchText, Result, Shown, TokenWritten, Why, Wrote, parse
from genctl.tree.explorer import Explorer
from genctl.tree.scores import Distribution
from genctl.tree.token_tree import At

FRAME_S = 0.05  # between two redraws
NARROW = 76  # columns; below this the panes are stacked


class ExploreApp(App[None]):
    """Three panes, a line of input and a status line."""

    CSS_PATH = "screen.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, show=False, priority=True) for key in KEYS if key.keys),
        Binding("enter", "enter", show=False, priority=True),  # for the input line, when it is open
    ]

    def __init__(self, explorer: Explorer, *, coloured: bool = True, signalled: Callable[[], int] = lambda: 0) -> None:
        super().__init__(ansi_color=True)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (NARROW, "-middle"), (100, "-wide")]
        self.explorer, self.shown_tree = explorer, explorer.tree
        self.coloured, self.signalled = coloured, signalled
        self._at = self.shown_tree.at  # the screen's own cursor
        self.follows = False  # whether the cursor follows the tokens being written
        self.answer, self.failed = "? shows the keys", False
        self.written = 0  # tokens written by the running command
        self.lines: list[str] = []  # output of the running command, for a dialog
        self.stale = False  # whether the panes are out of date
        self.waiting: deque[str] = deque()  # commands: the running one, then the queued ones
        self.arrived: deque[Callable[[], None]] = deque()  # calls from the model's thread, to run in this one
        self.model = ThreadPoolExecutor(1, "model")
        self.stopping = False
        self._look: int | None = None  # the node whose distribution the screen needs

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
        """Start drawing."""
        self.screen.set_focus(self.choices)
        self.set_interval(FRAME_S, self.frame)

    def on_resize(self) -> None:
        """Fit the panes to the new width."""
        self.call_after_refresh(self.show_all)

    @property
    def at(self) -> At:
        """The screen's own cursor; the tree's cursor if an undo has removed the nodes of the former."""
        with self.explorer.lock:
            is_undone = max(self._at.cursor, self._at.tip) >= len(self.shown_tree.nodes)
            return self.shown_tree.at if is_undone else self._at

    # -- the model's thread --------------------------------------------------------------------------------------------

    def run_command(self, line: str, at: At | None = None) -> bool:
        """Queue a command, to run from `at` if given. False if a command that writes is running or queued."""
        if any(_kind(each) in ("write", "fork") for each in self.waiting):
            self.report("one command at a time: Space stops what runs", failed=True)
            return False
        self.waiting.append(line)
        self.stopping = False
        self.model.submit(self._do, line, at)
        return True

    def _do(self, line: str, at: At | None) -> None:
        self.arrived.append(partial(self._begin, line))
        error = ""
        try:
            if at is not None:
                self.explorer.move(at.cursor, at.tip)
            for result in self.explorer.do(line):
                self.arrived.append(partial(self._take_in, result))
                self._answer_look()
                if self.stopping:  # the stop may have come before the command began
                    self.explorer.pause()
        except Exception as failed:
            error = formats.in_words(failed)
        self.arrived.append(partial(self._end, line, error))

    def _answer_look(self) -> None:
        node, self._look = self._look, None
        if node is None or node >= len(self.explorer.tree.nodes):
            return
        try:
            found = self.explorer.distribution(node)
            _ = found.ranks, found.entropy  # computed here, not in the UI thread
            self.arrived.append(partial(self._show_distribution, found))
        except Exception as failed:
            self.arrived.append(partial(self.report, formats.in_words(failed), failed=True))

    def stop(self) -> None:
        """Stop the running command at its next token."""
        self.stopping = True
        self.explorer.pause()

    # -- what is shown -------------------------------------------------------------------------------------------------

    def frame(self) -> None:
        """Process everything that has arrived, and draw once."""
        if self.signalled():
            self.exit()
        changed = bool(self.arrived)
        while self.arrived:
            self.arrived.popleft()()
        if self.stale:
            self.stale = False
            self.show_all()
        elif changed:
            self.show_status()

    def show_all(self) -> None:
        """Redraw all panes for the current cursor."""
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
        """Show the state or the last answer; below it the entropy of the next token, and the settings."""
        state, width = self.answer, max(self.size.width, 20)
        if self.waiting and not self.failed:
            state = f"{self.waiting[0].split()[0]}: {count(self.written, 'token')} · Space stops"
        figures = [f"{key}={value}" for key, value in self.shown_tree.settings.items()]
        if (found := self.choices.distribution) is not None:
            figures.insert(0, f"entropy {found.entropy:.2f}")
        line = Text(widgets.first_words(state, width), "bold red" if self.failed and self.coloured else "bold")
        line.append("\n").append(widgets.first_words(" · ".join(figures), width), theme.DIM)
        self.query_one("#status", Static).update(line)

    def report(self, words: str, *, failed: bool = False) -> None:
        """Show an answer in the status line."""
        self.answer, self.failed = words, failed
        self.show_status()

    def _begin(self, line: str) -> None:
        self.written, self.lines, self.answer, self.failed = 0, [], "", False
        self.follows = _kind(line) == "write"

    def _take_in(self, result: Result) -> None:
        """Show a result in the panes, in the status line or in a dialog at the end; copy the text of a branch."""
        if isinstance(result, TokenWritten):
            self.written += 1
            self.stale = True
            if self.follows:
                self._at = At(result.token.node, result.token.node)
        elif isinstance(result, BranchText):
            self.copy_to_clipboard(result.text)
            self.answer = f"copied {len(result.text)} characters"
        elif isinstance(result, (Shown, Why)):
            self.lines += formats.lines_of(result)
        elif not isinstance(result, Wrote):
            self.answer = " ".join(formats.lines_of(result)) or self.answer

    def _end(self, line: str, error: str) -> None:
        self.waiting.popleft()
        self.stale = True
        if self.follows or _kind(line) in ("move", "back", "fork"):
            self._at = self.shown_tree.at
        self.follows = False
        name = line.split()[0]
        if error:
            self.answer, self.failed = error, True
        elif not self.answer:
            self.answer = "stopped" if self.stopping else f"{name}: done"
        if self.lines and not error:
            self.push_screen(Dialog(f"{line}: {COMMANDS[name].about}", Text("\n".join(self.lines))))

    def _show_distribution(self, found: Distribution) -> None:
        with self.explorer.lock:
            if found.node == self.at.cursor:
                self.choices.border_title = f"next token{' (after EOS)' if found.after_eos else ''}"
                self.choices.show(found, self.shown_tree, self.at, coloured=self.coloured)

    # -- keys ----------------------------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        """Insert typed characters into the line at once, so that Enter comes after them however fast keys arrive."""
        text = event.character if isinstance(event, events.Key) and event.is_printable else None
        if text and self.screen_stack and self.focused is self.line:
            self.line.insert_text_at_cursor(text)
        else:
            await super().on_event(event)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key is active: none is while a dialog is open, few are while the input line is open."""
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
        (self.show_all if is_other else self.show_place)()

    def action_move(self, name: str) -> None:
        """Move the screen's cursor as the command of this name would."""
        with self.explorer.lock:
            self._go(COMMANDS[name].function(self.shown_tree, self.at, **parse(name).arguments))

    def action_run(self, line: str, place: str = "") -> None:
        """Run a command from the `cursor` or the `tip` of the branch; by default from the tree's own cursor."""
        self.run_command(line, {"cursor": self.at, "tip": At(self.at.tip, self.at.tip)}.get(place))

    def action_pause(self) -> None:
        """Stop the running command; if there is none, continue generating from the end of the branch."""
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
        """Open the input line with `value` in it."""
        self.line.value, self.line.cursor_position = value, len(value)
        self.line.display = True
        self.screen.set_focus(self.line)

    def action_edit(self) -> None:
        """Open the input line with the branch's text from the cursor on."""
        with self.explorer.lock:
            path = self.shown_tree.path(self.at.tip, self.at.cursor)
            rest = "".join(self.shown_tree.nodes[node].text for node in path)
        self.action_type(edit_line(rest))
        self.line.cursor_position -= 1  # before the quote

    def _close_line(self) -> None:
        self.line.display = False
        self.screen.set_focus(self.choices)

    def action_enter(self) -> None:
        """Run the typed command."""
        text = self.line.value.lstrip()
        self._close_line()
        if text.strip() == "help":
            self.action_help()
        elif text.strip() == "quit":
            self.exit()
        elif text:
            self.run_command(text, self.at)

    def action_let_go(self) -> None:
        """Close the input line; if none is open, stop the running command."""
        if self.line.display:
            self._close_line()
        elif self.waiting:
            self.stop()

    def action_help(self) -> None:
        """Show the keys, the columns, and the commands of `:`."""
        self.push_screen(Dialog("help", help_text()))

    def action_stop_or_leave(self) -> None:
        """Stop the running command, or close the input line; else leave."""
        if self.waiting or self.line.display:
            self.action_let_go()
        else:
            self.exit()


def _kind(line: str) -> str:
    """The kind of a line's command; "" if it is unknown."""
    name = line.split()[0]
    return COMMANDS[name].kind if name in COMMANDS else ""


def run_screen(explorer: Explorer, *, coloured: bool = True, signalled: Callable[[], int] = lambda: 0) -> None:
    """Show a tree until the user leaves or `signalled` is not 0; the caller handles signals.

    Raises GenctlError after the terminal is restored, if the screen itself fails.
    """
    app = ExploreApp(explorer, coloured=coloured, signalled=signalled)
    errors = io.StringIO()
    app.error_console = Console(file=errors, width=200, color_system=None)
    app.run()
    app.stop()
    app.model.shutdown(cancel_futures=True)
    if explorer.file is not None:
        print_message(f"saved: genctl explore --open {shlex.quote(str(explorer.file.path))} continues this tree")
    if app.return_code:
        raised = errors.getvalue()
        last = (raised.strip().splitlines() or ["no message"])[-1]
        hint = "this is a bug; --debug shows where"
        raise GenctlError(f"the screen failed: {last}", hint=hint) from RuntimeError(raised)
