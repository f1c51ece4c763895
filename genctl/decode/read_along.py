"""A model that reads beside the loop: for a negative prompt, as an amateur (contrastive decoding), or to draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.cache.growing import STEP
from genctl.decode.runtime import ModelRuntime, Pass
from genctl.decode.types import Source, Sources
from genctl.errors import ModelError


class ReadAlong:
    """Reads growing texts with a model and a cache of its own, so no token is read twice.

    Rows are recognised by their tokens, so they may be reordered, forked or dropped between two calls; unknown rows are
    read from the start. With `cuts` the only row may be shortened (`cut`): raises ModelError if the cache cannot be.
    """

    def __init__(
        self,
        forward: ModelRuntime,
        *,
        use_cache: bool = True,
        cuts: bool = False,
        source: Source | None = None,
        cache: Cache | None = None,
        read: Sequence[int] = (),
    ) -> None:
        """`cache` holds the tokens `read` of one row. It is not changed."""
        self.forward, self.cuts = forward, cuts
        self.cached = use_cache and forward.abilities.supports_cache
        self.sources = None if source is None else Sources(source.states, None, None)
        self.cache: Cache | None = None
        if cache is not None:
            self.cache = cache.select(torch.zeros(1, dtype=torch.long, device=forward.device), room=STEP)
            self.cache.activate_past_recording()
        self.rows = [tuple(read)] if read else []  # the rows in the cache, of one length
        self.floor = len(read)  # windows cannot restore columns dropped before this length

    @property
    def length(self) -> int:
        """Tokens of each row in the cache."""
        return len(self.rows[0]) if self.rows else 0

    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Texts of one length -> the logits after them, f32 [R, V]."""
        parents, at = self._parents(texts), self.length
        if parents is None:
            self.cache, at = self._empty(), 0
        elif self.cache is not None and parents != list(range(len(self.rows))):
            self.cache = self.cache.select(torch.tensor(parents, device=self.forward.device), room=STEP)
        device = self.forward.device
        feed = torch.tensor([[*text[at:]] for text in texts], device=device)
        history = torch.tensor([[*text] for text in texts], device=device) if self.forward.wants_history(at) else None
        given = Pass(feed, self.cache, sources=self.sources, first=at == 0, keep=1, history=history)
        logits = self.forward(given).logits[:, -1]
        if self.cuts and self.cache is not None and not self.cache.is_croppable:
            raise ModelError(f"{self.forward.name} cannot draft: it keeps recurrent states, which forget nothing")
        if at == 0 and not self.cuts:
            self.forward.prepare(self.cache)
        self.rows = [tuple(text) for text in texts]
        return logits

    def cut(self, length: int) -> None:
        """Drop all but the first `length` tokens of the only row."""
        surplus = self.length - length
        if self.cache is not None and (length == 0 or (self.cache.records_past and length < self.floor)):
            self.cache, length = None, 0  # the next call reads the row again
        elif self.cache is not None:
            self.cache.crop(surplus)
        self.rows = [row[:length] for row in self.rows if length]
        self.floor = length

    def _empty(self) -> Cache | None:
        if not self.cached:
            return None
        cache = self.forward.new_cache()
        if self.cuts:
            cache.activate_past_recording()
        return cache

    def _parents(self, texts: Sequence[Sequence[int]]) -> list[int] | None:
        """The row that each text continues; None if any text continues none."""
        length = self.length
        if self.cache is None or not length or len(texts[0]) <= length:
            return None
        places = {row: place for place, row in reversed(list(enumerate(self.rows)))}  # the first of equal ones
        parents = [places[head] for text in texts if (head := tuple(text[:length])) in places]
        return parents if len(parents) == len(texts) else None


def unconditional(reader: ReadAlong, negative: Sequence[int], prompt_len: int) -> Callable[[Tensor], Tensor]:
    """history int64 [R, T] -> logits f32 [R, V] of its new tokens, read after `negative` instead of the prompt.

    For classifier-free guidance.
    """
    return lambda history: reader([[*negative, *new] for new in history[:, prompt_len:].tolist()])
