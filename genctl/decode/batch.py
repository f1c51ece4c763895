"""A batch: lanes whose rows share a cache, a mask and one forward pass per step.

Rows are aligned to the right, with padding before the shorter ones. Between passes, rows are reordered, leave and join.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genctl import events
from genctl.decode.batch_cache import BatchCache, CacheObserver
from genctl.decode.lane import LaneState, OutOfMemory, raise_shortage, shortages
from genctl.decode.runtime import ModelRuntime, Pass
from genctl.decode.score import ModelScores
from genctl.decode.step_costs import PassPlan, never_pays
from genctl.decode.transfer import to_device
from genctl.decode.types import Prefix
from genctl.errors import GenctlError

if TYPE_CHECKING:
    from genctl.decode.choose import LanesChosen


class Batch:
    """The rows of several lanes."""

    def __init__(self, model: ModelRuntime, watcher: CacheObserver | None = None) -> None:
        self.model, self.watcher = model, watcher
        self.states: list[LaneState] = []
        self.kv = BatchCache(model)
        self.ahead: ModelScores | OutOfMemory | GenctlError | None = None  # of the next pass, if it was run ahead

    def clear(self) -> list[LaneState]:
        """Empty the batch. Returns the lanes that have not ended: they continue in other batches."""
        unfinished = [state for state in self.states if state.alive]
        self.states, self.kv, self.ahead = [], BatchCache(self.model), None
        return unfinished

    def accepts(self, state: LaneState) -> bool:
        """Whether a lane may share this batch's passes without any change of scores."""
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
        """Whether a lane drafts nothing, or only drafts that a pass over several rows can verify."""
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
        """The prompt of each lane that just ended; and prompt and text, if it was the only lane and had one row.

        The last token was never read. Call this before `arrange`; it may crop the cache, which is not used afterwards.
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
            beyond = columns - tokens.shape[1]  # of a rejected draft, or of one within which the row ended
            if tokens.shape[1] > prompt.shape[1] and (not beyond or state.fed_draft):
                cache = self.kv.cache.unshared()
                cache.crop(beyond)
                nothing = state.prefix.logits[:, :0]  # the scores at its end are not needed
                yield Prefix(tokens, cache, nothing, source=state.prefix.source)

    def run_ahead(self, chosen: Sequence[LanesChosen]) -> None:
        """Run the next pass before the host knows the chosen tokens, where that saves time and is possible.

        Rows stay in their places until then, so a row that turns out to have ended wastes one step.
        """
        kv, states = self.kv, self.states
        known = [each.next_tokens for each in chosen if each.next_tokens is not None]
        if (
            kv.cache is None
            or self.watcher is not None
            or not self.model.runs_ahead
            or kv.held != [(state, state.row_count) for state in states]
            or self.model.wants_history(kv.columns)
            # a row that reaches max_new_tokens ends for certain, perhaps because the context is full
            or any(state.live.written + 1 >= state.lane.max_new_tokens for state in states)
            or len(known) < len(chosen)
        ):
            return
        try:
            self.ahead = self._scores(torch.cat(known))
        except OutOfMemory as error:
            self.ahead = error.without_frames()
        except GenctlError as error:  # reported after this step's tokens, as if the pass had not been run ahead
            self.ahead = error

    def draft(self) -> Iterator[events.Event]:
        """Let lanes draft tokens for the next pass; Failed for each whose drafter fails. Raises OutOfMemory."""
        drafting = [state for state in self.states if state.alive and state.drafts and not state.drafts.rests()]
        if not drafting or self.ahead is not None:
            return  # no lane drafts, or the next pass has been run
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
            self.clear()  # frees the cache even if something still refers to the batch
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
        """The scores of one pass. `tokens` int64 [N] feeds one token to each row; None: all that it has not read."""
        try:
            given = self._next_pass(tokens)
            output = self.model(given)
        except (MemoryError, RuntimeError) as error:
            raise_shortage(error)
            raise
        if given.cache is not None and given.places is None:
            self.kv.columns += given.feed.shape[1]
            if self.kv.records_past and all(state.draft is None for state in self.states):
                given.cache.crop(0)  # no tokens can be rejected or taken back: windows drop what they no longer see
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
        # `full` does not wait for the device
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
