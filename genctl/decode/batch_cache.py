"""The cache of a batch: arranging its rows, observing it after each pass, and how many rows fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genctl import events
from genctl.decode.cache.cache import Cache, run_of
from genctl.decode.cache.layer import CROSS
from genctl.decode.lane import LaneState
from genctl.decode.runtime import ModelRuntime, Pass, Passed, TokenPlaces
from genctl.decode.transfer import to_device
from genctl.decode.types import Lane, Sources, join_sources

ROOM = 512  # maximum number of free columns that are allocated at once
SHARE = 0.5  # of free memory; activations and growing buffers need the rest
MOST = {"cpu": 32, "cuda": 256}  # beyond this the time of a pass grows in proportion to its rows


class BatchCache:
    """The keys and values of a batch's rows, in their order, and the padding before them."""

    def __init__(self, model: ModelRuntime) -> None:
        self.model = model
        self.cache: Cache | None = None  # None if the model has none: every pass then reads everything again
        self.records_past = False  # whether its windows drop nothing until the next `crop`
        self.columns = 0
        self.held: list[tuple[LaneState, int]] = []  # the lanes of the last pass in order, and each one's rows
        self.rows = 0  # of all these lanes
        self.pads: dict[LaneState, int] = {}  # columns of padding before a lane's tokens
        self.gaps: dict[LaneState, int] = {}  # empty columns after a lane's tokens, after a ragged pass
        self.reordered: list[int] = []  # the previous places of the rows, if any was moved or copied
        self.sources: Sources | None = None
        self._source_rows: list[tuple[LaneState, int]] = []  # the lanes and counts that `sources` was built from
        self._padding: tuple[list[int], Tensor] | None = None  # the last pads, and the same on the device

    def remaining(self, states: Sequence[LaneState]) -> list[LaneState]:
        """The lanes that have not ended. The last ones move to the places of ended ones, so few rows move."""
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
        for state, (held, rows) in zip(states, self.held, strict=True):
            if state is not held or not state.alive or state.fed_draft:
                return False
            if not state.mode.one_row and (state.draft is not None or state.parents != [*range(rows)]):
                return False
        self.reordered = []
        return True

    def arrange(self, states: list[LaneState]) -> None:
        """Bring the cache into the order of `states` and of the parents that their last choices continue."""
        if states[0].prefix.cache is not None:
            self._arrange(states)
        else:
            longest = max(state.fed_length for state in states)
            self.pads = {state: longest - state.fed_length for state in states}
        self.held = [(state, state.row_count) for state in states]
        self.rows = sum(count for _, count in self.held)
        if self.model.is_encoder_decoder:
            if self.held == self._source_rows:
                return
            self._source_rows = self.held
            prefixes = [state.prefix for state in states]
            cross = [None if prefix.cache is None else prefix.cache.cross for prefix in prefixes]
            sources = [prefix.source for prefix in prefixes if prefix.source is not None]
            counts = [state.row_count for state in states]
            group = self.model.abilities.shares_source and len(counts) > 1 and len(set(counts)) == 1
            self.sources = join_sources(sources, cross, counts, group=group)

    def places_of(self, states: Sequence[LaneState]) -> list[int]:
        """For each row of the next pass, the row of the last pass that it continues; only lanes that were in both."""
        places, at = {}, 0
        for state, count in self.held:
            places[state], at = at, at + count
        lanes = [state for state in states if state in places]
        return [places[state] + parent for state in lanes for parent in state.parents for _ in range(state.branches)]

    def padding(self, states: Sequence[LaneState]) -> Tensor:
        """Columns of padding before the tokens of each row, int64 [N]; the same tensor while they do not change."""
        pads = [self.pads[state] for state in states for _ in range(state.row_count)]
        if self._padding is None or self._padding[0] != pads:
            self._padding = pads, to_device(pads, self.model.device)
        return self._padding[1]

    def _arrange(self, states: list[LaneState]) -> None:
        held = {state for state, _ in self.held}
        before = [state for state in states if state in held]
        joining = states[len(before) :]
        room = max(state.lane.max_new_tokens - state.live.written for state in states)
        prefix = states[0].prefix.cache
        if prefix is not None and not prefix.is_fixed:
            room = min(ROOM, room)
        parts = []
        if before:
            assert self.cache is not None
            rows = self.places_of(before)
            spare = min(self.pads[state] for state in before)
            self.reordered = [] if rows == [*range(self.rows)] else rows
            if spare or self.reordered:
                index = to_device(rows, self.model.device)
                if spare or joining or [(state, state.row_count) for state in before] != self.held:
                    self.cache = self.cache.keep(rows, index, room=0 if joining else room, drop=spare)
                else:  # rows move only within their lane, whose rows share the prompt
                    since = min(self.pads[state] + state.prefix.tokens.shape[1] for state in before)
                    self.cache = self.model.reorder(self.cache, index, since)
            self.pads = {state: self.pads[state] - spare for state in before}
            self.columns -= spare
            # remove rejected draft tokens
            gaps = {state: self.gaps.get(state, 0) + state.rejected for state in before}
            beyond = min(gaps.values())
            self.cache.crop(beyond)
            self.columns -= beyond
            self.gaps = {state: gap - beyond for state, gap in gaps.items() if gap > beyond}
            parts.append(self.cache)
        if joining:
            self.align(before)
            shares_prompt = self._shares_prompt(states, before)
            if parts and not shares_prompt:
                parts = [parts[0].unshared()]
            lengths = {state: state.read for state in joining}
            parts += self._joining(joining, room, shares_prompt, alone=len(states) == 1, whole=not before)
            self.cache = parts[0].merge(parts[1:], room=room)
            # a merged cache takes its form from its first part
            if any(state.lane.strategy.traits.drafts or state.mode.drafting is not None for state in states):
                self.cache.activate_past_recording()
            self.records_past = self.cache.records_past
            lengths |= {state: self.columns - self.pads[state] for state in before}
            self.columns = max(self.columns if before else 0, *lengths.values())  # after `align` all rows may have pads
            self.pads = {state: self.columns - length for state, length in lengths.items()}

    # -- ragged passes: rows are fed different numbers of tokens -------------------------------------------------------

    def align(self, states: Sequence[LaneState]) -> None:
        """Shift rows to the right so that their tokens end in the last column."""
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

    def ragged_pass(self, states: Sequence[LaneState]) -> Pass:
        """A pass that feeds each row its newest token and its draft: N tokens in all, each a row of the pass.

        A token attends to the columns of its row up to its own: bool [N, C]. `columns` and `gaps` count them already.
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
        new, self.columns = count - self.columns, count
        self.gaps = {state: count - end for state, end in ends.items() if end < count}
        made = to_device([*rows, *columns, *tokens, *pads], self.model.device).view(4, -1)
        own, before = made[1, :, None], made[3, :, None]
        every = torch.arange(count, device=made.device)
        mask = (every <= own) & (every >= before)
        return Pass(made[2, :, None], self.cache, mask, own - before, keep=1, places=TokenPlaces(made[:2], new))

    # -- lanes that join -----------------------------------------------------------------------------------------------

    def _joining(
        self, joining: list[LaneState], room: int, shares_prompt: bool, *, alone: bool, whole: bool
    ) -> list[Cache]:
        """The caches of lanes that join, in order; adjacent lanes whose prompts were read in one pass share one.

        `alone`: a single lane joins an empty batch; `whole`: the batch is empty.
        """
        parts: list[Cache] = []
        at = 0
        while at < len(joining):
            # lanes with one row that continues its prompt, and without drafts
            plain = takewhile(
                lambda one: one.row_count == 1 and one.own is None and not one.lane.strategy.traits.drafts, joining[at:]
            )
            run = [] if shares_prompt else run_of(state.prefix.cache for state in plain)
            if run:
                index = to_device([row.row for row in run], self.model.device)
                own_room = room if whole and len(run) == len(joining) else 0  # otherwise the merge allocates it
                parts.append(run[0].whole.select(index, room=own_room, drop=min(row.pad for row in run)))
            else:
                parts.append(self._fork(joining[at], room, shares_prompt, alone=alone))
            at += max(len(run), 1)
        return parts

    def _shares_prompt(self, states: list[LaneState], before: list[LaneState]) -> bool:
        """Whether all rows continue one prompt and may share its keys and values."""
        prefix = states[0].prefix
        return (
            sum(state.row_count for state in states) > 1
            and prefix.cache is not None
            and prefix.cache.is_shareable
            and (not before or (self.cache is not None and self.cache.is_shared))
            and all(one.prefix is prefix and one.own is None and not one.lane.strategy.traits.drafts for one in states)
            and self.model.abilities.shares_prompt
        )

    def _fork(self, state: LaneState, room: int, shares_prompt: bool, *, alone: bool) -> Cache:
        """The cache of a lane that joins: its prompt's, repeated for its rows, or the one from `reread`."""
        device = self.model.device
        if state.own is not None:  # it has a row of its own for each row of the lane
            own, state.own = state.own, None
            if not alone or not (own.is_fixed or own.cross):  # a merge copies it; growing buffers need no room
                return own.with_layers(own.layers)
            return own.select(torch.arange(state.row_count, device=device), room=room)
        part = state.prefix.cache
        assert part is not None
        if shares_prompt:
            return part.share(state.row_count, room)
        rows = torch.zeros(state.row_count, dtype=torch.long, device=device)
        if alone:
            return part.continued(rows, room) if state.row_count == 1 else part.select(rows, room=room)
        return part.select(rows) if state.row_count > 1 else part  # a merge copies it


