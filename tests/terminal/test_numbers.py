"""Numbers as they are shown: no negative zero, no exponents where digits fit, no seed that nothing used."""

from __future__ import annotations

import pytest

from genctl.commands.inspect import report
from genctl.comparing import statistics
from genctl.errors import count
from genctl.events import Hypothesis
from genctl.terminal import explain, widgets


def test_what_rounds_to_nothing_has_no_sign() -> None:
    assert [widgets.rounded(value) for value in (-0.0, -0.0004, -0.0006, 0.0)] == ["0.000", "0.000", "-0.001", "0.000"]


def test_a_log_probability_looks_like_its_total_where_rounding_alone_separates_them() -> None:
    """Totals are float32 sums of the numbers that a log-probability adds up exactly."""
    one = Hypothesis((1,), -11.8814999, -11.8815001, "length", -11.8815001)
    assert explain.number(explain.logprob_beside_total(one)) == explain.number(one.total) == "-11.882"
    penalised = Hypothesis((1,), -11.8814999, -12.0, "length", -12.0)
    assert explain.number(explain.logprob_beside_total(penalised)) == "-11.881"


def test_a_large_perplexity_is_written_in_digits() -> None:
    assert [widgets.perplexity(value) for value in (2.5, 2238.4, 2051000.0, 3e12)] == [
        "2.5000",
        "2,238",
        "2,051,000",
        "3.00e+12",
    ]


def test_nouns_follow_their_numbers() -> None:
    assert [count(1, "token"), count(2, "pass", "passes"), count(1204, "row")] == ["1 token", "2 passes", "1,204 rows"]


@pytest.mark.parametrize(
    ("value", "digits", "shown", "difference"),
    [
        (-0.0004, 3, "0.000", "0.000"),
        (0.0004, 3, "0.000", "0.000"),
        (-0.5, 3, "-0.500", "-0.500"),
        (0.5, 0, "0", "0"),
        (2_051_000.4, 2, "2,051,000", "+2,051,000"),
        (2238.0, 2, "2,238.00", "+2,238.00"),
        (None, 2, "–", "–"),
    ],
)
def test_numbers_of_a_comparison(value: float | None, digits: int, shown: str, difference: str) -> None:
    assert statistics.number(value, digits) == shown
    assert statistics.signed(value, digits) == difference


def test_a_score_is_written_in_digits() -> None:
    values = (-11.8823, -0.0041, -0.0000021, -1e-12, 0.0)
    shown = ["-11.882", "-0.004100", "-0.000002", "0.000", "0.000"]
    assert [explain.number(value) for value in values] == shown


def test_bytes_are_whole() -> None:
    assert [report.number(value) for value in (10240, 1365.33, 2048.0)] == ["10,240", "about 1,365", "2,048"]
