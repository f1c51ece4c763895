"""Any bytes in presets, rows, options and grammars: a sentence with its place, or something that was understood."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

from tests.hostile import corpus, targets
from tests.hostile.targets import TARGETS

WHATEVER = settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", TARGETS)
def test_arbitrary_bytes(name: str) -> None:
    @WHATEVER
    @given(
        draw.one_of(draw.binary(max_size=80), draw.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
    )
    def check(data: bytes) -> None:
        assert targets.checked(TARGETS[name], data) in (targets.REFUSED, targets.ACCEPTED)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_sound_but_for_a_piece(name: str) -> None:
    sound = list(targets.seeds(name))
    assert sound

    @WHATEVER
    @given(draw.sampled_from(sound), draw.integers(min_value=0), draw.binary(max_size=6), draw.integers(0, 6))
    def check(data: bytes, at: int, piece: bytes, over: int) -> None:
        at %= len(data) + 1
        targets.checked(TARGETS[name], data[:at] + piece + data[at + over :])

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted(name: str) -> None:
    """Or the tests above would only ever see refusals."""
    assert targets.ACCEPTED in {targets.checked(TARGETS[name], data) for data in targets.seeds(name)}


@pytest.mark.parametrize(("make", "name"), [(corpus.preset, "preset"), (corpus.line, "jsonl")])
def test_hostile_ones_made_to_measure(make: Callable[[Random], bytes], name: str) -> None:
    found = {targets.REFUSED: 0, targets.ACCEPTED: 0}
    for seed in range(150):
        found[targets.checked(TARGETS[name], make(Random(seed)))] += 1
    assert found[targets.REFUSED] > 50
    assert found[targets.ACCEPTED] > 0


def test_a_breach_is_noticed() -> None:
    def broken(data: bytes) -> str:
        raise KeyError(data)

    with pytest.raises(targets.Breach):
        targets.checked(broken, b"x")
