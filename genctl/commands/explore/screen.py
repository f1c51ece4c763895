"""The full screen of `genctl explore`. Its keys are commands of the tree, or move the screen's own cursor.

The model runs in a thread of its own (`model_thread`). This one only reads the tree, so that every key is answered at
once.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import Console, Group
from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.message import Message
from textual.widgets import Input, Static

from genctl.commands.explore import formats
from genctl.commands.explore.dialogs import CommandLine, Dialog, Editor, help_dialog
from genctl.commands.explore.keys import KEYS
from genctl.commands.explore.model_thread import LineDone, Looked, ModelThread, Started, kind_of
from genctl.commands.explore.panes import Alternatives, TextPane, TreePane
from genctl.config.check import known
from genctl.errors import GenctlError, count
from genctl.terminal import theme, widgets
from genctl.terminal.message import print_message
from genctl.tree import token_tree
from genctl.tree.commands import COMMANDS, parse
from genctl.tree.explorer import Explorer
from genctl.tree.results import BranchText, Covered, Result, Saved, Searching, Settings, TokenWritten
from genctl.tree.token_tree import At

POLL_S = 0.1  # how often a signal is looked for
NARROW = 76  # columns below which the panes stand one below the other


class ExploreApp(App[int]):
    """Three panes, a line of input and a status line."""

    CSS_PATH = "screen.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, show=False, priority=True) for key in KEYS if key.keys),
        Binding("enter", "answer", show=False, priority=True),  # of the line, when it is open
    ]

    class Arrived(Message):
        """The model has put something into the inbox."""

    def __init__(self, explorer: Explorer, *, coloured: bool = True, signalled: Callable[[], int] = lambda: 0) -> None:
        super().__init__(ansi_color=True)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (NARROW, "-middle"), (100, "-wide")]
        self.explorer, self.shown_tree = explorer, explorer.tree
        self.coloured, self.signalled = coloured, signalled
        self._at = self.shown_tree.at  # the screen's own cursor
        self.answer, self.failed = "? shows the keys", False
        self.written = 0  # tokens of the command that runs
        self.times: list[float] = []  # when those came that the model chose
        self.speed = 0.0  # tokens a second
        self.follows = False  # whether the cursor goes with the tokens that are written
        self.wanted = ""  # the filter
        self.found: list[Result] = []  # by a command that looks
        self.outdated: set[str] = set()  # panes to draw anew
        self.model = ModelThread(explorer, lambda: self.post_message(self.Arrived()))

    def compose(self) -> ComposeResult:
        """The panes."""
        with Container(id="panes"):
            with TextPane(id="text") as text:
                text.border_title = "text"
            with Vertical(id="choices") as choices:
                choices.border_title = "next token"
                yield Alternatives(id="alternatives", cursor_type="row", cell_padding=0)
                yield Static(id="detail", markup=False)
            tree = TreePane(coloured=self.coloured, id="tree")
            tree.border_title = "tree: probability, tokens"
            yield tree
        yield CommandLine(id="line", compact=True, select_on_focus=False)
        yield Static(id="status", markup=False)

    def on_mount(self) -> None:
        """Show the tree once the panes have their sizes."""
        self.line = self.query_one("#line", CommandLine)
        self.choices = self.query_one("#alternatives", Alternatives)
        self.tree_pane = self.query_one("#tree", TreePane)
        self.line.display = False
        self.screen.set_focus(self.choices)
        self.set_interval(POLL_S, self._leave_on_signal)

    def on_resize(self) -> None:
        """Fit the panes to the new width."""
        self.call_after_refresh(self.show_all)

    def _leave_on_signal(self) -> None:
        if self.signalled():
            self.exit(self.signalled())

    @property
    def at(self) -> At:
        """Where the person is; where the tree is, once an undo has taken that away."""
        with self.explorer.lock:
            is_undone = max(self._at.cursor, self._at.tip) >= len(self.shown_tree.nodes)
            return self.shown_tree.at if is_undone else self._at

    # -- what the panes show -------------------------------------------------------------------------------------------

    def show_all(self) -> None:
        """Show the place of the cursor in all panes."""
        with self.explorer.lock:
            self.tree_pane.show(self.shown_tree, self.at)
        self.show_place()

    def show_place(self) -> None:
        """Show the branch, and the tokens that may follow the cursor once the model has scored them."""
        with self.explorer.lock:
            self.query_one("#text", TextPane).show(self.shown_tree, self.at, coloured=self.coloured)
        if not (self.model.waiting and self.follows):
            self.model.look(self.at.cursor)
        self.show_status()

    @on(Alternatives.RowHighlighted)
    def show_status(self) -> None:
        """Show what is going on, and figures of the place."""
        state = self.answer
        if self.model.waiting and not self.failed:
            state = f"{self.model.waiting[0].split()[0]}: {count(self.written, 'token')} · Space stops"
        with self.explorer.lock:
            figures = [f"logprob {widgets.rounded(self.shown_tree.joints[self.at.cursor])}"]
        if self.choices.distribution is not None:
            figures.insert(0, f"entropy {self.choices.distribution.entropy:.2f}")
        figures += [f"{self.speed:.1f} tokens/s"] if self.speed else []
        figures += [f"{key}={value}" for key, value in self.shown_tree.settings.items()]
        width = max(self.size.width, 20)
        style = "bold red" if self.failed and self.coloured else "bold"
        lines = Text(widgets.first_words(state, width), style).append("\n")
        lines.append(widgets.first_words(" · ".join(figures), width), theme.DIM)
        self.query_one("#status", Static).update(lines)
        self.query_one("#detail", Static).update(Text(self.choices.detail(), theme.DIM, no_wrap=True))

    def report(self, words: str, *, failed: bool = False) -> None:
        """Answer in the status line."""
        self.answer, self.failed = words, failed
        self.show_status()

    # -- the model -----------------------------------------------------------------------------------------------------

    def run_command(self, line: str, *, at: At | None = None) -> bool:
        """Give a command to the model; with `at`, from there. False while another one writes."""
        runs = self.model.run(line, at)
        if not runs:
            self.report("one command at a time: Space stops what runs", failed=True)
        return runs

    @on(Arrived)
    def _take_in(self) -> None:
        """Take in everything that has arrived, and draw once."""
        if not self.is_running or not self.screen_stack:
            return
        for arrival in self.model.arrivals():
            if isinstance(arrival, Started):
                self.written, self.times, self.answer, self.failed = 0, [], "", False
                self.follows = kind_of(arrival.line) == "write"
            elif isinstance(arrival, LineDone):
                self._done(arrival)
            elif isinstance(arrival, Looked):
                self._show_distribution(arrival)
            else:
                self._take_result(arrival)
        if "tree" in self.outdated:
            self.show_all()
        elif self.outdated:
            self.show_place()
        self.outdated.clear()
        self.show_status()

    def _show_distribution(self, looked: Looked) -> None:
        found = looked.distribution
        with self.explorer.lock:
            if found is not None and looked.node == self.at.cursor:
                end = " (after EOS)" if found.after_eos else ""
                self.query_one("#choices", Vertical).border_title = f"next token{end}"
                self.choices.show(found, self.shown_tree, self.at, self.wanted, coloured=self.coloured)
        if found is None and looked.node == self.at.cursor:
            self.report(looked.error, failed=True)

    def _done(self, done: LineDone) -> None:
        self.model.waiting.popleft()
        self.outdated |= {"tree", "place"}
        name = done.line.split()[0]
        if self.follows or kind_of(done.line) in ("move", "back", "fork"):
            self._at = self.shown_tree.at
        self.follows = False
        if done.error:
            self.answer, self.failed = done.error, True
        elif not self.answer:
            self.answer = "stopped" if self.model.stopping else f"{name}: done"
        found, self.found = self.found, []
        if found and not done.error:
            lines = [line for each in found for line in formats.drawn(each, coloured=self.coloured)]
            self.push_screen(Dialog(f"{done.line}: {COMMANDS[name].about}", Group(*lines)))

    def _take_result(self, result: Result) -> None:
        """What a command answers: in the panes, in the status line, on the clipboard, or in a dialog at its end."""
        if isinstance(result, TokenWritten):
            self._grow(result)
        elif isinstance(result, Searching):
            self.written += 1
        elif isinstance(result, At):
            self.answer = self.answer or result.note
        elif isinstance(result, Settings):
            self.answer = " · ".join([*result.notes, *(f"{key}={value}" for key, value in result.values.items())])
        elif isinstance(result, BranchText):
            self.copy_to_clipboard(result.text)
            self.answer = f"copied {len(result.text)} characters"
        elif isinstance(result, (Covered, Saved)):
            self.answer = next(formats.lines_of(result))
        elif kind_of(self.model.waiting[0]) == "look":
            self.found.append(result)

    def _grow(self, result: TokenWritten) -> None:
        self.written += 1
        node = result.token.node
        if result.token.by == "generate":
            self.times.append(time.monotonic())
            seconds = self.times[-1] - self.times[0]
            self.speed = (len(self.times) - 1) / seconds if seconds else 0.0
        with self.explorer.lock:
            if self.follows:
                self._at = At(node, node)
                self.outdated.add("place")
            is_there = node < len(self.shown_tree.nodes)  # not undone since
            if not result.known and not (is_there and self.tree_pane.grow(self.shown_tree, node)):
                self.outdated.add("tree")

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
        if action not in {key.action.partition("(")[0] for key in KEYS if key.keys} | {"answer", "place"}:
            return True
        if len(self.screen_stack) > 1:
            return False
        typing = self.focused is self.line
        return action in ("answer", "let_go", "stop_or_leave") if typing else action != "answer"

    def _go(self, at: At) -> None:
        if at.note:
            self.report(at.note)
        else:
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

    def action_place(self, node: int) -> None:
        """Go to a node of the branch: the token after it was clicked."""
        self._go(At(node, self.at.tip))

    def action_run(self, line: str, place: str = "") -> None:
        """A command: from the `cursor` or the `tip` of the branch, or from wherever the tree is."""
        self.run_command(line, at={"cursor": self.at, "tip": At(self.at.tip, self.at.tip)}.get(place))

    def action_pause(self) -> None:
        """Stop what runs; else generate on from the end of the branch."""
        if self.model.waiting:
            self.model.stop()
        elif self.run_command("generate", at=At(self.at.tip, self.at.tip)):
            self.action_move("end")

    @on(Alternatives.RowSelected)
    def _take(self) -> None:
        if self.choices.selected is not None:
            self.run_command(f"take id:{self.choices.selected}", at=self.at)

    @on(TreePane.NodeSelected)
    def _open_branch(self, event: TreePane.NodeSelected[Any]) -> None:
        if event.node.data is not None:
            with self.explorer.lock:
                self._go(token_tree.goto(self.shown_tree, self.at, event.node.data.end))

    def action_edit(self) -> None:
        """Another text from here."""
        at = self.at
        with self.explorer.lock:
            rest = "".join(self.shown_tree.nodes[node].text for node in self.shown_tree.path(at.tip, at.cursor))

        def edited(text: str | None) -> None:
            if text:
                self.run_command(f"edit {json.dumps(text, ensure_ascii=False)}", at=at)
            elif text is not None:
                self.report("there is no text to write", failed=True)

        self.push_screen(Editor(rest), lambda text: None if text == rest else edited(text))

    def action_ask(self, purpose: str, label: str, value: str = "") -> None:
        """Open the line of input."""
        self.line.open(purpose, label, value)
        self.screen.set_focus(self.line)

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        if self.line.purpose == "filter" and self.line.display:
            self.wanted = event.value
            self.show_place()

    def _close_line(self) -> str:
        """Hide the line. Returns what it was for."""
        purpose = self.line.close()
        if self.focused in (self.line, None):
            self.screen.set_focus(self.choices)
        return purpose

    @on(Input.Blurred)
    def _left_line(self) -> None:
        if self.line.display and self.app_focus and self.focused not in (self.line, None):
            self._close_line()  # another pane was clicked

    def action_answer(self) -> None:
        """Do what was typed."""
        text = self.line.value.strip()
        purpose = self._close_line()
        if purpose == "filter":
            self.wanted = self.line.value
            self.show_place()
        elif text.lower() in ("help", "?"):
            self.action_help()
        elif text.lower() in ("quit", "q", "exit"):
            self.action_leave()
        elif text and purpose == "expand":
            self.run_command(f"expand {text}", at=self.at)
        elif text and purpose == "setting":
            is_value = "=" in text or text.split()[0].replace("-", "_") in known()  # KEY=VALUE, KEY VALUE
            self.run_command(f"{'set' if is_value else 'preset'} {text}")
        elif text:
            self.run_command(text, at=self.at)

    def action_let_go(self) -> None:
        """Close the line; else stop what runs, else remove the filter."""
        if self.line.display and self._close_line() != "filter":
            return
        if self.model.waiting and not self.wanted:
            self.model.stop()
        self.wanted = ""
        self.show_place()

    def action_help(self) -> None:
        """The keys, what the panes show, and the commands of `:`."""
        self.push_screen(help_dialog())

    def action_stop_or_leave(self) -> None:
        """Stop what runs, else leave."""
        if self.model.waiting:
            self.model.stop()
        elif self.line.display:
            self.report("Escape leaves the line")
        else:
            self.action_leave()

    def action_leave(self) -> None:
        """Leave."""
        self.exit(0)


def run_screen(explorer: Explorer, *, coloured: bool = True, signalled: Callable[[], int] = lambda: 0) -> int:
    """Show a tree until the person leaves. Returns the exit status.

    `signalled` is the status to exit with once a signal has come, else 0; whoever calls handles signals. Raises
    GenctlError after the terminal is restored, if the screen itself fails.
    """
    app = ExploreApp(explorer, coloured=coloured, signalled=signalled)
    errors = io.StringIO()
    app.error_console = Console(file=errors, width=200, color_system=None)
    status = app.run()
    app.model.shutdown()
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
