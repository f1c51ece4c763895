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
from genctl.parity.values import Golden, Parity, Place, Position, Text
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
    places = {(each.text, each.index): each for each in chosen if each.kl > 0}
    texts = [text for text in one.texts if any(text.id == id for id, _ in places)]
    mine, theirs = (tops(texts, {*places}) for tops in (reference, other))
    return [
        WorstPosition(each, mine[place], theirs[place])
        for place, each in places.items()
        if place in mine and place in theirs
    ]


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
        first = self._pairs[0][0]
        reference = self.naming.reference(first.reference)
        facts = [("reference", reference), ("texts", f"{len(first.texts):,}"), *self.facts]
        pairs = [self._pair(one, worst) for one, worst in self._pairs]
        return self.filled("parity.html.jinja", f"Parity with {visible(reference)}", facts, pairs=pairs)

    def _pair(self, one: Parity, worst: Sequence[WorstPosition]) -> dict[str, Any]:
        from markupsafe import Markup

        naming, figures = self.naming, one.summary
        heads, rows = view.figure_rows(one)
        facts = [*view.sentences(one), ("correlation of log-probabilities", f"{figures.correlation:.6f}")]
        fault = [one.fault.reason] if one.fault else []
        failed = [f"text {naming.row(id)} could not be compared: {reason}" for id, reason in one.failed.items()]
        layers = ""
        if one.curve:
            lines = [("one", [layer.size for layer in one.curve]), ("two", [layer.noise for layer in one.curve])]
            layers = page.curve("Difference by layer", lines, FLOOR)
        partings = [
            {
                "row": naming.row(parting.text),
                "verdict": parting.verdict,
                "token": parting.index + 1,
                "ways": view.ways(parting, naming),
                "margin": view.nats(parting.margin),
                "reason": visible(parting.reason),
            }
            for parting in view.worst_first(one.partings)[:PARTINGS]
        ]
        parts = [
            {"cells": [*map(visible, view.curve_row(point))], "at_fault": view.is_fault(point, one.fault)}
            for point in one.curve
        ]
        return {
            "other": visible(one.other),
            "heads": view.HEADS,
            "row": [*map(visible, view.row_of(one))],
            "verdict": one.word,
            "reason": visible(view.sized(one)),
            "remarks": [*map(visible, (*fault, *one.notes, *failed))],
            "positions": f"{count(figures.positions, 'position')} of {count(len(one.texts), 'text')}",
            "figures": {"heads": heads, "rows": rows},
            "facts": [(label.strip(), visible(value)) for label, value in facts],
            "histogram": Markup(_histogram(one)),
            "curve": Markup(_curve(one)),
            "layers_chart": Markup(layers),
            "parts": {"heads": view.CURVE_HEADS, "rows": parts},
            **self._strip(one),
            "partings": partings,
            "partings_left": max(len(one.partings) - PARTINGS, 0),
            "worst": [self._worst(each, one) for each in worst],
        }

    def _strip(self, one: Parity) -> dict[str, Any]:
        """The text that differs most, each token with its KL."""
        text = view.worst_of(one)
        if text is None:
            return {"strip": []}
        pieces = []
        for each in (each for each in one.positions if each.text == text.id):
            about = f"token {each.index + 1}: KL {view.nats(each.kl)} nats"
            if not each.same:
                about += f"; {self.naming.token(each.first_reference)} or {self.naming.token(each.first_other)}"
            shown = visible(self.naming.text_of(each.token) or self.naming.token(each.token))
            level = view.LEVELS.digit(each.kl)
            pieces.append({"text": shown, "level": level, "other": not each.same, "about": about})
        return {
            "strip": pieces[:LONGEST],
            "strip_left": max(len(pieces) - LONGEST, 0),
            "strip_name": self.naming.row(text.id),
            "strip_prompt": visible(last_cells(text.prompt, 500)),
        }

    def _worst(self, worst: WorstPosition, one: Parity) -> dict[str, Any]:
        """A position with the best tokens of both sides, and the text before it."""
        each, named = worst.position, self.naming.token
        text = next(text for text in one.texts if text.id == each.text)
        before = text.prompt + "".join(self.naming.text_of(token) for token in text.token_ids[: each.index])
        sides = []
        for name, top in (("reference", worst.reference), (visible(one.other), worst.other)):
            shares = [f"{100 * math.exp(min(value, 0.0)):.2f}" for _, value in top]
            tokens = [
                {"text": named(id), "percent": view.chance(value), "share": share}
                for (id, value), share in zip(top, shares, strict=True)
            ]
            sides.append({"name": name, "tokens": tokens})
        return {
            "row": self.naming.row(each.text),
            "token": each.index + 1,
            "kl": view.nats(each.kl),
            "regret": view.nats(each.regret),
            "before": last_cells(before, 200),
            "sides": sides,
        }


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
