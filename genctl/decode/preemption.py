"""Preemption: which lanes make room when memory runs out, and how they resume.

A preempted lane loses only its keys and values: its tokens are read again when there is room.
"""

from __future__ import annotations

import torch

from genctl import events
from genctl.decode.batch import Batch
from genctl.decode.lane import LaneState
from genctl.decode.out_of_memory import OutOfMemory, release
from genctl.decode.types import Lane


def evict(batch: Batch, shortage: OutOfMemory) -> tuple[list[LaneState], LaneState | None]:
    """Empty a batch that did not fit. Returns the lanes that can continue, and the one that cannot."""
    states, lost = batch.clear(), None
    for state in states:
        state.scores = None  # the next pass computes them, after its rows were read again
    release()
    if shortage.torn:  # a search that failed within its choice cannot repeat it
        lost = states.pop(next(place for place, state in enumerate(states) if state.torn))
    elif len(states) == 1:
        lost = states.pop()
    if lost is not None:
        lost.close()
    return states, lost


def reread(state: LaneState) -> None:
    """Read all rows of a lane again into a cache of its own, after the one that held them was dropped."""
    state.fed_draft = 0
    if state.prefix.cache is None or state.live.written <= (state.front is None):
        return  # there is no cache, or it holds only the prompt
    tokens = state.live.tokens
    known = tokens if state.front is not None else tokens[:, :-1]
    cache = state.model.reread(known, state.prefix)
    branches = torch.arange(len(known), device=known.device).repeat_interleave(state.branches)
    state.own = cache.select(branches)
    state.own.convert(state.lane.cache)


def too_large(lane: Lane, rows: int, shortage: OutOfMemory) -> events.Failed:
    """The failure of a lane that does not fit alone."""
    tokens = len(lane.tokens) + len(lane.source or ())
    many = f"{rows} rows of it" if rows > 1 else "it alone"
    why = f" ({shortage})" if str(shortage) else ""
    return events.Failed(lane.name, "memory", f"not enough memory for a prompt of {tokens} tokens, {many}{why}")
