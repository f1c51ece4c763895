"""The most probable tokens of both sides at the worst positions, for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from genctl.parity.sides import LocalSide
from genctl.parity.values import Parity, Position, Text

WORST = 12  # positions on a page
TOP = 8  # tokens of each distribution

Top = tuple[tuple[int, float], ...]  # token and log-probability, the most probable first


@dataclass(frozen=True)
class WorstPosition:
    """A position with the best tokens of both sides."""

    position: Position
    reference: Top
    other: Top


def worst_positions(
    one: Parity, reference: LocalSide, other: LocalSide, interrupted: Callable[[], str]
) -> list[WorstPosition]:
    """The positions with the largest KL, the worst first. Their texts are read once more."""
    chosen = sorted(one.positions, key=lambda each: each.kl, reverse=True)[:WORST]
    chosen = [each for each in chosen if each.kl > 0]
    wanted = {each.text for each in chosen}
    texts = [text for text in one.texts if text.id in wanted]
    places = {(each.text, each.index) for each in chosen}
    both = [_tops(side, texts, places, interrupted) for side in (reference, other)]
    keys = [(each, (each.text, each.index)) for each in chosen]
    return [WorstPosition(each, both[0][key], both[1][key]) for each, key in keys if key in both[0] and key in both[1]]


def _tops(
    side: LocalSide, texts: Sequence[Text], places: set[tuple[str, int]], interrupted: Callable[[], str]
) -> dict[tuple[str, int], Top]:
    found: dict[tuple[str, int], Top] = {}

    def receive(place: int, index: int, logits: Tensor) -> None:
        key = texts[place].id, index
        if key in places:
            values, ids = logits.detach().double().log_softmax(-1).topk(min(TOP, logits.shape[-1]))
            found[key] = tuple(zip(ids.tolist(), values.tolist(), strict=True))

    side.read(texts, receive, interrupted=interrupted)
    return found
