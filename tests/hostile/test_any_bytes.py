"""Any bytes in presets, rows, options and grammars: a sentence with its place, or something that was understood."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

from genctl.config.toml import write_key, write_value
from tests.hostile import targets
from tests.hostile.corpus import KNOBS, TABLES, TEXTS, VALUES
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


@WHATEVER
@given(
    draw.sampled_from((*KNOBS, "extends", "about", "temprature", "Top_K", "generation.top_k", "")),
    draw.one_of(draw.sampled_from(VALUES), draw.sampled_from(TEXTS).map(write_value)),
    draw.one_of(draw.just(""), draw.sampled_from(TABLES)),
)
def test_any_value_of_any_setting(name: str, value: str, table: str) -> None:
    targets.checked(targets.preset, f"{write_key(name)} = {value}\n{table}\n".encode("utf-8", "surrogatepass"))
