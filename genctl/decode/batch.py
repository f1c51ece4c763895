"""Lanes whose rows go through the model together: one cache, one mask, one forward pass per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genctl import events
from genctl.decode.batch_cache import BatchCache
from genctl.decode.cache.cache import Cache
from genctl.decode.lane import LaneState
from genctl.decode.memory import OutOfMemory, raise_shortage, shortages
from genctl.decode.pass_prices import PassPlan, never_pays
from genctl.decode.runtime import ModelRuntime, Output, Pass
from genctl.decode.score import ModelScores
from genctl.decode.transfer import to_device
from genctl.decode.types import Prefix
from genctl.errors import GenctlError

if TYPE_CHECKING:
    from genctl.decode.cache_observer import CacheObserver
    from genctl.decode.choose import LanesChosen


class Batch:
    """The rows of several lanes. Between steps rows are reordered, lanes leave and others join."""

    def __init__(self, model: ModelRuntime, watcher: CacheObserver | None = None) -> None:
        self.model = model
        self.watcher = watcher
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
        other = self.states[0]
        if (state.lane.use_cache, state.lane.cache) != (other.lane.use_cache, other.lane.cache):
            return False
        if not self.model.abilities.together or not all(self._shares(one) for one in (state, other)):
            return False
        traits = [one.lane.strategy.traits for one in (state, *self.states)]
        if any(one.takes_back for one in traits) and (self.watcher or any(one.needs_hidden for one in traits)):
            return False
        cache = state.prefix.cache
        if cache is not None and not cache.is_mergeable:
            return False
        if (
            any(_source_length(state) != _source_length(peer) for peer in self.states)
            and not self.model.abilities.pads_sources
        ):
            return False
        if len({peer.fed_length for peer in (state, *self.states)}) == 1:
            return True
        # if rotary frequencies depend on the length, lengths may differ only below the bound
        return self.model.abilities.pads and all(_end(peer) <= self.model.bound for peer in (state, *self.states))

    def _shares(self, state: LaneState) -> bool:
        """Whether a lane drafts nothing, or what passes over several rows can check."""
        traits, cache = state.lane.strategy.traits, state.prefix.cache
        if not traits.drafts:
            return True
        one_each = traits.takes_back or state.mode.drafting is not None
        return one_each and self.model.abilities.ragged and cache is not None and cache.takes_places

    def join(self, state: LaneState) -> None:
        """Add a lane. It chooses first from the scores of its prefill."""
        self.states.append(state)

    @property
    def started(self) -> bool:
        """Whether any live lane has been through a pass."""
        return any(state.alive for state, _ in self.kv.held)

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
        tokens = self._tokens_ahead(chosen)
        if tokens is None:
            return
        try:
            self.ahead = self._scores(tokens)
        except OutOfMemory as error:
            self.ahead = error.without_frames()
        except GenctlError as error:  # reported after the tokens of this step, as if the pass had been run after them
            self.ahead = error

    def _tokens_ahead(self, chosen: Sequence[LanesChosen]) -> Tensor | None:
        """The token of each row that the host does not know yet, int64 [N]; None if the next pass has to wait."""
        kv, states = self.kv, self.states
        if kv.cache is None or self.watcher is not None or not self.model.runs_ahead:
            return None
        if kv.held != [(state, state.row_count) for state in states] or self.model.wants_history(kv.columns):
            return None
        # a row at its last token ends for certain, perhaps because the context is full
        if any(state.live.written + 1 >= state.lane.max_new_tokens for state in states):
            return None
        parts = [each.next_tokens for each in chosen]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None

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
            output = self._pass(tokens)
        except (MemoryError, RuntimeError) as error:
            raise_shortage(error)
            raise
        return ModelScores(output.logits, output.layers)

    def _pass(self, tokens: Tensor | None) -> Output:
        model, device = self.model, self.model.device
        hidden = any(state.lane.strategy.traits.needs_hidden for state in self.states)
        drafted = any(state.draft is not None for state in self.states)
        if self.kv.cache is not None and len(self.states) > 1 and (self.kv.gaps or drafted):
            if self._checks(self.states):
                return self._ragged(self.kv.cache)
            self.kv.align(self.states)
        if self.kv.cache is None:
            feed = self._everything()
            keep = 1 + max(state.drafted for state in self.states)
            start = 0
        else:
            feed = self._unfed() if tokens is None else tokens[:, None]
            keep, start = feed.shape[1], self.kv.columns
        if feed.shape[1] == 1:
            columns = torch.full((1, 1), start, device=device)
        else:
            columns = torch.arange(start, start + feed.shape[1], device=device)[None]
        mask, positions = None, columns
        if any(self.kv.pads.values()):
            pads = self.kv.padding(self.states)[:, None]
            all_columns = torch.arange(start + feed.shape[1], device=device)[None]
            mask, positions = (all_columns >= pads).long(), (columns - pads).clamp(min=0)
        output = model(
            Pass(
                feed,
                self.kv.cache,
                mask,
                positions,
                self.kv.sources,
                first=self.kv.cache is None,
                keep=keep,
                hidden=hidden,
                history=self._everything() if self.kv.cache is not None and model.wants_history(start) else None,
            )
        )
        if self.kv.cache is not None:
            self.kv.columns += feed.shape[1]
        return output

    def _ragged(self, cache: Cache) -> Output:
        """A pass that feeds each row its newest token and its draft."""
        tokens, positions, mask, places = self.kv.places(self.states)
        return self.model(Pass(tokens, cache, mask, positions, keep=1, places=places))

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


def _end(state: LaneState) -> int:
    """The maximum length of a lane's rows, a draft included."""
    return state.length - state.live.written + state.lane.max_new_tokens + max(state.drafted, 1)


def _source_length(state: LaneState) -> int:
    source = state.prefix.source
    return 0 if source is None else int(source.ids.shape[1])
