"""The model beside a tree: the scores after every node, and the caches of branches.

A branch is read once. What branches share is in the cache once (`columns.Columns`), so going back to another one reads
nothing; under the bound of memory, branches leave the oldest first and are read again when they are visited. Where a
cache cannot be cut (recurrent states), the states after some nodes are kept instead; without a cache a branch is read
again each time. The numbers are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from genctl.decode.runtime import Pass
from genctl.decode.types import Prefix
from genctl.engines.session import Session
from genctl.errors import InputError, ModelError
from genctl.kernels.ops import entropy, log_softmax
from genctl.tree.nodes import ROOT, Tree

if TYPE_CHECKING:
    from genctl.decode.cache.cache import Cache
    from genctl.decode.runtime import Output


# -- the keys and values of branches: what branches have in common is stored once --------------------------------------
# A segment holds the columns of a run of nodes, and refers to the segment that holds those before them. The cache of a
# branch is put together from its segments. Under a bound, segments that nothing continues leave, the one that was used
# longest ago first.


@dataclass(eq=False)
class Segment:
    """Columns `start` to `end` of a branch, of every layer."""

    start: int
    end: int
    nodes: list[int]
    states: dict[str, Tensor]  # by the names of `Cache.state_dict`, each [1, heads, end - start, head_dim]
    above: Segment | None
    below: list[Segment] = field(default_factory=list)
    used: int = 0

    @property
    def bytes(self) -> int:
        """The memory of the columns."""
        return sum(tensor.nbytes for tensor in self.states.values())


class Columns:
    """Columns of nodes, `most` bytes of them. A path is the numbers of nodes, the root's first."""

    def __init__(self, prompt: int, most: int) -> None:
        self.prompt, self.most = prompt, most  # columns of the root; bytes
        self.bytes = 0
        self._of: dict[int, Segment] = {}
        self._clock = 0

    def held(self, path: Sequence[int]) -> int:
        """How many columns of a path are held: all those of its first nodes."""
        for place in range(len(path) - 1, -1, -1):
            if path[place] in self._of:
                return self.prompt + place
        return 0

    def states(self, path: Sequence[int], columns: int) -> dict[str, Tensor]:
        """The first `columns` columns of a path, which are held, as `Cache.load_state_dict` takes them."""
        parts: list[dict[str, Tensor]] = []
        end = columns
        self._clock += 1
        for segment in self._chain(path):
            segment.used = self._clock
            if segment.start < end:
                parts.append({name: one[:, :, : end - segment.start] for name, one in segment.states.items()})
                end = segment.start
        parts.reverse()
        return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]} if parts else {}

    def keep(self, path: Sequence[int], states: dict[str, Tensor]) -> None:
        """Hold those columns of a path that are not held yet. `states` has all."""
        start, end = self.held(path), self.prompt + len(path) - 1
        if start == end or not states:
            return
        nodes = list(path[start - self.prompt + 1 :] if start else path)
        own = {name: one[:, :, start:end].clone() for name, one in states.items()}
        self._clock += 1
        above = self._of[path[start - self.prompt]] if start else None
        segment = Segment(start, end, nodes, own, above, used=self._clock)
        if above is not None:
            above.below.append(segment)
        self._of |= dict.fromkeys(nodes, segment)
        self.bytes += segment.bytes
        self._evict()

    def shared(self, path: Sequence[int]) -> tuple[int, int]:
        """How many columns of a path another branch has too, and how many are its own alone."""
        columns = self.held(path)
        end, shared = columns, 0
        chain = list(self._chain(path))
        for segment in chain:
            if segment.end > end:
                shared = max(shared, end)
            forks = [other.start for other in segment.below if other not in chain]
            shared = max([shared, *(min(fork, end) for fork in forks)])
            end = min(end, segment.start)
        return shared, columns - shared

    def _chain(self, path: Sequence[int]) -> Iterable[Segment]:
        """The segments of a path, the newest first."""
        columns = self.held(path)
        segment = self._of[path[columns - self.prompt]] if columns else None
        while segment is not None:
            yield segment
            segment = segment.above

    def _evict(self) -> None:
        while self.bytes > self.most and self._of:
            last = [segment for segment in dict.fromkeys(self._of.values()) if not segment.below]
            oldest = min(last, key=lambda segment: segment.used)
            for node in oldest.nodes:
                del self._of[node]
            if oldest.above is not None:
                oldest.above.below.remove(oldest)
            self.bytes -= oldest.bytes


AT_ONCE = 2**24  # most logits of a pass; a longer text is read in several passes
LOGITS = 0.25  # of the memory is for scores, the rest for the cache


