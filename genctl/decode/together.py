"""Which prompts are read in one pass: short ones of about the same length, padded on the left and masked.

A short prompt leaves the processor waiting for weights; several side by side share them. A long one keeps it busy
alone. What a prompt's cache holds afterwards is its own row without the padding: the same prefix either way, up to
the last digits of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from genctl.decode.types import Lane

MOST = 512  # tokens of a pass, padding included
_PADDING = 0.25  # the share of a prompt's own length that may be added to it, at most


def groups(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Lanes whose prompts differ, put together by length; every lane is in one group, alone where nothing fits.

    Groups and their lanes are in the order of `lanes`.
    """
    made: list[list[int]] = []
    lengths = [len(lane.tokens) for lane in lanes]
    for place in sorted(range(len(lanes)), key=lambda place: -lengths[place]):
        longest = lengths[made[-1][0]] if made else 0
        if made and (len(made[-1]) + 1) * longest <= MOST and longest <= lengths[place] * (1 + _PADDING):
            made[-1].append(place)
        else:
            made.append([place])
    return [[lanes[place] for place in group] for group in sorted(map(sorted, made))]


def work(lane: Lane) -> tuple[int, int]:
    """How long a lane may be at work: what it may write, then what it has to read. Longest first leaves the least idle.

    Graham (1969), "Bounds on Multiprocessing Timing Anomalies": the longest job first.
    """
    return lane.max_new_tokens, len(lane.tokens) + len(lane.source or ())
