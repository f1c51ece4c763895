"""The panes of rows: the text of the current branch, and the tree. Only the rows in view are made and drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from genctl.commands.explore import marks
from genctl.commands.explore.flow import TextFlow, TextPiece
from genctl.terminal import theme, widgets
from genctl.tree.nodes import Tree


class RowsPane(ScrollView, can_focus=True, inherit_bindings=False):
    """A pane of many rows, one of them kept in view. Keys come from the application, not from the widget."""

    drawn = 0  # rows that were drawn, for tests of the work done

    @property
    def room(self) -> Size:
        """The cells for rows, without the scrollbar."""
        return self.scrollable_content_region.size

    def measure(self, rows: int) -> None:
        """Say how many rows there are."""
        size = Size(self.room.width, max(rows, 1))
        if size != self.virtual_size:
            self.virtual_size = size

    def keep_in_view(self, row: int, rows: int = 1) -> None:
        """Scroll as little as needed to show these rows."""
        height = max(self.room.height, 1)
        if row < self.scroll_offset.y:
            self.scroll_to(y=row, animate=False)
        elif row + rows > self.scroll_offset.y + height:
            self.scroll_to(y=row + rows - height, animate=False)

    def redraw(self, first: int, end: int) -> None:
        """Draw rows again, as far as they are in view."""
        whole = Region(0, 0, *self.size)
        region = Region(0, first - self.scroll_offset.y, max(self.size.width, 1), end - first).intersection(whole)
        if region:
            self.refresh(region)


class TextPane(RowsPane):
    """The text of the current branch, each token coloured by its probability, with the cursor on one."""

    class Clicked(Message):
        """A token was clicked. `index` counts the pieces; the number of pieces stands for the end."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, *, coloured: bool, id: str | None = None) -> None:
        super().__init__(id=id)
        self.coloured = coloured  # else a line of digits stands below each line
        self.flow = TextFlow(2)
        self.cursor = 0  # index of a piece; their number: the end

    @property
    def rows(self) -> int:
        """Screen rows for each line of text."""
        return 1 if self.coloured else 2

    def show(self, pieces: Sequence[TextPiece], cursor: int) -> None:
        """Show this branch, the cursor on a piece."""
        before = self.cursor
        first = self.flow.update(pieces)
        self.cursor = cursor
        self._measure()
        self._refresh_lines(first, len(self.flow) + 1)
        if before != cursor:
            self._refresh_lines(*self._lines_of(before))
            self._refresh_lines(*self._lines_of(cursor))
        self._follow()

    def _lines_of(self, index: int) -> tuple[int, int]:
        line = self.flow.line_of(min(index, max(len(self.flow.pieces) - 1, 0)))
        end = self.flow.line_of(index + 1) if index + 1 < len(self.flow.pieces) else len(self.flow)
        return line, max(end, line) + 1

    def line_of_cursor(self) -> int:
        """The line that the cursor is on."""
        return self.flow.line_of(self.cursor) if self.cursor < len(self.flow.pieces) else len(self.flow) - 1

    def neighbour(self, lines: int) -> int:
        """The index of the piece that is `lines` below the cursor."""
        here = self.line_of_cursor()
        cell = self.flow.cell_of(self.cursor) if self.cursor < len(self.flow.pieces) else self.flow.cells(here)
        line = min(max(here + lines, 0), len(self.flow) - 1)
        found = self.flow.at(line, cell)
        if found is None:
            runs = self.flow.line(line)
            found = runs[-1].piece if runs and line < len(self.flow) - 1 else len(self.flow.pieces)
        return found

    def _measure(self) -> None:
        self.measure(len(self.flow) * self.rows)

    def _refresh_lines(self, first: int, end: int) -> None:
        self.redraw(first * self.rows, end * self.rows)

    def _follow(self) -> None:
        """Keep the line of the cursor in view."""
        self.keep_in_view(self.line_of_cursor() * self.rows, self.rows)

    def on_resize(self) -> None:
        """Lay out for the new width, with a cell for the cursor at the end of a line."""
        self.flow.resize(self.room.width - 1)
        self._measure()
        self._follow()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One row: a line of text, or the digits below it."""
        self.drawn += 1
        number, below = divmod(y + self.scroll_offset.y, self.rows)
        width = self.room.width
        if number >= len(self.flow):
            return Strip.blank(width)
        segments = []
        for run in self.flow.line(number):
            piece = self.flow.pieces[run.piece]
            if below:
                segments.append(Segment(marks.tenth(piece.probability).ljust(run.cells)[: run.cells], marks.DIM))
            else:
                segments.append(Segment(run.text, self._style(run.piece, piece)))
        if self.cursor >= len(self.flow.pieces) and number == len(self.flow) - 1:
            segments.append(Segment(" ", marks.PART if below else marks.CURSOR))
        return Strip(segments).extend_cell_length(width).crop(0, width)

    def _style(self, index: int, piece: TextPiece) -> Style:
        if piece.probability is None:
            style = marks.DIM
        else:
            style = theme.colour(piece.probability) if self.coloured else theme.PLAIN
        if piece.differs:
            style += marks.PART
        return style + marks.CURSOR if index == self.cursor else style

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the token that was clicked."""
        place = event.get_content_offset(self)
        if place is None:
            return
        line = (place.y + self.scroll_offset.y) // self.rows
        found = self.flow.at(line, place.x)
        self.post_message(self.Clicked(len(self.flow.pieces) if found is None else found))


