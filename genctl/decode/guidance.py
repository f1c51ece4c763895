"""Classifier-free guidance: the model's logits for the same new tokens after a negative prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.growing import STEP
from genctl.decode.runtime import ModelRuntime, Pass


class Unconditional:
    """history int64 [R, T] -> logits f32 [R, V] of the new tokens in it, read after `negative` instead of the prompt.

    It has its own cache. Rows are recognised by their tokens, so they may be reordered, forked, dropped or rolled back
    between two calls; unknown rows are read from the start.
    """

    def __init__(
        self, forward: ModelRuntime, negative: Sequence[int], prompt_len: int, *, use_cache: bool = True
    ) -> None:
        self.forward = forward
        self.negative = torch.tensor(list(negative), dtype=torch.long, device=forward.device)
        self.prompt_len = prompt_len
        self.use_cache = use_cache and forward.abilities.supports_cache and forward.abilities.together
        self.known: Tensor | None = None  # int64 [R, t], the new tokens that the cache has read
        self.cache: Cache | None = None

    def __call__(self, history: Tensor) -> Tensor:
        new = history[:, self.prompt_len :]
        parents = self._parents(new)
        if parents is None:
            logits = self._afresh(new)
        else:
            assert self.cache is not None
            if parents != list(range(self._rows())):
                self.cache = self.cache.select(torch.tensor(parents, device=new.device), room=STEP)
            history = self._tokens(new)
            logits = self.forward(Pass(new[:, -1:], self.cache, keep=1, history=history)).logits
        self.known = new.clone()
        return logits[:, -1]

    def _rows(self) -> int:
        return 0 if self.known is None else len(self.known)

    def _parents(self, new: Tensor) -> list[int] | None:
        """The known row that each row continues by one token; None if any row continues none."""
        known = self.known
        if not self.use_cache or known is None or self.cache is None or new.shape[1] != known.shape[1] + 1:
            return None
        same = (new[:, None, :-1] == known[None]).all(-1)  # [R, known rows]
        if not bool(same.any(1).all()):
            return None
        parents: list[int] = same.long().argmax(1).tolist()
        return parents

    def _afresh(self, new: Tensor) -> Tensor:
        tokens = self._tokens(new)
        self.cache = self.forward.new_cache() if self.use_cache else None
        logits = self.forward(Pass(tokens, self.cache, keep=1, first=True)).logits
        self.forward.prepare(self.cache)
        return logits

    def _tokens(self, new: Tensor) -> Tensor:
        return torch.cat([self.negative.expand(len(new), -1), new], 1)
