"""A tree as the events of one search, so that everything that shows recorded runs can show it."""

from __future__ import annotations

from collections.abc import Iterator

from genctl.events import Began, Ended, Event, Finished, Hypothesis, Row, Stepped, Token
from genctl.tree.nodes import ROOT, Tree

LANE = "0"


def events_of(tree: Tree) -> Iterator[Event]:
    """A step for each length of branches: the nodes that go on, and the ends of branches, which are the results.

    The results are ranked by their log-probability; the current branch comes first.
    """
    opened = tree.opened
    yield Began(LANE, opened.prompt, "explore", opened.model, None, {"length_penalty": 0.0}, 1, shown=opened.shown)
    level = [ROOT]
    texts: dict[int, str] = {ROOT: ""}
    results: list[tuple[bool, float, Hypothesis]] = []
    step = 0
    names = {node: name for name, node in tree.bookmarks.items()}
    while level:
        rows: list[tuple[int, Row]] = []
        ended: list[Ended] = []
        for place, parent in enumerate(level):
            for child in tree.children(parent):
                node = tree.nodes[child]
                token = Token(node.id, node.logprob, node.text, node.rank, node.entropy)
                texts[child] = texts[parent] + node.text
                joint = tree.joints[child]
                if child in tree.leaves:
                    ids = tuple(tree.nodes[each].id for each in tree.path(child))
                    end = Hypothesis(ids, joint, joint, "stop", joint, None, "end of the branch", texts[child])
                    ended.append(Ended(LANE, place, (token,), end))
                    results.append((child != tree.tip, -joint, end))
                else:
                    rows.append((child, Row(LANE, place, (token,), joint, joint, None, names.get(child, ""))))
        for parent in level:
            del texts[parent]
        texts = {child: texts[child] for child, _ in rows}
        level = [child for child, _ in rows]
        if rows or ended:
            yield Stepped(LANE, step, tuple(row for _, row in rows), tuple(ended))
        step += 1
    results.sort(key=lambda result: result[:2])
    yield Finished(LANE, tuple(end for _, _, end in results), len(opened.prompt_ids))
