"""The keys of `genctl explore`: one table for the bindings, the help and the documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from textual import events
from textual.screen import ModalScreen

from genctl.commands.explore.dialogs import Editor
from genctl.commands.explore.screen_panes import TreeApp
from genctl.tree.language import COMMANDS

# Keys in the order in which they are pressed: what one stands for is done before the next one is looked at.
# Textual passes a key from widget to widget and opens a line for typing later, so that of keys which arrive together (a
# fast hand, a script) the last ones would act on what is not there yet. Here a key of the panes or of the line is done
# at once. It waits while a brief command runs, an editor opens or the vocabulary is read.


AT_ONCE = ("escape", "ctrl+c")  # do not wait: they stop what is waited for
IN_LINE = ("down", "pageup", "pagedown", "ctrl+c")  # of the keys of the panes, those that act while a line is typed


class OrderedKeys(TreeApp):
    """The panes, with keys that keep their order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.held: deque[events.Key | events.Paste] = deque()

    @property
    def must_wait(self) -> bool:
        """Whether the next key would come too early."""
        return self.is_brief or (isinstance(self.screen, Editor) and self.screen.focused is None)

    async def on_event(self, event: events.Event) -> None:
        """Do a key, or hold it."""
        if not isinstance(event, (events.Key, events.Paste)) or event.is_forwarded:
            await super().on_event(event)
        elif isinstance(event, events.Key) and event.key in AT_ONCE:
            self.held.clear()
            await self._press(event)
        elif self.held or self.must_wait:
            self.held.append(event)
        else:
            await self._press(event)

    async def release_keys(self) -> None:
        """Do the keys that were held, as far as they no longer have to wait."""
        while self.held and not self.must_wait:
            await self._press(self.held.popleft())

    async def on_descendant_focus(self) -> None:
        """An editor is open: the keys for it are no longer held."""
        await self.release_keys()

    async def _press(self, event: events.Key | events.Paste) -> None:
        if isinstance(self.screen, ModalScreen):
            await super().on_event(event)
            return
        typing = self.focused is self.prompt
        if isinstance(event, events.Paste):
            if typing:
                self.prompt.write(event.text.partition("\n")[0].rstrip("\r"))
            return
        self.app_focus = True
        if typing and event.is_printable and event.character is not None:
            self.prompt.write(event.character)
            return
        found = self.screen.active_bindings.get(event.key)
        if found is None or not found.enabled:
            return
        if not typing or found.node is self.prompt or event.key in IN_LINE:
            await self.run_action(found.binding.action, found.node)


class Key(NamedTuple):
    """One key, or several that do the same kind of thing."""

    keys: str  # as Textual names them, with commas
    action: str
    shown: str  # as people read it
    about: str
    question: str = ""  # above the line that it opens for typing


