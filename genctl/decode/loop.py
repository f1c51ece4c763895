"""The only loop there is: score -> choose -> commit -> feed.

It holds several lanes (one prompt with one strategy each) and runs one forward pass per step for all: their rows
are concatenated, shorter ones padded on the left and masked. A finished lane's rows leave at once and a waiting lane
takes their place. The loop never asks which strategy it drives, and what a row receives does not depend on its
neighbours: its prompt is read alone, its generator is its own, its padding is masked.

The loop knows token ids only. Nothing in it grows with the length of a text, except where rows are reordered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from genctl import events
from genctl.decode import cache as caches
from genctl.decode.batch import Batch
from genctl.decode.forward import Forward
from genctl.decode.lane import Run
from genctl.decode.types import Lane, Prefix, Source
from genctl.decode.watch import Watcher
from genctl.errors import GenctlError

Prompt: TypeAlias = tuple[tuple[int, ...], tuple[int, ...] | None]  # the decoder's tokens, the encoder's


def decode(
    forward: Forward,
    lanes: Iterable[Lane],
    *,
    width: int = 1,
    prefixes: dict[Prompt, Prefix] | None = None,
    interrupted: Callable[[], str] = lambda: "",
    clock: Callable[[], float] = time.perf_counter,
    watch: bool = False,
    saved: Prefix | None = None,
) -> Iterator[events.Event]:
    """Run lanes, at most `width` at once, and tell what happens: Prefilled, Stepped …, Finished or Failed for each.

    `lanes` is read lazily, as places become free. Lanes with the same prompt share one prefill while any of them is at
    work; `prefixes` may bring prefills made before. `interrupted` is asked once per step: a non-empty answer ends every
    live row with that reason, and no further lane begins. With `watch` the cache is told of after every pass
    (CacheRead). `saved` is a prompt read before, with its whole cache: what a lane's prompt has in common with it is
    not read again.
    """
    waiting = iter(lanes)
    shelf = Shelf(forward, prefixes or {}, saved)
    watcher = Watcher(forward) if watch else None
    batches: list[Batch] = []
    exhausted = False
    try:
        while True:
            reason = interrupted()
            # rows with absolute positions in the decoder move in step: newcomers wait until the batch is done
            closed = not forward.relative and any(batch.runs for batch in batches)
            while not (exhausted or reason or closed) and sum(map(len, batches)) < width:
                lane = next(waiting, None)
                if lane is None:
                    exhausted = True
                    break
                yield from _admit(lane, forward, shelf, batches, clock, reason, watcher)
            if not batches and (exhausted or reason):
                return
            for batch in batches:
                yield from batch.step(reason)
            batches = [batch for batch in batches if len(batch)]
            shelf.release([run.lane for batch in batches for run in batch.runs])
    finally:
        for batch in batches:
            for run in (*batch.runs, *batch.joining):
                run.close()
        if watcher is not None:
            watcher.close()


def _admit(
    lane: Lane,
    forward: Forward,
    shelf: Shelf,
    batches: list[Batch],
    clock: Callable[[], float],
    interrupted: str,
    watcher: Watcher | None,
) -> Iterator[events.Event]:
    began = clock()
    try:
        prefix, known = shelf.take(lane)
    except GenctlError as error:
        yield events.Failed(lane.name, error.code, error.message)
        return
    run = Run(lane, prefix, forward, clock, began, passes=0 if known else 1)
    prompt = len(lane.source) if lane.source is not None else len(lane.tokens)
    if watcher is not None and not known:
        yield watcher.read([lane.name], 0)
    yield events.Prefilled(lane.name, prompt, run.decoding - began, known, 0 if known else shelf.reused)
    yield from run.first(interrupted)
    if not run.live:
        return
    batch = next((batch for batch in batches if batch.welcomes(run)), None)
    if batch is None:
        batch = Batch(forward, watcher)
        batches.append(batch)
    batch.join(run)


class Shelf:
    """Prefills that are at hand, so that a prompt is read once however many lanes start from it."""

    def __init__(self, forward: Forward, given: dict[Prompt, Prefix], saved: Prefix | None = None) -> None:
        self.forward = forward
        self.given = given
        self.saved = saved
        self.reused = 0  # tokens of the newest prefix that did not have to be read
        self.made: dict[tuple[Prompt, str, bool], Prefix] = {}
        self.sources: dict[tuple[int, ...], Source] = {}

    def take(self, lane: Lane) -> tuple[Prefix, bool]:
        """The lane's prefix, and whether it was there already."""
        prompt, hidden = (lane.tokens, lane.source), lane.strategy.needs_hidden
        form = lane.cache if lane.use_cache else "off"
        found = self.given.get(prompt)
        if found is None or (hidden and found.hidden is None):
            found = self.made.get((prompt, form, True))
            if found is None and not hidden:
                found = self.made.get((prompt, form, False))
        if found is not None:
            return found, True
        saved = self.saved if lane.use_cache else None
        source = None
        self.reused = 0
        if lane.source is not None:
            source = self.sources.get(lane.source)
            held = None if saved is None else saved.source
            if source is None and held is not None and tuple(held.ids[0].tolist()) == lane.source:
                source = held
                self.reused = len(lane.source)
            source = source or self.forward.encode(lane.source)
            self.sources[lane.source] = source
        prefix = None
        if saved is not None:
            prefix, reused = self.forward.resume(saved, lane.tokens, source, hidden=hidden)
            self.reused += reused
        if prefix is None:
            prefix = self.forward.prefill(lane.tokens, source, use_cache=lane.use_cache, hidden=hidden)
        if prefix.cache is not None:
            caches.kept_as(prefix.cache, lane.cache)
        self.made[prompt, form, hidden] = prefix
        return prefix, False

    def release(self, lanes: list[Lane]) -> None:
        """Forget what no live lane began from: memory must not grow with the number of prompts."""
        if self.made or self.sources:
            wanted = {(lane.tokens, lane.source) for lane in lanes}
            self.made = {key: prefix for key, prefix in self.made.items() if key[0] in wanted}
            sources = {lane.source for lane in lanes}
            self.sources = {key: source for key, source in self.sources.items() if key in sources}
