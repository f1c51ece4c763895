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
DEEPEST = 40  # levels of nested branches that are indented; deeper ones stay in the last column
_LEAST = 16  # minimum cells for text, however deep a branch is nested
_STYLES = {"returned": theme.CHOSEN, "died": theme.DIM, "left": theme.DIM}


def tree_record(tree: SearchTree, format: str) -> dict[str, Any]:
    """The tree as a record: its drawing as text, or the tree itself (`format` json)."""
    return tree_json(tree) if format == "json" else {"text": "\n".join(line.plain for line in tree_lines(tree))}


def tree_lines(tree: SearchTree, width: int | None = None) -> list[Text]:
    """The tree as text. The branch that leads to the best sequence runs straight down, others hang from it.

    Each line begins with the position of its first token among the new ones; a fork has the total up to it.
    Lines are wrapped to `width` cells, or not at all if it is None.
    """
    label = one_line(tree.prompt) or f"prompt {widgets.visible(tree.lane)}"
    lines = [Text(line.rstrip(), style=theme.PROMPT) for line in _wrapped(label, width, 0)]
    sizes, places = tree.weights()
    margin = len(str(max(node.depth for node in tree.nodes)))

    def survives(node: Node) -> bool:
        """Whether the node leads to a returned sequence, which is drawn with heavy lines."""
        return places[node] < len(tree.nodes)

    def below(node: Node, indent: str) -> list[tuple[Node, Node, str]]:
        """The children of a node, in reverse order of drawing, each with the main child, which stays in the column."""
        if not node.children:
            return []
        main = min(node.children, key=lambda child: (places[child], -sizes[child], child.number))
        sides = sorted((child for child in node.children if child is not main), key=_best_first, reverse=True)
        return [(child, main, indent) for child in (main, *sides)]

    waiting = below(tree.root, "")  # a stack, because a tree may be deeper than Python's recursion limit
    while waiting:
        node, main, indent = waiting.pop()
        segment = [node]  # up to the next fork, or to the end
        while len(segment[-1].children) == 1:
            segment.append(segment[-1].children[0])
        end, heavy = segment[-1], survives(main)
        down = "┃" if heavy else "│"
        if node is main:
            mark = f"{('┣' if heavy else '├') if end.children else ('┗' if heavy else '└')}▸ "
            inner, more = indent, indent + (f"{down}  " if end.children else "   ")
        else:
            mark = "┣━ " if survives(node) else "┠─ " if heavy else "├─ "
            inner = more = f"{indent}{down}  "
            more += ("┃" if survives(node) else "│") if end.children else ""
        style = _STYLES.get(end.state, theme.PLAIN)
        if end.children:
            style = theme.PLAIN if survives(end) else theme.DIM
        first, rest = f"{node.depth:>{margin}} {indent}{mark}", f"{'':{margin}} {more}"
        for place, line in enumerate(_wrapped(_words(segment), width, len(first))):
            drawn = Text(first if place == 0 else rest, style=theme.DIM)
            lines.append(drawn.append(line.rstrip(), style=Style(dim=False) + style))
        waiting += below(end, indent if len(indent) >= 3 * DEEPEST else inner)
    lines += [Text(line.rstrip(), style=theme.DIM) for line in _wrapped(_legend(tree), width, 0)]
    for text in lines:
        text.no_wrap = True
    return lines


def _legend(tree: SearchTree) -> str:
    states = [node.state for node in tree.nodes[1:]]
    counts = [("★", "returned"), ("○", "finished"), ("✗", "died"), ("…", "left")]
    words = {"finished": "finished, not returned", "left": "left when the search ended"}
    phrases = [f"{mark} {states.count(state)} {words.get(state, state)}" for mark, state in counts if state in states]
    read = ["▸ best continuation"] if states else []
    read += ["heavy lines lead to ★"] if "returned" in states else []
    read += ["in front: which token begins"] if states else []
    return " · ".join([f"{count(len(tree.nodes) - 1, 'token')} tried", *phrases, *read])


def _words(segment: list[Node]) -> str:
    """The text of a branch up to a fork, with its total there; or up to its end, with how it ended."""
    end = segment[-1]
    text = one_line("".join(node.token.text for node in segment if node.token))
    text = "·" + text[1:] if text.startswith(" ") and text.strip() else text
    if not text and (end.hypothesis is None or len(segment) > 1):
        text = "".join(f"‹id {node.token.id}›" for node in segment if node.token)
    how = ending(end)
    if end.children:  # a fork
        how = "" if end.total is None else f"total {number(end.total)}"
    return f"{text}  {how}" if text and how else text or how


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