# The rows of the tree's pane: a row for each part of a branch between two forks.


@dataclass(slots=True)
class BranchPart:
    """The tokens from `first` to `end`, which have one continuation each, but for the last."""

    first: int
    end: int
    forks: str  # the lines that lead to it, one character for each fork above
    last: bool  # of those that follow the same fork


def parts(tree: Tree, root: int = 0) -> Iterator[BranchPart]:
    """All parts, each before those that follow it."""
    first = tree.children(root)
    stack = [(child, "", child == first[-1]) for child in reversed(first)]
    while stack:
        first_node, forks, last = stack.pop()
        end = first_node
        while len(below := tree.children(end)) == 1:
            end = below[0]
        yield BranchPart(first_node, end, forks, last)
        deeper = forks + (" " if last else "│")
        stack += [(child, deeper, child == below[-1]) for child in reversed(below)]


class BranchRows:
    """The parts of a tree in their order. A token at the end of a branch changes one row, a fork all of them."""

    def __init__(self) -> None:
        self.parts: list[BranchPart] = []
        self._ends: dict[int, int] = {}  # the last node of a part -> its row
        self.stale = True
        self.made = 0  # times that all rows were made

    def grow(self, node: int, parent: int, siblings: int) -> None:
        """Take in a new node, with `siblings` shown nodes after its parent, itself included."""
        row = self._ends.get(parent)
        if self.stale or row is None or siblings > 1:
            self.stale = True
            return
        del self._ends[parent]
        self.parts[row].end = node
        self._ends[node] = row

    def refresh(self, tree: Tree) -> bool:
        """Make the rows anew if the tree has forked. Returns whether they were."""
        if not self.stale:
            return False
        self.parts = list(parts(tree))
        self._ends = {part.end: row for row, part in enumerate(self.parts)}
        self.stale = False
        self.made += 1
        return True

    def row_of(self, path: Collection[int]) -> int | None:
        """The last row whose part ends on a branch, given as its nodes."""
        rows = [self._ends[node] for node in path if node in self._ends]
        return max(rows) if rows else None


def text_of(tree: Tree, part: BranchPart, most: int) -> str:
    """The beginning of a part's text: at least `most` characters, if there are so many."""
    found: list[str] = []
    size, node = 0, part.first
    while True:
        text = tree.nodes[node].text
        found.append(text)
        size += len(text)
        below = tree.children(node)
        if node == part.end or size >= most or not below:  # an undo may come before the rows are made anew
            return "".join(found)
        node = below[0]


LIMIT = 12  # cells of the lines that lead to a row


