"""Scheduler: prefills prompts as slots become free; when memory runs out, preempts some lanes and reads them again."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from genctl import events
from genctl.decode.batch import Batch
from genctl.decode.batch_cache import CacheObserver
from genctl.decode.lane import LaneState, OutOfMemory, shortages, too_large
from genctl.decode.prefix_cache import MOST, MOST_ON_GPU, PrefixCache, groups
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane, Prefix
from genctl.errors import ContractError, GenctlError

# An item of the input: a lane, the error of a prompt that has none, or None if the next prompt is not available yet.
Waiting: TypeAlias = Lane | events.Failed | None
_END = object()
T = TypeVar("T")


class PromptInPieces(NamedTuple):
    """A long prompt that is read in several passes, between the steps of other lanes."""

    lane: Lane
    began: float
    passes: Generator[Prefix | None, None, None]


class Scheduler:
    """The live lanes, in batches, at most `width` at once, and the waiting ones."""

    def __init__(
        self,
        model: ModelRuntime,
        queue: LaneQueue,
        width: int,
        prefixes: PrefixCache,
        clock: Callable[[], float],
        watcher: CacheObserver | None,
        on_shortage: Callable[[int], None],
    ) -> None:
        self.model, self.queue, self.width, self.prefixes = model, queue, width, prefixes
        self.clock, self.watcher, self.on_shortage = clock, watcher, on_shortage
        self.batches: list[Batch] = []
        self.known_states: list[LaneState] = []  # lanes whose prefixes are stored
        self.preempted: deque[LaneState] = deque()  # lanes that have begun and wait for memory
        self.reading: list[PromptInPieces] = []

    @property
    def live(self) -> int:
        """Lanes in batches."""
        return sum(len(batch.states) for batch in self.batches)

    def waiting(self, interrupted: str) -> bool:
        """Whether any work is left. An interrupted run begins no further lane."""
        return bool((not interrupted and (self.queue or self.reading)) or self.batches or self.preempted)

    def admit(self, interrupted: str) -> Iterator[events.Event]:
        """Fill the free slots: Prefilled for each lane that begins, Failed for each that cannot."""
        # without padding, rows must have equal lengths: new lanes wait until the batch is done
        closed = not self.model.abilities.pads and any(
            state.alive for batch in self.batches for state, _ in batch.kv.held
        )
        if self.reading and not interrupted:
            yield from self._read_on(self.reading[0])
        while (busy := self.live + len(self.reading)) < self.width and not closed:
            if self.preempted:
                state = self.preempted.popleft()
                found = self._try(state.lane, partial(state.reread, self.prefixes), state.row_count)
                if isinstance(found, GenctlError):
                    yield state.fail(found)
                elif found is None:
                    self.preempted.appendleft(state)
                else:
                    self._join(state)
            elif interrupted:
                return
            else:
                lanes, failed = self.queue.take(self.width - busy, wait=not busy)
                yield from failed
                if not lanes:
                    return
                yield from self._admit(lanes)

    def forget(self) -> None:
        """Drop empty batches, and prefixes that no live lane started from."""
        self.batches = [batch for batch in self.batches if batch.states]
        states = [state for batch in self.batches for state in batch.states]
        if states != self.known_states:
            self.known_states = states
            self.prefixes.release([state.lane for state in states])

    def preempt(self, batch: Batch, shortage: OutOfMemory) -> Iterator[events.Event]:
        """Split a batch that did not fit. Half of its lanes resume at once, the others when memory is free.

        A preempted lane loses only its keys and values: it reads its tokens again.
        """
        states = batch.clear()
        for state in states:
            state.scores = state.own = None  # the next pass computes them, once its rows have been read again
            state.forget_prompt()
        self._reclaim()
        if len(states) == 1:
            yield states[0].fail(too_large(states[0].lane, states[0].row_count, shortage))
        elif states:
            self.preempted.extend(states)
            self._narrow(max(1, len(states) // 2))

    def close(self) -> None:
        """End every search."""
        for state in [*self.preempted, *(state for batch in self.batches for state in batch.states)]:
            state.close()
        for reading in self.reading:
            reading.passes.close()
        if self.watcher is not None:
            self.watcher.close()

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self, lanes: list[Lane]) -> Iterator[events.Event]:
        """Read prompts, several short ones in a pass, and let their lanes begin."""
        # a watcher needs the cache of each prompt
        unread, others = self.prefixes.unread(lanes) if self.watcher is None else ([], lanes)
        places = {id(lane): place for place, lane in enumerate(lanes)}
        read_together = groups(unread, MOST_ON_GPU if self.model.device.type == "cuda" else MOST)
        for group in sorted([*read_together, *([lane] for lane in others)], key=lambda group: places[id(group[0])]):
            began = self.clock()
            if len(group) == 1 and self.live and self.watcher is None:  # live lanes would wait for a long prompt
                passes = self.prefixes.in_pieces(group[0])
                if passes is not None:
                    self.reading.append(PromptInPieces(group[0], began, passes))
                    continue
            if len(group) > 1:  # after an error they are read one by one below, which shows whose error it is
                self._try(group[0], partial(self.prefixes.read, group))
            for lane in group:
                if self.live < self.width:
                    alone = len(lanes) == 1 and not self.live and lane.strategy.max_rows == 1
                    # a static cache gets its final size, unless it will be merged into another one
                    yield from self._begin(lane, began, lane.max_new_tokens - 1 if alone else 0)
                else:  # memory ran out, so the width is less than before
                    self.queue.postponed.append(lane)

    def _read_on(self, reading: PromptInPieces) -> Iterator[events.Event]:
        """Read the next piece of a prompt; after the last one its lane begins."""
        found = self._try(reading.lane, lambda: (next(reading.passes),))
        if isinstance(found, tuple) and found[0] is None:
            return
        self.reading.remove(reading)
        if isinstance(found, GenctlError):
            yield events.Failed(reading.lane.name, found.code, found.message)
        elif found is None:
            self.queue.postponed.appendleft(reading.lane)
        elif found[0] is not None:
            self.prefixes.put(reading.lane, found[0])
            yield from self._begin(reading.lane, reading.began, 0)

    def _begin(self, lane: Lane, began: float, room: int) -> Iterator[events.Event]:
        found = self._try(lane, lambda: self.prefixes.take(lane, room))
        if isinstance(found, GenctlError):
            yield events.Failed(lane.name, found.code, found.message)
        elif found is None:
            self.queue.postponed.appendleft(lane)
        else:
            prefix, known = found
            state = LaneState(lane, prefix, self.model, self.clock, began, passes=0 if known else 1)
            if self.watcher is not None and not known:
                yield self.watcher.read([lane.name], 0)
            yield events.Prefilled(lane.name, lane.prompt_length, state.decoding - began, known, prefix.reused)
            self._join(state)

    def _join(self, state: LaneState) -> None:
        batch = next((batch for batch in self.batches if batch.accepts(state)), None)
        if batch is None:
            batch = Batch(self.model, self.watcher)
            self.batches.append(batch)
        batch.states.append(state)  # its first choice is from the scores of its prefill

    # -- shortages -----------------------------------------------------------------------------------------------------

    def _try(self, lane: Lane, read: Callable[[], T], rows: int = 1) -> T | GenctlError | None:
        """The result of `read`, or why the lane fails; None if it did not fit: try again when other lanes have ended.

        After a shortage the width is the number of live lanes; if there are none, the lane does not fit alone. The
        frames of the failed attempt, which hold its tensors, are freed first. Raises ContractError.
        """
        try:
            with shortages():
                return read()
        except ContractError:
            raise
        except GenctlError as error:
            return error
        except OutOfMemory as error:
            shortage = error.without_frames()
        self._reclaim()
        if not self.live:
            return too_large(lane, rows, shortage)
        self._narrow(self.live)
        return None

    def _reclaim(self) -> None:
        """Free what can be computed again: prefixes that no lane holds, and what a model keeps only for speed."""
        self.prefixes.clear()
        self.model.free()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _narrow(self, width: int) -> None:
        if width < self.width:
            self.width = width
            self.on_shortage(width)


class LaneQueue:
    """The lanes to run, read lazily. Of the next `ahead` lanes, the one with the most work comes first."""

    def __init__(self, lanes: Iterable[Waiting], ahead: int) -> None:
        self.lanes = iter(lanes)
        self.ahead = max(ahead, 1)
        self.known: list[Lane] = []  # read from `lanes` and not begun
        self.exhausted = False
        self.postponed: deque[Lane] = deque()  # lanes whose prompts did not fit beside the others

    def __bool__(self) -> bool:
        """Whether any lane may be left."""
        return bool(not self.exhausted or self.postponed or self.known)

    def take(self, places: int, *, wait: bool = False) -> tuple[list[Lane], list[events.Failed]]:
        """The lanes to begin next, at most `places` (postponed ones first, then the longest known ones), and the
        failures read from `lanes` on the way.

        With `wait` both are empty only if no lane is left.
        """
        chosen: list[Lane] = []
        failed: list[events.Failed] = []
        while len(chosen) < places:
            if self.postponed:
                chosen.append(self.postponed.popleft())
                continue
            while not self.exhausted and len(self.known) < self.ahead:
                lane = next(self.lanes, _END)
                if lane is _END:
                    self.exhausted = True
                elif isinstance(lane, Lane):
                    self.known.append(lane)
                elif isinstance(lane, events.Failed):
                    failed.append(lane)
                    if wait and not chosen and not self.known:
                        break  # nothing is being decoded: waiting for the next lane would delay the failure
                elif self.known or failed or chosen or not wait:
                    break
            if not self.known:
                break
            longest = max(self.known, key=work)  # the first of equals
            self.known.remove(longest)
            chosen.append(longest)
        return chosen, failed


def work(lane: Lane) -> tuple[int, int]:
    """The size of a lane: tokens that it may write, then tokens to read. Longest first leaves the least idle time
    (Graham 1969, "Bounds on Multiprocessing Timing Anomalies").
    """
    return lane.max_new_tokens, len(lane.tokens) + len(lane.source or ())
