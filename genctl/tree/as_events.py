"""A tree as the events of one search, so that everything that shows recorded runs can show it."""

from __future__ import annotations

from collections.abc import Iterator

from genctl.errors import count
from genctl.events import Began, Ended, Event, Finished, Hypothesis, Row, Stepped, Token
from genctl.tree.token_tree import ROOT, TokenTree

LANE = "0"
MOST = 2**20  # tokens of all results together, where branches share so many that each of them would have most of a tree


def events_of(tree: TokenTree) -> Iterator[Event]:
    """A step for each depth: nodes with children are its rows, and ends of branches are results.

    The results are ranked by their log-probability; the current branch comes first. Of a tree whose branches have more
    than MOST tokens together, and more than twice its own, the first ones are results. The others have an end without
    a text; `left_out` counts them.
    """
    opened = tree.opened
    yield Began(LANE, opened.prompt, "explore", opened.model, None, {"length_penalty": 0.0}, 1, shown=opened.shown)
    leaves = set(tree.leaves)
    results = {leaf: _end(tree, leaf, with_text=True) for leaf in _results(tree, leaves)}
    level = [ROOT]
    step = 0
    while level:
        rows: list[tuple[int, Row]] = []
        ended: list[Ended] = []
        for place, parent in enumerate(level):
            for child in tree.children(parent):
                node = tree.nodes[child]
                token = Token(node.id, node.logprob, node.text, node.rank, node.entropy)
                joint = tree.joints[child]
                if child in leaves:
                    end = results.get(child) or _end(tree, child, with_text=False)
                    ended.append(Ended(LANE, place, (token,), end))
                else:
                    rows.append((child, Row(LANE, place, (token,), joint, joint)))
        level = [child for child, _ in rows]
        if rows or ended:
            yield Stepped(LANE, step, tuple(row for _, row in rows), tuple(ended))
        step += 1
    yield Finished(LANE, tuple(results.values()), len(opened.prompt_ids))


def left_out(tree: TokenTree) -> str:
    """A sentence about the branches that are not among the results; "" if all are."""
    leaves = set(tree.leaves)
    more = len(leaves - {ROOT}) - len(_results(tree, leaves))
    if not more:
        return ""
    return f"{count(more, 'branch is', 'branches are')} in the tree and not among the results, which share most tokens"


def _results(tree: TokenTree, ends: set[int]) -> list[int]:
    """The ends of the branches that are results, the current branch first, then the most probable."""
    leaves = sorted(ends - {ROOT}, key=lambda leaf: (leaf != tree.tip, -tree.joints[leaf], leaf))
    room = max(MOST, 2 * len(tree.nodes))
    found: list[int] = []
    for leaf in leaves:
        room -= tree.depths[leaf]
        if room < 0 and found:
            break
        found.append(leaf)
    return found


def _end(tree: TokenTree, leaf: int, *, with_text: bool) -> Hypothesis:
    """The end of a branch: a result has its tokens and its text, another one their number alone."""
    nodes = [tree.nodes[each] for each in tree.path(leaf)] if with_text else []
    ids, text, joint = tuple(node.id for node in nodes), "".join(node.text for node in nodes), tree.joints[leaf]
    counted = 0 if with_text else tree.depths[leaf]
    return Hypothesis(ids, joint, joint, "stop", joint, None, "end of the branch", text, counted=counted)
