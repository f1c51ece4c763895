"""How the total of a hypothesis becomes its score: as a formula with numbers, and in words."""

from __future__ import annotations

import math

from genctl.events import Hypothesis
from genctl.events.history import LaneHistory
from genctl.terminal import widgets


def searches(lane: LaneHistory) -> bool:
    """Whether the rows of a lane compete, so that totals and scores decide between them."""
    return lane.began is not None and "beam" in lane.began.strategy


def penalty_of(lane: LaneHistory) -> float:
    """The length_penalty of a lane, as recorded; 1 where the recording has none."""
    if lane.began is None:
        return 0.0
    setting = lane.began.settings.get("length_penalty")
    return float(setting) if isinstance(setting, (int, float)) and not isinstance(setting, bool) else 1.0


def score(total: float, tokens: int, penalty: float) -> float:
    """total / tokens ** length_penalty; no tokens count as one."""
    try:
        return float(total / max(tokens, 1) ** penalty)
    except OverflowError:  # the divisor is beyond all numbers
        return 0.0
    except ZeroDivisionError:
        return math.copysign(math.inf, total)


def number(value: float) -> str:
    """A log-probability, total or score in at most nine characters, unless it is huge. No -0.000."""
    if 5e-7 <= abs(value) < 0.0095:
        return f"{value:.6f}"
    return widgets.rounded(value)


def logprob_beside_total(one: Hypothesis) -> float:
    """Its log-probability; its total, where rounding alone separates the two, so that both look the same."""
    return one.total if math.isclose(one.logprob, one.total, rel_tol=2e-6) else one.logprob


def formula(lane: LaneHistory, best: Hypothesis) -> str:
    """The score of a hypothesis as a formula on one line."""
    numbers = f"{number(best.total)} / {len(best.tokens)} ** {penalty_of(lane)!r}"
    return f"score = total / tokens ** length_penalty = {numbers} = {number(best.score)}"


def meaning(lane: LaneHistory, best: Hypothesis) -> str:
    """What length_penalty does here, in one sentence: its sign is often misread."""
    if best.total > 0:
        return (
            "This total is above 0 (a processor raised the scores above log-probabilities), which reverses the effect: "
            "here a larger length_penalty favours SHORTER sequences."
        )
    kind, penalty = lane.began.strategy if lane.began else "", penalty_of(lane)
    first = "Sequences that keep every promise come first; among them, totals" if kind.startswith("con") else "Totals"
    effect = "favours LONGER sequences" if penalty > 0 else "favours SHORTER sequences; above 0 favours longer ones"
    return f"{first} are negative and divided by tokens ** length_penalty: length_penalty = {penalty!r} {effect}."
