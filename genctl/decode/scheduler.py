"""Which lanes are at work: prompts are prefilled as places become free; where memory runs out, some are preempted.

A preempted lane loses nothing but its keys and values: its tokens are read again when there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from genctl import events
from genctl.decode.batch import Batch
from genctl.decode.cache_observer import CacheObserver
from genctl.decode.lane import LaneState
from genctl.decode.out_of_memory import OutOfMemory, release, shortages
from genctl.decode.prefix_cache import PrefixCache, groups
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane
from genctl.errors import GenctlError


class Scheduler:
    """The lanes at work, in batches, at most `width` at once, and those that wait."""

    def __init__(
        self,
        model: ModelRuntime,
        lanes: Iterable[Lane],
        width: int,
        prefixes: PrefixCache,
        clock: Callable[[], float],
        watcher: CacheObserver | None,
        on_shortage: Callable[[int], None],
        ahead: int = 0,
    ) -> None:
        self.model = model
        self.lanes = iter(lanes)
        self.width = width
        self.ahead = max(ahead, 1)  # lanes among which the next one is chosen
        self.known: list[Lane] = []  # and those of them that have been asked for
        self.exhausted = False
        self.prefixes = prefixes
        self.clock = clock
        self.watcher = watcher
        self.on_shortage = on_shortage
        self.batches: list[Batch] = []
        self.known_states: list[LaneState] = []  # those for which prompts are kept
        self.preempted: deque[LaneState] = deque()  # at work before, and to go on
        self.postponed: deque[Lane] = deque()  # whose prompts did not fit beside the others

    @property
    def live(self) -> int:
        """Lanes in batches."""
        return sum(len(batch.states) for batch in self.batches)

    def waiting(self, interrupted: str) -> bool:
        """Whether anything is left to do. An interrupted run begins no further lane."""
        new = not interrupted and bool(not self.exhausted or self.postponed or self.known)
        return new or bool(self.batches or self.preempted)

    def admit(self, interrupted: str) -> Iterator[events.Event]:
        """Fill the free places: Prefilled for each lane that begins, Failed for each that cannot."""
        # rows that cannot be padded move in step: newcomers wait until the batch is done
        closed = not self.model.pads and any(batch.started for batch in self.batches)
        while self.live < self.width and not closed:
            if self.preempted:
                yield from self._readmit(self.preempted.popleft())
            elif interrupted or not (lanes := self._next(self.width - self.live)):
                return
            else:
                yield from self._admit(lanes)

    def forget(self) -> None:
        """Let empty batches go, and prompts that no live lane began from."""
        self.batches = [batch for batch in self.batches if batch.states]
        states = [state for batch in self.batches for state in batch.states]
        if states != self.known_states:
            self.known_states = states
            self.prefixes.release([state.lane for state in states])

    def close(self) -> None:
        """End every search."""
        for state in [*self.preempted, *(state for batch in self.batches for state in batch.states)]:
            state.close()
        if self.watcher is not None:
            self.watcher.close()

    # -- admission -----------------------------------------------------------------------------------------------------

    def _next(self, places: int) -> list[Lane]:
        """The lanes to begin next, at most `places`: those put off, then of those known the one with the most work."""
        chosen: list[Lane] = []
        while len(chosen) < places:
            if self.postponed:
                chosen.append(self.postponed.popleft())
                continue
            while not self.exhausted and len(self.known) < self.ahead:
                lane = next(self.lanes, None)
                if lane is None:
                    self.exhausted = True
                else:
                    self.known.append(lane)
            if not self.known:
                break
            longest = max(self.known, key=work)  # the first of equals
            self.known.remove(longest)
            chosen.append(longest)
        return chosen

    def _admit(self, lanes: list[Lane]) -> Iterator[events.Event]:
        """Read prompts, short ones together, and let their lanes begin."""
        unread, others = self.prefixes.unread(lanes)
        if self.watcher is not None:  # it shows each prompt's cache as it was read
            unread, others = [], lanes
        places = {id(lane): place for place, lane in enumerate(lanes)}
        for group in sorted([*groups(unread), *([lane] for lane in others)], key=lambda group: places[id(group[0])]):
            began = self.clock()
            if len(group) > 1:
                try:
                    with shortages():
                        self.prefixes.read(group)
                except GenctlError:
                    pass  # said for the prompt that it comes from, when it is read alone
                except OutOfMemory:
                    release()  # one by one, then
            for lane in group:
                if self.live < self.width:
                    alone = len(lanes) == 1 and not self.live and lane.strategy.rows == 1
                    # a static cache is made as large as it must be, where it need not become part of another
                    room = lane.max_new_tokens - 1 if alone else 0
                    yield from self._begin(lane, began, room)
                else:  # there was not enough memory for all
                    self.postponed.append(lane)

    def _begin(self, lane: Lane, began: float, room: int) -> Iterator[events.Event]:
        try:
            with shortages():
                prefix, known = self.prefixes.take(lane, room)
        except GenctlError as error:
            yield events.Failed(lane.name, error.code, error.message)
            return
        except OutOfMemory as shortage:
            release()
            if self.live:
                self.postponed.appendleft(lane)
                self._narrow(self.live)
            else:
                yield _too_large(lane, 1, shortage)
            return
        state = LaneState(lane, prefix, self.model, self.clock, began, passes=0 if known else 1)
        prompt = len(lane.source) if lane.source is not None else len(lane.tokens)
        if self.watcher is not None and not known:
            yield self.watcher.read([lane.name], 0)
        yield events.Prefilled(lane.name, prompt, state.decoding - began, known, prefix.reused)
        self._join(state)

    def _join(self, state: LaneState) -> None:
        batch = next((batch for batch in self.batches if batch.welcomes(state)), None)
        if batch is None:
            batch = Batch(self.model, self.watcher)
            self.batches.append(batch)
        batch.join(state)

    # -- where memory runs out -----------------------------------------------------------------------------------------

    def preempt(self, batch: Batch, shortage: OutOfMemory) -> Iterator[events.Event]:
        """Take a batch apart that did not fit. Half of its lanes go on at once, the others when there is room."""
        states = batch.clear()
        for state in states:
            state.scores = None  # fed again, when its rows have been read again
        release()
        if shortage.torn:  # a search that was stopped in its choice cannot be asked again
            torn = states.pop(next(place for place, state in enumerate(states) if state.torn))
            yield self._fail(torn, shortage)
        elif len(states) == 1:
            yield self._fail(states.pop(), shortage)
        self.preempted.extend(states)
        if states:
            self._narrow(max(1, (len(states) + shortage.torn) // 2))

    def _readmit(self, state: LaneState) -> Iterator[events.Event]:
        try:
            with shortages():
                state.reread()
        except OutOfMemory as shortage:
            release()
            if self.live:
                self.preempted.appendleft(state)
                self._narrow(self.live)
            else:
                yield self._fail(state, shortage)
            return
        self._join(state)

    def _narrow(self, width: int) -> None:
        if width < self.width:
            self.width = width
            self.on_shortage(width)

    def _fail(self, state: LaneState, shortage: OutOfMemory) -> events.Failed:
        state.close()
        return _too_large(state.lane, state.rows, shortage)


def _too_large(lane: Lane, rows: int, shortage: OutOfMemory) -> events.Failed:
    tokens = len(lane.tokens) + len(lane.source or ())
    many = f"{rows} rows of it" if rows > 1 else "it alone"
    why = f" ({shortage})" if str(shortage) else ""
    return events.Failed(lane.name, "memory", f"not enough memory for a prompt of {tokens} tokens, {many}{why}")


def work(lane: Lane) -> tuple[int, int]:
    """How long a lane may be at work: what it may write, then what it has to read. Longest first leaves the least idle.

    Graham (1969), "Bounds on Multiprocessing Timing Anomalies": the longest job first.
    """
    return lane.max_new_tokens, len(lane.tokens) + len(lane.source or ())