class Branches:
    """What the model made of the nodes of one tree. `memory` bounds the bytes that are kept."""

    def __init__(self, session: Session, tree: Tree, memory: int) -> None:
        self.session, self.tree, self.forward = session, tree, session.forward
        if self.forward.is_encoder_decoder:
            raise ModelError(
                f"{session.about.name} is an encoder-decoder, whose text is not one branch of tokens with its prompt",
                hint="genctl run and genctl beam show how it writes",
            )
        self.memory = memory
        self.columns = Columns(len(tree.opened.prompt_ids), int(memory * (1 - LOGITS)))
        self.read_tokens = 0  # that went through the model, to see what is read again
        self._scores: OrderedDict[int, Tensor] = OrderedDict()  # f32 [V] on the CPU, the newest last
        self._states: OrderedDict[int, Prefix] = OrderedDict()  # where the cache cannot be cut
        empty = (
            self.forward.new_cache(whole=True)
            if self.forward.abilities.supports_cache and self.forward.abilities.savable
            else None
        )
        self._keeps_columns = empty is not None and not empty.is_recurrent and self.forward.abilities.together
        self._keeps_states = empty is not None and not self._keeps_columns

    def scores(self, node: int) -> Tensor:
        """The model's logits after a node, f32 [V], on the CPU. Not to be written to."""
        found = self._scores.get(node)
        if found is None:
            found = self._read(node)
        else:
            self._scores.move_to_end(node)
        return found

    def prefix(self, node: int) -> Prefix | None:
        """The branch down to `node`, read, for the decode loop; None where the loop has to read it itself."""
        if not self._keeps_columns or self._beyond(node):
            return None
        logits = self.scores(node)
        path = self._path(node)
        if self.columns.held(path) < self.tree.length(node):  # more than the memory holds
            return None
        cache = self._cache(path, self.tree.length(node))
        cache.narrow(self.forward.new_cache())
        self.forward.prepare(cache)
        return Prefix(self._tokens(node), cache, logits[None].to(self.forward.device))

    def read_given(self, node: int, ids: Sequence[int]) -> GivenTokens:
        """Read tokens that are given, after a node: what the model says of each, in few passes.

        They are in the cache once `GivenTokens.keep` is told their nodes.
        """
        first = _figures(self.scores(node), ids[0])
        if not self._keeps_columns or self._beyond(node, len(ids)) or not self._held(node):
            before = self.tree.ids(node)
            rest = [_figures(self._alone((*before, *ids[:end])), ids[end]) for end in range(1, len(ids))]
            return GivenTokens([first, *rest], lambda nodes: None)
        path, at = self._path(node), self.tree.length(node)
        cache = self._cache(path, at)
        tokens = torch.tensor([[*self.tree.ids(node), *ids]], dtype=torch.long, device=self.forward.device)
        figures, scores = [first], list[Tensor]()
        for output, begin, end in self._passes(tokens, cache, at, at):
            cache = output.cache or cache
            for place in range(begin, end):
                logits = output.logits[0, place - end].float().cpu()
                if place + 1 < tokens.shape[1]:
                    figures.append(_figures(logits, int(tokens[0, place + 1])))
                else:
                    scores.append(logits.clone())

        def keep(nodes: Sequence[int]) -> None:
            self.columns.keep([*path, *nodes], cache.state_dict())
            self._keep(nodes[-1], scores[0])

        return GivenTokens(figures, keep)

    def shared(self, node: int) -> tuple[int, int]:
        """How many columns of the branch down to `node` other branches have too, and how many it has alone."""
        return self.columns.shared(self._path(node))

    def continuations(self, node: int, endings: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The logits after each ending (none empty, all equally long) of the branch down to `node`, f32 [V] each.

        Endings are read in one pass where rows may share one.
        """
        count = len(endings[0])
        if not self._keeps_columns or self._beyond(node, count) or not self._held(node):
            return [self._alone((*self.tree.ids(node), *ending)) for ending in endings]
        cache = self._cache(self._path(node), self.tree.length(node))
        rows = torch.zeros(len(endings), dtype=torch.long, device=self.forward.device)
        forked = cache.select(rows, room=count)
        feed = torch.tensor(endings, dtype=torch.long, device=self.forward.device)
        self.read_tokens += feed.numel()
        output = None
        for part in [feed] if self.forward.abilities.reads_several(True) else torch.split(feed, 1, 1):
            output = self.forward(Pass(part, forked, keep=1))
            assert output.cache is not None
            forked = output.cache
        assert output is not None
        return list(output.logits[:, -1].cpu())

    # -- reading -------------------------------------------------------------------------------------------------------

    def _path(self, node: int) -> list[int]:
        return [ROOT, *self.tree.path(node)]

    def _tokens(self, node: int) -> Tensor:
        return torch.tensor([list(self.tree.ids(node))], dtype=torch.long, device=self.forward.device)

    def _beyond(self, node: int, more: int = 0) -> bool:
        """Whether the numbers of so long a text depend on where it is cut."""
        return self.tree.length(node) + more > self.forward.bound

    def _held(self, node: int) -> bool:
        """Whether the whole branch is in the cache now."""
        if self.columns.held(self._path(node)) < self.tree.length(node):
            self._read(node)
        return self.columns.held(self._path(node)) == self.tree.length(node)

    def _cache(self, path: Sequence[int], columns: int) -> Cache:
        cache = self.forward.new_cache(whole=True)
        if columns:
            cache.load_state_dict(self.columns.states(path, columns), columns)
        return cache

    def _read(self, node: int) -> Tensor:
        if not self.tree.length(node):
            raise InputError("there is no token before the first one, so the model says nothing of it")
        if self._keeps_columns and not self._beyond(node):
            return self._read_on(node)
        if self._keeps_states and not self._beyond(node):
            return self._read_states(node)
        return self._keep(node, self._alone(self.tree.ids(node)))

    def _read_on(self, node: int) -> Tensor:
        """Read what is not in the cache yet; keep the columns, and the scores after every node on the way."""
        path, tokens, prompt = self._path(node), self._tokens(node), self.columns.prompt
        length = tokens.shape[1]
        at = min(self.columns.held(path), length - 1)
        cache = self._cache(path, at)
        for output, begin, end in self._passes(tokens, cache, at, prompt):
            cache = output.cache or cache
            for place in range(max(begin, prompt - 1), end):
                self._keep(path[place - prompt + 1], output.logits[0, place - end].float().cpu().clone())
        self.columns.keep(path, cache.state_dict())
        found = self._scores.get(node)
        assert found is not None
        return found

    def _passes(self, tokens: Tensor, cache: Cache, at: int, prompt: int) -> Iterator[tuple[Output, int, int]]:
        """Feed tokens int64 [1, T] from place `at` on: the output of each pass, and the places that it read.

        Of the first `prompt` tokens, which one pass reads, only the last has scores.
        """
        several, length = self.forward.abilities.reads_several(True), tokens.shape[1]
        size = max(AT_ONCE // self.forward.vocab_size, 1) if several else 1
        while at < length:
            if at < prompt:
                end, keep = prompt if several else at + 1, 1
            else:
                end = min(at + size, length)
                keep = end - at
            history = tokens[:, :end] if self.forward.wants_history(at) else None
            output = self.forward(Pass(tokens[:, at:end], cache, first=at == 0, keep=keep, history=history))
            assert output.cache is not None
            cache = output.cache
            self.read_tokens += end - at
            yield output, end - keep, end
            at = end

    def _read_states(self, node: int) -> Tensor:
        """Continue the state after the nearest node above, which a recurrent model reads token by token."""
        ids = self.tree.ids(node)
        above = next((each for each in reversed(self._path(node)[:-1]) if each in self._states), None)
        prefix: Prefix | None = None
        reused = 0
        if above is not None:
            prefix, reused = self.forward.resume(self._states[above], ids, None)
        if prefix is None:
            prefix, reused = self.forward.prefill(ids, None, whole=True), 0
        self.read_tokens += len(ids) - reused
        self._states[node] = prefix
        self._states.move_to_end(node)
        while len(self._states) > 1 and sum(map(_bytes, self._states.values())) > self.columns.most:
            self._states.popitem(last=False)
        return self._keep(node, prefix.logits[0].float().cpu().clone())

    def _alone(self, ids: Sequence[int]) -> Tensor:
        self.read_tokens += len(ids)
        prefix = self.forward.prefill(ids, None, use_cache=self.forward.abilities.supports_cache)
        return prefix.logits[0].float().cpu().clone()

    def _keep(self, node: int, logits: Tensor) -> Tensor:
        """Keep scores while there is room: the newest ones, and at least these."""
        self._scores[node] = logits
        self._scores.move_to_end(node)
        most = max(int(self.memory * LOGITS) // max(logits.nbytes, 1), 1)
        while len(self._scores) > most:
            self._scores.popitem(last=False)
        return logits


@dataclass(frozen=True)
class GivenTokens:
    """What the model says of tokens that were given: log-probability, rank and entropy of each."""

    figures: list[tuple[float, int, float]]
    keep: Callable[[Sequence[int]], None]  # takes their nodes


def _figures(logits: Tensor, id: int) -> tuple[float, int, float]:
    """Log-probability, rank and entropy of a token, from logits f32 [V]."""
    logprobs = log_softmax(logits[None])[0]
    own = logprobs[id]
    return float(own), 1 + int((logprobs > own).sum()), float(entropy(logprobs))


def _bytes(prefix: Prefix) -> int:
    return 0 if prefix.cache is None else sum(int(part["bytes"]) for part in prefix.cache.describe())
