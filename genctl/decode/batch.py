"""Lanes whose rows go through the model together: one cache, one mask, one forward pass per step.

Rows are aligned to the right, with padding before the shorter ones; between passes rows are reordered, leave and join.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genctl import events
from genctl.decode.cache.cache import Cache, run_of
from genctl.decode.lane import LaneState
from genctl.decode.memory import OutOfMemory, raise_shortage, shortages
from genctl.decode.pass_prices import PassPlan, never_pays
from genctl.decode.runtime import CacheObserver, ModelRuntime, Pass, TokenPlaces, join_sources
from genctl.decode.score import ModelScores
from genctl.decode.transfer import to_device
from genctl.decode.types import Prefix, Sources
from genctl.errors import GenctlError

if TYPE_CHECKING:
    from genctl.decode.choose import LanesChosen

ROOM = 512  # maximum number of free columns that are allocated at once


class Batch:
    """The rows of several lanes."""

    def __init__(self, model: ModelRuntime, watcher: CacheObserver | None = None) -> None:
        self.model, self.watcher = model, watcher
        self.states: list[LaneState] = []
        self.kv = BatchCache(model)
        self.ahead: ModelScores | OutOfMemory | GenctlError | None = None  # what came of the next pass, if it was run

    def clear(self) -> list[LaneState]:
        """Empty the batch. Returns the lanes that have not ended: they continue in other batches."""
        unfinished = [state for state in self.states if state.alive]
        self.states, self.kv, self.ahead = [], BatchCache(self.model), None
        return unfinished

    def accepts(self, state: LaneState) -> bool:
        """Whether a lane may share this batch's passes without a change of its scores."""
        if not self.states:
            return True
        other, cache, abilities = self.states[0], state.prefix.cache, self.model.abilities
        all_states = (state, *self.states)
        traits = [one.lane.strategy.traits for one in all_states]
        lengths = [(0, 0) if one.prefix.source is None else one.prefix.source.ids.shape for one in all_states]
        if (
            (state.lane.use_cache, state.lane.cache) != (other.lane.use_cache, other.lane.cache)
            or not (abilities.together and self._shares(state) and self._shares(other))
            or (any(one.takes_back for one in traits) and (self.watcher or any(one.needs_hidden for one in traits)))
            or not (cache is None or cache.is_mergeable)
            or (len({*lengths}) > 1 and not abilities.pads_sources)  # measured on first use
        ):
            return False
        if len({peer.fed_length for peer in all_states}) == 1:
            return True
        # if rotary frequencies depend on the length, lengths may differ only below the bound
        longest = max(
            one.length - one.live.written + one.lane.max_new_tokens + max(one.drafted, 1) for one in all_states
        )
        return abilities.pads and longest <= self.model.bound

    def _shares(self, state: LaneState) -> bool:
        """Whether a lane drafts nothing, or what passes over several rows can check."""
        traits, cache = state.lane.strategy.traits, state.prefix.cache
        if not traits.drafts:
            return True
        one_each = traits.takes_back or state.mode.drafting is not None
        return one_each and self.model.abilities.ragged and cache is not None and cache.takes_places

    def fail(self, error: GenctlError) -> Iterator[events.Event]:
        """End every lane."""
        for state in self.clear():
            yield state.fail(error)

    def read_by_ended(self) -> Iterator[Prefix]:
        """What the model has read of each lane that just ended: its prompt, and of a single row the text up to its end.

        The last token was never read. Call it before `arrange`; the cache is not used afterwards.
        """
        for state in self.states:
            if state.alive or state.is_forgotten:
                continue
            yield state.prefix
            alone = len(self.states) == 1 and self.kv.held == [(state, 1)] and not any(self.kv.pads.values())
            if not alone or self.kv.cache is None or len(state.ended) != 1:
                continue
            prompt, columns = state.prefix.tokens, self.kv.columns
            written = torch.tensor([state.ended[0].tokens], dtype=torch.long, device=prompt.device)
            tokens = torch.cat([prompt, written], 1)[:, : columns - state.rejected]
            beyond = columns - tokens.shape[1]  # of a draft that was not accepted, or in which the row ended
            if tokens.shape[1] > prompt.shape[1] and (not beyond or state.fed_draft):
                cache = self.kv.cache.unshared()
                cache.crop(beyond)
                nothing = state.prefix.logits[:, :0]  # the scores at its end are not needed
                yield Prefix(tokens, cache, nothing, source=state.prefix.source)

    def run_ahead(self, chosen: Sequence[LanesChosen]) -> None:
        """Run the next pass before the host knows the tokens that were chosen, where that is of use and possible.

        Rows stay in their places until the host knows more: a row that turns out to have ended has one step in vain.
        """
        kv, states = self.kv, self.states
        known = [each.next_tokens for each in chosen if each.next_tokens is not None]
        if (
            kv.cache is None
            or self.watcher is not None
            or not self.model.runs_ahead
            or kv.held != [(state, state.row_count) for state in states]
            or self.model.wants_history(kv.columns)
            # a row at its last token ends for certain, perhaps because the context is full
            or any(state.live.written + 1 >= state.lane.max_new_tokens for state in states)
            or len(known) < len(chosen)
        ):
            return
        try:
            self.ahead = self._scores(torch.cat(known))
        except OutOfMemory as error:
            self.ahead = error.without_frames()
        except GenctlError as error:  # reported after the tokens of this step, as if the pass had been run after them
            self.ahead = error

    def draft(self) -> Iterator[events.Event]:
        """Let lanes draft what the next pass checks; Failed for each whose drafter fails. Raises OutOfMemory."""
        drafting = [state for state in self.states if state.alive and state.drafts and not state.drafts.rests()]
        if not drafting or self.ahead is not None:
            return  # nothing drafts, or the next pass has been run
        alive = [state for state in self.states if state.alive]
        rows, price = sum(state.row_count for state in alive), self.model.pass_price
        cache = self.kv.cache or drafting[0].prefix.cache
        if not (self._checks(alive) if rows > 1 else cache is None or cache.is_croppable):
            return
        by_strategy = any(state.lane.strategy.traits.drafts for state in drafting)
        if not by_strategy and (self.watcher is not None or never_pays(price, rows)):
            return
        plan = PassPlan(price, rows, cached=cache is not None)
        for state in drafting:
            try:
                with shortages():
                    state.propose(plan)
            except GenctlError as error:
                yield state.fail(error)

    def _checks(self, states: Sequence[LaneState]) -> bool:
        """Whether the next pass may feed these rows different numbers of tokens."""
        cache, held = self.kv.cache, {state for state, _ in self.kv.held}
        if cache is None or not (self.model.abilities.ragged and cache.takes_places) or not held.issuperset(states):
            return False
        return self.watcher is None and not any(state.lane.strategy.traits.needs_hidden for state in states)

    def arrange(self) -> None:
        """Remove ended lanes and bring the cache into the order of the last choices. Raises OutOfMemory."""
        if self.kv.stays(self.states):
            return
        self.states = self.kv.remaining(self.states)
        if not self.states:
            self.clear()  # frees the cache, whoever still holds the batch
            return
        with shortages():
            if isinstance(self.ahead, ModelScores):
                rows = self.kv.places_of(self.states)
                if rows != [*range(len(self.ahead.logits))]:
                    index = to_device(rows, self.model.device)
                    self.ahead = self.ahead.map(lambda tensor: tensor[index])
            self.kv.arrange(self.states)

    # -- the pass ------------------------------------------------------------------------------------------------------

    def feed(self) -> Iterator[events.Event]:
        """One forward pass for all lanes, unless it was run ahead; CacheRead if there is a watcher.

        Raises OutOfMemory and ModelError.
        """
        if not self.states:
            return
        scores, self.ahead = self.ahead, None
        if scores is None:
            scores = self._scores()
        elif isinstance(scores, Exception):
            raise scores
        if self.watcher is not None:
            lanes = [state.lane.name for state in self.states for _ in range(state.row_count)]
            yield self.watcher.read(lanes, max(state.step for state in self.states), self.kv.reordered)
        at = 0
        ragged = self.kv.cache is not None and len(scores.logits) > self.kv.rows
        for state, count in self.kv.held:
            fed = len(state.to_feed()[0]) if ragged else 1
            rows = slice(at, at := at + count * fed)
            if fed > 1:  # the tokens of its row are rows of the pass
                state.receive(ModelScores(scores.logits[rows].transpose(0, 1)), slice(0, 1))
            elif self.kv.cache is not None:
                state.receive(scores, rows)
            else:  # everything was read again: only the scores after the newest tokens are new
                state.receive(scores.cut(rows, 1 + state.drafted), slice(0, state.row_count))

    def _scores(self, tokens: Tensor | None = None) -> ModelScores:
        """The scores of one pass, in which each row is fed its own of `tokens`, int64 [N], or what it has not read."""
        try:
            given = self._next_pass(tokens)
            output = self.model(given)
        except (MemoryError, RuntimeError) as error:
            raise_shortage(error)
            raise
        if given.cache is not None and given.places is None:
            self.kv.columns += given.feed.shape[1]
            if given.feed.shape[1] == 1 and given.cache.records_past:
                given.cache.crop(0)  # nothing of this pass will be taken back: windows drop what they no longer see
        return ModelScores(output.logits, output.layers)

    def _next_pass(self, tokens: Tensor | None) -> Pass:
        model, device = self.model, self.model.device
        hidden = any(state.lane.strategy.traits.needs_hidden for state in self.states)
        drafted = any(state.draft is not None for state in self.states)
        if self.kv.cache is not None and len(self.states) > 1 and (self.kv.gaps or drafted):
            if self._checks(self.states):
                return self.kv.ragged_pass(self.states)
            self.kv.align(self.states)
        cache = self.kv.cache
        if cache is None:
            feed, start = self._everything(), 0
            keep = 1 + max(state.drafted for state in self.states)
        else:
            feed, start = self._unfed() if tokens is None else tokens[:, None], self.kv.columns
            keep = feed.shape[1]
        end = start + feed.shape[1]
        # a number that is filled in does not wait for the device
        columns = torch.full((1, 1), start, device=device) if end == start + 1 else None
        if columns is None:
            columns = torch.arange(start, end, device=device)[None]
        mask, positions = None, columns
        if any(self.kv.pads.values()):
            pads = self.kv.padding(self.states)[:, None]
            all_columns = torch.arange(end, device=device)[None]
            mask, positions = (all_columns >= pads).long(), (columns - pads).clamp(min=0)
        history = self._everything() if cache is not None and model.wants_history(start) else None
        return Pass(feed, cache, mask, positions, self.kv.sources, cache is None, keep, hidden, history)

    def _unfed(self) -> Tensor:
        """The tokens of each row that the model has not read, int64 [N, F]."""
        if all(state.draft is None and state.known_scores is None for state in self.states):
            newest = [node[0] for state in self.states for node in state.live.row_tokens.nodes if node is not None]
            return to_device(newest, self.model.device)[:, None]
        parts = [state.unfed() for state in self.states]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _everything(self) -> Tensor:
        """All tokens of all rows, int64 [N, T+D], padded on the left: the input of a model without a cache."""
        padded = [torch.nn.functional.pad(state.all_tokens(), (self.kv.pads[state], 0)) for state in self.states]
        return padded[0] if len(padded) == 1 else torch.cat(padded)


