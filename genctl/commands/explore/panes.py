"""The panes of `genctl explore`: the text of the branch, the next tokens, the tree; its dialog and its keys."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Static
from textual.widgets import Tree as TreeWidget

from genctl.errors import percent
from genctl.io.writers import escaped
from genctl.terminal import theme, widgets
from genctl.tree.commands import COMMANDS
from genctl.tree.scores import Distribution
from genctl.tree.token_tree import ROOT, At, TokenTree

ROWS = 200  # alternatives that are listed
CURSOR = Style(reverse=True)
OPEN = "▯"  # a token that completes no character
TENTHS = "₀₁₂₃₄₅₆₇₈₉"
WIDTHS = {"rank": 7, "token": 12, "prob": 7, "final": 7, "logprob": 9, "removed by": 20}  # cells


def share(logprob: float) -> float:
    """The probability of a log-probability."""
    return math.exp(min(logprob, 0.0))


class TextPane(VerticalScroll, can_focus=False):
    """The text of the branch, each token in the colour of its probability, with the cursor on one.

    Without colour, a small digit after each token gives the tenths of its probability.
    """

    def compose(self) -> Iterator[Static]:
        """The text."""
        yield Static(id="branch", markup=False)

    def show(self, tree: TokenTree, at: At, *, coloured: bool) -> None:
        """Show the branch that ends at `at.tip`, and scroll to the cursor."""
        drawn = Text(widgets.visible(tree.opened.shown or tree.opened.prompt), style=theme.DIM)
        before = ""
        for node in tree.path(at.tip):
            token = tree.nodes[node]
            probability = share(token.logprob)
            style = theme.colour(probability) if coloured else theme.PLAIN
            if token.parent == at.cursor:
                before = drawn.plain
                style += CURSOR
            text = widgets.visible(token.text).replace("\t", "⇥").replace("\n", "↵\n") or OPEN
            drawn.append(text, style + Style(dim=False))
            if not coloured:
                drawn.append(TENTHS[min(int(probability * 10), 9)], theme.DIM)
        if at.cursor == at.tip:
            before = drawn.plain
            drawn.append(" ", CURSOR)
        self.query_one("#branch", Static).update(drawn)
        size = self.scrollable_content_region
        line = len(Text(before).wrap(self.app.console, max(size.width, 1))) - 1
        self.scroll_to(y=max(line - size.height // 2, 0), animate=False)


class Alternatives(DataTable[Text]):
    """The most probable tokens at the cursor."""

    distribution: Distribution | None = None
    ids: tuple[int, ...] = ()  # of the rows

    @property
    def selected(self) -> int | None:
        """The id of the token in the selected row."""
        return self.ids[self.cursor_row] if self.cursor_row < len(self.ids) else None

    def show(self, found: Distribution, tree: TokenTree, at: At, *, coloured: bool) -> None:
        """List the tokens that may follow `at`, with the branch's own token selected."""
        under = tree.under(at)
        chosen = None if under is None else tree.nodes[under].id
        there = {tree.nodes[child].id for child in tree.children(at.cursor)}
        wanted = self.selected if found is self.distribution else chosen
        ids = found.order[:ROWS].tolist()
        ids += [chosen] if chosen is not None and chosen not in ids else []
        self.distribution, self.ids = found, tuple(ids)
        self.clear(columns=True)
        room = self.scrollable_content_region.width - sum(WIDTHS.values())
        wide = WIDTHS["token"] + max(room, 0)
        for name, cells in WIDTHS.items():
            self.add_column(name, width=wide if name == "token" else cells)
        for id in ids:
            row = found.of(id)
            removed = Text("     –", theme.DIM) if row.removed_by else None
            style = theme.CHOSEN if id == chosen else theme.DIM if removed else theme.PLAIN
            self.add_row(
                Text(f"{'▸' if id == chosen else '•' if id in there else ' '}{row.rank:>5} ", theme.DIM),
                Text(widgets.cells(widgets.token_text(id, row.text), wide - 1), style),
                _number(row.logprob, coloured),
                removed or _number(row.processed, coloured),
                Text(f"{row.logprob:>8.3f}", theme.DIM),
                Text(row.removed_by, theme.DIM),
            )
        self.move_cursor(row=ids.index(wanted) if wanted in ids else 0)


def _number(logprob: float, coloured: bool) -> Text:
    probability = share(logprob)
    return Text(widgets.percent(probability), theme.colour(probability) if coloured else theme.PLAIN)


