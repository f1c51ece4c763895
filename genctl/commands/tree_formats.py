"""A search tree as text with box characters, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.style import Style
from rich.text import Text

from genctl.errors import count
from genctl.io.records import finite
from genctl.pages.search_tree import Node, SearchTree
from genctl.terminal import theme, widgets
from genctl.terminal.explain import number
from genctl.terminal.run_history import stop_words
from genctl.terminal.text_width import one_line, wrap

SCHEMA = "genctl-search-tree/1"
DEEPEST = 40  # branches within branches that are indented; what is deeper stands in the column of these
_LEAST = 16  # cells for text, however deep a branch is nested
_STYLES = {"returned": theme.CHOSEN, "died": theme.DIM, "left": theme.DIM}


def tree_record(tree: SearchTree, format: str) -> dict[str, Any]:
    """The tree as a record: its drawing as text, or the tree itself (`format` json)."""
    return tree_json(tree) if format == "json" else {"text": "\n".join(line.plain for line in tree_lines(tree))}


def tree_lines(tree: SearchTree, width: int | None = None) -> list[Text]:
    """The tree as text. The branch that leads to the best sequence runs straight down, others hang from it.

    Each line begins with the place of its first token among the new ones; a fork has the total up to there.
    Lines are wrapped to `width` cells, or not at all where it is None.
    """
    lines = [Text(f"{line.rstrip()}", style=theme.PROMPT) for line in _wrapped(_label(tree), width, 0)]
    drawing = _Drawing(tree, width)
    lines += drawing.lines()
    lines += [Text(line.rstrip(), style=theme.DIM) for line in _wrapped(_legend(tree, drawing.deep), width, 0)]
    for line in lines:
        line.no_wrap = True
    return lines


def _label(tree: SearchTree) -> str:
    return one_line(tree.prompt) or f"prompt {widgets.visible(tree.lane)}"


def _legend(tree: SearchTree, deep: bool) -> str:
    states = [node.state for node in tree.nodes[1:]]
    counts = [("★", "returned"), ("○", "finished"), ("✗", "died"), ("…", "left")]
    words = {"finished": "finished, not returned", "left": "left when the search ended"}
    phrases = [f"{mark} {states.count(state)} {words.get(state, state)}" for mark, state in counts if state in states]
    read = ["▸ best continuation"] if states else []
    read += ["heavy lines lead to ★"] if "returned" in states else []
    read += ["in front: which token begins"] if states else []
    read += [f"branches more than {DEEPEST} deep are not indented further"] if deep else []
    return " · ".join([f"{count(len(tree.nodes) - 1, 'token')} tried", *phrases, *read])


class _Drawing:
    """Draws the nodes below the root. Heavy lines lead to a returned sequence, light ones do not."""

    def __init__(self, tree: SearchTree, width: int | None) -> None:
        self.tree = tree
        self.width = width
        self.sizes, self.places = tree.weights()
        self.margin = len(str(max(node.depth for node in tree.nodes)))
        self.output: list[Text] = []
        self.deep = False  # whether a branch is nested too deep for its indent

    def lines(self) -> list[Text]:
        forks = [self._fork(self.tree.root, "")]
        while forks:  # a tree may be deeper than calls may
            below = next(forks[-1], None)
            if below is None:
                forks.pop()
            else:
                forks.append(self._fork(*below))
        return self.output

    def _fork(self, node: Node, rest: str) -> Iterator[tuple[Node, str]]:
        """The children of a node: side branches first, then the main one in the same column.

        Yields the end of each side branch and the indent below it, when what follows it is to be drawn.
        """
        while node.children:
            main = min(node.children, key=lambda child: (self.places[child], -self.sizes[child], child.number))
            down = "┃" if self._survives(main) else "│"
            for side in sorted(node.children, key=_best_first):
                if side is not main:
                    yield self._branch(side, rest, down)
            segment, node = self._segment(main)
            corner = ("┣" if node.children else "┗") if down == "┃" else ("├" if node.children else "└")
            self._write(f"{rest}{corner}▸ ", rest + (f"{down}  " if node.children else "   "), segment)

    def _branch(self, start: Node, rest: str, down: str) -> tuple[Node, str]:
        segment, node = self._segment(start)
        mark = "┣━" if self._survives(start) else "┠─" if down == "┃" else "├─"
        below = ("┃" if self._survives(start) else "│") if node.children else " "
        self._write(f"{rest}{mark} ", f"{rest}{down}  {below}" if node.children else f"{rest}{down}  ", segment)
        deep = len(rest) >= 3 * DEEPEST
        self.deep = self.deep or (deep and bool(node.children))
        return node, rest if deep else f"{rest}{down}  "

    def _survives(self, node: Node) -> bool:
        return self.places[node] < len(self.tree.nodes)

    def _segment(self, node: Node) -> tuple[list[Node], Node]:
        """The nodes from here to the next fork, which is returned too, or to the end."""
        segment = [node]
        while len(node.children) == 1:
            node = node.children[0]
            segment.append(node)
        return segment, node

    def _write(self, first: str, rest: str, segment: list[Node]) -> None:
        end = segment[-1]
        style = _STYLES.get(end.state, theme.PLAIN)
        text = one_line("".join(node.token.text for node in segment if node.token))
        text = "·" + text[1:] if text.startswith(" ") and text.strip() else text
        if not text and (end.hypothesis is None or len(segment) > 1):
            text = "".join(f"‹id {node.token.id}›" for node in segment if node.token)
        how = ending(end)
        if end.children:  # a fork
            how = "" if end.total is None else f"total {number(end.total)}"
            style = theme.PLAIN if self._survives(end) else theme.DIM
        label = f"{text}  {how}" if text and how else text or how
        first, rest = f"{segment[0].depth:>{self.margin}} {first}", f"{'':{self.margin}} {rest}"
        for place, line in enumerate(_wrapped(label, self.width, len(first))):
            drawn = Text(first if place == 0 else rest, style=theme.DIM)
            drawn.append(line.rstrip(), style=Style(dim=False) + style)
            self.output.append(drawn)


def _best_first(node: Node) -> tuple[float, int]:
    return (-node.total if node.total is not None else 0.0, node.number)


def _wrapped(text: str, width: int | None, used: int) -> list[str]:
    return [text] if width is None else wrap(text, max(width - used, _LEAST))


def ending(node: Node) -> str:
    """How a branch ended; "" if it continues."""
    hypothesis = node.hypothesis
    if hypothesis is not None:
        mark = f"★ {node.place}" if node.state == "returned" else "○"
        return f"{mark} · score {number(hypothesis.score)} · {stop_words(hypothesis.reason, hypothesis.cause)}"
    total = "" if node.total is None else f", total {number(node.total)}"
    if node.state == "died":
        return f"✗ died at step {(node.died or 0) + 1}{total}"
    if node.state == "left":
        return f"… left at the end{total}"
    return f"live{total}" if node.state == "live" else ""


def tree_json(tree: SearchTree) -> dict[str, Any]:
    """The tree as plain JSON values: a list of nodes, each with the number of its parent."""
    began = tree.began
    return {
        "schema": SCHEMA,
        "id": tree.lane,
        "prompt": began.prompt if began else "",
        "strategy": began.strategy if began else "",
        "seed": began.seed if began else None,
        "model": began.model if began else "",
        "nodes": list(_json_nodes(tree)),
    }


def _json_nodes(tree: SearchTree) -> Iterator[dict[str, Any]]:
    for node in tree.nodes:
        fields: dict[str, Any] = {"node": node.number, "parent": node.parent.number if node.parent else None}
        fields["state"] = "root" if node.parent is None else node.state
        if node.token is not None:
            fields |= {"step": node.step, "id": node.token.id, "text": node.token.text}
            fields["logprob"] = finite(node.token.logprob)
        if node.total is not None:
            fields["total"] = finite(node.total)
        if node.note:
            fields["note"] = node.note
        if node.died is not None:
            fields["died"] = node.died
        if node.hypothesis is not None:
            hypothesis = node.hypothesis
            fields |= {
                "finish_reason": hypothesis.reason,
                "score": finite(hypothesis.score),
                "new_tokens": hypothesis.length,
            }
        if node.place is not None:
            fields["sequence"] = node.place - 1
        yield fields
