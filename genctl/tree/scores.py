"""The model's logits after each node, and the distribution of the next token.

KV caches are those of the engine (`prefix_cache.KeptTexts`), which generations continue, too. Beyond the memory bound
the least recently used one is dropped, and its text is prefilled again on the next visit: the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genctl.decode.processors import trace
from genctl.decode.processors.trace import Stage
from genctl.decode.runtime import Pass
from genctl.decode.types import Prefix
from genctl.engines.session import Session
from genctl.errors import InputError, ModelError
from genctl.events import Trace
from genctl.kernels.ops import log_softmax
from genctl.tree.commands import Alternative
from genctl.tree.token_tree import TokenTree

CACHED = 64  # entries of each cache: logits, distributions, detokenizers


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry to a cache, and drop its oldest one beyond CACHED."""
    cache[key] = value
    if len(cache) > CACHED:
        del cache[next(iter(cache))]


class BranchScores:
    """The model's logits after the nodes of one tree."""

    def __init__(self, session: Session, tree: TokenTree) -> None:
        self.session, self.tree, self.forward = session, tree, session.forward
        if self.forward.is_encoder_decoder:
            raise ModelError(
                f"{session.about.name} is an encoder-decoder, whose text is not one branch of tokens with its prompt",
                hint="genctl run and genctl beam show how it writes",
            )
        session.keep_texts()
        self.read_tokens = 0  # tokens that went through the model
        self._scores: dict[tuple[int, ...], Tensor] = {}
        self._newest: tuple[tuple[int, ...], Prefix] | None = None  # the text that was read last

    def scores(self, node: int) -> Tensor:
        """The model's logits after a node, f32 [V], on the CPU. Do not change them in place."""
        return self.after(self.tree.ids(node))

    def after(self, ids: tuple[int, ...]) -> Tensor:
        """The model's logits after a text, f32 [V], on the CPU. Raises InputError if it has no token."""
        if ids not in self._scores:
            if not ids:
                raise InputError("the first token has no token before it, so the model gives it no probability")
            remember(self._scores, ids, self._read(ids).logits[0].float().cpu().clone())
        return self._scores[ids]

    def continuations(self, node: int, endings: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The logits after `node` followed by each of `endings` (not empty, equally long), f32 [V] each.

        The endings share one forward pass if the model can batch them.
        """
        text, count, abilities = self.tree.ids(node), len(endings[0]), self.forward.abilities
        prefix = None
        if abilities.together and self._saves and len(text) + count <= self.forward.bound:
            prefix = self._read(text)
        if prefix is None or prefix.cache is None or prefix.cache.is_recurrent:
            return [self.after((*text, *ending)) for ending in endings]
        rows = torch.zeros(len(endings), dtype=torch.long, device=self.forward.device)
        cache = prefix.cache.select(rows, room=count)
        feed = torch.tensor(endings, dtype=torch.long, device=self.forward.device)
        self.read_tokens += feed.numel()
        for part in [feed] if abilities.reads_several(True) else torch.split(feed, 1, 1):
            output = self.forward(Pass(part, cache, keep=1))
            assert output.cache is not None
            cache = output.cache
        return list(output.logits[:, -1].float().cpu())

    def forget(self) -> None:
        """Drop all logits, but not the KV caches of texts."""
        self._scores.clear()
        self._newest = None

    def _read(self, ids: tuple[int, ...]) -> Prefix:
        """Prefill a text, from the end of its longest cached prefix."""
        if self._newest is not None and self._newest[0] == ids:
            return self._newest[1]
        texts = self.session.texts
        cached = None if texts is None or not self._saves else texts.best(ids)
        prefix, reused = (None, 0) if cached is None else self.forward.resume(cached, ids, None)
        if prefix is None:
            prefix, reused = self.forward.prefill(ids, None, use_cache=True, whole=self._saves), 0
        self.read_tokens += len(ids) - reused
        if texts is not None and texts.grows and self._saves:
            texts.keep(prefix)
        self._newest = ids, prefix
        return prefix

    @property
    def _saves(self) -> bool:
        return self.forward.abilities.supports_cache and self.forward.abilities.savable


class Distribution:
    """The distribution of the token after a node, over V tokens."""

    def __init__(
        self,
        node: int,
        logits: Tensor,  # f32 [V], the model's
        scores: Tensor,  # f32 [1, V], after the processors
        stages: Sequence[Stage],
        piece: Callable[[int], str],
        *,
        after_eos: bool = False,  # whether the text has already ended
    ) -> None:
        self.node, self.stages, self._piece, self.after_eos = node, stages, piece, after_eos
        self.logprobs: NDArray[np.float32] = log_softmax(logits[None])[0].cpu().numpy()
        self.processed = processed_logprobs(scores[0]).float().cpu().numpy() if stages else self.logprobs

    def __len__(self) -> int:
        """V."""
        return len(self.logprobs)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The ids by the model's probability, the most probable first; equal ones by id."""
        return np.argsort(-self.logprobs, kind="stable")

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """The rank of each id by the model's probability, from 1."""
        ranks = np.empty(len(self), np.int64)
        ranks[self.order] = np.arange(1, len(self) + 1)
        return ranks

    @cached_property
    def entropy(self) -> float:
        """The entropy of the model's distribution, in nats."""
        possible = self.logprobs[self.logprobs > -np.inf].astype(np.float64)
        return float(-(np.exp(possible) * possible).sum()) + 0.0

    def of(self, id: int) -> Alternative:
        """The figures of one token."""
        remover = ""
        if self.processed[id] == -np.inf:
            remover = next((stage.name for stage in self.stages if not is_alive(stage.after[0, id])), "")
        logprob, processed = float(self.logprobs[id]), float(self.processed[id])
        return Alternative(id, self._piece(id), int(self.ranks[id]), logprob, processed, remover)

    def containing(self, text: str) -> Iterator[Alternative]:
        """The tokens whose text contains `text` in any case, the most probable first."""
        wanted = text.casefold()
        return (self.of(int(id)) for id in self.order if wanted in self._piece(int(id)).casefold())

    def why(self, id: int) -> tuple[Trace, ...]:
        """What each processor did to one token, in their order."""
        stages = [Stage(one.name, one.before.cpu(), one.after.cpu()) for one in self.stages]
        return trace.traces(stages, torch.zeros(1, dtype=torch.long), torch.tensor([id]))[0]


def is_alive(scores: Tensor) -> Tensor:
    """bool, of the shape of `scores`: whether a token may still be chosen after processors."""
    return scores > torch.finfo(scores.dtype).min


def processed_logprobs(scores: Tensor) -> Tensor:
    """Log-probabilities f64 [V] of scores [V] after processors; -inf: removed (possibly all tokens)."""
    alive = is_alive(scores)
    remaining = scores.double().masked_fill(~alive, -torch.inf)
    return remaining.log_softmax(-1) if bool(alive.any()) else remaining