class TreePane(RowsPane):
    """A row for each part of a branch, one of them selected."""

    class BranchOpened(Message):
        """A row was clicked. `node` is its last token."""

        def __init__(self, node: int) -> None:
            super().__init__()
            self.node = node

    def __init__(self, tree: Tree, *, id: str | None = None, coloured: bool = True) -> None:
        super().__init__(id=id)
        self.tree_shown = tree
        self.coloured = coloured
        self.rows = BranchRows()
        self.at = 0
        self.on_path: Collection[int] = frozenset()  # nodes of the current branch
        self.marked: dict[int, list[str]] = {}

    @property
    def selected(self) -> int | None:
        """The last node of the selected row."""
        return self.rows.parts[self.at].end if self.at < len(self.rows.parts) else None

    def show(self, on_path: Collection[int], *, follow: bool = True) -> None:
        """Show the tree, with a branch as the current one; `follow` selects its last row."""
        made = self.rows.refresh(self.tree_shown)
        moved = on_path != self.on_path
        self.on_path = on_path
        marked = defaultdict(list)
        for name, node in self.tree_shown.bookmarks.items():
            marked[node].append(name)
        if made or moved or marked != self.marked:
            self.refresh()
        self.marked = dict(marked)
        if follow:
            self.at = self.rows.row_of(on_path) or 0
        self.at = min(self.at, max(len(self.rows.parts) - 1, 0))
        self._measure()

    def _measure(self) -> None:
        self.measure(len(self.rows.parts))
        self.keep_in_view(self.at)

    def move(self, rows: int) -> None:
        """Select another row."""
        before, self.at = self.at, min(max(self.at + rows, 0), max(len(self.rows.parts) - 1, 0))
        self.keep_in_view(self.at)
        self.redraw(before, before + 1)
        self.redraw(self.at, self.at + 1)

    def on_resize(self) -> None:
        """Keep the selection in view."""
        self._measure()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One row."""
        row, width = y + self.scroll_offset.y, self.room.width
        if row >= len(self.rows.parts):
            words = "" if y or self.rows.parts else "no tokens yet: Space generates"
            return Strip([Segment(words, marks.DIM)]).extend_cell_length(width).crop(0, width)
        self.drawn += 1
        line = self._line(self.rows.parts[row], width)
        if row == self.at and self.has_focus:
            line.stylize(marks.CURSOR)
        return Strip([Segment(text, style) for text, style, _ in line.render(self.app.console)]).adjust_cell_length(
            width, marks.CURSOR if row == self.at and self.has_focus else None
        )

    def _line(self, part: BranchPart, width: int) -> Text:
        here = part.end in self.on_path or part.first in self.on_path
        limit = min(LIMIT, max(width // 4, 2))
        lines = part.forks if len(part.forks) < limit else f"{len(part.forks)}…{part.forks[-limit + 4 :]}"
        line = Text("▸" if here else " ", no_wrap=True, end="")
        line.append(lines + ("└" if part.last else "├"), style=marks.DIM)
        figures = Text(no_wrap=True)
        names = [name for node, found in self.marked.items() if self._within(part, node) for name in found]
        if names:
            figures.append(f" ★{widgets.first_words(' '.join(names), 16)}", style=marks.BOLD)
        joint, depth = self.tree_shown.joints[part.end], self.tree_shown.depths[part.end]
        probability = marks.probability_of(joint / max(depth, 1))
        figures.append(f" {marks.odds(joint)}", style=theme.colour(probability) if self.coloured else theme.PLAIN)
        figures.append(f" {depth:>5}", style=marks.DIM)
        room = max(width - line.cell_len - figures.cell_len, 4)
        text = widgets.first_words(text_of(self.tree_shown, part, room + 1), room) or "▯"
        line.append(widgets.cells(text, room), style=marks.BOLD if here else theme.PLAIN)
        return line.append_text(figures)

    def _within(self, part: BranchPart, node: int) -> bool:
        depths, nodes = self.tree_shown.depths, self.tree_shown.nodes
        if not depths[part.first] <= depths[node] <= depths[part.end]:
            return False
        while depths[node] > depths[part.first]:
            node = nodes[node].parent
        return node == part.first

    def on_focus(self) -> None:
        """Show the selection."""
        self.refresh()

    def on_blur(self) -> None:
        """Hide the selection."""
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Go to the branch that was clicked."""
        place = event.get_content_offset(self)
        if place is None or place.y + self.scroll_offset.y >= len(self.rows.parts):
            return
        self.move(place.y + self.scroll_offset.y - self.at)
        if self.selected is not None:
            self.post_message(self.BranchOpened(self.selected))
