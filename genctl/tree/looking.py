"""The commands that only look: probabilities, processors, layers, two branches side by side, command lines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import torch

from genctl.config.check import shown as shown_value
from genctl.config.listed_knobs import processors_of
from genctl.decode.runtime import Pass, depth_of
from genctl.decode.score import check_finite
from genctl.errors import GenctlError, InputError, ModelError
from genctl.params import Generation
from genctl.tree.changes import Grown
from genctl.tree.distribution import Alternative
from genctl.tree.nodes import ROOT
from genctl.tree.results import AtLayer, Compared, Repeat, Shown, Why
from genctl.tree.workspace import Workspace

LAYER_TOP = 5  # tokens listed after each layer


def shown(space: Workspace, node: int, count: int, begin: int = 0) -> Shown:
    """The most probable tokens after a node."""
    found = space.distribution(node)
    listed = [_placed(space, node, each) for each in found.top(count, begin)]
    return Shown(node, found.entropy, found.mass(begin + count), tuple(listed), found.effects)


def found(space: Workspace, node: int, text: str, count: int) -> Shown:
    """The tokens after a node that have this text."""
    distribution = space.distribution(node)
    listed = []
    for each in distribution.containing(text):
        listed.append(_placed(space, node, each))
        if len(listed) == count:
            break
    mass = float(sum(each.probability for each in listed))
    return Shown(node, distribution.entropy, mass, tuple(listed), distribution.effects)


def _placed(space: Workspace, node: int, token: Alternative) -> Alternative:
    child = space.tree.child(node, token.id)
    if child is None:
        return token
    return Alternative(token.id, token.text, token.rank, token.logprob, token.processed, token.removed_by, child)


def why(space: Workspace, node: int, id: int) -> Why:
    """What each processor did to a token after a node."""
    distribution = space.distribution(node)
    return Why(distribution.of(id), distribution.why(id))


def layers(space: Workspace, node: int, id: int | None) -> Iterator[AtLayer]:
    """What the model would say after each layer: its first layers alone, with its last norm and its head.

    nostalgebraist 2020, "interpreting GPT: the logit lens". Raises ModelError for models whose layers cannot be left
    early.
    """
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


def compared(space: Workspace, a: int, b: int) -> Compared:
    """Two branches, from where they part."""
    tree = space.tree
    fork = tree.fork_of(a, b)
    return Compared(
        fork,
        space.text(fork),
        (a, b),
        (space.text(a, fork), space.text(b, fork)),
        (tree.joints[a] - tree.joints[fork], tree.joints[b] - tree.joints[fork]),
        (tree.depths[a] - tree.depths[fork], tree.depths[b] - tree.depths[fork]),
    )


def repeat(space: Workspace, node: int) -> Repeat:
    """The command line that writes the last generation of a branch again, token for token.

    It gives the tokens before it as ids, which a text may not give back. Settings that the tree began with are given
    too, so that it does not depend on files.
    """
    tree = space.tree
    if node == ROOT:
        raise InputError("the branch has no token yet")
    last = tree.nodes[node]
    if last.by != "generate":
        what = {"edit": "typed", "expand": "found by expanding"}.get(last.by, "chosen by hand")
        return Repeat(node, (), f"its last token was {what}: no command writes it")
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
    return Repeat(node, (line,), note)


def _values(space: Workspace, node: Grown) -> dict[str, Any]:
    """All knobs that are set for a node, but for those of the checkpoint."""
    resolved = space.resolved(node.settings)
    kinds = {key: setting for key, setting in resolved.settings.items() if setting.kind != "model"}
    return {
        key: setting.value for key, setting in kinds.items() if key not in ("max_new_tokens", "max_length", "about")
    }


def drawing(before: Generation, after: Generation) -> tuple[str, ...]:
    """What to say where other settings begin to draw tokens, with the knobs that act, or no longer draw."""
    if before.draws == after.draws:
        return ()
    if not after.draws:
        return ("sampling is off",)
    names = dict.fromkeys(
        ["temperature", *(row.knobs[0] for row in processors_of(after, healed=False) if row.sampling)]
    )
    values = ", ".join(f"{name} = {shown_value(getattr(after, name))}" for name in names)
    return (f"sampling is on: {values}",)
