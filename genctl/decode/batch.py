"""Lanes whose rows go through the model together: one cache, one mask, one forward pass per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from genctl import events
from genctl.decode import cache as caches
from genctl.decode import host, shared
from genctl.decode.cache import Cache
from genctl.decode.host import Desk, sent
from genctl.decode.lane import Run
from genctl.decode.runtime import ModelRuntime, Output
from genctl.decode.sources import Sources, join_sources
from genctl.decode.watch import Watcher

ROOM = 512  # columns a cache is given at once beyond what it holds, at most


class Batch:
    """The rows of several lanes. Between steps rows are reordered, lanes leave and others join."""

    def __init__(self, forward: ModelRuntime, watcher: Watcher | None = None) -> None:
        self.forward = forward
        self.watcher = watcher
        self.torn: list[Run] = []  # whose searches have been asked for a choice that is not written yet
        self.reordered: list[int] = []  # where the rows were before the pass, if any was moved or copied
        self.runs: list[Run] = []
        self.joining: list[Run] = []
        self.cache: Cache | None = None
        self.held: list[tuple[Run, int]] = []  # whose rows the cache has, in order, and how many
        self.columns = 0  # of the cache
        self.pads: dict[int, int] = {}  # id of a run -> columns of padding before its tokens
        self._padding: tuple[list[int], Tensor] | None = None  # the last pads, and those on the device
        self.sources: Sources | None = None
        self.layout: list[tuple[int, int]] = []  # for which runs and counts `sources` was made

    def __len__(self) -> int:
        return len(self.runs) + len(self.joining)

    def welcomes(self, run: Run) -> bool:
        """Whether a lane may share this batch's passes without a change in what it receives."""
        if not len(self):
            return True
        other = (self.runs or self.joining)[0]
        if (run.lane.use_cache, run.lane.cache) != (other.lane.use_cache, other.lane.cache):
            return False
        if drafts(run) or drafts(other) or not self.forward.together:
            return False
        cache = run.prefix.cache
        if cache is not None and not caches.mergeable(cache):
            return False
        members = (*self.runs, *self.joining)
        if any(_source_length(run) != _source_length(member) for member in members) and not self.forward.pads_sources:
            return False
        if all(run.reach == member.reach for member in members):
            return True
        # where frequencies depend on the length, only texts that stay below it may be of different lengths
        return self.forward.pads and all(_end(member) <= self.forward.bound for member in (run, *members))

    def join(self, run: Run) -> None:
        """Take a lane in, from the next step on."""
        self.joining.append(run)

    def live(self) -> list[Run]:
        """The lanes that have not ended."""
        return [run for run in (*self.runs, *self.joining) if run.live]

    def clear(self) -> None:
        """Forget everything: the lanes go on elsewhere."""
        self.runs, self.joining, self.held, self.layout = [], [], [], []
        self.cache = self.sources = None
        self.torn = []

    def step(self, interrupted: str) -> Iterator[events.Event]:
        """Bring the cache into the order that the last choices ask for, feed, and let every lane advance."""
        self._arrange()
        output = self._feed()
        if self.watcher is not None:
            lanes = [run.lane.name for run in self.runs for _ in range(run.rows)]
            yield self.watcher.read(lanes, max(run.step for run in self.runs), self.reordered)
        said = list(self._said(output))
        # on a GPU all lanes choose before the host waits, once; on a CPU a lane's scores are still near when it is told
        for group in [[one] for one in said] if host.near(output.logits) else [said]:
            yield from self._advance(group, interrupted)
        self.runs = [run for run in self.runs if run.live]

    def _said(self, output: Output) -> Iterator[tuple[Run, Output, Tensor]]:
        """What the model said to each lane, and the normalizer of that."""
        normalizer = output.logits.logsumexp(-1)
        at = 0
        for run in self.runs:
            count = run.rows
            part = slice(at, at + count)
            at += count
            mine = output if count == output.logits.shape[0] else _slice(output, part)
            said = normalizer[part]
            if self.cache is None:  # everything was read again: only what follows the newest token is news
                mine, said = _last(mine, 1 + run.drafted), said[:, -1 - run.drafted :]
            yield run, mine, said

    def _advance(self, group: Sequence[tuple[Run, Output, Tensor]], interrupted: str) -> Iterator[events.Event]:
        """Let lanes choose, wait for the device, and say what they wrote.

        Where one fails for want of memory, those before it are written first; it and those after it are not.
        """
        desk, failed = Desk(), None
        chosen: list[Run] = []
        for run, mine, said in group:
            run.passes += 1
            self.torn.append(run)
            try:
                run.choose(mine, said, desk)
            except (MemoryError, RuntimeError) as error:
                failed = error
                break
            chosen.append(run)
        desk.fetch()
        for run in chosen:
            run.settle(interrupted)
        desk.fetch()
        for run in chosen:
            yield from run.tell()
            self.torn.remove(run)
        if failed is not None:
            raise failed

    # -- the cache -----------------------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        if not self.runs and not self.joining:
            return
        cached = (self.runs or self.joining)[0].prefix.cache is not None
        if cached:
            self._arrange_cache()
        self.runs += self.joining
        self.joining = []
        if not cached:
            longest = max(run.reach for run in self.runs)
            self.pads = {id(run): longest - run.reach for run in self.runs}
        if self.forward.is_encoder_decoder:
            self._arrange_sources()

    def _arrange_cache(self) -> None:
        rows: list[int] = []
        at = 0
        for run, count in self.held:
            if run.live:
                rows += [at + parent for parent in run.parents for _ in range(run.branches)]
            at += count
        everyone = (*self.runs, *self.joining)
        room = max(run.lane.max_new_tokens - run.pending.rows.written for run in everyone)
        if not caches.fixed(everyone[0].prefix.cache):
            room = min(ROOM, room)
        parts, spare = [], 0
        if rows:
            assert self.cache is not None
            spare = min(self.pads[id(run)] for run in self.runs)
            self.reordered = [] if rows == list(range(at)) else rows
            if spare or self.reordered:
                index = sent(rows, self.forward.device)
                if spare or self.joining or [(run, run.rows) for run in self.runs] != self.held:
                    self.cache = caches.select(self.cache, index, room=0 if self.joining else room, drop=spare)
                else:  # rows move within their lanes, whose prompts are the same for all their rows
                    since = min(self.pads[id(run)] + run.prefix.tokens.shape[1] for run in self.runs)
                    self.cache = caches.reorder(self.cache, index, since)
            rejected = self._rejected()
            caches.crop(self.cache, rejected)
            self.columns -= spare + rejected
            parts.append(self.cache)
        if self.joining:
            together = self._together()
            if parts and not together:
                parts = [shared.unshared(parts[0])]
            lengths = {id(run): run.read for run in self.joining}
            parts += [self._fork(run, room, together) for run in self.joining]
            self.cache = caches.merge(parts, room=room)
            lengths |= {id(run): self.columns - (self.pads[id(run)] - spare) for run in self.runs}
            self.columns = max(lengths.values())
            self.pads = {key: self.columns - length for key, length in lengths.items()}
        elif spare:
            self.pads = {id(run): self.pads[id(run)] - spare for run in self.runs}
        self.held = [(run, run.rows) for run in everyone]

    def _together(self) -> bool:
        """Whether all rows continue one prompt, whose keys and values they may then share."""
        everyone = (*self.runs, *self.joining)
        prefix = everyone[0].prefix
        return (
            sum(run.rows for run in everyone) > 1
            and (self.cache is None or not self.runs or shared.is_shared(self.cache))
            and all(run.prefix is prefix and run.own is None and not drafts(run) for run in everyone)
            and shared.shareable(prefix.cache)
            and self.forward.shares(prefix)
        )

    def _fork(self, run: Run, room: int, together: bool) -> Cache:
        """The cache of a lane that joins: its prompt's, for as many rows as it has."""
        device = self.forward.device
        if run.own is not None:  # its rows were read again: they differ, and there are as many as it needs
            part, run.own = run.own, None
            return caches.select(part, torch.arange(run.rows, device=device), room=room)
        part = caches.self_part(run.prefix.cache)
        if together:
            return shared.share(part, run.rows, room)
        rows = torch.zeros(run.rows, dtype=torch.long, device=device)
        alone = run.rows == 1 and not self.runs and len(self.joining) == 1  # else what is needed is made by the merge
        part = (caches.continued if alone else caches.select)(part, rows, room=room)
        return caches.rewindable(part) if drafts(run) else part

    def _rejected(self) -> int:
        """Draft columns to take back. A lane that drafts is alone in its batch."""
        run = self.runs[0]
        choice = run.choice
        return 0 if choice is None or run.fed_draft == 0 else run.fed_draft - choice.kept

    def _arrange_sources(self) -> None:
        layout = [(id(run), run.rows) for run in self.runs]
        if layout == self.layout:
            return
        self.layout = layout
        cross = [None if run.prefix.cache is None else run.prefix.cache.cross_attention_cache for run in self.runs]
        sources = [run.prefix.source for run in self.runs if run.prefix.source is not None]
        counts = [run.rows for run in self.runs]
        group = len(counts) > 1 and counts[0] > 1 and cross[0] is not None and self.forward.groups(self.runs[0].prefix)
        self.sources = join_sources(sources, cross, counts, group=group)

    # -- the pass ------------------------------------------------------------------------------------------------------

    def _feed(self) -> Output:
        forward, device = self.forward, self.forward.device
        if self.cache is None:
            feed = self._everything()
            keep = 1 + max(run.drafted for run in self.runs)
            start = 0
        else:
            parts = [run.unfed() for run in self.runs]
            feed = parts[0] if len(parts) == 1 else torch.cat(parts)
            keep, start = feed.shape[1], self.columns
        mask = positions = None
        longest = max(self.pads.values(), default=0)
        if feed.shape[1] == 1:
            columns = torch.full((1, 1), start, device=device)
        else:
            columns = torch.arange(start, start + feed.shape[1], device=device)[None]
        if longest:
            pads = self._before(device)
            whole = torch.arange(start + feed.shape[1], device=device)[None]
            mask = (whole >= pads[:, None]).long()
            positions = (columns - pads[:, None]).clamp(min=0)
        else:
            positions = columns
        hidden = any(run.lane.strategy.needs_hidden for run in self.runs)
        output = forward(
            feed,
            self.cache,
            mask=mask,
            positions=positions,
            sources=self.sources,
            keep=keep,
            hidden=hidden,
            first=self.cache is None,
            history=self._everything() if self.cache is not None and forward.wants_history(start) else None,
        )
        if self.cache is not None:
            self.columns += feed.shape[1]
        for run in self.runs:
            run.fed_draft = run.drafted
        return output

    def _before(self, device: torch.device) -> Tensor:
        """Columns of padding before the tokens of each row, int64 [N]; the same tensor while they stay the same."""
        pads = [self.pads[id(run)] for run in self.runs for _ in range(run.rows)]
        if self._padding is None or self._padding[0] != pads:
            self._padding = pads, sent(pads, device)
        return self._padding[1]

    def _everything(self) -> Tensor:
        """All tokens of all rows, int64 [N, T+D], padded on the left: what a model without a cache is fed."""
        parts = []
        for run in self.runs:
            tokens = run.pending.rows.tokens
            if run.draft is not None:
                tokens = torch.cat([tokens.repeat_interleave(run.branches, 0), run.draft.flatten(0, 1)], 1)
            pad = self.pads[id(run)]
            parts.append(torch.nn.functional.pad(tokens, (pad, 0)) if pad else tokens)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def drafts(run: Run) -> bool:
    """Whether a lane takes back tokens that it tried: its cache is cropped by its own measure, so it goes alone."""
    return bool(getattr(run.lane.strategy, "drafts", False))


def _end(run: Run) -> int:
    """The longest that a lane's rows can become."""
    return run.length - run.pending.rows.written + run.lane.max_new_tokens + run.drafted


def _source_length(run: Run) -> int:
    source = run.prefix.source
    return 0 if source is None else int(source.ids.shape[1])


def _slice(output: Output, part: slice) -> Output:
    return Output(
        output.logits[part],
        output.cache,
        None if output.hidden is None else output.hidden[part],
        None if output.layers is None else tuple(layer[part] for layer in output.layers),
    )


def _last(output: Output, count: int) -> Output:
    """What was said of the newest `count` tokens."""
    return Output(
        output.logits[:, -count:],
        output.cache,
        None if output.hidden is None else output.hidden[:, -count:],
        None if output.layers is None else tuple(layer[:, -count:] for layer in output.layers),
    )
