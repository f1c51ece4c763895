"""Prefix cache: each prompt is read once for any number of lanes, and texts are kept for later prompts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TypeAlias

from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane, Prefix, Source

Prompt: TypeAlias = tuple[tuple[int, ...], tuple[int, ...] | None]  # the decoder's tokens, the encoder's

MOST = 512  # maximum tokens of a pass that reads several prompts, padding included
MOST_ON_GPU = 8192
KEPT = 2**30  # default maximum of the kept texts' caches, in bytes
PIECE = 2048  # tokens of a prompt that a GPU reads between two steps of other lanes
_PADDING = 0.25  # the most padding, as a share of a prompt's length


class KeptTexts:
    """Texts that were read, kept so that a later prompt that begins like one of them reads only the rest.

    Keeps the newest texts, as far as their caches fit into `most` bytes; by default into `KEPT` bytes, but at least the
    last two: a prompt, and the same with its answer. With `saved`, a prompt that was prefilled with `whole`, only that.

    A cache whose layers keep every column may be cut anywhere. Any other (a sliding window, a recurrent state) can be
    reused only by prompts that continue its whole text.
    """

    def __init__(self, most: int | None = None, *, saved: Prefix | None = None) -> None:
        self.saved = saved
        self.most, self.least = (KEPT, 2) if most is None else (most, 0)
        self._kept: dict[tuple[int, ...], Prefix] = {}  # the newest last

    @property
    def grows(self) -> bool:
        """Whether texts are added."""
        return self.saved is None

    def keep(self, prefix: Prefix) -> None:
        """Keep a text that was read. If its cache can be cut anywhere, kept beginnings of the text are dropped."""
        if prefix.cache is None:
            return
        ids = tuple(prefix.tokens[0].tolist())
        self._kept.pop(ids, None)
        if prefix.cache.is_plain:
            for shorter in [other for other in self._kept if other == ids[: len(other)]]:
                del self._kept[shorter]
        elif any(other[: len(ids)] == ids and kept.cache.is_plain for other, kept in self._kept.items() if kept.cache):
            return
        self._kept[ids] = prefix
        while len(self._kept) > self.least and self.bytes > self.most:
            del self._kept[next(iter(self._kept))]

    def clear(self) -> None:
        """Drop all texts but a saved prompt."""
        self._kept.clear()

    @property
    def bytes(self) -> int:
        """The memory of all caches."""
        return sum(kept.cache.reserved() for kept in self._kept.values() if kept.cache is not None)

    def best(self, ids: Sequence[int]) -> Prefix | None:
        """The kept text with the longest common beginning with `ids`, if its cache can be reused for them."""
        if self.saved is not None:
            return self.saved
        found: Prefix | None = None
        most = 0
        for kept_ids, prefix in self._kept.items():
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept_ids, ids, strict=False)))
            common = min(common, len(ids) - 1)  # the last token is read, for its scores
            assert prefix.cache is not None
            if common >= most and common > 0 and (common == len(kept_ids) or prefix.cache.is_plain):
                found, most = prefix, common
        if found is not None:  # move it to the end, as the most recently used
            key = tuple(found.tokens[0].tolist())
            self._kept[key] = self._kept.pop(key)
        return found


class PrefixCache:
    """The prefixes of live lanes; new prompts are resumed from kept `texts`."""

    def __init__(self, forward: ModelRuntime, texts: KeptTexts | None = None) -> None:
        self.forward = forward
        self.texts = texts
        self.prefixes: dict[tuple[Prompt, str, bool], Prefix] = {}
        self.sources: dict[tuple[int, ...], Source] = {}
        self.ready: dict[tuple[Prompt, str], Prefix] = {}  # read together and not taken yet

    def unread(self, lanes: list[Lane]) -> tuple[list[Lane], list[Lane]]:
        """Lanes whose prompts may share passes, each prompt once; and the other lanes."""
        if not self.forward.abilities.reads_together or any(map(self._begun, lanes)):
            return [], lanes
        seen = {key[0] for key in self.prefixes}
        unread: list[Lane] = []
        others: list[Lane] = []
        for lane in lanes:
            prompt = (lane.tokens, lane.source)
            plain = lane.use_cache and not lane.strategy.traits.needs_hidden
            plain = plain and len(lane.tokens) <= self.forward.bound
            (unread if plain and prompt not in seen else others).append(lane)
            seen.add(prompt)
        return unread, others

    def read(self, lanes: list[Lane]) -> None:
        """Read the prompts of these lanes in one pass, for `take`."""
        prefixes = self.forward.prefill_together([lane.tokens for lane in lanes])
        for lane, prefix in zip(lanes, prefixes, strict=True):
            self.put(lane, prefix)

    def in_pieces(self, lane: Lane) -> Generator[Prefix | None, None, None] | None:
        """The passes over a lane's prompt, if it is long and may be read in several; else None."""
        forward, length = self.forward, len(lane.tokens)
        if forward.device.type != "cuda" or length <= PIECE or length > forward.bound or lane.source is not None:
            return None
        unread, _ = self.unread([lane])
        if not unread or not forward.abilities.multi_token_exact or not forward.abilities.supports_cache:
            return None
        return forward.prefill_in_pieces(lane.tokens, PIECE)

    def put(self, lane: Lane, prefix: Prefix) -> None:
        """Store a prompt that was read, for `take`."""
        if prefix.cache is not None:
            prefix.cache.convert(lane.cache)
        self.ready[(lane.tokens, lane.source), lane.cache] = prefix

    def take(self, lane: Lane, room: int = 0) -> tuple[Prefix, bool]:
        """The lane's prefix, and whether its prefill already existed. `room`: free columns of a static cache."""
        prompt, hidden = (lane.tokens, lane.source), lane.strategy.traits.needs_hidden
        # if rows of one pass affect each other, a lane of several rows runs without a cache
        cached = lane.use_cache and (lane.strategy.max_rows == 1 or self.forward.abilities.together)
        form = lane.cache if cached else "off"
        known = self.prefixes.get((prompt, form, True))
        if known is None and not hidden:
            known = self.prefixes.get((prompt, form, False))
        if known is not None:
            return known, True
        ready = None if hidden else self.ready.pop((prompt, form), None)
        if ready is not None:
            self.prefixes[prompt, form, False] = ready
            return ready, False
        saved = self._begun(lane) if cached else None
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
        self.prefixes[prompt, form, hidden] = prefix
        return prefix, False

    def _begun(self, lane: Lane) -> Prefix | None:
        """A kept text that begins like the lane's prompt."""
        return None if self.texts is None else self.texts.best(lane.tokens)

    def clear(self) -> None:
        """Drop all prefixes and kept texts. Live lanes keep theirs."""
        self.ready, self.prefixes, self.sources = {}, {}, {}
        if self.texts is not None:
            self.texts.clear()

    def release(self, lanes: list[Lane]) -> None:
        """Drop prefixes that no live lane started from: memory must not grow with the number of prompts."""
        self.ready = {}
        if self.prefixes or self.sources:
            wanted = {(lane.tokens, lane.source) for lane in lanes}
            self.prefixes = {key: prefix for key, prefix in self.prefixes.items() if key[0] in wanted}
            sources = {lane.source for lane in lanes}
            self.sources = {key: source for key, source in self.sources.items() if key in sources}


def groups(lanes: Sequence[Lane], most: int = MOST) -> list[list[Lane]]:
    """Group lanes whose prompts are read in one pass of at most `most` tokens: prompts of about the same length.

    A pass over one short prompt is bound by reading the weights, which several prompts can share; a long prompt is
    bound by arithmetic. Groups and their lanes are in the order of `lanes`, whose prompts differ.
    """
    places: list[list[int]] = []
    lengths = [len(lane.tokens) for lane in lanes]
    for place in sorted(range(len(lanes)), key=lambda place: -lengths[place]):
        longest = lengths[places[-1][0]] if places else 0
        if places and (len(places[-1]) + 1) * longest <= most and longest <= lengths[place] * (1 + _PADDING):
            places[-1].append(place)
        else:
            places.append([place])
    return [[lanes[place] for place in group] for group in sorted(map(sorted, places))]
