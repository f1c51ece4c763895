"""How prompts are read: alone, several in one pass, after a saved prefix, and again after a preemption."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.runtime import Abilities, Output
from genctl.decode.types import Prefix, Source, Sources

if TYPE_CHECKING:
    from genctl.decode.cut_windows import CutWindow
    from genctl.decode.pass_prices import PassPrice


class Reader(ABC):
    """Reading for a runtime, with a source for an encoder-decoder."""

    model: Any
    device: torch.device
    abilities: Abilities
    # For rotary positions that depend on the length of a text (see `length_rope`), and for windows whose results depend
    # on where a text is cut (see `cut_windows`):
    bound: float = math.inf  # up to this length texts may be cut anywhere
    dynamic = False  # beyond it every token is read on its own
    reads_again = False  # a text that grows beyond it is read again in one pass
    cut_window: CutWindow | None = None
    remark = ""  # see `runtime.ModelRuntime`

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end a text, as the checkpoint says."""
        eos = self.model.generation_config.eos_token_id
        return (eos,) if isinstance(eos, int) else tuple(eos or ())

    @abstractmethod
    def __call__(
        self,
        feed: Tensor,
        cache: Cache | None,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        sources: Sources | None = None,
        keep: int = 0,
        hidden: bool = False,
        first: bool = False,
        history: Tensor | None = None,
    ) -> Output:
        """See `runtime.ModelRuntime`."""

    @abstractmethod
    def new_cache(self, *, room: int = 0, whole: bool = False) -> Cache:
        """See `runtime.ModelRuntime`."""

    def prepare(self, cache: Cache | None) -> None:  # noqa: B027 — most runtimes take any form
        """See `runtime.ModelRuntime`."""

    def free(self) -> None:  # noqa: B027 — most runtimes keep nothing
        """See `runtime.ModelRuntime`."""

    def limit_cuts(self, window: CutWindow | None) -> None:
        """Lower the bound to that of a window."""
        self.cut_window = window
        if window is not None:
            self.bound, self.dynamic = min(self.bound, window.bound), True

    def in_one_piece(self, length: int) -> bool:
        """Whether the scores of a text depend on where it is cut."""
        return length > self.bound

    def wants_history(self, before: int) -> bool:
        """Whether a pass that continues texts of `before` tokens needs `history`, the full texts."""
        return self.reads_again and before <= self.bound

    @property
    def weights_form(self) -> str:
        """How the products' weights are held on the CPU: a key of `pass_prices.PRICES`."""
        return "torch"

    @cached_property
    def pass_price(self) -> PassPrice:
        """What its passes cost, by a table."""
        from genctl.decode.pass_prices import price_of

        return price_of(self.model.config, self.weights_form if self.device.type == "cpu" else "gpu")

    def draft_room(self, length: int) -> float:
        """How many tokens may be on trial after a text of `length` tokens without changing how it is read."""
        if length <= self.bound:
            return self.bound - length
        return 0 if self.dynamic else math.inf

    def prefill(
        self,
        ids: Sequence[int],
        source: Source | None,
        *,
        use_cache: bool = True,
        hidden: bool = False,
        whole: bool = False,
    ) -> Prefix:
        """Read a prompt, alone: batch 1, no padding. A `whole` cache can be resumed at any of its tokens."""
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        cache = self.new_cache(whole=whole) if use_cache and self.abilities.supports_cache else None
        sources = None if source is None else Sources(source.states, None, None)
        output = self(tokens, cache, sources=sources, keep=0 if hidden else 1, hidden=hidden, first=True)
        if not whole:
            self.prepare(output.cache)
        return _prefix(tokens, output, output.hidden, source)

    def prefill_together(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Read prompts in one pass, padded on the left; each prefix holds its own row, without the padding."""
        longest = max(map(len, prompts))
        pads = [longest - len(ids) for ids in prompts]
        tokens = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)])
        tokens = tokens.to(self.device)
        mask = None
        positions = torch.arange(longest, device=self.device)[None]
        if any(pads):
            before = torch.tensor(pads, device=self.device)[:, None]
            mask, positions = (positions >= before).long(), (positions - before).clamp(min=0)
        together = self.new_cache()
        output = self(tokens, together, mask=mask, positions=positions, keep=1, first=True)
        if self.copies_late and type(together) is Cache:
            return self._rows_of_pass(tokens, together, pads, output.logits[:, -1:])
        prefixes = []
        for row, pad in enumerate(pads):
            cache = together.select(torch.tensor([row], device=self.device), drop=pad)
            self.prepare(cache)
            prefixes.append(
                Prefix(tokens[row : row + 1, pad:], cache, output.logits[row : row + 1, -1], None, None, None)
            )
        return prefixes

    @property
    def copies_late(self) -> bool:
        """Whether a row of a pass is copied when it is needed: on a GPU, which waits for the launch of each copy."""
        return self.device.type == "cuda"

    def _rows_of_pass(self, tokens: Tensor, together: Cache, pads: list[int], logits: Tensor) -> list[Prefix]:
        from genctl.decode.cache.together import RowOfPass
        from genctl.decode.score import ModelScores

        self.prepare(together)
        scores = ModelScores(logits)
        return [
            Prefix(
                tokens[row : row + 1, pad:],
                RowOfPass(together, row, pad),
                logits[row : row + 1, -1],
                together=(scores, row),
            )
            for row, pad in enumerate(pads)
        ]

    def prefill_in_pieces(self, ids: Sequence[int], size: int) -> Generator[Prefix | None, None, None]:
        """Read a prompt, so many tokens in a pass: None after each pass but the last, then the prefix.

        Only for texts that may be cut anywhere (`Abilities.multi_token_exact`, `bound`).
        """
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        cache: Cache | None = self.new_cache(room=len(ids) - size)
        for begin in range(0, len(ids), size):
            output = self(tokens[:, begin : begin + size], cache, keep=1, first=begin == 0)
            cache = output.cache
            if begin + size < len(ids):
                yield None
        self.prepare(cache)
        yield _prefix(tokens, output, None, None)

    def resume(
        self, saved: Prefix, ids: Sequence[int], source: Source | None, *, hidden: bool = False
    ) -> tuple[Prefix | None, int]:
        """Read a prompt that begins like `saved` (a prefix made with `whole`): only the rest is read.

        Returns the prefix and the number of reused tokens; (None, 0) if nothing can be reused. The last token is always
        read, for its logits. Recurrent states cannot remove tokens, so they serve only prompts that continue the
        complete saved one.
        """
        known = saved.tokens[0].tolist()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, ids, strict=False)))
        reused = min(same, len(ids) - 1)
        assert saved.cache is not None
        forgets = saved.cache.is_croppable
        if source is not saved.source or (reused == 0 and source is None) or (reused < len(known) and not forgets):
            return None, 0
        if (hidden and saved.hidden is None) or self.in_one_piece(max(len(known), len(ids))):
            return None, 0
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        row = torch.zeros(1, dtype=torch.long, device=self.device)
        cache = saved.cache.select(row, room=len(ids) - reused)
        cache.crop(len(known) - reused)
        sources = None if source is None else Sources(source.states, None, saved.cache.cross)
        seen = [] if saved.hidden is None else [saved.hidden[:, :reused]]
        # a recurrent state reads the following tokens one by one
        for feed in [tokens[:, reused:]] if forgets else torch.split(tokens[:, reused:], 1, 1):
            output = self(feed, cache, sources=sources, first=reused == 0, keep=0 if hidden else 1, hidden=hidden)
            assert output.cache is not None
            cache = output.cache
            if output.hidden is not None:
                seen.append(output.hidden)
        cache.narrow(self.new_cache())
        self.prepare(cache)
        return _prefix(tokens, output, torch.cat(seen, 1) if hidden else None, source), reused

    def reread(self, tokens: Tensor, prefix: Prefix) -> Cache:
        """The cache of rows int64 [R, T] that began at `prefix`, by reading them again."""
        cache = self.new_cache()
        sources = None
        if prefix.source is not None:
            from genctl.decode.encoder_inputs import join_sources

            assert prefix.cache is not None
            sources = join_sources([prefix.source], [prefix.cache.cross], [len(tokens)])
        length, prompt = tokens.shape[1], int(prefix.tokens.shape[1])
        ends = [length]
        if self.in_one_piece(length) and not self.reads_again:
            cuts = range(prompt, length) if self.dynamic else sorted({prompt, max(prompt, int(self.bound))})
            ends = [*cuts, length]
        at = 0
        for end in ends:  # cut the text where it was cut before, if the cuts matter
            self(tokens[:, at:end], cache, sources=sources, keep=1, first=at == 0, history=tokens[:, :end])
            at = end
        self.prepare(cache)
        return cache

    def _grown(
        self, feed: Tensor, cache: Cache | None, history: Tensor | None, past: int, *, first: bool, hidden: bool
    ) -> Output | None:
        """A pass that reads the full texts again if the fed tokens bring them beyond the bound; None otherwise."""
        if cache is None or history is None or first or not (self.reads_again and past <= self.bound):
            return None
        beyond = past + feed.shape[1] > self.bound
        # after a rejected draft a shorter cache may hold values that were computed beyond the bound
        if not beyond and not cache.beyond:
            return None
        cache.beyond = beyond
        return self._again(history, cache, keep=feed.shape[1], hidden=hidden)

    def _again(self, history: Tensor, cache: Cache, *, keep: int, hidden: bool) -> Output:
        """Read texts int64 [N, T+F] in one pass and refill `cache` with the result, in the form that it has."""
        fresh = self.new_cache()
        if cache.records_past:  # a draft may be rejected
            fresh.activate_past_recording()
        output = self(history, fresh, first=True, keep=0 if hidden else keep, hidden=hidden)
        cache.refill(fresh)
        if not hidden:
            return Output(output.logits, cache)
        layers = tuple(layer[:, -keep:] for layer in output.layers or ())
        return Output(output.logits[:, -keep:], cache, layers[-1], layers)


def _prefix(tokens: Tensor, output: Output, hidden: Tensor | None, source: Source | None) -> Prefix:
    layers = None if output.layers is None else tuple(layer[:, -1:] for layer in output.layers)
    return Prefix(tokens, output.cache, output.logits[:, -1], hidden, layers, source)
