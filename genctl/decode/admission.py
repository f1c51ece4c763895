"""Who is at work: prompts are read and join as places become free; where memory runs out, some step back.

A lane that steps back loses nothing but its keys and values: its tokens are read again when there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from genctl import events
from genctl.decode import cache as caches
from genctl.decode.batch import Batch
from genctl.decode.lane import Run
from genctl.decode.runtime import ModelRuntime
from genctl.decode.shortage import is_shortage, release
from genctl.decode.together import groups, work
from genctl.decode.types import Lane, Prefix, Source
from genctl.decode.watch import Watcher
from genctl.errors import GenctlError

Prompt: TypeAlias = tuple[tuple[int, ...], tuple[int, ...] | None]  # the decoder's tokens, the encoder's


class Admission:
    """The lanes at work, in batches, at most `width` at once, and those that wait."""

    def __init__(
        self,
        forward: ModelRuntime,
        lanes: Iterable[Lane],
        width: int,
        shelf: Shelf,
        clock: Callable[[], float],
        watcher: Watcher | None,
        on_shortage: Callable[[int], None],
        ahead: int = 0,
    ) -> None:
        self.forward = forward
        self.waiting = iter(lanes)
        self.width = width
        self.ahead = max(ahead, 1)  # lanes among which the next one is chosen
        self.known: list[Lane] = []  # and those of them that have been asked for
        self.shelf = shelf
        self.clock = clock
        self.watcher = watcher
        self.on_shortage = on_shortage
        self.batches: list[Batch] = []
        self.stepped_back: deque[Run] = deque()  # at work before, and to go on
        self.postponed: deque[Lane] = deque()  # whose prompts did not fit beside the others
        self.exhausted = False

    @property
    def live(self) -> int:
        """Lanes in batches."""
        return sum(map(len, self.batches))

    def done(self, interrupted: str) -> bool:
        """Whether nothing is left to do."""
        nothing_new = (self.exhausted and not self.postponed and not self.known) or bool(interrupted)
        return not self.batches and not self.stepped_back and nothing_new

    def admit(self, interrupted: str) -> Iterator[events.Event]:
        """Fill the free places."""
        # rows that cannot be padded move in step: newcomers wait until the batch is done
        closed = self.live and not self.forward.pads and any(batch.runs for batch in self.batches)
        while self.live < self.width and not closed:
            if self.stepped_back:
                yield from self._readmit(self.stepped_back.popleft())
            elif interrupted or not (lanes := self._choose(self.width - self.live)):
                return
            else:
                yield from self._admit(lanes, interrupted)

    def step(self, interrupted: str) -> Iterator[events.Event]:
        """One pass for every batch."""
        for batch in self.batches:
            try:
                yield from batch.step(interrupted)
            except GenctlError as error:
                for run in batch.live():
                    run.close()
                    yield events.Failed(run.lane.name, error.code, error.message)
                batch.clear()
            except (MemoryError, RuntimeError) as error:
                if not is_shortage(error):
                    raise
                yield from self._relieve(batch, error)
        self.batches = [batch for batch in self.batches if len(batch)]
        self.shelf.release([run.lane for batch in self.batches for run in batch.runs])

    def close(self) -> None:
        """End every search."""
        for batch in self.batches:
            for run in (*batch.runs, *batch.joining):
                run.close()
        for run in self.stepped_back:
            run.close()

    def _choose(self, places: int) -> list[Lane]:
        """The lanes to begin next, at most `places`."""
        chosen: list[Lane] = []
        while len(chosen) < places and (lane := self._next()) is not None:
            chosen.append(lane)
        return chosen

    def _next(self) -> Lane | None:
        if self.postponed:
            return self.postponed.popleft()
        while not self.exhausted and len(self.known) < self.ahead:
            lane = next(self.waiting, None)
            if lane is None:
                self.exhausted = True
            else:
                self.known.append(lane)
        if not self.known:
            return None
        longest = max(self.known, key=work)  # the first of equals
        self.known.remove(longest)
        return longest

    def _admit(self, lanes: list[Lane], interrupted: str) -> Iterator[events.Event]:
        """Read prompts, short ones together, and let their lanes begin."""
        unread, others = self.shelf.unread(lanes)
        if self.watcher is not None:  # it shows each prompt's cache as it was read
            unread, others = [], lanes
        places = {id(lane): place for place, lane in enumerate(lanes)}
        for group in sorted([*groups(unread), *([lane] for lane in others)], key=lambda group: places[id(group[0])]):
            began = self.clock()
            if len(group) > 1:
                try:
                    self.shelf.read(group)
                except GenctlError:
                    pass  # told of the prompt that it comes from, when it is read alone
                except (MemoryError, RuntimeError) as error:
                    if not is_shortage(error):
                        raise
                    error.__traceback__ = None
                    release()  # one by one, then
            for lane in group:
                if self.live < self.width:
                    alone = len(lanes) == 1 and not self.live and lane.strategy.rows == 1
                    # a static cache is made as large as it must be, where it need not become part of another
                    room = lane.max_new_tokens - 1 if alone else 0
                    yield from self._begin(lane, began, interrupted, room)
                else:  # there was not enough memory for all
                    self.postponed.append(lane)

    def _begin(self, lane: Lane, began: float, interrupted: str, room: int) -> Iterator[events.Event]:
        try:
            prefix, known = self.shelf.take(lane, room)
        except GenctlError as error:
            yield events.Failed(lane.name, error.code, error.message)
            return
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            release()
            if not self.live:
                yield _too_large(lane, 1, error)
                return
            self.postponed.appendleft(lane)
            self._narrow(self.live)
            return
        run = Run(lane, prefix, self.forward, self.clock, began, passes=0 if known else 1)
        prompt = len(lane.source) if lane.source is not None else len(lane.tokens)
        if self.watcher is not None and not known:
            yield self.watcher.read([lane.name], 0)
        yield events.Prefilled(lane.name, prompt, run.decoding - began, known, prefix.reused)
        yield from run.first(interrupted)
        if run.live:
            self._join(run)

    def _join(self, run: Run) -> None:
        batch = next((batch for batch in self.batches if batch.welcomes(run)), None)
        if batch is None:
            batch = Batch(self.forward, self.watcher)
            self.batches.append(batch)
        batch.join(run)

    # -- where memory runs out -----------------------------------------------------------------------------------------

    def _relieve(self, batch: Batch, error: BaseException) -> Iterator[events.Event]:
        """Take a batch apart that did not fit. Half of its lanes go on at once, the others when there is room."""
        runs = batch.live()
        torn = batch.torn  # a search that was interrupted in its choice cannot be asked again
        batch.clear()
        error.__traceback__ = None  # its frames hold the tensors of the pass
        release()
        if not torn and len(runs) == 1:
            torn = runs
        for run in torn:
            if run.live:
                run.close()
                yield _too_large(run.lane, run.rows, error)
        self.stepped_back.extend(run for run in runs if run.live)
        if len(runs) > 1:
            self._narrow(max(1, len(runs) // 2))

    def _readmit(self, run: Run) -> Iterator[events.Event]:
        try:
            run.reread()
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            release()
            if self.live:
                self.stepped_back.appendleft(run)
                self._narrow(self.live)
            else:
                run.close()
                yield _too_large(run.lane, run.rows, error)
            return
        self._join(run)

    def _narrow(self, width: int) -> None:
        if width < self.width:
            self.width = width
            self.on_shortage(width)


def _too_large(lane: Lane, rows: int, error: BaseException) -> events.Failed:
    tokens = len(lane.tokens) + len(lane.source or ())
    many = f"{rows} rows of it" if rows > 1 else "it alone"
    why = (str(error).splitlines() or [""])[0][:120]
    return events.Failed(
        lane.name, "memory", f"not enough memory for a prompt of {tokens} tokens, {many}" + (f" ({why})" if why else "")
    )


class Shelf:
    """Prefills that are at hand, so that a prompt is read once however many lanes start from it."""

    def __init__(self, forward: ModelRuntime, given: dict[Prompt, Prefix], saved: Prefix | None = None) -> None:
        self.forward = forward
        self.given = given
        self.saved = saved
        self.made: dict[tuple[Prompt, str, bool], Prefix] = {}
        self.sources: dict[tuple[int, ...], Source] = {}
        self.ready: dict[tuple[Prompt, str], Prefix] = {}  # read together, and not taken yet

    def unread(self, lanes: list[Lane]) -> tuple[list[Lane], list[Lane]]:
        """Lanes whose prompts may be read together, each prompt once, and the other lanes."""
        if self.saved is not None or not self.forward.reads_together:
            return [], lanes
        seen = {*self.given, *(key[0] for key in self.made)}
        unread: list[Lane] = []
        others: list[Lane] = []
        for lane in lanes:
            prompt = (lane.tokens, lane.source)
            plain = lane.use_cache and not lane.strategy.needs_hidden
            plain = plain and len(lane.tokens) <= self.forward.bound
            (unread if plain and prompt not in seen else others).append(lane)
            seen.add(prompt)
        return unread, others

    def read(self, lanes: list[Lane]) -> None:
        """Read the prompts of these lanes in one pass, to be taken next."""
        prefixes = self.forward.prefill_together([lane.tokens for lane in lanes])
        for lane, prefix in zip(lanes, prefixes, strict=True):
            caches.kept_as(prefix.cache, lane.cache)
            self.ready[(lane.tokens, lane.source), lane.cache] = prefix

    def take(self, lane: Lane, room: int = 0) -> tuple[Prefix, bool]:
        """The lane's prefix, and whether it was there already. `room`: columns that a static cache is to have free."""
        prompt, hidden = (lane.tokens, lane.source), lane.strategy.needs_hidden
        # rows that change each other are read alone, which only a text without a cache can be
        cached = lane.use_cache and (lane.strategy.rows == 1 or self.forward.together)
        form = lane.cache if cached else "off"
        found = self.given.get(prompt)
        if found is None or (hidden and found.hidden is None):
            found = self.made.get((prompt, form, True))
            if found is None and not hidden:
                found = self.made.get((prompt, form, False))
        if found is not None:
            return found, True
        ready = None if hidden else self.ready.pop((prompt, form), None)
        if ready is not None:
            self.made[prompt, form, False] = ready
            return ready, False
        saved = self.saved if cached else None
        source = None
        reused = 0
        if lane.source is not None:
            source = self.sources.get(lane.source)
            held = None if saved is None else saved.source
            if source is None and held is not None and tuple(held.ids[0].tolist()) == lane.source:
                source = held
            if source is not None and source is held:
                reused = len(lane.source)
            source = source or self.forward.encode(lane.source)
            self.sources[lane.source] = source
        prefix = None
        if saved is not None:
            prefix, kept = self.forward.resume(saved, lane.tokens, source, hidden=hidden)
            reused += kept
        if prefix is None:
            prefix = self.forward.prefill(lane.tokens, source, use_cache=cached, hidden=hidden)
        if prefix.cache is not None:
            caches.kept_as(prefix.cache, lane.cache, room)
        prefix = replace(prefix, reused=reused)
        self.made[prompt, form, hidden] = prefix
        return prefix, False

    def release(self, lanes: list[Lane]) -> None:
        """Forget what no live lane began from: memory must not grow with the number of prompts."""
        self.ready = {}
        if self.made or self.sources:
            wanted = {(lane.tokens, lane.source) for lane in lanes}
            self.made = {key: prefix for key, prefix in self.made.items() if key[0] in wanted}
            sources = {lane.source for lane in lanes}
            self.sources = {key: source for key, source in self.sources.items() if key in sources}
