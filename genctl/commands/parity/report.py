"""`--report` of `genctl parity`: the texts that both sides read, as the runs of a comparison on the page of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias
from urllib.parse import quote

from torch import Tensor

from genctl.commands.page_file import PageFile
from genctl.commands.parity import view
from genctl.commands.parity.view import Naming
from genctl.events import Token
from genctl.parity.sides import LocalSide
from genctl.parity.values import Golden, Parity, Place, Position, Text

WORST = 12  # positions with alternatives
TOP = 8  # tokens of each distribution

Top: TypeAlias = tuple[tuple[int, float], ...]  # token and log-probability, the most probable first
Tops: TypeAlias = "Callable[[Sequence[Text], set[Place]], dict[Place, Top]]"  # of texts, at places in them


def tops_of(side: LocalSide, interrupted: Callable[[], str]) -> Tops:
    """The best tokens of a side, whose texts are read once more."""

    def tops(texts: Sequence[Text], places: set[Place]) -> dict[Place, Top]:
        found: dict[Place, Top] = {}

        def receive(number: int, index: int, logits: Tensor) -> None:
            place = texts[number].id, index
            if place in places:
                values, ids = logits.detach().double().log_softmax(-1).topk(min(TOP, logits.shape[-1]))
                found[place] = tuple(zip(ids.tolist(), values.tolist(), strict=True))

        side.read(texts, receive, interrupted=interrupted)
        return found

    return tops


def recorded_tops(golden: Golden) -> Tops:
    """The best tokens of a recording."""
    return lambda texts, places: {place: golden.known[place].top[:TOP] for place in places if place in golden.known}


def worst_tops(one: Parity, *sides: Tops) -> list[dict[Place, Top]]:
    """For each side its best tokens at the positions with the largest KL."""
    worst = sorted((each for each in one.positions if each.kl > 0), key=lambda each: -each.kl)[:WORST]
    places = {(each.text, each.index) for each in worst}
    texts = [text for text in one.texts if any(text.id == id for id, _ in places)]
    return [side(texts, places) for side in sides]


def add_pair(page: PageFile, one: Parity, naming: Naming, number: int, tops: Sequence[dict[Place, Top]]) -> None:
    """Add a pair to the page: what is found of it, and the texts of both sides as runs of a comparison.

    `number` counts pairs from 1; the texts of the reference are added with the first. `tops`: those of `worst_tops`.
    """
    reference = naming.reference(one.reference)
    found = [f"{one.word}: {view.sized(one)}", *([one.fault.reason] if one.fault else []), *one.notes]
    found += [f"text {naming.row(id)} could not be compared: {reason}" for id, reason in one.failed.items()]
    found += [f"{label.strip()} {words}" for label, words in view.sentences(one)]
    page.facts.append((f"{one.other} against {reference}", "; ".join(found)))
    by_text: dict[str, list[Position]] = {}
    for position in one.positions:
        by_text.setdefault(position.text, []).append(position)
    sides = [(0, reference, [each.logprob_reference for each in one.positions])] if number == 1 else []
    sides.append((number, one.other, [each.logprob_other for each in one.positions]))
    for run, name, logprobs in sides:
        known = dict(zip(map(id, one.positions), logprobs, strict=True))
        for text in one.texts:
            positions = by_text.get(text.id, [])
            lane = f"{name}/{quote(text.id, safe='')}/0"
            kl, figures = [position.kl for position in positions], ""
            if run and kl:
                figures = f"KL {view.nats(math.fsum(kl) / len(kl))} nats on average, {view.nats(max(kl))} at most"
            tokens = []
            for position in positions:
                top = tops[min(run, 1)].get((text.id, position.index), ())
                alternatives = tuple((token, naming.text_of(token), logprob) for token, logprob in top)
                piece = naming.text_of(position.token)
                tokens.append(Token(position.token, known[id(position)], piece, top=alternatives))
            page.scored(lane, text.prompt, tokens, model=name, figures=figures, run=run + 1)
