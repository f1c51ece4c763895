"""The abilities of a transformers model: known for the architectures that were compared, measured for all others.

transformers does not declare whether a model's cache is exact, whether its rows are independent, or whether padding can
be masked: some models take positions from the length of the cache, ignore the mask, or keep states in their modules.
The architectures marked `compared` in `models/architectures.py` were compared with `generate()` (tests/zoo). For any
other, the first run that needs an ability compares the logits of a few short passes, batched and separate.

N rows, F tokens fed, T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from genctl import compat
from genctl.decode.cache.cache import Cache
from genctl.decode.cache.foreign import new_cache
from genctl.decode.runtime import Abilities, ModelRuntime, Pass
from genctl.decode.types import Source, Sources, join_sources
from genctl.models.architectures import facts_of

# The largest difference between two computations of the same logits, relative to their spread.
_EXACT, _ROUNDED = 1e-3, 1e-1
_SHORT = 512  # the largest window that a trial fills
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


@dataclass
class _Rows:
    """Partly read rows, with the state for the next step."""

    cache: Cache | None
    tokens: Tensor  # int64 [N, T], padded on the left
    pads: list[int]
    sources: Sources | None


class Probe:
    """Tests a model's abilities. Each method tests one; it returns whether the model has it, or raises `FAILURES`."""

    def __init__(self, forward: ModelRuntime) -> None:
        self.forward = forward
        exact = forward.model.dtype == torch.float32 and not getattr(forward.config, "quantization_config", None)
        self.limit = _EXACT if exact else _ROUNDED
        self.ids = _plain_ids(forward)

    def cache(self) -> bool:
        """Whether steps on a cache agree with recomputing the whole text, even after a pass over another prompt."""
        text = self._text(5, 0)
        try:
            reference = torch.cat([self._read([text[:4]]), self._read([text])])
        except FAILURES:  # a model that needs a cache
            return True
        rows = self._begin([text[:3]])
        self._begin([self._text(5, 50)])
        return self.alike(torch.cat([self._step(rows, [[token]]) for token in text[3:]]), reference)

    def continued(self, begun: int, count: int) -> tuple[Tensor, Tensor, bool]:
        """Logits f32 [count, V] after `begun` tokens, from steps on a cache and from recomputing the whole text.

        Also whether each step changed the recurrent states of every layer. Raises what the model's code raises.
        """
        text = self._text(begun + count, 0)
        rows, steps, moved = self._begin([text[:begun]]), [], True
        assert rows.cache is not None
        for token in text[begun:]:
            before = _states(rows.cache)
            steps.append(self._step(rows, [[token]]))
            pairs = zip(before, _states(rows.cache), strict=False)
            moved = moved and all(any(not torch.equal(old[name], new[name]) for name in old) for old, new in pairs)
        anew = [self._read([text[:end]]) for end in range(begun + 1, begun + count + 1)]
        return torch.cat(steps), torch.cat(anew), moved

    def several(self) -> bool:
        """Whether reading several tokens at once on a cache agrees with one at a time, even after removing some."""
        windows = [getattr(layer, "sliding_window", 0) for layer in self.forward.new_cache().layers]
        past = max((size for size in windows if size and size <= _SHORT), default=0)  # the prompt exceeds it
        length = int(min(past + 6, self.forward.bound))  # no drafts beyond the bound
        if length < 6:
            return True
        text = self._text(length, 0)
        begun = self._begin([text[:-4]])
        reference = torch.cat([self._step(begun, [[token]]) for token in text[-4:]])
        rows = self._begin([text[:-4]])
        assert rows.cache is not None
        rows.cache.activate_past_recording()
        if not self.alike(self._step(rows, [text[-4:]]), reference):
            return False
        rows.cache.crop(3)
        rows.tokens = rows.tokens[:, :-3]
        rows.cache.activate_past_recording()
        return self.alike(self._step(rows, [text[-3:]]), reference[1:])

    def whole(self) -> bool:
        """Whether a pass without a cache agrees, at each of its last tokens, with a pass that ends there."""
        text = self._text(8, 0)
        reference = torch.cat([self._read([text[:length]]) for length in range(5, 9)])
        return self.alike(self._read([text], keep=4), reference)

    def rows(self) -> bool:
        """Whether two rows of equal length agree with each row alone, even after they are swapped."""
        text, second = self._text(5, 0), self._text(5, 50)
        second = [*text[:3], *second[3:]]
        reference = torch.cat([self._alone(text, 3), self._alone(second, 3)])
        if not self.forward.abilities.supports_cache:
            return self.alike(self._read([text, second]), reference)
        rows = self._fork(self._begin([text[:3]]), 2)
        self._step(rows, [[second[3]], [text[3]]])
        assert rows.cache is not None
        swap = torch.tensor([1, 0], device=self.forward.device)
        rows.cache, rows.tokens = rows.cache.reorder(swap, 3), rows.tokens[swap]
        return self.alike(self._step(rows, [[text[4]], [second[4]]]), reference)

    def padding(self) -> bool:
        """Whether rows of different lengths, padded on the left and masked, agree with each row alone."""
        texts = [self._text(7, 0), self._text(4, 50)]
        reference = torch.cat([self._alone(text, len(text) - 2) for text in texts])
        if not self.forward.abilities.supports_cache:
            return self.alike(self._read(texts), reference)

        def ends(rows: _Rows) -> bool:
            self._step(rows, [[text[-2]] for text in texts])
            return self.alike(self._step(rows, [[text[-1]] for text in texts]), reference)

        if not ends(self._merge([self._begin([text[:-2]]) for text in texts])):
            return False
        return not self.forward.abilities.reads_padded or ends(self._begin([text[:-2] for text in texts]))

    def sources(self) -> bool:
        """Whether sources of different lengths, padded on the right, agree with each source alone."""
        sources = [self.forward.encode(self._text(7, 0)), self.forward.encode(self._text(4, 50))]
        text = self._text(3, 20)
        alone = [self._begin([text[:2]], source) for source in sources]
        reference = torch.cat([self._step(rows, [text[2:]]) for rows in alone])
        together = self._merge([self._begin([text[:2]], source) for source in sources], sources)
        return self.alike(self._step(together, [text[2:]] * 2), reference)

    # -- passes --------------------------------------------------------------------------------------------------------

    def _text(self, length: int, start: int) -> list[int]:
        """`length` ids of the vocabulary, none of them special."""
        return [self.ids[(start + 7 * place) % len(self.ids)] for place in range(length)]

    def _rows(self, texts: Sequence[Sequence[int]], source: Source | None = None) -> _Rows:
        """Texts that have not been read yet. They share a source."""
        longest = max(map(len, texts))
        pads = [longest - len(text) for text in texts]
        feed = [[0] * pad + list(text) for text, pad in zip(texts, pads, strict=True)]
        if source is None and self.forward.is_encoder_decoder:
            source = self.forward.encode(self._text(4, 90))
        sources = None if source is None else join_sources([source], [None], [len(texts)])
        return _Rows(None, torch.tensor(feed, device=self.forward.device), pads, sources)

    def _read(self, texts: Sequence[Sequence[int]], keep: int = 1) -> Tensor:
        """Logits f32 [N * keep, V] after the last tokens of each text, all read in one pass without a cache."""
        rows = self._rows(texts)
        return self._pass(rows, rows.tokens, keep)

    def _begin(self, texts: Sequence[Sequence[int]], source: Source | None = None) -> _Rows:
        """Read texts in one pass, with a new cache."""
        rows = self._rows(texts, source)
        rows.cache = self.forward.new_cache()
        self._pass(rows, rows.tokens)
        return rows

    def _step(self, rows: _Rows, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits f32 [N * F, V] after each of F more tokens of each row."""
        feed = torch.tensor(tokens, device=self.forward.device)
        rows.tokens = torch.cat([rows.tokens, feed], 1)
        return self._pass(rows, feed, keep=feed.shape[1])

    def _alone(self, text: Sequence[int], known: int) -> Tensor:
        """Logits f32 [1, V] after a text, read as one row as in a run: `known` tokens, then step by step."""
        if not self.forward.abilities.supports_cache:
            return self._read([text])
        rows = self._begin([text[:known]])
        return [self._step(rows, [[token]]) for token in text[known:]][-1]

    def _fork(self, rows: _Rows, count: int) -> _Rows:
        """Copy a row `count` times."""
        index = torch.zeros(count, dtype=torch.long, device=self.forward.device)
        assert rows.cache is not None
        sources = rows.sources
        if sources is not None:
            sources = join_sources([Source(rows.tokens, sources.states)], [rows.cache.cross], [count])
        return _Rows(rows.cache.select(index, room=2), rows.tokens[index], rows.pads * count, sources)

    def _merge(self, parts: Sequence[_Rows], sources: Sequence[Source] = ()) -> _Rows:
        """Merge rows of different lengths into one cache."""
        longest = max(rows.tokens.shape[1] for rows in parts)
        pads = [longest - rows.tokens.shape[1] for rows in parts]
        tokens = [torch.nn.functional.pad(rows.tokens, (pad, 0)) for rows, pad in zip(parts, pads, strict=True)]
        held = [rows.cache for rows in parts if rows.cache is not None]
        joined = join_sources(sources, [cache.cross for cache in held], [1] * len(parts)) if sources else None
        return _Rows(held[0].merge(held[1:], room=2), torch.cat(tokens), pads, joined)

    def _pass(self, rows: _Rows, feed: Tensor, keep: int = 1) -> Tensor:
        """Feed tokens; returns logits f32 [N * keep, V] after the last `keep` tokens of each row."""
        total, device = rows.tokens.shape[1], self.forward.device
        columns = torch.arange(total - feed.shape[1], total, device=device)[None]
        mask, positions = None, columns
        if any(rows.pads):
            before = torch.tensor(rows.pads, device=device)[:, None]
            mask = (torch.arange(total, device=device)[None] >= before).long()
            positions = (columns - before).clamp(min=0)
        first = feed.shape[1] == total
        given = Pass(feed, rows.cache, mask=mask, positions=positions, sources=rows.sources, first=first, keep=keep)
        output = self.forward(replace(given, history=rows.tokens))
        return output.logits[:, -keep:].flatten(0, 1)

    def alike(self, logits: Tensor, reference: Tensor) -> bool:
        """Whether logits f32 [N, V] are equal up to rounding."""
        finite = torch.isfinite(reference)
        if logits.shape != reference.shape or not bool((finite == torch.isfinite(logits)).all()):
            return False
        spread = torch.where(finite, reference, 0.0).std(-1, keepdim=True)
        off = torch.where(finite, logits - reference, 0.0).abs()
        return bool((off <= self.limit * spread + 1e-6).all())


def _states(cache: Cache) -> list[dict[str, Tensor]]:
    """Copies of each layer's recurrent states, for layers that have some."""
    states = [layer.state_dict() for layer in cache.layers if layer.is_recurrent]
    columns = ("keys", "values")
    return [{name: state.clone() for name, state in held.items() if name not in columns} for held in states if held]


def _plain_ids(forward: ModelRuntime) -> list[int]:
    """Ordinary token ids, not listed in the config as special."""
    special: set[int] = set()
    parts: list[dict[str, Any]] = [forward.config.to_dict()]
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif str(key).endswith(("_token_id", "_token_index", "_id")):
                numbers = value if isinstance(value, list) else [value]
                special.update(number for number in numbers if isinstance(number, int))
    return [id for id in range(3, min(forward.vocab_size, 500)) if id not in special] or [0]


FINDINGS = {
    "cache": "{} says something else with a cache than without: it runs without one and reads all at every step",
    "rows": "rows of {} affect each other: each runs alone and without a cache",
    "padding": "padding changes the output of {}: prompts of different lengths are not batched",
    "sources": "padding changes the output of {}: sources of different lengths are not batched",
}


def _measured(trial: str) -> cached_property[bool]:
    """An ability that depends on one trial only."""
    return cached_property(lambda abilities: abilities._has(trial))


class MeasuredAbilities(Abilities):
    """Measures each ability when it is first read; missing ones of `FINDINGS` add a sentence to `findings`.

    `runtime` makes a separate runtime for the short passes that measure it (see `Probe`), so a run's counters and the
    states between its passes do not change. None: every ability counts as present.
    """

    def __init__(
        self,
        model: Any,
        *,
        takes_cache: bool,
        takes_mask: bool,
        findings: list[str],
        runtime: Callable[[Abilities], ModelRuntime] | None,
    ) -> None:
        self._config, self._model_class = model.config, type(model).__name__
        self._facts = facts_of(model.config.model_type)
        self._is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self._stateful = compat.is_stateful(model)
        self._takes_cache, self._takes_mask = takes_cache, takes_mask
        self._findings, self._runtime = findings, runtime

    def _has(self, ability: str) -> bool:
        if self._runtime is None:
            return True
        probe = Probe(self._runtime(self))
        try:
            has = bool(getattr(probe, ability)())
        except FAILURES:
            has = False
        if not has and ability in FINDINGS:
            self._findings.append(FINDINGS[ability].format(self._model_class))
        return has

    @property
    def savable(self) -> bool:
        """Whether its cache consists of layers, rather than states that the model returns."""
        return not self._facts.returns

    @property
    def recurrent(self) -> bool:
        """Whether its class is marked as stateful."""
        return self._stateful

    @property
    def _always_cached(self) -> bool:
        """Whether the cache is used even if it changes the texts, as in `generate()`."""
        return bool(self._facts.returns or self._facts.cache_differs)

    @cached_property
    def supports_cache(self) -> bool:
        """Whether the model takes a cache that either changes no text or is used anyway, as in `generate()`."""
        return bool(self._facts.returns or self._takes_cache) and (self._always_cached or self._has("cache"))

    @cached_property
    def cache_differs(self) -> bool:
        """Whether a cache that is used anyway was found to change the texts."""
        return self._always_cached and self.supports_cache and not self._has("cache")

    multi_token_exact = _measured("several")  # also after a rejected draft
    multi_token_exact_uncached = _measured("whole")
    together = _measured("rows")  # if False, each row is read alone

    @cached_property
    def pads(self) -> bool:
        """Whether rows may share a pass, and padding does not change their scores."""
        if self._is_encoder_decoder:  # positions of most decoders are columns of the cache, which cannot be shifted
            return self._facts.relative and self.together
        return self._takes_mask and self.together and not self._facts.returns and self._has("padding")

    @cached_property
    def pads_sources(self) -> bool:
        """Whether rows may share a pass, and padding of sources does not change their scores."""
        return self.together and self._has("sources")

    @cached_property
    def pads_behind(self) -> bool:
        """Not measured: complete texts of unlisted architectures share a pass only if they are equally long."""
        return self.together and self._runtime is None

    @cached_property
    def reads_padded(self) -> bool:
        """Whether prompts can be read with padding: the cache has only columns, which can be dropped, and no states."""
        if not self._takes_mask or not self.supports_cache or self._is_encoder_decoder or self._facts.returns:
            return False
        return new_cache(self._config).only_columns
