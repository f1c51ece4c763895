"""How prompts are read: alone, several in one pass, from where a saved one ends, and again after memory was short."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from genctl.decode import cache as caches
from genctl.decode.runtime import Output
from genctl.decode.types import Prefix, Source


class Reader:
    """Reading for a decoder-only runtime whose caches can be cut back at any token."""

    device: torch.device
    reads_again = False  # a text that grows beyond where angles change is read again as a whole

    def __call__(
        self,
        feed: Tensor,
        cache: Any,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        keep: int = 0,
        hidden: bool = False,
        first: bool = False,
    ) -> Output:
        """See `runtime.ModelRuntime`."""
        raise NotImplementedError

    def new_cache(self, *, room: int = 0, whole: bool = False) -> Any:
        """See `runtime.ModelRuntime`."""
        raise NotImplementedError

    def in_one_piece(self, length: int) -> bool:
        """Whether a text of `length` tokens comes out otherwise if it is read in pieces."""
        return False

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
        cache = self.new_cache(whole=whole) if use_cache else None
        output = self(tokens, cache, keep=0 if hidden else 1, hidden=hidden, first=True)
        return _prefix(tokens, output, output.hidden)

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
        output = self(tokens, self.new_cache(), mask=mask, positions=positions, keep=1, first=True)
        found = []
        for row, pad in enumerate(pads):
            cache = caches.select(output.cache, torch.tensor([row], device=self.device), drop=pad)
            found.append(Prefix(tokens[row : row + 1, pad:], cache, output.logits[row : row + 1, -1], None, None, None))
        return found

    def resume(
        self, saved: Prefix, ids: Sequence[int], source: Source | None, *, hidden: bool = False
    ) -> tuple[Prefix | None, int]:
        """A prompt that begins as `saved` does (a prefix made `whole`): only the rest is read.

        Returns the prefix and how many tokens were not read again; (None, 0) where nothing can be reused. The last
        token is always read: it says what follows.
        """
        known = saved.tokens[0].tolist()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, ids, strict=False)))
        kept = min(same, len(ids) - 1)
        if kept == 0 or (hidden and saved.hidden is None) or self.in_one_piece(max(len(known), len(ids))):
            return None, 0
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        row = torch.zeros(1, dtype=torch.long, device=self.device)
        cache = caches.select(saved.cache, row, room=len(ids) - kept)
        caches.crop(cache, len(known) - kept)
        output = self(tokens[:, kept:], cache, keep=0 if hidden else 1, hidden=hidden)
        output.cache = caches.narrowed(cache, self.new_cache())
        seen = None
        if saved.hidden is not None and output.hidden is not None:
            seen = torch.cat([saved.hidden[:, :kept], output.hidden], 1)
        return _prefix(tokens, output, seen), kept

    def reread(self, tokens: Tensor, prefix: Prefix) -> Any:
        """The cache of rows int64 [R, T] that began at `prefix`, by reading them again."""
        cache = self.new_cache()
        length = tokens.shape[1]
        ends = [length] if self.reads_again or not self.in_one_piece(length) else [int(prefix.tokens.shape[1]), length]
        at = 0
        for end in ends:  # where it matters, what was one piece is one again
            self(tokens[:, at:end], cache, keep=1, first=at == 0)
            at = end
        return cache


def _prefix(tokens: Tensor, output: Output, hidden: Tensor | None) -> Prefix:
    layers = None if output.layers is None else tuple(layer[:, -1:] for layer in output.layers)
    return Prefix(tokens, output.cache, output.logits[:, -1], hidden, layers)