class BatchCache:
    """The keys and values of a batch's rows in order, and the padding before them."""

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
        for state, (held, rows) in zip(states, self.held, strict=True):
            if state is not held or not state.alive or state.fed_draft:
                return False
            if not state.mode.one_row and (state.draft is not None or state.parents != [*range(rows)]):
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
                else:  # rows move within their lanes, whose prompts are the same for all their rows
                    since = min(self.pads[state] + state.prefix.tokens.shape[1] for state in before)
                    self.cache = self.model.reorder(self.cache, index, since)
            self.pads = {state: self.pads[state] - spare for state in before}
            self.columns -= spare
            # take back the tokens of drafts that were not accepted
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
            # a merge has the form of its first part
            if any(state.lane.strategy.traits.drafts or state.mode.drafting is not None for state in states):
                self.cache.activate_past_recording()
            lengths |= {state: self.columns - self.pads[state] for state in before}
            self.columns = max(self.columns if before else 0, *lengths.values())  # after `align` all may have padding
            self.pads = {state: self.columns - length for state, length in lengths.items()}

    # -- rows of different numbers of tokens ---------------------------------------------------------------------------

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

    def ragged_pass(self, states: Sequence[LaneState]) -> Pass:
        """A pass that feeds each row its newest token and its draft: T tokens in all, each a row of the pass.

        A token sees the columns of its row up to its own, bool [T, C]. The rows have the tokens from then on.
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
        """The caches of lanes that join, in order. Prompts that were read in one pass are one of them.

        `alone`: a single lane joins an empty batch; `whole`: the batch is empty.
        """
        parts: list[Cache] = []
        at = 0
        while at < len(joining):
            # of lanes with one row, which continues its prompt without a draft
            plain = takewhile(
                lambda one: one.row_count == 1 and one.own is None and not one.lane.strategy.traits.drafts, joining[at:]
            )
            run = [] if shares_prompt else run_of(state.prefix.cache for state in plain)
            if run:
                index = to_device([row.row for row in run], self.model.device)
                own_room = room if whole and len(run) == len(joining) else 0  # else a merge makes it
                parts.append(run[0].whole.select(index, room=own_room, drop=min(row.pad for row in run)))
            else:
                parts.append(self._fork(joining[at], room, shares_prompt, alone=alone))
            at += max(len(run), 1)
        return parts

    def _shares_prompt(self, states: list[LaneState], before: list[LaneState]) -> bool:
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

    def _fork(self, state: LaneState, room: int, shares_prompt: bool, *, alone: bool) -> Cache:
        """The cache of a lane that joins: its prompt's, for as many rows as it has."""
        device = self.model.device
        if state.own is not None:  # its rows were read again: they differ, and none is missing
            own, state.own = state.own, None
            if not alone or not (own.is_fixed or own.cross):  # a merge copies it, and buffers grow
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
