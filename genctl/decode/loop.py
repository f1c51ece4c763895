"""The decode loop, the only one: score -> choose -> commit -> feed.

Several lanes (one prompt with one strategy each) share one forward pass per step: their rows are concatenated, the
shorter ones padded on the left and masked. A finished lane's rows leave the batch at once and a waiting lane takes
their place. The loop is the same for every strategy and handles token ids only. The scores of a row do not depend on
its neighbours: padding is masked, each row has its own keys and values, and each lane draws from its own generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from genctl import events
from genctl.decode.batch import Batch
from genctl.decode.choose import choose
from genctl.decode.lane import OutOfMemory
from genctl.decode.prefix_cache import KeptTexts, PrefixCache
from genctl.decode.runtime import ModelRuntime
from genctl.decode.scheduler import LaneQueue, Scheduler, Waiting
from genctl.decode.transfer import PendingCopy
from genctl.errors import ContractError, GenctlError


def decode(
    forward: ModelRuntime,
    lanes: Iterable[Waiting],
    *,
    width: int = 1,
    texts: KeptTexts | None = None,
    interrupted: Callable[[], str] = lambda: "",
    clock: Callable[[], float] = time.perf_counter,
    watch: bool = False,
    on_shortage: Callable[[int], None] = lambda width: None,
    ahead: int = 0,
) -> Iterator[events.Event]:
    """Run lanes, at most `width` at once. Yields for each: Prefilled, Stepped …, then Finished or Failed.

    `lanes` is read lazily, as slots become free; of the next `ahead` lanes, the one with the most work begins first.
    None in `lanes` means that the next lane is not available yet: the live ones continue. A Failed in `lanes` is
    yielded unchanged. Lanes with the same prompt share one prefill while any of them is live. A beginning that a prompt
    shares with one of `texts` is not read again; what a lane has read is added to them. `interrupted` is called once
    per step: a non-empty result ends every live row with that reason, and no further lane begins. `watch` adds a
    CacheRead after every pass. When memory runs out, fewer lanes run at once (`on_shortage` receives their number) and
    the others follow; a lane fails only if it does not fit alone.
    """
    watcher = None
    if watch:
        from genctl.decode.batch_cache import CacheObserver

        watcher = CacheObserver(forward)
    prefills = PrefixCache(forward, texts)
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
                if shortage is not None:  # here the frames of the failed step are freed, with their tensors
                    yield from scheduler.preempt(batch, shortage)
            scheduler.forget()


def step(batch: Batch, interrupted: str, texts: KeptTexts | None = None) -> Iterator[events.Event]:
    """Write one token to every row of a batch, or several where a draft is accepted."""
    chosen = choose(batch.states)  # processors, then searches
    copy = PendingCopy([each.questions for each in chosen])
    batch.run_ahead(chosen)  # on a GPU: launch the next pass while the host commits this choice
    facts = copy.wait()  # the one wait for the device
    for each, answers in zip(chosen, facts, strict=True):
        yield from each.commit(answers, interrupted)  # Stepped; Finished when no row lives
    if texts is not None and texts.grows:
        for prefix in batch.read_by_ended():
            texts.keep(prefix)
    yield from batch.draft()  # tokens for the next pass to verify; Failed
    batch.arrange()  # remove ended rows, reorder rows, remove rejected drafts
    yield from batch.feed()  # one forward pass for all lanes, unless it was run ahead; CacheRead with `watch`
