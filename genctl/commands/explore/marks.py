"""How probabilities are shown: by colour, or by another mark where there is none."""

from __future__ import annotations

import math

from rich.style import Style

from genctl.errors import percent
from genctl.terminal import theme

DIM = theme.DIM
BOLD = theme.HEADING
CURSOR = Style(reverse=True)
CHOSEN = Style(bold=True, reverse=True)
PART = Style(underline=True)


def probability_of(logprob: float | None) -> float:
    """The probability of a log-probability; NaN where there is none."""
    return math.nan if logprob is None or math.isnan(logprob) else math.exp(min(logprob, 0.0))


def tenth(probability: float | None) -> str:
    """The probability as a digit from 0 to 9, for the line below a token."""
    if probability is None or math.isnan(probability):
        return " "
    return str(min(int(probability * 10), 9))


def logprob(value: float) -> str:
    """A log-probability in nats in seven cells at most: `-1.355`, `-12.35`."""
    return f"{value:.3f}" if -10.0 < value <= 0.0 else f"{value:.2f}"


def odds(logprob: float) -> str:
    """A joint probability in seven cells: `12.3%`, `1.2e-9`, or as a power of ten beyond what fits."""
    if math.isnan(logprob) or logprob == -math.inf:
        return f"{'–' if math.isnan(logprob) else '0':>7}"
    probability = math.exp(min(logprob, 0.0))
    if probability >= 0.001:
        return f"{percent(probability):>7}"
    if logprob > -200:
        mantissa, _, exponent = f"{probability:.1e}".partition("e")
        return f"{f'{mantissa}e{int(exponent)}':>7}"
    return f"{f'1e{round(logprob / math.log(10))}':>7}"
