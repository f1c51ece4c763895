"""The panes of `genctl explore`: the text of the branch, the tokens that may follow, and the tree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from rich.style import Style
from rich.text import Text
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Static
from textual.widgets import Tree as TreeWidget
from textual.widgets.tree import TreeNode

from genctl.errors import percent
from genctl.terminal import theme, widgets
from genctl.tree.distribution import Distribution
from genctl.tree.token_tree import ROOT, At, TokenTree

ROWS = 200  # alternatives that are listed
CURSOR = Style(reverse=True)
OPEN = "▯"  # a token that completes no character
TENTHS = "₀₁₂₃₄₅₆₇₈₉"


def share(logprob: float) -> float:
    """The probability of a log-probability."""
    return math.exp(min(logprob, 0.0))


class TextPane(VerticalScroll, can_focus=False):
    """The text of the branch, each token in the colour of its probability, with the cursor on one.

    Without colour a small digit behind each token has the tenths.
    """

    def compose(self) -> Iterator[Static]:
        """The text."""
        yield Static(id="branch", markup=False)

    def show(self, tree: TokenTree, at: At, *, coloured: bool) -> None:
        """Show the branch that ends at `at.tip`, and keep the cursor in view."""
        drawn = Text(widgets.visible(tree.opened.shown or tree.opened.prompt), style=theme.DIM)
        before = ""
        for node in tree.path(at.tip):
            token = tree.nodes[node]
            if token.parent == at.cursor:
                before = drawn.plain
            probability = share(token.logprob)
            style = theme.colour(probability) if coloured else theme.PLAIN
            style += CURSOR if token.parent == at.cursor else theme.PLAIN
            click = Style.from_meta({"@click": f"app.place({token.parent})"})
            text = widgets.visible(token.text).replace("\t", "⇥").replace("\n", "↵\n") or OPEN
            drawn.append(text, style + Style(dim=False) + click)
            if not coloured:
                drawn.append(TENTHS[min(int(probability * 10), 9)], theme.DIM)
        if at.cursor == at.tip:
            before = drawn.plain
            drawn.append(" ", CURSOR)
        self.query_one("#branch", Static).update(drawn)
        width = max(self.scrollable_content_region.width, 1)
        line = max(len(Text(before).wrap(self.app.console, width)) - 1, 0)
        height = max(self.scrollable_content_region.height, 1)
        if not self.scroll_offset.y < line < self.scroll_offset.y + height - 1:
            self.scroll_to(y=max(line - height // 2, 0), animate=False)


class Alternatives(DataTable[Text]):
    """The most probable tokens at the cursor, or those that a filter finds."""

    distribution: Distribution | None = None
    ids: tuple[int, ...] = ()  # of the rows

    @property
    def selected(self) -> int | None:
        """The id of the token in the selected row."""
        return self.ids[self.cursor_row] if self.cursor_row < len(self.ids) else None

    def show(self, found: Distribution, tree: TokenTree, at: At, wanted: str, *, coloured: bool) -> None:
        """Show what may follow `at`, the token of the branch selected; `wanted`: only tokens with this text."""
        under = tree.under(at)
        chosen = None if under is None else tree.nodes[under].id
        there = {tree.nodes[child].id for child in tree.children(at.cursor)}
        previous = self.selected if found is self.distribution else None
        if wanted:
            ids = [each.id for each in islice(found.containing(wanted), ROWS)]
        else:
            ids = found.order[:ROWS].tolist()
            ids += [chosen] if chosen is not None and chosen not in ids else []
        self.distribution, self.ids = found, tuple(ids)
        width = self.scrollable_content_region.width
        widths = {"rank": 7, "token": 12, "prob": 7, "final": 7, "logprob": 9, "changed by": 10}
        if width < 60:  # the reason is worth more; the line below the rows has the log-probability
            del widths["logprob"]
        room = max(width - sum(widths.values()), 0)
        widths["token"] += room // 2
        widths["changed by"] += room - room // 2
        self.clear(columns=True)
        for name, cells in widths.items():
            self.add_column(name, width=cells)
        for id in ids:
            self.add_row(*self._cells(id, there, chosen, widths, coloured))
        wanted_id = previous if previous in ids else chosen
        self.move_cursor(row=ids.index(wanted_id) if wanted_id in ids else 0)

    def _cells(
        self, id: int, there: set[int], chosen: int | None, widths: dict[str, int], coloured: bool
    ) -> list[Text]:
        """A row: the columns of `widths`."""
        assert self.distribution is not None
        row = self.distribution.of(id)
        is_removed = row.processed == -math.inf
        mark = "▸" if id == chosen else "•" if id in there else " "
        name = widgets.cells(widgets.token_text(id, row.text), widths["token"] - 1)
        columns = {
            "rank": Text(f"{mark}{row.rank:>5} ", theme.DIM),
            "token": Text(name, theme.CHOSEN if id == chosen else theme.DIM if is_removed else theme.PLAIN),
            "prob": _number(row.logprob, coloured),
            "final": Text("     –", theme.DIM) if is_removed else _number(row.processed, coloured),
            "logprob": Text(f"{row.logprob:>8.3f}", theme.DIM),
            "changed by": Text(widgets.visible(self.distribution.how(id)), theme.DIM, no_wrap=True),
        }
        return [columns[name] for name in widths]

    def detail(self) -> str:
        """What the processors did to the selected token."""
        if self.distribution is None or self.selected is None:
            return "" if self.distribution is None else "no token has this in it"
        row = self.distribution.of(self.selected)
        how = widgets.visible(self.distribution.how(row.id))
        name = widgets.first_words(widgets.token_text(row.id, row.text), 20)
        verb = "changed" if row.processed > -math.inf else "removed"
        return f"{name}: logprob {widgets.rounded(row.logprob)}" + (f", {verb} by {how}" if how else "")


def _number(logprob: float, coloured: bool) -> Text:
    probability = share(logprob)
    return Text(widgets.percent(probability), theme.colour(probability) if coloured else theme.PLAIN)


@dataclass(slots=True)
class BranchPart:
    """The tokens from `first` to `end`, which have one continuation each, but for the last."""

    first: int
    end: int
    forks: int  # above it


class TreePane(TreeWidget[BranchPart]):
    """A row for each part of a branch between two forks: its text, joint probability and number of tokens."""

    def __init__(self, *, coloured: bool, id: str | None = None) -> None:
        super().__init__("", id=id)
        self.coloured = coloured
        self.show_root, self.guide_depth = False, 2
        self.rows: dict[int, TreeNode[BranchPart]] = {}  # by the last node of a part

    def show(self, tree: TokenTree, at: At) -> None:
        """Draw all parts anew, the one at the end of the branch selected."""
        path = {ROOT, *tree.path(at.tip)}
        self.clear()
        self.rows = {}
        stack = [(child, self.root, 0) for child in reversed(tree.children(ROOT))]
        while stack:
            first, above, forks = stack.pop()
            end = first
            while len(below := tree.children(end)) == 1:
                end = below[0]
            part = BranchPart(first, end, forks)
            row = above.add(self._label(tree, part, path), part, expand=True, allow_expand=bool(below))
            self.rows[end] = row
            stack += [(child, row, forks + 1) for child in reversed(below)]
        if not self.rows:
            self.root.add_leaf(Text("no tokens yet: Space generates", theme.DIM))
        self.root.expand()
        self.move_cursor(self.rows.get(at.tip))

    def grow(self, tree: TokenTree, node: int) -> bool:
        """Take in a new token; False where it forks the tree, and all rows have to be drawn anew."""
        parent = tree.nodes[node].parent
        row = self.rows.get(parent)
        if row is None or row.data is None or len(tree.children(parent)) > 1:
            return False
        del self.rows[parent]
        row.data.end = node
        self.rows[node] = row
        row.set_label(self._label(tree, row.data, {node}))
        return True

    def _label(self, tree: TokenTree, part: BranchPart, path: set[int]) -> Text:
        here = part.first in path or part.end in path
        joint, depth = tree.joints[part.end], tree.depths[part.end]
        figures = f" {odds(joint)} {depth:>4}"
        room = max(self.scrollable_content_region.width - len(figures) - 6 - 2 * part.forks, 8)
        text, node = tree.nodes[part.first].text, part.first
        while node != part.end and len(text) <= room:
            (node,) = tree.children(node)
            text += tree.nodes[node].text
        label = Text("▸" if here else " ", no_wrap=True)
        style = theme.CHOSEN if here else theme.PLAIN
        label.append(widgets.cells(widgets.first_words(text, room) or OPEN, room), style)
        average = share(joint / max(depth, 1))
        return label.append(figures, theme.colour(average) if self.coloured else theme.PLAIN)


def odds(logprob: float) -> str:
    """A joint probability in seven cells: `12.3%`, `1.2e-9`."""
    if logprob > math.log(0.001):
        return f"{percent(share(logprob)):>7}"
    if not math.isfinite(logprob):
        return f"{'–' if math.isnan(logprob) else '0':>7}"
    exponent = math.floor(logprob / math.log(10))
    return f"{f'{10 ** (logprob / math.log(10) - exponent):.1f}e{exponent}':>7}"