class CacheObserver:
    """Observes every pass of `forward` and the cache after it, until closed."""

    def __init__(self, forward: ModelRuntime) -> None:
        self.forward = forward
        self.passed: Passed | None = None  # the last pass
        forward.watch = self

    def close(self) -> None:
        """Stop observing."""
        self.forward.watch = None

    def __call__(self, passed: Passed) -> None:
        """Record a pass."""
        self.passed = passed

    def read(self, lanes: Sequence[str], step: int, reordered: Sequence[int] = ()) -> events.CacheRead:
        """The last pass as an event. `lanes` names the lane of each row."""
        passed = self.passed
        assert passed is not None
        cache, inputs = passed.cache, passed.inputs
        fed = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        assert fed is not None
        mask = inputs.get("decoder_attention_mask" if self.forward.is_encoder_decoder else "attention_mask")
        count = int(fed.shape[1])
        layers = [] if cache is None else cache.describe()
        for layer in layers:  # the columns of this pass; cross-attention is computed once, with the prompt
            layer["new"] = (layer["shape"][2] if passed.first else 0) if layer["kind"] == CROSS else count
        columns = tuple(range(passed.past, passed.past + count))
        given = events.Given(_rows(fed) or (), passed.past, columns, _rows(inputs.get("position_ids")), _rows(mask))
        reserved = 0 if cache is None else cache.reserved()
        lane = lanes[0] if lanes else ""
        return events.CacheRead(lane, step, tuple(layers), given, tuple(lanes), tuple(reordered), reserved)


