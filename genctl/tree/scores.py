"""The model's scores after each node. The caches of texts stay, so that a later text reads only what is new.

The caches are those of the engine (`prefix_cache.KeptTexts`), which generations continue, too. Beyond the bound of
memory the least recently used one is dropped, and its text is read again when it is visited: the numbers are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from genctl.decode.runtime import Pass
from genctl.decode.types import Prefix
from genctl.engines.session import Session
from genctl.errors import InputError, ModelError
from genctl.tree.token_tree import TokenTree

AT_ONCE = 2**24  # most logits of a pass; a longer text is read in several passes
LOGITS = 2**26  # bytes of cached scores, besides those of the newest node


class BranchScores:
    """The scores after the nodes of one tree. `memory` bounds the bytes of the caches."""

    def __init__(self, session: Session, tree: TokenTree, memory: int) -> None:
        self.session, self.tree, self.forward = session, tree, session.forward
        if self.forward.is_encoder_decoder:
            raise ModelError(
                f"{session.about.name} is an encoder-decoder, whose text is not one branch of tokens with its prompt",
                hint="genctl run and genctl beam show how it writes",
            )
        session.keep_texts(memory)
        self.read_tokens = 0  # that went through the model, to see what is read again
        self._scores: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()  # the newest last
        self._newest: tuple[tuple[int, ...], Prefix] | None = None  # the text that was read last

    def scores(self, node: int) -> Tensor:
        """The model's logits after a node, f32 [V], on the CPU. Not to be written to."""
        return self.after(self.tree.ids(node))

    def after(self, ids: tuple[int, ...]) -> Tensor:
        """The model's logits after a text, f32 [V], on the CPU. Raises InputError if it has no token."""
        if ids in self._scores:
            self._scores.move_to_end(ids)
        else:
            if not ids:
                raise InputError("the first token has no token before it, so the model gives it no probability")
            self._keep(ids, self._read(ids).logits[0])
        return self._scores[ids]

    def given(self, node: int, ids: Sequence[int]) -> list[Tensor]:
        """The logits from which each of some tokens that are given after a node is chosen, f32 [V] each.

        They are read in as few passes as the model allows.
        """
        text = self.tree.ids(node)
        first = self.scores(node)
        rest = self._read_all((*text, *ids[:-1]), len(text)) if len(ids) > 1 else []
        if rest is None:
            rest = [self.after((*text, *ids[:place])) for place in range(1, len(ids))]
        return [first, *rest]

    def continuations(self, node: int, endings: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The logits after each ending (none empty, all equally long) of the branch down to `node`, f32 [V] each.

        Endings are read in one pass where rows may share one.
        """
        text, count = self.tree.ids(node), len(endings[0])
        abilities = self.forward.abilities
        prefix = None
        if abilities.together and self._saves and len(text) + count <= self.forward.bound:
            prefix = self._read(text)
        if prefix is None or prefix.cache is None or prefix.cache.is_recurrent:
            return [self.after((*text, *ending)) for ending in endings]
        rows = torch.zeros(len(endings), dtype=torch.long, device=self.forward.device)
        cache = prefix.cache.select(rows, room=count)
        feed = torch.tensor(endings, dtype=torch.long, device=self.forward.device)
        self.read_tokens += feed.numel()
        output = None
        for part in [feed] if abilities.reads_several(True) else torch.split(feed, 1, 1):
            output = self.forward(Pass(part, cache, keep=1))
            assert output.cache is not None
            cache = output.cache
        assert output is not None
        return list(output.logits[:, -1].float().cpu())

    def forget(self) -> None:
        """Drop the scores, for instance because the tree has other settings now."""
        self._scores.clear()
        self._newest = None

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(self, ids: tuple[int, ...]) -> Prefix:
        """A text, read from where its cache ends."""
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

    def _read_all(self, ids: tuple[int, ...], begin: int) -> list[Tensor] | None:
        """The logits after each token from place `begin` on, in few passes; None where each needs a pass of its own."""
        if not self._saves or not self.forward.abilities.reads_several(True) or len(ids) > self.forward.bound:
            return None
        cache = self._read(ids[:begin]).cache
        if cache is None or not cache.is_plain:
            return None
        row = torch.zeros(1, dtype=torch.long, device=self.forward.device)
        cache = cache.select(row, room=len(ids) - begin)
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.forward.device)
        size = max(AT_ONCE // self.forward.vocab_size, 1)
        found: list[Tensor] = []
        for at in range(begin, len(ids), size):
            feed = tokens[:, at : at + size]
            history = tokens[:, : at + size] if self.forward.wants_history(at) else None
            output = self.forward(Pass(feed, cache, keep=feed.shape[1], history=history))
            assert output.cache is not None
            cache = output.cache
            found += output.logits[0].float().cpu()
        self.read_tokens += len(ids) - begin
        if self.session.texts is not None and self.session.texts.grows:
            self.session.texts.keep(Prefix(tokens, cache, output.logits[:, -1]))
        self._keep(ids, found[-1])
        return found

    def _keep(self, ids: tuple[int, ...], logits: Tensor) -> None:
        self._scores[ids] = logits.float().cpu().clone()
        most = max(LOGITS // (4 * self.forward.vocab_size), 64)
        while len(self._scores) > most:
            self._scores.popitem(last=False)
