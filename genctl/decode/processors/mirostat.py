"""Mirostat 2: hold the surprise of the written tokens at a target (arXiv:2007.14966; version 2 as in llama.cpp)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch
from torch import Tensor

# Steps back that a row may be rolled to and still find what was there (drafts are far shorter).
_DEPTH = 64


class Mirostat:
    """Keep the tokens whose surprise, in bits, is at most mu; mu follows what the row has written.

    mu begins at 2 * tau. After a token x drawn from the kept ones, renormalised to q: mu -= eta * (-log2 q(x) - tau).

    The threshold of a row is looked up by what the row wrote before its last token, so it is a function of its history
    alone: rows may be moved, forked and rolled back between calls. A row whose past was never scored here begins anew
    at 2 * tau. A token that was not among the kept ones counts as surprising as the threshold allows.
    """

    def __init__(self, tau: float, eta: float, prompt_len: int, min_tokens_to_keep: int = 1) -> None:
        self.tau, self.eta, self.prompt_len, self.least = tau, eta, prompt_len, min_tokens_to_keep
        # history -> its mu, the kept ids and their surprises
        self._past: OrderedDict[bytes, tuple[float, Tensor, Tensor]] = OrderedDict()

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """history int64 [R, T], scores f32 [R, V] -> scores with what is too surprising removed."""
        written = history.cpu().numpy()
        thresholds = [self._threshold(row[:-1].tobytes(), int(row[-1]), len(row)) for row in written]
        surprise = -scores.log_softmax(-1) / torch.log(scores.new_tensor(2.0))
        keep = surprise <= scores.new_tensor(thresholds)[:, None]
        keep.scatter_(1, scores.topk(min(self.least, scores.shape[1])).indices, True)
        kept = scores.masked_fill(~keep, -torch.inf)
        observed = -kept.log_softmax(-1) / torch.log(scores.new_tensor(2.0))
        for row, mu in enumerate(thresholds):
            ids = keep[row].nonzero()[:, 0]
            self._remember(written[row].tobytes(), (mu, ids, observed[row, ids]), len(thresholds))
        return kept

    def _threshold(self, before: bytes, token: int, length: int) -> float:
        past = self._past.get(_key(before)) if length > self.prompt_len else None
        if past is None:
            return 2.0 * self.tau
        mu, ids, surprises = past
        here = (ids == token).nonzero()
        observed = float(surprises[here[0, 0]]) if len(here) else mu
        return mu - self.eta * (observed - self.tau)

    def _remember(self, written: bytes, what: tuple[float, Tensor, Tensor], rows: int) -> None:
        key = _key(written)
        self._past[key] = what
        self._past.move_to_end(key)
        while len(self._past) > _DEPTH * max(rows, 16):
            self._past.popitem(last=False)


def _key(written: bytes) -> bytes:
    return hashlib.blake2b(written, digest_size=16).digest()