def _rows(tensor: Any) -> tuple[tuple[int, ...], ...] | None:
    return tuple(map(tuple, tensor.tolist())) if isinstance(tensor, Tensor) and tensor.dim() == 2 else None


def available(device: torch.device) -> int | None:
    """Free bytes on a device, including what torch has reserved and does not use; None if unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def fitting(forward: ModelRuntime, lane: Lane, columns: int) -> int:
    """How many lanes like this one to decode at once, if each grows to `columns` tokens.

    Reads one token to measure a row's cache.
    """
    most = MOST.get(forward.device.type, 16)
    free = available(forward.device)
    if free is None:
        return min(16, most)
    source = None if lane.source is None else forward.encode(lane.source[:1])
    cache = forward.prefill(lane.tokens[:1], source, use_cache=lane.use_cache).cache
    bytes_of_row = 0 if cache is None else sum(_grown(part, columns) for part in cache.describe())
    if not bytes_of_row:  # without a cache every pass reads all tokens, so activations grow with the length
        bytes_of_row = columns * int(getattr(forward.config.get_text_config(decoder=True), "hidden_size", 1024)) * 16
    fits = int(free * SHARE / (bytes_of_row * max(int(lane.strategy.max_rows), 1)))
    return max(1, min(int(most), fits))


def _grown(part: dict[str, Any], columns: int) -> int:
    """Bytes of a layer's cache for `columns` tokens, in proportion to those for one token; a window limits them."""
    if part["kind"] == "recurrent state":
        return int(part["bytes"])
    return int(part["bytes"]) * min(columns, int(part.get("window", columns))) // int(part["shape"][2])
