"""The most probable tokens of both sides at the worst positions, for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from genctl.parity.recorded import Golden
from genctl.parity.sides import LocalSide
from genctl.parity.values import Parity, Position, Text

WORST = 12  # positions on a page
TOP = 8  # tokens of each distribution

Top: TypeAlias = tuple[tuple[int, float], ...]  # token and log-probability, the most probable first
Place: TypeAlias = tuple[str, int]  # a text and the index of a token
Tops: TypeAlias = "Callable[[Sequence[Text], set[Place]], dict[Place, Top]]"  # of texts, at places in them


@dataclass(frozen=True)
class WorstPosition:
    """A position with the best tokens of both sides."""

    position: Position
    reference: Top
    other: Top


def worst_positions(one: Parity, reference: Tops, other: Tops) -> list[WorstPosition]:
    """The positions with the largest KL, the worst first."""
    chosen = sorted(one.positions, key=lambda each: each.kl, reverse=True)[:WORST]
    chosen = [each for each in chosen if each.kl > 0]
    wanted = {each.text for each in chosen}
    texts = [text for text in one.texts if text.id in wanted]
    places = {(each.text, each.index) for each in chosen}
    both = [tops(texts, places) for tops in (reference, other)]
    keys = [(each, (each.text, each.index)) for each in chosen]
    return [WorstPosition(each, both[0][key], both[1][key]) for each, key in keys if key in both[0] and key in both[1]]


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
