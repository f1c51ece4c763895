"""Lanes whose rows go through the model together: one cache, one mask, one forward pass per step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from genctl import events
from genctl.decode import cache as caches
from genctl.decode import shared_prompt
from genctl.decode.cache import Cache
from genctl.decode.cache_observer import CacheObserver
from genctl.decode.encoder_inputs import Sources, join_sources
from genctl.decode.lane import LaneState, Said
from genctl.decode.out_of_memory import shortages
from genctl.decode.runtime import ModelRuntime, Output
from genctl.decode.transfer import to_device
from genctl.errors import GenctlError

ROOM = 512  # columns a cache is given at once beyond what it holds, at most


class Batch:
    """The rows of several lanes. Between steps rows are reordered, lanes leave and others join."""

    def __init__(self, model: ModelRuntime, watcher: CacheObserver | None = None) -> None:
        self.model = model
        self.watcher = watcher
        self.states: list[LaneState] = []
        self.clear()

    def clear(self) -> list[LaneState]:
        """Forget everything. Returns the lanes that have not ended, which go on elsewhere."""
        left = [state for state in self.states if state.alive]
        self.states = []
        self.cache: Cache | None = None
        self.held: list[tuple[LaneState, int]] = []  # whose rows were in the last pass, in order, and how many
        self.columns = 0  # of the cache
        self.pads: dict[LaneState, int] = {}  # columns of padding before a lane's tokens
        self._padding: tuple[list[int], Tensor] | None = None  # the last pads, and those on the device
        self.sources: Sources | None = None
        self.layout: list[tuple[LaneState, int]] = []  # for which lanes and counts `sources` was made
        self.reordered: list[int] = []  # where the rows were before the pass, if any was moved or copied
        return left

    def welcomes(self, state: LaneState) -> bool:
        """Whether a lane may share this batch's passes without a change in what it receives."""
        if not self.states:
            return True
        other = self.states[0]
        if (state.lane.use_cache, state.lane.cache) != (other.lane.use_cache, other.lane.cache):
            return False
        if state.lane.strategy.drafts or other.lane.strategy.drafts or not self.model.together:
            return False
        cache = state.prefix.cache
        if cache is not None and not caches.mergeable(cache):
            return False
        if any(_source_length(state) != _source_length(one) for one in self.states) and not self.model.pads_sources:
            return False
        if all(state.reach == one.reach for one in self.states):
            return True
        # where frequencies depend on the length, only texts that stay below it may be of different lengths
        return self.model.pads and all(_end(one) <= self.model.bound for one in (state, *self.states))

    def join(self, state: LaneState) -> None:
        """Take a lane in: what its prefill said is what it chooses from first."""
        self.states.append(state)

    @property
    def started(self) -> bool:
        """Whether some of its lanes have been fed."""
        return any(state.alive for state, _ in self.held)

    def fail(self, error: GenctlError) -> Iterator[events.Event]:
        """End every lane."""
        for state in self.clear():
            yield state.fail(error)

    # -- the cache -----------------------------------------------------------------------------------------------------

    def arrange(self) -> None:
        """Bring the cache into the order that the last choices ask for. Raises OutOfMemory."""
        self.states = [state for state in self.states if state.alive]
        if not self.states:
            return
        with shortages():
            if self.states[0].prefix.cache is not None:
                self._arrange_cache()
            else:
                longest = max(state.reach for state in self.states)
                self.pads = {state: longest - state.reach for state in self.states}
            self.held = [(state, state.rows) for state in self.states]
            if self.model.is_encoder_decoder:
                self._arrange_sources()

    def _arrange_cache(self) -> None:
        rows: list[int] = []
        at = 0
        for state, count in self.held:
            if state.alive:
                rows += [at + parent for parent in state.reordered]
            at += count
        before = [state for state, _ in self.held if state.alive]
        joining = self.states[len(before) :]
        room = max(state.lane.max_new_tokens - state.live.rows.written for state in self.states)
        if not caches.fixed(self.states[0].prefix.cache):
            room = min(ROOM, room)
        parts, spare = [], 0
        if before:
            assert self.cache is not None
            spare = min(self.pads[state] for state in before)
            self.reordered = [] if rows == list(range(at)) else rows
            if spare or self.reordered:
                index = to_device(rows, self.model.device)
                if spare or joining or [(state, state.rows) for state in before] != self.held:
                    self.cache = caches.select(self.cache, index, room=0 if joining else room, drop=spare)
                else:  # rows move within their lanes, whose prompts are the same for all their rows
                    since = min(self.pads[state] + state.prefix.tokens.shape[1] for state in before)
                    self.cache = caches.reorder(self.cache, index, since)
            # a lane that drafts is alone in its batch, and so are those with branches of one length
            rejected = before[0].fed_draft - before[0].accepted if before[0].fed_draft else 0
            caches.crop(self.cache, rejected)
            self.columns -= spare + rejected
            self.pads = {state: self.pads[state] - spare for state in before}
            parts.append(self.cache)
        if joining:
            together = self._together(before)
            if parts and not together:
                parts = [shared_prompt.unshared(parts[0])]
            lengths = {state: state.read for state in joining}
            parts += [self._fork(state, room, together) for state in joining]
            self.cache = caches.merge(parts, room=room)
            lengths |= {state: self.columns - self.pads[state] for state in before}
            self.columns = max(lengths.values())
            self.pads = {state: self.columns - length for state, length in lengths.items()}

    def _together(self, before: list[LaneState]) -> bool:
        """Whether all rows continue one prompt, whose keys and values they may then share."""
        prefix, states = self.states[0].prefix, self.states
        return (
            sum(state.rows for state in states) > 1
            and (not before or shared_prompt.is_shared(self.cache))
            and all(one.prefix is prefix and one.own is None and not one.lane.strategy.drafts for one in states)
            and shared_prompt.shareable(prefix.cache)
            and self.model.shares(prefix)
        )

    def _fork(self, state: LaneState, room: int, together: bool) -> Cache:
        """The cache of a lane that joins: its prompt's, for as many rows as it has."""
        device = self.model.device
        if state.own is not None:  # its rows were read again: they differ, and there are as many as it needs
            part, state.own = state.own, None
            return caches.select(part, torch.arange(state.rows, device=device), room=room)
        part = caches.self_part(state.prefix.cache)
        if together:
            return shared_prompt.share(part, state.rows, room)
        rows = torch.zeros(state.rows, dtype=torch.long, device=device)
        alone = state.rows == 1 and len(self.states) == 1  # else what is needed is made by the merge
        part = (caches.continued if alone else caches.select)(part, rows, room=room)
        return caches.rewindable(part) if state.lane.strategy.drafts else part

    def _arrange_sources(self) -> None:
        if self.held == self.layout:
            return
        self.layout = self.held
        prefixes = [state.prefix for state in self.states]
        cross = [None if prefix.cache is None else prefix.cache.cross_attention_cache for prefix in prefixes]
        sources = [prefix.source for prefix in prefixes if prefix.source is not None]
        counts = [state.rows for state in self.states]
        group = len(counts) > 1 and counts[0] > 1 and cross[0] is not None and self.model.groups(prefixes[0])
        self.sources = join_sources(sources, cross, counts, group=group)

    # -- the pass ------------------------------------------------------------------------------------------------------

    def feed(self) -> Iterator[events.Event]:
        """One forward pass for all lanes; CacheRead, if somebody watches. Raises OutOfMemory and ModelError."""
        if not self.states:
            return
        with shortages():
            output = self._pass()
            said = Said.of(output.logits, output.layers)
        if self.watcher is not None:
            lanes = [state.lane.name for state in self.states for _ in range(state.rows)]
            yield self.watcher.read(lanes, max(state.step for state in self.states), self.reordered)
        at = 0
        for state in self.states:
            rows = slice(at, at := at + state.rows)
            if self.cache is not None:
                state.hear(said, rows)
            else:  # everything was read again: only what follows the newest token is news
                state.hear(said.cut(rows, 1 + state.drafted), slice(0, state.rows))

    def _pass(self) -> Output:
        model, device = self.model, self.model.device
        if self.cache is None:
            feed = self._everything()
            keep = 1 + max(state.drafted for state in self.states)
            start = 0
        else:
            feed = self._unfed()
            keep, start = feed.shape[1], self.columns
        if feed.shape[1] == 1:
            columns = torch.full((1, 1), start, device=device)
        else:
            columns = torch.arange(start, start + feed.shape[1], device=device)[None]
        mask, positions = None, columns
        if any(self.pads.values()):
            pads = self._before(device)[:, None]
            whole = torch.arange(start + feed.shape[1], device=device)[None]
            mask, positions = (whole >= pads).long(), (columns - pads).clamp(min=0)
        output = model(
            feed,
            self.cache,
            mask=mask,
            positions=positions,
            sources=self.sources,
            keep=keep,
            hidden=any(state.lane.strategy.needs_hidden for state in self.states),
            first=self.cache is None,
            history=self._everything() if self.cache is not None and model.wants_history(start) else None,
        )
        if self.cache is not None:
            self.columns += feed.shape[1]
        return output

    def _unfed(self) -> Tensor:
        """What the model has not read of each row, int64 [N, F]."""
        newest = [state.newest for state in self.states]
        if None not in newest:
            return to_device([token for tokens in newest for token in tokens or ()], self.model.device)[:, None]
        parts = [state.unfed() for state in self.states]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _before(self, device: torch.device) -> Tensor:
        """Columns of padding before the tokens of each row, int64 [N]; the same tensor while they stay the same."""
        pads = [self.pads[state] for state in self.states for _ in range(state.rows)]
        if self._padding is None or self._padding[0] != pads:
            self._padding = pads, to_device(pads, device)
        return self._padding[1]

    def _everything(self) -> Tensor:
        """All tokens of all rows, int64 [N, T+D], padded on the left: what a model without a cache is fed."""
        padded = [torch.nn.functional.pad(state.whole(), (self.pads[state], 0)) for state in self.states]
        return padded[0] if len(padded) == 1 else torch.cat(padded)


def _end(state: LaneState) -> int:
    """The longest that a lane's rows can become, a draft included."""
    return state.length - state.live.rows.written + state.lane.max_new_tokens + max(state.drafted, 1)


def _source_length(state: LaneState) -> int:
    source = state.prefix.source
    return 0 if source is None else int(source.ids.shape[1])
