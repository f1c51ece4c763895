"""The only loop there is: score -> choose -> commit -> feed.

It holds several lanes (one prompt with one strategy each) and runs one forward pass per step for all: their rows are
concatenated, shorter ones padded on the left and masked. A finished lane's rows leave at once and a waiting lane takes
their place. The loop never asks which strategy it drives, and what a row receives does not depend on its neighbours:
its cache is its own, its generator is its own, its padding is masked. It knows token ids only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from genctl import events
from genctl.decode.batch import Batch
from genctl.decode.choose import choose
from genctl.decode.lane import OutOfMemory
from genctl.decode.prefix_cache import KeptTexts, PrefixCache, Prompt
from genctl.decode.runtime import ModelRuntime
from genctl.decode.scheduler import LaneQueue, Scheduler, Waiting
from genctl.decode.transfer import PendingCopy
from genctl.decode.types import Prefix
from genctl.errors import ContractError, GenctlError


def decode(
    forward: ModelRuntime,
    lanes: Iterable[Waiting],
    *,
    width: int = 1,
    prefixes: dict[Prompt, Prefix] | None = None,
    texts: KeptTexts | None = None,
    interrupted: Callable[[], str] = lambda: "",
    clock: Callable[[], float] = time.perf_counter,
    watch: bool = False,
    on_shortage: Callable[[int], None] = lambda width: None,
    ahead: int = 0,
) -> Iterator[events.Event]:
    """Run lanes, at most `width` at once: Prefilled, Stepped …, Finished or Failed for each.

    `lanes` is read lazily, as places become free; of the next `ahead` of them, the one with the most work begins
    first. While the next one is not there yet (None), the others go on; a failure in the place of a lane comes out as
    it is. Lanes with the same prompt share one prefill while any of them is live; `prefixes` are prefills from before.
    The beginning that a prompt shares with one of `texts` is not read again; they get what each lane has read.
    `interrupted` is called once per step: a non-empty answer ends every live row with that reason, and no further lane
    begins. With `watch` there is a CacheRead after every pass. When memory runs out, fewer lanes continue at once
    (`on_shortage` receives their number) and the others follow; a lane fails only if it does not fit alone.
    """
    watcher = None
    if watch:
        from genctl.decode.batch_cache import CacheObserver

        watcher = CacheObserver(forward)
    prefills = PrefixCache(forward, prefixes or {}, texts)
    queue = LaneQueue(lanes, ahead)
    with closing(Scheduler(forward, queue, width, prefills, clock, watcher, on_shortage)) as scheduler:
        while scheduler.waiting(reason := interrupted()):
            yield from scheduler.admit(reason)  # Prefilled, or Failed
            for batch in scheduler.batches:
                shortage: OutOfMemory | None = None
                try:
                    yield from step(batch, reason, texts)
                except OutOfMemory as error:
                    shortage = error.without_frames()
                except ContractError:
                    raise
                except GenctlError as error:  # the model's own code failed
                    yield from batch.fail(error)
                if shortage is not None:  # here the frames of what failed are gone, and their tensors
                    yield from scheduler.preempt(batch, shortage)
            scheduler.forget()


def step(batch: Batch, interrupted: str, texts: KeptTexts | None = None) -> Iterator[events.Event]:
    """One token for every row of a batch, or several where a draft is accepted."""
    chosen = choose(batch.states)  # processors, then searches
    copy = PendingCopy([each.questions for each in chosen])
    batch.run_ahead(chosen)  # on a GPU: the next pass, while the host learns and tells what was chosen
    facts = copy.wait()  # the one wait for the device
    for each, answers in zip(chosen, facts, strict=True):
        yield from each.commit(answers, interrupted)  # Stepped; Finished when no row lives
    if texts is not None and texts.grows:
        for prefix in batch.read_by_ended():
            texts.keep(prefix)
    yield from batch.draft()  # tokens that the next pass checks; Failed
    batch.arrange()  # remove ended rows, reorder rows, remove rejected drafts
    yield from batch.feed()  # one forward pass for all lanes, if it has not been run; CacheRead with `watch`
