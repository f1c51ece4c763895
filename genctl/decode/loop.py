"""The only loop there is: score -> choose -> commit -> feed.

It holds several lanes (one prompt with one strategy each) and runs one forward pass per step for all: their rows
are concatenated, shorter ones padded on the left and masked. A finished lane's rows leave at once and a waiting lane
takes their place. The loop never asks which strategy it drives, and what a row receives does not depend on its
neighbours: its cache is its own, its generator is its own, its padding is masked.

The loop knows token ids only. Nothing in it grows with the length of a text, except where rows are reordered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from genctl import events
from genctl.decode.admission import Admission, Prompt, Shelf
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane, Prefix
from genctl.decode.watch import Watcher


def decode(
    forward: ModelRuntime,
    lanes: Iterable[Lane],
    *,
    width: int = 1,
    prefixes: dict[Prompt, Prefix] | None = None,
    interrupted: Callable[[], str] = lambda: "",
    clock: Callable[[], float] = time.perf_counter,
    watch: bool = False,
    saved: Prefix | None = None,
    on_shortage: Callable[[int], None] = lambda width: None,
    ahead: int = 0,
) -> Iterator[events.Event]:
    """Run lanes, at most `width` at once, and tell what happens: Prefilled, Stepped …, Finished or Failed for each.

    `lanes` is read lazily, as places become free; of the next `ahead` of them, the one with the most work begins
    first. Lanes with the same prompt share one prefill while any of them is at work; `prefixes` may bring prefills made
    before. `interrupted` is asked once per step: a non-empty answer ends every live row with that reason, and no
    further lane begins. With `watch` the cache is told of after every pass (CacheRead). `saved` is a prompt read
    before, with its whole cache: what a lane's prompt has in common with it is not read again. Where memory runs out,
    fewer lanes go on at once (`on_shortage` is told how many) and the others follow; a lane fails only if it does not
    fit alone.
    """
    watcher = Watcher(forward) if watch else None
    shelf = Shelf(forward, prefixes or {}, saved)
    lanes_at_work = Admission(forward, lanes, width, shelf, clock, watcher, on_shortage, ahead)
    try:
        while True:
            reason = interrupted()
            yield from lanes_at_work.admit(reason)
            if lanes_at_work.done(reason):
                return
            yield from lanes_at_work.step(reason)
    finally:
        lanes_at_work.close()
        if watcher is not None:
            watcher.close()
