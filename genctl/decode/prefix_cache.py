"""Prompts that the model has read, so that each is read once however many lanes start from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane, Prefix, Source

Prompt: TypeAlias = tuple[tuple[int, ...], tuple[int, ...] | None]  # the decoder's tokens, the encoder's

MOST = 512  # tokens of a pass that reads several prompts, padding included
_PADDING = 0.25  # the share of a prompt's own length that may be added to it, at most


class PrefixCache:
    """The prefixes of live lanes, those given from outside, and a saved one."""

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
            if prefix.cache is not None:
                prefix.cache.convert(lane.cache)
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
            prefix.cache.convert(lane.cache, room)
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


def groups(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Which prompts are read in one pass: short ones of about the same length, each lane in one group.

    A short prompt leaves the processor waiting for weights; several side by side share them. A long one keeps it busy
    alone. Groups and their lanes are in the order of `lanes`, whose prompts differ.
    """
    made: list[list[int]] = []
    lengths = [len(lane.tokens) for lane in lanes]
    for place in sorted(range(len(lanes)), key=lambda place: -lengths[place]):
        longest = lengths[made[-1][0]] if made else 0
        if made and (len(made[-1]) + 1) * longest <= MOST and longest <= lengths[place] * (1 + _PADDING):
            made[-1].append(place)
        else:
            made.append([place])
    return [[lanes[place] for place in group] for group in sorted(map(sorted, made))]