class TreePane(TreeWidget[int]):
    """A row for each segment between two forks: its text, and joint probability and number of tokens up to its end.

    The value of a row is the last node of its segment.
    """

    def __init__(self, *, coloured: bool, id: str | None = None) -> None:
        super().__init__("", id=id)
        self.coloured = coloured
        self.show_root, self.guide_depth = False, 2

    def show(self, tree: TokenTree, at: At) -> None:
        """Draw all segments, with the last one of the current branch selected."""
        path = {ROOT, *tree.path(at.tip)}
        self.clear()
        self.root.expand()
        selected = None
        stack = [(child, self.root, 0) for child in reversed(tree.children(ROOT))]
        while stack:
            first, above, forks = stack.pop()
            end, text = first, tree.nodes[first].text
            while len(below := tree.children(end)) == 1:
                (end,) = below
                text += tree.nodes[end].text
            label = self._label(text, tree.joints[end], tree.depths[end], forks, here=first in path)
            row = above.add(label, end, expand=True, allow_expand=bool(below))
            selected = row if end == at.tip else selected
            stack += [(child, row, forks + 1) for child in reversed(below)]
        if not len(tree):
            self.root.add_leaf(Text("no tokens yet: Space generates", theme.DIM))
        self.move_cursor(selected)

    def _label(self, text: str, joint: float, depth: int, forks: int, *, here: bool) -> Text:
        figures = f" {percent(share(joint), significant=3):>8} {depth:>4}"
        room = max(self.scrollable_content_region.width - len(figures) - 6 - 2 * forks, 8)
        label = Text("▸" if here else " ", no_wrap=True)
        label.append(
            widgets.cells(widgets.first_words(text, room) or OPEN, room), theme.CHOSEN if here else theme.PLAIN
        )
        return label.append(figures, theme.colour(share(joint / depth)) if self.coloured else theme.PLAIN)


class Dialog(ModalScreen[None]):
    """A text to read: arrows scroll, Escape, Enter or q closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,question_mark", "app.pop_screen", show=False)]

    def __init__(self, title: str, body: Text) -> None:
        super().__init__()
        self.heading, self.body = title, body

    def compose(self) -> ComposeResult:
        """A frame with the text."""
        with VerticalScroll(classes="dialog") as frame:
            frame.border_title, frame.border_subtitle = self.heading, "Escape closes"
            yield Static(self.body, id="body", markup=False)


# -- keys --------------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """One key, or several that do the same kind of thing."""

    keys: str  # Textual's names, separated by commas; "" if Textual's own widgets handle the key
    action: str
    shown: str  # as the help shows it
    about: str


KEYS = (
    Key("left", "move('left')", "←", "the token before"),
    Key("right", "move('right')", "→", "the next token"),
    Key("home", "move('start')", "Home", "the beginning of the branch"),
    Key("end", "move('end')", "End", "the end of the branch"),
    Key("", "", "↑ ↓ PgUp PgDn", "another alternative; in the tree, another branch"),
    Key("", "", "Tab", "to the tree and back to the alternatives"),
    Key("", "", "Enter", "take the alternative and generate on; in the tree, go to the branch"),
    Key("space", "pause", "Space", "generate on from the end of the branch; while something runs, stop it"),
    Key("1", "run('sample 1', 'cursor')", "1 … 9", "sample so many continuations from here"),
    *(Key(str(digit), f"run('sample {digit}', 'cursor')", "", "") for digit in range(2, 10)),
    Key("b", "run('beams', 'cursor')", "b", "beam search from here"),
    Key("u", "run('undo')", "u", "undo"),
    Key("w", "run('why', 'cursor')", "w", "what each processor did to the token at the cursor"),
    Key("c", "run('text', 'tip')", "c", "copy the text of the branch"),
    Key("colon", "type('')", ":", "type a command, as in --script; help, quit. → completes it, Esc leaves the line"),
    Key("e", "edit", "e", "type another text from here"),
    Key("s", "type('set ')", "s", "type a setting (min_p=0.05): the distribution changes at once"),
    Key("p", "type('preset ')", "p", "type the name of a preset"),
    Key("x", "type('expand mass=0.9,depth=6')", "x", "type how far to expand all continuations by joint probability"),
    Key("slash", "type('find ')", "/", "type a text, to find the alternatives that contain it"),
    Key("escape", "let_go", "Esc", "leave the line; else stop what runs"),
    Key("question_mark", "help", "?", "these keys and the commands"),
    Key("q", "quit", "q", "leave; the last line says where the tree is saved"),
    Key("ctrl+c", "stop_or_leave", "Ctrl+C", "stop what runs; if nothing runs, leave"),
    Key("", "", "click", "an alternative: select it, or take it if it is selected; a branch of the tree: go to it"),
)


def help_text() -> Text:
    """The keys, and the commands of `:`."""
    keys = [(key.shown, key.about) for key in KEYS if key.shown]
    commands = [(row.usage, row.about) for row in COMMANDS.values()]
    lines: list[Text] = []
    for title, rows in ("keys", keys), ("commands of : and of --script", commands):
        width = max(len(name) for name, _ in rows)
        lines.append(Text(title, theme.DIM))
        lines += [Text.assemble((f"{name:<{width}}", theme.HEADING), f"  {about}") for name, about in rows]
    return Text("\n").join(lines)


def edit_line(text: str) -> str:
    """The `edit` command for a text, with control characters escaped."""
    return f"edit {escaped(json.dumps(text, ensure_ascii=False))}"
