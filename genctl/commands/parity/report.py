"""`--report` of `genctl parity`: charts, the worst text, and the worst positions with both distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from genctl.commands.page_file import ReportPage
from genctl.commands.parity import view
from genctl.commands.parity.view import Naming
from genctl.errors import count
from genctl.pages import page
from genctl.parity.sides import LocalSide
from genctl.parity.values import Golden, LayerDifference, Parity, Place, Position, Text
from genctl.terminal.text_width import last_cells
from genctl.terminal.widgets import visible

# -- the most probable tokens of both sides at the worst positions -----------------------------------------------------

WORST = 12  # positions on a page
TOP = 8  # tokens of each distribution

Top: TypeAlias = tuple[tuple[int, float], ...]  # token and log-probability, the most probable first
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


# -- the page: charts, texts and tables, without a script --------------------------------------------------------------


FLOOR = 1e-12  # nats: smaller KL is drawn there
EDGES = tuple(10.0**power for power in range(-10, 1))  # of the histogram, in nats
LONGEST = 2000  # tokens of a text on the page
PARTINGS = 200  # on the page


class ParityPage(ReportPage):
    """The page in the making."""

    def __init__(self, path: str, *, force: bool) -> None:
        super().__init__(path, force=force)
        self.naming = Naming()
        self.facts: list[tuple[str, str]] = []
        self._pairs: list[tuple[Parity, list[WorstPosition]]] = []

    def pair(self, one: Parity, worst: list[WorstPosition]) -> None:
        """Take a pair that is compared."""
        self._pairs.append((one, worst))

    def content(self) -> bytes:
        """The page in UTF-8. Every text in it is escaped by the template."""
        reference = self.naming.reference(self._pairs[0][0].reference)
        facts = [("reference", reference), ("texts", f"{len(self._pairs[0][0].texts):,}"), *self.facts]
        pairs = [_pair(one, worst, self.naming) for one, worst in self._pairs]
        return self.filled("parity.html.jinja", f"Parity with {visible(reference)}", facts, pairs=pairs)


def _pair(one: Parity, worst: Sequence[WorstPosition], naming: Naming) -> dict[str, Any]:
    from markupsafe import Markup

    figures, fault = one.summary, one.fault
    heads, rows = view.figure_rows(one)
    facts = [*view.sentences(one), ("correlation of log-probabilities", f"{figures.correlation:.6f}")]
    layers = ""
    if one.curve:
        lines = [("one", [layer.size for layer in one.curve]), ("two", [layer.noise for layer in one.curve])]
        layers = page.curve("Difference by layer", lines, FLOOR)
    return {
        "other": visible(one.other),
        "heads": view.HEADS,
        "row": [visible(cell) for cell in view.row_of(one)],
        "verdict": one.word,
        "reason": visible(view.sized(one)),
        "remarks": [visible(line) for line in (*([fault.reason] if fault else []), *one.notes, *_failed(one, naming))],
        "positions": f"{count(figures.positions, 'position')} of {count(len(one.texts), 'text')}",
        "figures": {"heads": heads, "rows": rows},
        "facts": [(label.strip(), visible(value)) for label, value in facts],
        "histogram": Markup(_histogram(one)),
        "curve": Markup(_curve(one)),
        "layers_chart": Markup(layers),
        "parts": {"heads": view.CURVE_HEADS, "rows": [_part(point, one) for point in one.curve]},
        **_strip(one, naming),
        "partings": _partings(one, naming),
        "partings_left": max(len(one.partings) - PARTINGS, 0),
        "worst": [_worst(each, one, naming) for each in worst],
    }


def _failed(one: Parity, naming: Naming) -> list[str]:
    return [f"text {naming.row(id)} could not be compared: {reason}" for id, reason in one.failed.items()]


def _histogram(one: Parity) -> str:
    counts = [0] * (len(EDGES) + 1)
    for position in one.positions:
        counts[sum(position.kl >= edge for edge in EDGES)] += 1
    labels = ["0", *(f"{edge:.0e}".replace("e+00", "").replace("e-0", "e-") for edge in EDGES)]
    return page.bars("Histogram of KL", labels, counts)


def _curve(one: Parity) -> str:
    by_index: dict[int, list[float]] = {}
    for position in one.positions:
        by_index.setdefault(position.index, []).append(position.kl)
    ordered = [by_index[index] for index in sorted(by_index)]
    means = [math.fsum(values) / len(values) for values in ordered]
    return page.curve("KL by position", [("one", means), ("two", [max(values) for values in ordered])], FLOOR)


def _part(point: LayerDifference, one: Parity) -> dict[str, Any]:
    return {"cells": [visible(cell) for cell in view.curve_row(point)], "at_fault": view.is_fault(point, one.fault)}


def _strip(one: Parity, naming: Naming) -> dict[str, Any]:
    text = view.worst_of(one)
    if text is None:
        return {"strip": [], "strip_left": 0, "strip_name": "", "strip_prompt": ""}
    pieces = []
    for each in (each for each in one.positions if each.text == text.id):
        about = f"token {each.index + 1}: KL {view.nats(each.kl)} nats"
        if not each.same:
            about += f"; {naming.token(each.first_reference)} or {naming.token(each.first_other)}"
        shown = naming.text_of(each.token) or naming.token(each.token)
        pieces.append(
            {"text": visible(shown), "level": view.LEVELS.digit(each.kl), "other": not each.same, "about": about}
        )
    return {
        "strip": pieces[:LONGEST],
        "strip_left": max(len(pieces) - LONGEST, 0),
        "strip_name": naming.row(text.id),
        "strip_prompt": visible(last_cells(text.prompt, 500)),
    }


def _partings(one: Parity, naming: Naming) -> list[dict[str, Any]]:
    found = []
    for parting in view.worst_first(one.partings)[:PARTINGS]:
        ways = view.ways(parting, naming)
        found.append(
            {
                "row": naming.row(parting.text),
                "verdict": parting.verdict,
                "token": parting.index + 1,
                "reference": ways[0],
                "other": ways[1],
                "margin": view.nats(parting.margin),
                "reason": visible(parting.reason),
            }
        )
    return found


def _worst(worst: WorstPosition, one: Parity, naming: Naming) -> dict[str, Any]:
    each = worst.position
    text = next(text for text in one.texts if text.id == each.text)
    before = text.prompt + "".join(naming.text_of(token) for token in text.token_ids[: each.index])
    names = [("reference", worst.reference), (visible(one.other), worst.other)]
    return {
        "row": naming.row(each.text),
        "token": each.index + 1,
        "kl": view.nats(each.kl),
        "regret": view.nats(each.regret),
        "before": last_cells(before, 200),
        "sides": [{"name": name, "tokens": _tokens(top, naming)} for name, top in names],
    }


def _tokens(top: Top, naming: Naming) -> list[dict[str, str]]:
    return [
        {
            "text": naming.token(token),
            "percent": view.chance(logprob),
            "share": f"{100 * math.exp(min(logprob, 0.0)):.2f}",
        }
        for token, logprob in top
    ]
