"""The full screen of `genctl explore`. Its keys are commands of the tree, or move the screen's own cursor.

The model runs in a thread of its own, one command after another; it answers what is looked at between two tokens. This
thread only reads the tree, so that every key is answered at once.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.message import Message
from textual.suggester import SuggestFromList
from textual.widgets import Input, Static

from genctl.commands.explore import formats
from genctl.commands.explore.dialogs import Dialog, Editor
from genctl.commands.explore.keys import COLUMNS, KEYS
from genctl.commands.explore.panes import Alternatives, TextPane, TreePane
from genctl.config import presets
from genctl.config.check import known
from genctl.errors import GenctlError, count
from genctl.terminal import theme, widgets
from genctl.terminal.message import print_message
from genctl.tree import token_tree
from genctl.tree.commands import COMMANDS, parse
from genctl.tree.distribution import Distribution
from genctl.tree.explorer import Explorer
from genctl.tree.results import BranchText, Covered, Result, Saved, Searching, Settings, TokenWritten
from genctl.tree.token_tree import At

POLL_S = 0.1  # how often a signal is looked for
NARROW = 76  # columns below which the panes stand one below the other


@dataclass(frozen=True)
class CommandBegan:
    """A command begins."""

    line: str


@dataclass(frozen=True)
class Looked:
    """What may follow a node; an error where that cannot be told."""

    node: int
    distribution: Distribution | None
    error: str = ""


@dataclass(frozen=True)
class CommandDone:
    """The commands that were given are done, or one of them failed."""

    line: str
    error: str = ""


class ExploreApp(App[int]):
    """Three panes, a line of input and a status line."""

    CSS_PATH = "screen.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, show=False, priority=True) for key in KEYS if key.keys),
        Binding("enter", "answer", show=False, priority=True),  # of the line, when it is open
    ]

    class Told(Message):
        """Something is in the inbox."""

    def __init__(self, explorer: Explorer, *, coloured: bool = True, signalled: Callable[[], int] = lambda: 0) -> None:
        super().__init__(ansi_color=True)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (NARROW, "-middle"), (100, "-wide")]
        self.explorer, self.shown_tree = explorer, explorer.tree
        self.coloured, self.signalled = coloured, signalled
        self._at = self.shown_tree.at  # the screen's own cursor
        self.answer, self.failed = "? shows the keys", False
        self.waiting: deque[str] = deque()  # commands, the one that runs first
        self.written, self.began = 0, 0.0  # tokens of the command that runs, and when the first one came
        self.speed = 0.0  # tokens a second
        self.follows = False  # whether the cursor goes with the tokens that are written
        self.stopping = False
        self.purpose = ""  # of the line of input
        self.wanted = ""  # the filter
        self.found: list[Result] = []  # by a command that looks
        self.look: int | None = None  # a node that is looked at
        self.inbox: deque[object] = deque()
        self.model = ThreadPoolExecutor(1, "model")

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
        yield Input(id="line", compact=True, select_on_focus=False)
        yield Static(id="status", markup=False)

    def on_mount(self) -> None:
        """Show the tree once the panes have their sizes."""
        self.line = self.query_one("#line", Input)
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
            gone = max(self._at.cursor, self._at.tip) >= len(self.shown_tree.nodes)
            return self.shown_tree.at if gone else self._at

    # -- what the panes show -------------------------------------------------------------------------------------------

    def show_all(self) -> None:
        """Show the place of the cursor in all panes."""
        with self.explorer.lock:
            self.tree_pane.show(self.shown_tree, self.at)
        self.show_place()

    def show_place(self) -> None:
        """Show the branch, and what may follow the cursor once the model has said it."""
        with self.explorer.lock:
            self.query_one("#text", TextPane).show(self.shown_tree, self.at, coloured=self.coloured)
        if not (self.waiting and self.follows):
            self.look = self.at.cursor
            self.model.submit(self._look)
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
        figures += [f"{self.speed:.1f} tokens/s"] if self.speed else []
        figures += [f"{key}={value}" for key, value in self.shown_tree.settings.items()]
        width = max(self.size.width, 20)
        style = "bold red" if self.failed and self.coloured else "bold"
        lines = Text(widgets.first_words(state, width), style).append("\n")
        lines.append(widgets.first_words(" · ".join(figures), width), theme.DIM)
        self.query_one("#status", Static).update(lines)
        self.query_one("#detail", Static).update(Text(self.choices.detail(), theme.DIM, no_wrap=True))

    def say(self, words: str, *, failed: bool = False) -> None:
        """Answer in the status line."""
        self.answer, self.failed = words, failed
        self.show_status()

    @on(Alternatives.RowHighlighted)
    def _row_highlighted(self) -> None:
        self.show_status()

    # -- the thread of the model ---------------------------------------------------------------------------------------

    def run_command(self, line: str, *, at: At | None = None) -> bool:
        """Give a command to the model; with `at`, from there. False while another one writes."""
        if any(kind_of(each) in ("write", "fork") for each in self.waiting):
            self.say("one command at a time: Space stops what runs", failed=True)
            return False
        self.waiting.append(line)
        self.stopping = False
        self.model.submit(self._do, line, at)
        return True

    def stop(self) -> None:
        """Stop what runs at its next token."""
        self.stopping = True
        self.explorer.pause()

    def _do(self, line: str, at: At | None) -> None:
        """In the thread of the model: do a command, and tell what it comes to."""
        self._tell(CommandBegan(line))
        error = ""
        try:
            if at is not None:
                self.explorer.move(at.cursor, at.tip)
            for result in self.explorer.do(line):
                self._tell(result)
                self._look()
                if self.stopping:  # it may have come before the command began
                    self.explorer.pause()
        except Exception as failed:
            error = in_words(failed)
        self._tell(CommandDone(line, error))

    def _look(self) -> None:
        """In the thread of the model: answer what is looked at."""
        node, self.look = self.look, None
        if node is None or node >= len(self.shown_tree.nodes):
            return
        try:
            found = self.explorer.distribution(node)
            _ = found.rank(0), found.entropy, found.effects  # here, and not where keys are answered
            self._tell(Looked(node, found))
        except Exception as failed:
            self._tell(Looked(node, None, in_words(failed)))

    def _tell(self, told: object) -> None:
        first = not self.inbox
        self.inbox.append(told)
        if first:
            self.post_message(self.Told())

    @on(Told)
    def _take_in(self) -> None:
        """Take in everything that was told, and draw once."""
        if not self.is_running or len(self.screen_stack) == 0:
            return
        draws_tree = draws_place = False
        while self.inbox:
            told = self.inbox.popleft()
            if isinstance(told, CommandBegan):
                self.written, self.began, self.answer, self.failed = 0, 0.0, "", False
                self.follows = kind_of(told.line) == "write"
            elif isinstance(told, TokenWritten):
                draws_tree |= not (told.known or self._grown(told.token.node))
                draws_place |= self.follows
            elif isinstance(told, Searching):
                self.written += 1
            elif isinstance(told, Looked):
                self._looked(told)
            elif isinstance(told, CommandDone):
                self._done(told)
                draws_tree = draws_place = True
            elif isinstance(told, Result):
                self._take_result(told)
        if draws_tree:
            self.show_all()
        elif draws_place:
            self.show_place()
        self.show_status()

    def _grown(self, node: int) -> bool:
        self.written += 1
        self.began = self.began or time.monotonic()
        self.speed = (self.written - 1) / max(time.monotonic() - self.began, 1e-9) if self.written > 1 else 0.0
        with self.explorer.lock:
            if node >= len(self.shown_tree.nodes):
                return False
            if self.follows:
                self._at = At(node, node)
            return self.tree_pane.grow(self.shown_tree, node)

    def _looked(self, told: Looked) -> None:
        if told.node != self.at.cursor:
            return
        if told.distribution is None:
            self.say(told.error, failed=True)
        elif told.distribution.node < len(self.shown_tree.nodes):
            with self.explorer.lock:
                self.choices.show(told.distribution, self.shown_tree, self.at, self.wanted, coloured=self.coloured)

    def _done(self, done: CommandDone) -> None:
        self.waiting.popleft()
        kind = kind_of(done.line)
        if self.follows or kind in ("move", "back", "fork"):
            self._at = self.shown_tree.at
        self.follows = False
        if done.error:
            self.answer, self.failed = done.error, True
        elif not self.answer:
            self.answer = "stopped" if self.stopping else f"{done.line.split()[0]}: done"
        found, self.found = self.found, []
        if found and not done.error:
            lines = [line for each in found for line in formats.drawn(each, coloured=self.coloured)]
            self.push_screen(Dialog(f"{done.line}: {COMMANDS[done.line.split()[0]].about}", Group(*lines)))

    def _take_result(self, told: Result) -> None:
        """What a command answers: in the status line, on the clipboard, or in a dialog once all of it is there."""
        if isinstance(told, At):
            self.answer = self.answer or told.note
        elif isinstance(told, Settings):
            self.answer = " · ".join([*told.notes, *(f"{key}={value}" for key, value in told.values.items())])
        elif isinstance(told, Covered):
            covered = widgets.percent(told.mass).strip()
            self.answer = f"{count(told.continuations, 'continuation')}, {covered} of the mass"
            self.answer += f": {told.reason}" if told.reason else ""
        elif isinstance(told, BranchText):
            self.copy_to_clipboard(told.text)
            self.answer = f"copied {len(told.text)} characters"
        elif isinstance(told, Saved):
            self.answer = f"saved in {told.path}"
        elif kind_of(self.waiting[0]) == "look":
            self.found.append(told)

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
            self.say(at.note)
        else:
            self._at, self.follows = at, False
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
        if self.waiting:
            self.stop()
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
                self.say("there is no text to write", failed=True)

        self.push_screen(Editor(rest), lambda text: None if text == rest else edited(text))

    def action_ask(self, purpose: str, label: str, value: str = "") -> None:
        """Open the line of input."""
        settings = [f"{name}=" for name in sorted(known())]
        names = sorted({preset.name for preset in presets.available()})
        suggestions = {
            "setting": [*settings, *names],
            "command": [*COMMANDS, *(f"set {each}" for each in settings), *(f"preset {each}" for each in names)],
        }.get(purpose)
        self.purpose = purpose
        self.line.suggester = SuggestFromList(suggestions) if suggestions else None
        self.line.border_title = self.line.placeholder = label
        self.line.value, self.line.cursor_position = value, len(value)
        self.line.display = True
        self.screen.set_focus(self.line)

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        if self.purpose == "filter" and self.line.display:
            self.wanted = event.value
            self.show_place()

    def _close_line(self) -> str:
        """Hide the line. Returns what it is for."""
        purpose, self.purpose = self.purpose, ""
        self.line.display = False
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
        if self.waiting and not self.wanted:
            self.stop()
        self.wanted = ""
        self.show_place()

    def action_help(self) -> None:
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
        self.push_screen(Dialog("help", Group(*body)))

    def action_stop_or_leave(self) -> None:
        """Stop what runs, else leave."""
        if self.waiting:
            self.stop()
        elif self.line.display:
            self.say("Escape leaves the line")
        else:
            self.action_leave()

    def action_leave(self) -> None:
        """Leave."""
        self.exit(0)


def in_words(failed: Exception) -> str:
    """What failed, for the status line."""
    if isinstance(failed, GenctlError):
        return f"{failed.message}{f' ({failed.hint})' if failed.hint else ''}"
    return f"unexpected {type(failed).__name__}: {failed} (this is a bug)"


def kind_of(line: str) -> str:
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
        told = errors.getvalue()
        last = next(iter(re.findall(r"^\w+(?:Error|Exception|Exit|Matches)\b.*$", told, re.MULTILINE)), "no message")
        raise ScreenError(f"the screen failed: {last}", hint="this is a bug; --debug shows where") from RuntimeError(
            told
        )
    return signalled() or int(status or 0)


class ScreenError(GenctlError):
    """The screen failed, not the model."""
