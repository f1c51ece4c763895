"""The panes of `genctl explore` on one tree, and what the worker tells.

The model runs in the worker's thread. This one only reads the tree and moves a cursor of its own, so that every key is
answered at once.
"""

from __future__ import annotations

import io
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import inf

from rich.console import Console
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.containers import Container, Vertical
from textual.css.query import QueryError
from textual.message import Message
from textual.widgets import Static

from genctl.commands.explore import marks
from genctl.commands.explore.alternatives import Alternatives, Beams
from genctl.commands.explore.dialogs import PromptLine
from genctl.commands.explore.panes import TextPane, TreePane
from genctl.commands.explore.screen_source import NodeLook, Place, TreeSource
from genctl.commands.explore.screen_worker import CommandBegan, CommandDone, DiffersAt, ModelThread
from genctl.errors import count
from genctl.events.history import LaneHistory
from genctl.terminal import widgets
from genctl.tree.language import COMMANDS
from genctl.tree.results import Result, Searching, TokenWritten

LOOKS = 8  # looks that are kept
NARROW, WIDE = 76, 100  # columns below which the panes are stacked; with a second distribution, below WIDE


def kind_of(line: str) -> str:
    """The kind of a command, as its row has it; `resume` finishes one that writes."""
    name = line.split()[0]
    return "write" if name == "resume" else COMMANDS[name].kind if name in COMMANDS else ""


