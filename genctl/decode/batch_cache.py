"""The cache of a batch: the keys and values of its rows in order, and the padding before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.lane import LaneState
from genctl.decode.runtime import ModelRuntime, TokenPlaces
from genctl.decode.transfer import to_device
from genctl.decode.types import Sources

ROOM = 512  # maximum number of free columns that are allocated at once


class BatchCache:
    """Rows of several lanes, aligned to the right. Between passes rows are reordered, leave and join."""

    def __init__(self, model: ModelRuntime) -> None:
        self.model = model
        self.cache: Cache | None = None  # None if the model has none: every pass then reads everything again
        self.columns = 0
        self.held: list[tuple[LaneState, int]] = []  # the lanes of the last pass in order, and each one's rows
        self.rows = 0  # of all of them
        self.pads: dict[LaneState, int] = {}  # columns of padding before a lane's tokens
        self.gaps: dict[LaneState, int] = {}  # columns after a lane's tokens, where others have more than it
        self.reordered: list[int] = []  # the previous places of the rows, if any was moved or copied
        self.sources: Sources | None = None
        self._source_rows: list[tuple[LaneState, int]] = []  # the lanes and counts that `sources` was built from
        self._padding: tuple[list[int], Tensor] | None = None  # the last pads, and the same on the device

    def remaining(self, states: Sequence[LaneState]) -> list[LaneState]:
        """The lanes that have not ended. The last ones take the places of ended ones, so that few rows move."""
        held = [state for state, _ in self.held]
        if held == states and all([state.alive for state in states]):
            return held
        joining = [state for state in states if state.alive and state not in held]
        if any(rows != 1 or state.row_count != 1 for state, rows in self.held if state.alive):
            return [state for state in held if state.alive] + joining
        while held and not all(state.alive for state in held):
            last = held.pop()
            if last.alive:
                held[next(place for place, state in enumerate(held) if not state.alive)] = last
        return held + joining

    def stays(self, states: Sequence[LaneState]) -> bool:
        """Whether every row stays in its place."""
        if self.cache is None or len(states) != len(self.held):
            return False
        if not all(map(_stays, states, self.held)) or not all([state.alive for state in states]):
            return False
        self.reordered = []
        return True

    def arrange(self, states: list[LaneState]) -> None:
        """Reorder the cache to the parents of the lanes' last choices."""
        if states[0].prefix.cache is not None:
            self._arrange(states)
        else:
            longest = max(state.fed_length for state in states)
            self.pads = {state: longest - state.fed_length for state in states}
        self.held = [(state, state.row_count) for state in states]
        self.rows = sum(count for _, count in self.held)
        if self.model.is_encoder_decoder:
            self._arrange_sources(states)

    def places_of(self, states: Sequence[LaneState]) -> list[int]:
        """The row of the last pass that each row of the next one continues, for lanes that were in it."""
        places, at = {}, 0
        for state, count in self.held:
            places[state], at = at, at + count
        return [places[state] + parent for state in states if state in places for parent in state.reordered]

    def padding(self, states: Sequence[LaneState]) -> Tensor:
        """Columns of padding before the tokens of each row, int64 [N]; the same tensor while they stay the same."""
        pads = [self.pads[state] for state in states for _ in range(state.row_count)]
        if self._padding is None or self._padding[0] != pads:
            self._padding = pads, to_device(pads, self.model.device)
        return self._padding[1]

    def _arrange(self, states: list[LaneState]) -> None:
        held = {state for state, _ in self.held}
        before = [state for state in states if state in held]
        joining = states[len(before) :]
        rows = self.places_of(before)
        room = max(state.lane.max_new_tokens - state.live.written for state in states)
        prefix = states[0].prefix.cache
        if prefix is not None and not prefix.is_fixed:
            room = min(ROOM, room)
        parts, spare = [], 0
        if before:
            assert self.cache is not None
            spare = min(self.pads[state] for state in before)
            self.reordered = [] if rows == [*range(self.rows)] else rows
            if spare or self.reordered:
                index = to_device(rows, self.model.device)
                if spare or joining or [(state, state.row_count) for state in before] != self.held:
                    self.cache = self.cache.keep(rows, index, room=0 if joining else room, drop=spare)
                else:  # rows move within their lanes, whose prompts are the same for all their rows
                    since = min(self.pads[state] + state.prefix.tokens.shape[1] for state in before)
                    self.cache = self.model.reorder(self.cache, index, since)
            self.pads = {state: self.pads[state] - spare for state in before}
            self.columns -= spare
            self._reject(before)
            parts.append(self.cache)
        if joining:
            self.align(before)
            together = self._together(states, before)
            if parts and not together:
                parts = [parts[0].unshared()]
            lengths = {state: state.read for state in joining}
            parts += self._joining(states, joining, room, together)
            self.cache = parts[0].merge(parts[1:], room=room)
            # a merge has the form of its first part
            if any(state.lane.strategy.traits.drafts or state.mode.drafting is not None for state in states):
                self.cache.activate_past_recording()
            lengths |= {state: self.columns - self.pads[state] for state in before}
            self.columns = max(self.columns if before else 0, *lengths.values())  # after `align` all may have padding
            self.pads = {state: self.columns - length for state, length in lengths.items()}

    def _reject(self, states: list[LaneState]) -> None:
        """Take back the tokens of drafts that were not accepted."""
        assert self.cache is not None
        gaps = {state: self.gaps.get(state, 0) + state.rejected for state in states}
        beyond = min(gaps.values())
        self.cache.crop(beyond)
        self.columns -= beyond
        self.gaps = {state: gap - beyond for state, gap in gaps.items() if gap > beyond}

    def align(self, states: Sequence[LaneState]) -> None:
        """Let the tokens of all rows end in the last column."""
        if not self.gaps:
            return
        assert self.cache is not None
        moves, at = [], 0
        for state in states:
            gap = self.gaps.get(state, 0)
            moves += [(at + row, self.pads[state], gap) for row in range(state.row_count) if gap]
            at += state.row_count
            self.pads[state] += gap
        self.cache.shift(moves)
        self.gaps = {}

    def places(self, states: Sequence[LaneState]) -> tuple[Tensor, Tensor, Tensor, TokenPlaces]:
        """What a pass is given whose rows are fed different numbers of tokens, T in all.

        Returns the tokens and their positions, int64 [T, 1] each, the columns that each sees, bool [T, C], and where
        each goes. The rows have the tokens from then on.
        """
        tokens: list[int] = []
        rows: list[int] = []
        columns: list[int] = []
        pads: list[int] = []
        row, ends = 0, {}
        for state in states:
            first = self.columns - self.gaps.get(state, 0)
            for fed in state.to_feed():
                tokens += fed
                rows += [row] * len(fed)
                columns += range(first, first + len(fed))
                pads += [self.pads[state]] * len(fed)
                row += 1
            ends[state] = first + len(fed)
        count = max(ends.values())
        gaps = {state: count - end for state, end in ends.items() if end < count}
        new, self.columns, self.gaps = count - self.columns, count, gaps
        made = to_device([*rows, *columns, *tokens, *pads], self.model.device).view(4, -1)
        both, own, before = made[:2], made[1, :, None], made[3, :, None]
        every = torch.arange(count, device=made.device)
        return made[2, :, None], own - before, (every <= own) & (every >= before), TokenPlaces(both, new)

    def _joining(self, states: list[LaneState], joining: list[LaneState], room: int, together: bool) -> list[Cache]:
        """The caches of lanes that join, in order. Prompts that were read in one pass are one of them."""
        if self.model.device.type != "cuda":  # prompts of one pass lie apart (see `ModelRuntime.prefill_together`)
            return [self._fork(state, room, together, alone=len(states) == 1) for state in joining]
        from genctl.decode.cache.cache import run_of

        parts: list[Cache] = []
        at = 0
        while at < len(joining):
            rows = run_of([state.prefix.cache for state in takewhile(_is_plain, joining[at:])])
            if rows and not together:
                index = to_device([row.row for row in rows], self.model.device)
                own_room = room if len(rows) == len(states) else 0  # else a merge makes it
                parts.append(rows[0].whole.select(index, room=own_room, drop=min(row.pad for row in rows)))
                at += len(rows)
            else:
                parts.append(self._fork(joining[at], room, together, alone=len(states) == 1))
                at += 1
        return parts

    def _together(self, states: list[LaneState], before: list[LaneState]) -> bool:
        """Whether all rows continue one prompt, whose keys and values they may then share."""
        prefix = states[0].prefix
        return (
            sum(state.row_count for state in states) > 1
            and prefix.cache is not None
            and prefix.cache.is_shareable
            and (not before or (self.cache is not None and self.cache.is_shared))
            and all(one.prefix is prefix and one.own is None and not one.lane.strategy.traits.drafts for one in states)
            and self.model.abilities.shares_prompt
        )

    def _fork(self, state: LaneState, room: int, together: bool, *, alone: bool) -> Cache:
        """The cache of a lane that joins: its prompt's, for as many rows as it has."""
        device = self.model.device
        if state.own is not None:  # its rows were read again: they differ, and none is missing
            own, state.own = state.own, None
            if not alone or not (own.is_fixed or own.cross):  # a merge copies it, and buffers grow
                return own.with_layers(own.layers)
            return own.select(torch.arange(state.row_count, device=device), room=room)
        part = state.prefix.cache
        assert part is not None
        if together:
            return part.share(state.row_count, room)
        rows = torch.zeros(state.row_count, dtype=torch.long, device=device)
        if alone:
            part = part.continued(rows, room) if state.row_count == 1 else part.select(rows, room=room)
        elif state.row_count > 1:  # otherwise the merge copies it
            part = part.select(rows)
        return part

    def _arrange_sources(self, states: list[LaneState]) -> None:
        if self.held == self._source_rows:
            return
        self._source_rows = self.held
        prefixes = [state.prefix for state in states]
        cross = [None if prefix.cache is None else prefix.cache.cross for prefix in prefixes]
        sources = [prefix.source for prefix in prefixes if prefix.source is not None]
        counts = [state.row_count for state in states]
        group = self.model.abilities.shares_source and len(counts) > 1 and len(set(counts)) == 1
        from genctl.decode.encoder_inputs import join_sources

        self.sources = join_sources(sources, cross, counts, group=group)


def _stays(state: LaneState, held: tuple[LaneState, int]) -> bool:
    """Whether a lane's rows stay where they were in the last pass."""
    if state.mode.one_row:
        return state is held[0] and not state.fed_draft
    return state is held[0] and state.draft is None and not state.fed_draft and state.parents == [*range(held[1])]


def _is_plain(state: LaneState) -> bool:
    """Whether a lane that joins has one row, which continues its prompt without a draft."""
    return state.row_count == 1 and state.own is None and not state.lane.strategy.traits.drafts
