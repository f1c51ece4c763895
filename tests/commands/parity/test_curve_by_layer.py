"""The curve by layer of a deep model: what a terminal and a file show of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from genctl.commands.parity import view
from genctl.commands.parity.view import Naming
from genctl.parity.measure import measure
from genctl.parity.values import Fault, LayerDifference, Parity
from tests.parity.sides import requests, side

PARTS = ("attn_norm", "o", "mlp_norm", "mlp")
LAYERS = 24


@pytest.fixture(scope="module")
def pair() -> Parity:
    sides = side(name="reference"), side(name="other")
    return measure(*sides, requests(sides[0], ["The sea"]))


def deep(pair: Parity, fault: str) -> Parity:
    """A pair with the curve of 24 layers: an encoder's and a decoder's, one of whose parts is at fault."""
    curve = []
    for stack in ("encoder ", ""):
        path = f"{stack.strip()}.layers.".lstrip(".")
        for layer in range(LAYERS):
            curve += [LayerDifference(layer, f"{stack}mlp", f"{path}{layer}.{part}", 1e-7, 1e-7, 0) for part in PARTS]
            curve.append(LayerDifference(layer, f"{stack}layer", f"{path}{layer}", 1e-7, 1e-7, 0))
    curve.append(LayerDifference(None, "head", "", 1e-7, 1e-7, 0))
    point = next(point for point in curve if (point.name or point.sublayer) == fault)
    found = Fault("0", point.layer, point.sublayer, point.name, 0, 1.0, "it parts", tuple(curve))
    return replace(pair, fault=found, curve=tuple(curve))


def shown(one: Parity, width: int | None) -> list[str]:
    """The names in the table of parts, and what is said below it."""
    lines = [line.plain for line in view.pair_lines(one, Naming(), width)]
    table = lines[next(place for place, line in enumerate(lines) if line.startswith("part of the model")) + 1 :]
    return [line.split()[0] if line[:1] != " " else line.strip() for line in table]


@pytest.mark.parametrize("fault", ["layers.22.mlp_norm", "encoder.layers.9.o", "head"])
def test_a_terminal_shows_the_fault_and_what_each_layer_ends_with(fault: str, pair: Parity) -> None:
    names = shown(deep(pair, fault), 100)[:-1]
    layers = {f"{stack}layers.{layer}" for stack in ("", "encoder.") for layer in range(LAYERS)}
    assert {*names} == {*layers, "head", fault}


def test_what_is_left_out_is_said_with_where_it_is(pair: Parity) -> None:
    one = deep(pair, "layers.22.mlp_norm")
    *names, below = shown(one, 100)
    assert len(names) < len(one.curve) == 2 * LAYERS * 5 + 1
    left = len(one.curve) - len(names)
    assert below == f"{left} parts within layers are not shown; --format jsonl has all {len(one.curve)}"


def test_a_file_has_every_part(pair: Parity) -> None:
    one = deep(pair, "layers.22.mlp_norm")
    assert shown(one, None) == [point.name or point.sublayer for point in one.curve]