class TreeApp(App[int]):
    """Three panes, a line of input and a status line."""

    CSS_PATH = "screen.tcss"
    ENABLE_COMMAND_PALETTE = False

    class Told(Message):
        """The worker has told something."""

    def __init__(self, source: TreeSource, *, coloured: bool = True) -> None:
        super().__init__(ansi_color=True)
        middle = [] if source.names is not None else [(NARROW, "-middle")]
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), *middle, (WIDE, "-wide")]
        self.source, self.coloured = source, coloured
        self.place = Place(source.tree)
        self.worker = ModelThread(source, self._tell)
        self.inbox: deque[object] = deque()
        self.running = ""  # the command
        self.follows = False  # whether the cursor goes with the tokens that are written
        self.answer, self.failed = "? shows the keys", False
        self.looks: OrderedDict[tuple[int, int], NodeLook] = OrderedDict()
        self.look: NodeLook | None = None
        self.search: LaneHistory | None = None  # of beams, while they run
        self.written = 0  # tokens of the command; steps of a search
        self.is_brief = False  # whether the command that runs is over at once
        self.first_command = ""  # is done at the beginning
        self._told = False
        self._signalled: Callable[[], int] = lambda: 0
        self._poll = 0.0

    def capture_errors(self) -> io.StringIO:
        """Where the traceback goes if the screen fails, in place of the terminal."""
        errors = io.StringIO()
        self.error_console = Console(file=errors, width=200, color_system=None)
        return errors

    def watch_signals(self, signalled: Callable[[], int], seconds: float) -> None:
        """Leave once `signalled` gives a status; it is asked every so many seconds."""
        self._signalled, self._poll = signalled, seconds

    def _leave_on_signal(self) -> None:
        if self._signalled():
            self.exit(self._signalled())

    # -- the panes -----------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """The panes."""
        with Container(id="panes"):
            yield TextPane(coloured=self.coloured, id="text")
            with Vertical(id="choices"):
                yield Static(id="heading", markup=False)
                yield Alternatives(id="alternatives", coloured=self.coloured)
                yield Beams(id="beams", coloured=self.coloured)
                yield Static(id="detail", markup=False)
            yield TreePane(self.source.tree, id="tree", coloured=self.coloured)
        yield PromptLine(answered=self.line_answered, left=self.line_left, id="prompt")
        yield Static(id="status", markup=False)

    def on_mount(self) -> None:
        """Name the panes, and begin."""
        self.text_pane = self.query_one("#text", TextPane)
        self.choices = self.query_one("#alternatives", Alternatives)
        self.beams = self.query_one("#beams", Beams)
        self.tree_pane = self.query_one("#tree", TreePane)
        self.prompt = self.query_one("#prompt", PromptLine)
        self.text_pane.border_title = "text"
        self.query_one("#choices").border_title = self._choices_title()
        self.tree_pane.border_title = "tree: probability, tokens"
        self.screen.set_focus(self.choices)
        self.worker.start()
        self.call_after_refresh(self.show_all)
        if self._poll:
            self.set_interval(self._poll, self._leave_on_signal)
        if self.first_command:
            self.run_command(self.first_command)

    def _choices_title(self) -> str:
        names = self.source.names
        return (
            "next token"
            if names is None
            else "next token · " + " · ".join(map(": ".join, zip("AB", names, strict=True)))
        )

    def on_resize(self) -> None:
        """Fit the lines that depend on the width."""
        self.call_after_refresh(self.show_all)

    def show_all(self) -> None:
        """Show the place in all panes."""
        self.show_text()
        self.show_choices()
        self.show_tree()

    def show_text(self) -> None:
        """Show the branch and its cursor."""
        self.text_pane.show(self.place.pieces, self.place.index)

    def show_tree(self, *, follow: bool = True) -> None:
        """Show the branches."""
        with self.source.lock:
            self.tree_pane.show(frozenset(self.place.on_path), follow=follow)

    def show_choices(self, *, keep: bool = False) -> None:
        """Show what may follow the cursor, asking the worker if it is not known."""
        node, tree = self.place.cursor, self.source.tree
        look = self.looks.get((node, tree.view.settings))
        self.look = look
        if look is None and not (self.running and self.follows):
            self.worker.look(node)
        under = self.place.under
        with self.source.lock:
            there = {tree.nodes[child].id for child in tree.children(node)}
        self.choices.show(
            None if look is None else look.first,
            None if look is None else look.other,
            chosen=None if under is None else tree.nodes[under].id,
            there=there,
            keep=keep,
        )
        self.show_heads()
        self.show_detail()

    @on(Alternatives.Fitted)
    def show_heads(self) -> None:
        """Show the heads of the columns that fit."""
        self.query_one("#heading", Static).update(self.choices.heading())

    def show_detail(self) -> None:
        """Show what the processors did to the selected token, and the status line."""
        detail, look, id = Text(no_wrap=True), self.look, self.choices.selected
        if look is not None and look.error:
            detail.append(widgets.visible(look.error), style=marks.BOLD)
        elif look is not None and look.first is not None and id is not None:
            row, how = look.first.of(id), look.first.how(id)
            logprobs = [row.logprob, *([] if look.other is None else [look.other.of(id).logprob])]
            words = [
                f"{widgets.first_words(widgets.token_text(id, row.text), 20)}: logprob "
                + " | ".join(dict.fromkeys(map(widgets.rounded, logprobs)))
            ]
            if how:
                words.append(f"{'changed' if row.processed > -inf else 'removed'} by {widgets.visible(how)}")
            detail.append(", ".join(words), style=marks.DIM)
        self.query_one("#detail", Static).update(detail)
        self.show_status()

    def show_status(self) -> None:
        """Show the status line."""
        tree, look = self.source.tree, self.look
        found = []
        if look is not None and look.first is not None:
            mass = widgets.percent(self.choices.mass_in_view()).strip()
            found += [f"entropy {look.first.entropy:.2f}", f"mass shown {mass}"]
        found.append(f"logprob {widgets.rounded(tree.joints[self.place.cursor])}")
        if look is not None and look.shared is not None and look.own is not None:
            found.append(f"cache {look.shared} shared, {look.own} own")
        if self.source.speed is not None:
            found.append(f"{self.source.speed:.1f} tokens/s")
        found += [" ".join(f"{key}={value}" for key, value in tree.knobs.items())] if tree.knobs else []
        state = Text(self._state(), style="bold red" if self.failed and self.coloured else marks.BOLD)
        self.query_one("#status", Static).update(status_lines(state, found, max(self.size.width, 20)))

    def _state(self) -> str:
        if self.running and not self.failed:
            done = count(self.written, "token" if self.search is None else "step")
            return f"{self.running.split()[0]}: {done} · Space stops"
        return self.answer

    def say(self, words: str, *, failed: bool = False) -> None:
        """Answer in the status line."""
        self.answer, self.failed = words, failed
        self.show_status()

    # -- commands ------------------------------------------------------------------------------------------------------

    def run_command(self, line: str, *, at: int | None = None) -> bool:
        """Give a command to the worker; with `at`, from this node. False while another one runs."""
        lines = [line] if at is None or at == self.source.tree.cursor else [f"goto {at}", line]
        if not self.worker.submit(lines):
            self.say("one command at a time: Space stops what runs", failed=True)
            return False
        self.is_brief = kind_of(line) in ("move", "back", "set", "name")  # never runs the model
        return True

    def line_answered(self, purpose: str, text: str) -> None:
        """A line was typed."""

    def line_left(self, purpose: str, text: str) -> None:
        """A line was left."""

    async def release_keys(self) -> None:
        """Do the keys that waited for a command."""

    def _tell(self, told: object) -> None:
        """From the worker's thread."""
        self.inbox.append(told)
        if not self._told:
            self._told = True
            self.post_message(self.Told())

    async def on_tree_app_told(self) -> None:
        """Take in everything that was told, draw once, and do the keys that waited for it."""
        self._told = False
        try:
            self._take_in()
        except QueryError:  # the screen is closing
            return
        await self.release_keys()

    def _take_in(self) -> None:
        seen: set[str] = set()
        while self.inbox:
            told = self.inbox.popleft()
            with self.source.lock:
                seen |= self._take(told)
        if "text" in seen:
            self.show_text()
        if "search" in seen:
            self._show_search()
        if "choices" in seen:
            self.show_choices(keep="keep" in seen)
        if "tree" in seen:
            self.show_tree(follow=self.screen.focused is not self.tree_pane or self.follows)
        self.show_status()

    def _take(self, told: object) -> set[str]:
        """One thing that was told. Returns the panes that it changes."""
        if isinstance(told, CommandBegan):
            self.running, self.written = told.line, 0
            self.follows = kind_of(told.line) == "write"
            self.failed, self.answer = False, ""
        elif isinstance(told, TokenWritten):
            return self._grow(told)
        elif isinstance(told, Searching):
            lane = told.step.lane
            self.search = (self.search or LaneHistory(lane)).after(told.step)
            self.written += 1
            return {"search"}
        elif isinstance(told, NodeLook):
            return self._looked(told)
        elif isinstance(told, DiffersAt):
            self.place.mark(told.nodes)
            return {"text"}
        elif isinstance(told, CommandDone):
            return self._done(told)
        elif isinstance(told, Result):
            self.take_result(told)
        return set()

    def _grow(self, told: TokenWritten) -> set[str]:
        token, tree = told.token, self.source.tree
        self.answer, self.failed = "", False
        self.written += 1
        if told.known:
            self.tree_pane.rows.stale = True  # it may have been undone
        else:
            self.tree_pane.rows.grow(token.node, token.parent, len(tree.children(token.parent)))
        if not self.follows:
            return {"tree"}
        self.place.grow(token)
        return {"tree", "text"}

    def _looked(self, look: NodeLook) -> set[str]:
        if not look.error:
            self.looks[look.node, look.settings] = look
            while len(self.looks) > LOOKS:
                self.looks.popitem(last=False)
        if look.node != self.place.cursor:
            return set()
        if look.error:
            self.look = look
            self.say(look.error, failed=True)
            return set()
        return {"choices", *({"keep"} if self.choices.first is not None else set())}

    def _done(self, done: CommandDone) -> set[str]:
        tree, kind = self.source.tree, kind_of(done.line)
        followed, self.running, self.search = self.follows, "", None
        self.follows = self.is_brief = False
        if kind in ("move", "back", "fork") or done.error or done.stopped:
            self.tree_pane.rows.stale = True
        gone = not (tree.is_shown(self.place.cursor) and tree.is_shown(self.place.tip))
        if followed or kind in ("move", "back", "fork") or gone:
            self.place.adopt()
        if kind in ("set", "back"):
            self.place.differing.clear()
        if self.failed:  # a key that was refused meanwhile
            self.answer, self.failed = "", False
        if done.error:
            self.answer, self.failed = f"{done.error}{f' ({done.hint})' if done.hint else ''}", True
        elif not self.answer:
            self.answer = "stopped" if done.stopped else f"{done.line.split()[0]}: done"
        self.looks = OrderedDict((key, look) for key, look in self.looks.items() if tree.is_shown(key[0]))
        self.finished(done)
        if self.source.names is not None:
            self.worker.compare(self.place.unknown())
        return {"text", "search", "choices", "tree", *({"keep"} if kind == "set" else set())}

    def take_result(self, told: Result) -> None:
        """A result that is for the keys."""

    def finished(self, done: CommandDone) -> None:
        """After a command, before the panes are drawn."""

    def _show_search(self) -> None:
        searching = self.search is not None
        if self.beams.display != searching:
            self.beams.display, self.choices.display = searching, not searching
        if self.search is not None:
            self.beams.show(self.search)


def status_lines(state: Text, found: Sequence[str], width: int) -> Text:
    """Two lines at most of `width` cells: the state, then as many figures as fit."""
    first = Text(no_wrap=True, end="")
    if state:
        first.append(widgets.first_words(state.plain, width), style=state.style)
    lines = [first]
    for words in found:
        line = lines[-1]
        if line.cell_len and line.cell_len + 3 + len(words) > width:
            if len(lines) == 2:
                break
            line = Text(no_wrap=True, end="")
            lines.append(line)
        if line.cell_len:
            line.append(" · ", style=marks.DIM)
        line.append(widgets.first_words(words, width), style=marks.DIM)
    return Text("\n").join(lines)