KEYS: tuple[Key, ...] = (
    Key("left", "move('left')", "←", "the token before"),
    Key("right", "move('right')", "→", "the next token"),
    Key("home", "move('start')", "Home", "the beginning of the branch"),
    Key("end", "move('end')", "End", "the end of the branch"),
    Key("up", "lines(-1)", "↑", "the alternative, line or branch above"),
    Key("down", "lines(1)", "↓", "the one below"),
    Key("pageup", "page(-1)", "PgUp", "a page up"),
    Key("pagedown", "page(1)", "PgDn", "a page down"),
    Key("tab", "app.focus_next", "Tab", "the next pane: alternatives, tree, text"),
    Key("shift+tab", "app.focus_previous", "Shift+Tab", "the pane before"),
    Key("enter", "take", "Enter", "take the alternative and generate on; in the tree, go to the branch"),
    Key("space", "pause", "Space", "generate on from the end of the branch; while something runs, stop it"),
    *(
        Key(
            str(digit),
            f"run('sample {digit}', 'cursor')",
            "1 … 9" if digit == 1 else "",
            "sample so many continuations from here",
        )
        for digit in range(1, 10)
    ),
    Key("b", "run('beams', 'cursor')", "b", "beam search from here"),
    Key("e", "edit", "e", "write another text from here (a token that it cuts is healed)"),
    Key("u", "run('undo')", "u", "undo"),
    Key("U,shift+u", "run('redo')", "U", "redo"),
    Key("n", "move('next')", "n", "the next uncertain token: entropy of 1 nat or more"),
    Key("N,shift+n", "move('previous')", "N", "the uncertain token before"),
    Key(
        "s",
        "settings",
        "s",
        "change a setting (min_p=0.05) or a preset: the distribution changes at once",
        question="a setting or a preset: min_p=0.05, temperature=1.2, beam5; reset",
    ),
    Key(
        "x",
        "expand",
        "x",
        "expand all continuations by joint probability, up to a mass and a depth",
        question="expand up to: mass=0.9,depth=6",
    ),
    Key("m", "run('bookmark', 'cursor')", "m", "bookmark this place"),
    Key("d", "compare", "d", "compare two branches: press it on one, then on the other"),
    Key("l", "run('layers', 'cursor')", "l", "what the model would say after each of its layers"),
    Key("slash", "filter", "/", "filter the alternatives by text", question="filter the alternatives"),
    Key("c", "run('copy', 'tip')", "c", "copy the text of the branch"),
    Key("y", "run('repeat', 'tip')", "y", "show and copy the command that repeats this branch"),
    Key(
        "colon",
        "command",
        ":",
        "a command, as in --script; help, quit. Tab completes it, Esc leaves the line",
        question="a command: goto m1, sample 3 40, find TEXT; help lists them",
    ),
    Key("escape", "let_go", "Esc", "stop what runs; remove the filter"),
    Key("question_mark", "help", "?", "these keys, the mouse, the columns and the commands"),
    Key("q", "leave", "q", "leave; the last line says where the tree is saved"),
    Key("ctrl+c", "stop_or_leave", "Ctrl+C", "stop what runs; if nothing runs, leave"),
)

QUESTIONS = {key.action: key.question for key in KEYS if key.question}
ASKS_FOR_HELP, LEAVES = ("help", "?"), ("quit", "q", "exit")  # what `:` takes besides the commands of the tree

MOUSE = (
    ("click", "a token of the text: move there; a row: select it; a branch of the tree: go to it"),
    ("double click", "an alternative: take it and generate on"),
    ("wheel", "scroll the pane under the pointer"),
)
COLUMNS = (
    ("rank", "place among all tokens, by the model's probability"),
    ("prob", "probability by the model"),
    ("logprob", "its natural logarithm; the line below the rows has it for the selected token"),
    ("final", "probability after the processors of the settings; –: removed"),
    ("changed by", "the processors that removed the token or changed it alone"),
    ("▸ •", "the token of this branch, and tokens that other branches have here"),
)


def help_rows() -> list[tuple[str, str]]:
    """The keys and what they do, for people."""
    return [(key.shown, key.about) for key in KEYS if key.shown]


def help_sections(names: tuple[str, str] | None = None) -> list[tuple[str, Sequence[tuple[str, str]]]]:
    """Everything that the help shows, by title. `names`: the two distributions that are shown side by side."""
    second = (
        ()
        if names is None
        else (("A", names[0]), ("B", names[1]), ("≠", "what one of them would write and not the other"))
    )
    return [
        ("", help_rows()),
        ("mouse", MOUSE),
        ("columns", (*COLUMNS, *second)),
        ("commands of : and of --script", [(row.usage, row.about) for row in COMMANDS.values()]),
    ]


def markdown_table() -> str:
    """The tables of the documents."""
    rows = [f"| `{shown}` | {about} |" for shown, about in (*help_rows(), *MOUSE)]
    return "\n".join(("| key | what it does |", "|---|---|", *rows))
