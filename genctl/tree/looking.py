"""The commands that only look: probabilities, processors, layers, two branches side by side, command lines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from genctl.decode.runtime import Pass, depth_of
from genctl.decode.score import check_finite
from genctl.errors import GenctlError, InputError, ModelError, UsageError
from genctl.tree.changes import Grown
from genctl.tree.distribution import Distribution
from genctl.tree.nodes import ROOT
from genctl.tree.results import Alternative, AtLayer, Beside, BranchText, Compared, Repeat, Shown, Why
from genctl.tree.workspace import Workspace

if TYPE_CHECKING:
    from genctl.tree.explorer import Explorer

FOUND = 20  # tokens that `find` lists
LAYER_TOP = 5  # tokens listed after each layer


def show(explorer: Explorer, n: int) -> Iterator[Shown]:
    """The n most probable tokens at the cursor."""
    node = explorer.tree.cursor
    found = explorer.space.distribution(node)
    yield _shown(explorer.space, found, found.top(n), found.mass(n))


def find(explorer: Explorer, text: str) -> Iterator[Shown]:
    """The tokens at the cursor that have this text, FOUND at most."""
    found = explorer.space.distribution(explorer.tree.cursor)
    listed = list(islice(found.containing(text), FOUND))
    yield _shown(explorer.space, found, listed, float(sum(each.probability for each in listed)))


def _shown(space: Workspace, found: Distribution, listed: Sequence[Alternative], mass: float) -> Shown:
    """Tokens of a distribution, each with the node where the tree has it."""
    node = found.node
    placed = (replace(each, node=space.tree.child(node, each.id)) for each in listed)
    return Shown(node, found.entropy, mass, tuple(placed), found.effects)


def why(explorer: Explorer) -> Iterator[Why]:
    """What each processor did to the token under the cursor; at the end of a branch, to the most probable one."""
    distribution, under = explorer.space.distribution(explorer.tree.cursor), explorer.tree.under()
    id = distribution.at(1).id if under is None else explorer.tree.nodes[under].id
    yield Why(distribution.of(id), distribution.why(id))


def layers(explorer: Explorer) -> Iterator[AtLayer]:
    """What the model would say after each layer: its first layers alone, with its last norm and its head.

    nostalgebraist 2020, "interpreting GPT: the logit lens". Raises ModelError for models whose layers cannot be left
    early.
    """
    space, tree = explorer.space, explorer.tree
    under = tree.under()
    node, id = tree.cursor, None if under is None else tree.nodes[under].id
    forward = space.session.forward
    depth = depth_of(forward)
    ids = torch.tensor([list(space.tree.ids(node))], device=forward.device)
    for count in range(1, depth):
        try:
            part = forward.first_layers(count)
            logits = part(Pass(ids, first=True, keep=1)).logits[0, -1]
        except GenctlError:
            raise
        except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
            raise ModelError(f"{forward.name} cannot run with its first {count} layers alone") from error
        yield _layer(space, count, logits, id)
    yield _layer(space, depth, space.branches.scores(node), id)


def _layer(space: Workspace, number: int, logits: torch.Tensor, id: int | None) -> AtLayer:
    check_finite(logits, f"after layer {number}")
    logprobs = logits.double().cpu().log_softmax(-1)
    best = logprobs.topk(min(LAYER_TOP, len(logprobs)))
    top = tuple(
        (token, space.piece(token), value)
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
    entropy = float(torch.special.entr(logprobs.exp()).numpy().sum())
    if id is None:
        return AtLayer(number, top, entropy)
    own = logprobs[id]
    return AtLayer(number, top, entropy, float(own), 1 + int((logprobs > own).sum()))


def compare(explorer: Explorer, names: Sequence[str]) -> Iterator[Compared]:
    """Two branches, from where they part: one of a bookmark or node each, the second the current one by default."""
    space, tree = explorer.space, explorer.tree
    a, b = [*map(tree.named, names), tree.tip][:2]
    fork = tree.fork_of(a, b)
    yield Compared(
        fork,
        space.text(fork),
        (a, b),
        (space.text(a, fork), space.text(b, fork)),
        (tree.joints[a] - tree.joints[fork], tree.joints[b] - tree.joints[fork]),
        (tree.depths[a] - tree.depths[fork], tree.depths[b] - tree.depths[fork]),
    )


def beside(explorer: Explorer) -> Iterator[Beside]:
    """Both distributions at each token of the branch."""
    if explorer.second is None:
        raise UsageError("there is one distribution", hint="--models A,B or --beside gives another one")
    yield from explorer.second.along(explorer.tree.tip)


def text(explorer: Explorer) -> Iterator[BranchText]:
    """The text of the branch."""
    tip = explorer.tree.tip
    yield BranchText(tip, explorer.space.text(tip), explorer.tree.opened.prompt)


def repeat(explorer: Explorer) -> Iterator[Repeat]:
    """The command line that writes the last generation of a branch again, token for token.

    It gives the tokens before it as ids, which a text may not give back. Settings that the tree began with are given
    too, so that it does not depend on files.
    """
    space, tree = explorer.space, explorer.tree
    node = tree.tip
    if node == ROOT:
        raise InputError("the branch has no token yet")
    last = tree.nodes[node]
    if last.by != "generate":
        what = {"edit": "typed", "expand": "found by expanding"}.get(last.by, "chosen by hand")
        yield Repeat(node, (), f"its last token was {what}: no command writes it")
        return
    start, path = last.start, tree.path(node, last.start)
    words = ["genctl", "run", "--model", tree.opened.model, "--input", "-", "--input-format", "jsonl"]
    values = _values(space, last)
    params = {**values, "max_new_tokens": len(path)}
    row = {"prompt_ids": list(tree.ids(start)), "params": params}
    if last.seed is not None:
        words += ["--seed", str(last.seed)]
    line = f"printf '%s\\n' {shlex.quote(json.dumps(row, ensure_ascii=False))} | {shlex.join(words)}"
    is_search = space.resolved(last.settings).generation.is_beam_search
    note = "the best of its search may be another branch" if is_search else ""
    yield Repeat(node, (line,), note)


def _values(space: Workspace, node: Grown) -> dict[str, Any]:
    """All knobs that are set for a node, but for those of the checkpoint."""
    resolved = space.resolved(node.settings)
    kinds = {key: setting for key, setting in resolved.settings.items() if setting.kind != "model"}
    return {
        key: setting.value for key, setting in kinds.items() if key not in ("max_new_tokens", "max_length", "about")
    }
