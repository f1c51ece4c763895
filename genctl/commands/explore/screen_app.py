"""The full screen of `genctl explore`. Its keys are commands of the tree, or move the screen's own cursor."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import on
from textual.binding import Binding, BindingType
from textual.widgets import Input, TextArea

from genctl.commands.explore import formats, marks
from genctl.commands.explore.alternatives import Alternatives, matching
from genctl.commands.explore.dialogs import Dialog, Editor, PromptLine, side_by_side
from genctl.commands.explore.flow import TextPiece
from genctl.commands.explore.panes import TextPane, TreePane
from genctl.commands.explore.screen_keys import ASKS_FOR_HELP, KEYS, LEAVES, QUESTIONS, OrderedKeys, help_sections
from genctl.commands.explore.screen_panes import kind_of
from genctl.commands.explore.screen_source import TreeSource
from genctl.commands.explore.screen_worker import CommandDone
from genctl.config.check import known
from genctl.errors import GenctlError, count
from genctl.terminal import widgets
from genctl.terminal.message import print_message
from genctl.tree import moves
from genctl.tree.language import COMMANDS, parse
from genctl.tree.looking import compare
from genctl.tree.results import At, Bookmarked, BranchText, Compared, Covered, Repeat, Result, Settings


class ExploreApp(OrderedKeys):
    """The panes with their keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key.keys, key.action, key.about, show=False, priority=key.keys == "ctrl+c") for key in KEYS
    ]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.found: list[Result] = []  # by the command that looks, while it runs
        self.first_of_two: int | None = None  # the end of the branch that `d` was pressed on
        self.texts: list[str] | None = None  # of the vocabulary

    # -- moving --------------------------------------------------------------------------------------------------------

    def _moved(self) -> None:
        self.follows = False
        self.show_text()
        self.show_choices()

    def _go(self, at: At) -> None:
        """Put the screen's cursor somewhere else; a place that it has already says why."""
        if self.place.go(at):
            self._moved()
        elif at.note:
            self.say(at.note)

    def action_move(self, name: str) -> None:
        """The move that the command of this name makes."""
        self._go(COMMANDS[name].function(self.source.tree, self.place.at, **parse(name).arguments))

    def action_page(self, pages: int) -> None:
        """A page up or down in the pane that has the focus."""
        focused = self.focused
        height = focused.size.height if focused is not None else 10
        rows = self.text_pane.rows if focused is self.text_pane else 1
        self.action_lines(pages * max(height // rows - 1, 1))

    def action_lines(self, lines: int) -> None:
        """Up or down in the pane that has the focus."""
        if self.focused is self.text_pane:
            self._go(self.place.piece(self.text_pane.neighbour(lines)))
        elif self.focused is self.tree_pane:
            self.tree_pane.move(lines)
        else:
            self.choices.move(lines)

    @on(TextPane.Clicked)
    def _text_clicked(self, event: TextPane.Clicked) -> None:
        self._go(self.place.piece(event.index))

    @on(TreePane.BranchOpened)
    def _branch_clicked(self, event: TreePane.BranchOpened) -> None:
        self._open_branch(event.node)

    def _open_branch(self, node: int) -> None:
        self.place.go(moves.to(self.source.tree, self.place.at, node))
        self._moved()
        self.show_tree()

    @on(Alternatives.Selected)
    def _row_selected(self) -> None:
        self.show_detail()

    @on(Alternatives.Taken)
    def _row_taken(self) -> None:
        self._take_selected()

    # -- writing -------------------------------------------------------------------------------------------------------

    def action_take(self) -> None:
        """Take the alternative, or go to the branch."""
        if self.focused is self.tree_pane:
            if self.tree_pane.selected is not None:
                self._open_branch(self.tree_pane.selected)
        else:
            self._take_selected()

    def _take_selected(self) -> None:
        if self.choices.selected is None:
            self.say("the alternatives are not known yet", failed=True)
        else:
            self.run_command(f"take id:{self.choices.selected}", at=self.place.cursor)

    def action_pause(self) -> None:
        """Stop what runs; else generate on from the end of the branch."""
        if self.worker.busy:
            self.worker.stop()
        elif self.run_command("generate", at=self.place.tip):
            self.action_move("end")

    def action_run(self, line: str, place: str = "") -> None:
        """A command: from the `cursor` or the `tip` of the branch, or from wherever the tree is."""
        self.run_command(line, at=getattr(self.place, place) if place else None)

    def action_edit(self) -> None:
        """Another text from here."""
        rest = "".join(piece.text for piece in self.place.pieces[self.place.index :])
        at = self.place.cursor

        def edited(text: str | None) -> None:
            if text is not None and text != rest:
                if text:
                    self.run_command(f"edit {json.dumps(text, ensure_ascii=False)}", at=at)
                else:
                    self.say("there is no text to write", failed=True)

        self.push_screen(Editor(rest), edited)

    # -- asking --------------------------------------------------------------------------------------------------------

    def _ask(self, purpose: str, value: str = "", suggestions: Any = ()) -> None:
        self.prompt.ask(purpose, QUESTIONS[purpose], value, suggestions)

    def action_settings(self) -> None:
        """Change a knob or a preset."""
        self._ask("settings", "", self.source.suggestions)

    def action_expand(self) -> None:
        """Expand by joint probability."""
        self._ask("expand", self.prompt.answers.get("expand", "mass=0.9,depth=6"))

    def action_command(self) -> None:
        """Any command."""
        settings = self.source.suggestions
        values = [f"{'set' if each.endswith('=') else 'preset'} {each}" for each in settings if each != "reset"]
        self._ask("command", "", [*COMMANDS, *values, "help", "quit"])

    def action_filter(self) -> None:
        """Filter the alternatives."""
        if self.texts is None:
            self.run_worker(self._read_vocabulary, thread=True, exclusive=True)
        self._ask("filter")

    def _read_vocabulary(self) -> None:
        texts = list(self.source.vocabulary())
        self.call_from_thread(self._know_vocabulary, texts)

    def _know_vocabulary(self, texts: list[str]) -> None:
        self.texts = texts
        if self.prompt.purpose == "filter":
            self._filter(self.prompt.value)
        self.call_later(self.release_keys)

    @property
    def must_wait(self) -> bool:
        """Whether the next key would come too early; a filter that is typed comes late where the vocabulary is read."""
        return super().must_wait or (self.texts is None and self.prompt.purpose == "filter" and not self.prompt.display)

    def _filter(self, wanted: str) -> None:
        if self.texts is not None:
            self.choices.filter(matching(self.texts, wanted) if wanted else None)
            self.query_one("#choices").border_subtitle = f"/{widgets.first_words(wanted, 20)}" if wanted else ""
            self.show_detail()

    @on(Input.Changed, "#prompt")
    def _asked(self, event: Input.Changed) -> None:
        if self.prompt.purpose == "filter" and self.prompt.display:  # else it comes after the line was left
            self._filter(event.value)

    def line_left(self, purpose: str, text: str) -> None:
        """The line was left without an answer."""
        self.prompt.purpose = ""
        if purpose == "filter":
            self._filter("")
        if self.focused is self.prompt:
            self.screen.set_focus(self.choices)

    def line_answered(self, purpose: str, text: str) -> None:
        """Do what was typed."""
        answer = text.strip()
        self.screen.set_focus(self.choices)
        if purpose == "filter":
            self._filter(text)
        elif not answer:
            return
        elif answer.lower() in ASKS_FOR_HELP:
            self.action_help()
        elif answer.lower() in LEAVES:
            self.action_leave()
        elif purpose == "expand":
            self.run_command(f"expand {answer}", at=self.place.cursor)
        elif purpose == "settings":
            is_value = "=" in answer or answer.split()[0].replace("-", "_") in known()  # KEY=VALUE, KEY VALUE
            self.run_command(answer if answer == "reset" else f"{'set' if is_value else 'preset'} {answer}")
        else:
            self.run_command(answer, at=self.place.cursor)

    # -- looking -------------------------------------------------------------------------------------------------------

    def action_compare(self) -> None:
        """Note a branch, or compare this one with the noted one."""
        here, there = self.place.tip, self.first_of_two
        if there is None or there == here or not self.source.tree.is_shown(there):
            self.first_of_two = here
            self.say("this branch is noted: go to another one and press d again")
            return
        self.first_of_two = None
        self._show_two(next(compare(self.source.explorer, [str(there), str(here)])))

    def _show_two(self, both: Compared) -> None:
        """Two branches side by side."""
        tree = self.source.tree
        shared = (tree.opened.shown or tree.opened.prompt) + both.shared_text
        heads = [
            f"{name}: logprob {widgets.rounded(logprob)}, {length} tokens from there"
            for name, logprob, length in zip("AB", both.logprobs, both.lengths, strict=True)
        ]
        columns = [[self._piece(node) for node in tree.path(end, both.fork)] for end in both.nodes]
        body = side_by_side(heads, columns, shared, self._dialog_width(), coloured=self.coloured)
        self.push_screen(Dialog("two branches", body))

    def _piece(self, node: int) -> TextPiece:
        token = self.source.tree.nodes[node]
        return TextPiece(node, token.text, marks.probability_of(token.logprob))

    def _dialog_width(self) -> int:
        return max(min(self.size.width * 9 // 10, 110) - 6, 20)

    def action_help(self) -> None:
        """The keys, the mouse, what the panes show, and the commands of `:`."""
        body: list[RenderableType] = []
        for title, rows in help_sections(self.source.names):
            table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
            for shown, about in rows:
                table.add_row(Text(shown, style=marks.BOLD), Text(about))
            body += [*([Text()] if body else []), *([Text(title, style=marks.DIM)] if title else []), table]
        self.push_screen(Dialog("help", Group(*body)))

    def take_result(self, told: Result) -> None:
        """What a command answers: in the status line, on the clipboard, or in a dialog once all of it is there."""
        if isinstance(told, At):
            self.answer = self.answer or told.note
        elif isinstance(told, Bookmarked):
            self.answer = f"bookmarked as {told.name}"
        elif isinstance(told, Settings):
            values = " ".join(f"{key}={value}" for key, value in told.values.items()) or "the first settings"
            self.answer = " · ".join([*told.notes, values])
        elif isinstance(told, Covered):
            covered = widgets.percent(told.mass).strip()
            self.answer = f"{count(told.continuations, 'continuation')}, {covered} of the mass"
            self.answer += f": {told.reason}" if told.reason else ""
        elif isinstance(told, Compared):
            self._show_two(told)
        elif isinstance(told, BranchText):
            self.copy_to_clipboard(told.text)
            self.answer = f"copied {len(told.text)} characters"
        elif kind_of(self.running) == "look":
            self.found.append(told)

    def finished(self, done: CommandDone) -> None:
        """Show what a command that looks has found."""
        found, self.found = self.found, []
        if not found or done.error:
            return
        width = self._dialog_width()
        lines = [line for each in found for line in formats.drawn(each, coloured=self.coloured, width=width)]
        commands = "\n".join(command for each in found if isinstance(each, Repeat) for command in each.commands)
        if commands:
            self.copy_to_clipboard(commands)
            lines += [Text(), Text("copied")]
        self.push_screen(Dialog(f"{done.line}: {COMMANDS[done.line.split()[0]].about}", Group(*lines)))

    # -- leaving -------------------------------------------------------------------------------------------------------

    def action_let_go(self) -> None:
        """Stop what runs, else remove the filter."""
        if self.worker.busy:
            self.worker.stop()
        else:
            self.prompt.purpose = ""
            self._filter("")

    def action_stop_or_leave(self) -> None:
        """Stop what runs, else leave."""
        if self.worker.busy:
            self.worker.stop()
        elif isinstance(self.focused, (PromptLine, TextArea)):
            self.say("Escape leaves the line")
        else:
            self.action_leave()

    def action_leave(self) -> None:
        """Leave."""
        self.exit(0)


# -- the full screen, from the terminal to the exit status -------------------------------------------------------------

POLL_S = 0.1  # how often a signal is looked for


def run_screen(
    source: TreeSource,
    *,
    saved: str = "",
    coloured: bool = True,
    signalled: Callable[[], int] = lambda: 0,
    resume: bool = False,
) -> int:
    """Show a tree until the person leaves. Returns the exit status.

    `saved` is the file of the tree, which the last line names. `signalled` is the status to exit with once a signal has
    come, else 0; whoever calls handles signals. `resume` finishes the command that was cut short. Raises GenctlError
    after the terminal is restored, if the screen itself fails.
    """
    app = ExploreApp(source, coloured=coloured)
    errors = app.capture_errors()
    app.watch_signals(signalled, POLL_S)
    if resume:
        app.first_command = "resume"
    status = app.run()
    app.worker.close()
    if saved:
        command = f"genctl explore --open {shlex.quote(saved)}"
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
