"""Forward passes over known tokens: log-probability, rank and entropy of each.

Rows of different lengths are padded on the right and masked. Logits are processed a few positions at a time, so that no
copy of their full size is made; a row whose own logits would be too large is read in pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.encoder_inputs import join_sources
from genctl.decode.runtime import ModelRuntime, Pass
from genctl.decode.score import damaged
from genctl.decode.types import Sources
from genctl.engines.protocol import Detail
from genctl.errors import ModelError
from genctl.events import Token
from genctl.kernels.ops import entropy, log_softmax

LARGEST = 2**28  # most logits in one pass, 1 GiB
AT_ONCE = 2**24  # most logits processed at a time


@dataclass(frozen=True)
class Piece:
    """Tokens to read; those from `first` (at least 1) on are scored."""

    ids: tuple[int, ...]
    first: int
    source: tuple[int, ...] | None = None  # the encoder's input


class Passes:
    """Reads pieces with one model. The returned tokens have no text."""

    def __init__(self, forward: ModelRuntime, *, batch_size: int, detail: Detail | None = None) -> None:
        self.forward = forward
        self.batch_size = batch_size
        self.detail = detail or Detail()
        able = forward.abilities
        # whether several tokens in one pass may continue from a cache
        self.continues = able.supports_cache and able.savable and not forward.new_cache().is_recurrent
        self.continues = self.continues and able.together and not forward.wants_history(0)
        self.continues = self.continues and forward.draft_room(sys.maxsize) > 0

    def batches(self, pieces: Sequence[Piece]) -> Iterator[list[int]]:
        """Places of pieces to be read together: the longest first, and never more logits than `LARGEST`.

        Lengths differ within a batch only if the model reads padded rows exactly.
        """
        batch: list[int] = []
        longest = columns = 0
        lengths = [(len(piece.ids), len(piece.source or ())) for piece in pieces]
        for place in sorted(range(len(pieces)), key=lambda place: lengths[place], reverse=True):
            piece = pieces[place]
            if batch and not self._may_share_pass(lengths[batch[0]], lengths[place]):
                yield batch
                batch, longest, columns = [], 0, 0
            longest = max(longest, len(piece.ids))
            # the logits of all rows begin at the earliest scored token of any row
            columns = max(columns, longest - piece.first)
            crowded = (len(batch) + 1) * columns * self.forward.vocab_size > LARGEST
            if batch and (len(batch) == self.batch_size or crowded):
                yield batch
                batch, longest, columns = [], len(piece.ids), len(piece.ids) - piece.first
            batch.append(place)
        if batch:
            yield batch

    def _may_share_pass(self, a: tuple[int, int], b: tuple[int, int]) -> bool:
        """Whether texts of these lengths, with their sources, may share a pass."""
        if a[0] != b[0] and (not self.forward.abilities.pads_behind or max(a[0], b[0]) > self.forward.bound):
            return False
        return a[1] == b[1] or self.forward.abilities.pads_sources

    def read(self, pieces: Sequence[Piece], sources: Sources | None = None) -> list[list[Token]]:
        """Read pieces together. For each, its scored tokens. Raises ModelError if the model's scores are NaN."""
        huge = len(pieces) == 1 and (len(pieces[0].ids) - pieces[0].first) * self.forward.vocab_size > LARGEST
        if huge and self.continues and not self.forward.is_encoder_decoder:
            return [self._read_long(pieces[0])]
        if self.forward.is_encoder_decoder and sources is None:
            encoded = [self.forward.encode(piece.source or ()) for piece in pieces]
            sources = join_sources(encoded, [None] * len(encoded), [1] * len(encoded))
        feed, mask = self._padded([piece.ids[:-1] for piece in pieces])
        start = min(piece.first for piece in pieces) - 1  # the first position whose logits are needed
        positions = torch.arange(feed.shape[1], device=feed.device).expand(feed.shape[0], -1)
        output = self.forward(
            Pass(feed, None, mask=mask, positions=positions, sources=sources, first=True, keep=feed.shape[1] - start)
        )
        rows, columns, targets = list[int](), list[int](), list[int]()
        for row, piece in enumerate(pieces):
            scored = piece.ids[piece.first :]
            rows += [row] * len(scored)
            columns += range(piece.first - 1 - start, piece.first - 1 - start + len(scored))
            targets += scored
        return _split(self._measure(output.logits, rows, columns, targets), [len(p.ids) - p.first for p in pieces])

    def continuations(
        self, context: Sequence[int], endings: Sequence[tuple[int, ...]], source: Sequence[int] | None = None
    ) -> list[list[Token]]:
        """Several endings (none empty) of one context, all of their tokens scored. The context is read once.

        For an encoder-decoder `source` is read once, and `context` is the decoder's start. A model with a recurrent
        state cannot continue from it by several tokens at a time, and reads the context with each ending.
        """
        pieces = [Piece((*context, *ending), len(context)) for ending in endings]
        if source is not None:
            encoded = self.forward.encode(source)
            return self._spread(pieces, lambda batch: self.read(batch, join_sources([encoded], [None], [len(batch)])))
        if not self.continues:
            return self._spread(pieces, self.read)
        prefix = self.forward.prefill(context, None)
        cache = prefix.cache
        assert cache is not None  # since `continues`
        nothing = [0] * len(endings)
        begun = self._measure(prefix.logits[:, None], nothing, nothing, [ending[0] for ending in endings])
        rest = [Piece(ending, 1) for ending in endings if len(ending) > 1]
        scored = iter(self._spread(rest, lambda batch: self._fork(batch, cache, len(context))))
        return [
            [token, *(next(scored) if len(ending) > 1 else ())] for token, ending in zip(begun, endings, strict=True)
        ]

    def _spread(
        self, pieces: Sequence[Piece], read: Callable[[Sequence[Piece]], list[list[Token]]]
    ) -> list[list[Token]]:
        """The results of `read` for pieces in batches, in the order of the pieces."""
        results: list[list[Token]] = [[] for _ in pieces]
        for batch in self.batches(pieces):
            for place, tokens in zip(batch, read([pieces[place] for place in batch]), strict=True):
                results[place] = tokens
        return results

    def _fork(self, pieces: Sequence[Piece], cache: Cache, past: int) -> list[list[Token]]:
        """`read` on top of a cache of one row with `past` tokens, which does not change."""
        feed, mask = self._padded([piece.ids[:-1] for piece in pieces])
        if mask is not None:
            mask = torch.cat([mask.new_ones(len(pieces), past), mask], 1)
        forked = cache.select(torch.zeros(len(pieces), dtype=torch.long, device=feed.device), room=feed.shape[1])
        positions = torch.arange(past, past + feed.shape[1], device=feed.device).expand(feed.shape[0], -1)
        output = self.forward(Pass(feed, forked, mask=mask, positions=positions))
        lengths = [len(piece.ids) - 1 for piece in pieces]
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        columns = [column for length in lengths for column in range(length)]
        targets = [id for piece in pieces for id in piece.ids[1:]]
        return _split(self._measure(output.logits, rows, columns, targets), lengths)

    def _read_long(self, piece: Piece) -> list[Token]:
        """One row, a few positions at a time, with a growing cache."""
        feed = self._padded([piece.ids[:-1]])[0]
        cache = self.forward.new_cache(room=feed.shape[1])
        step = max(LARGEST // self.forward.vocab_size, 1)
        tokens: list[Token] = []
        for at in range(0, feed.shape[1], step):
            end = min(at + step, feed.shape[1])
            output = self.forward(Pass(feed[:, at:end], cache, first=at == 0))
            begin = max(piece.first - 1, at)
            columns = list(range(begin - at, end - at))
            tokens += self._measure(output.logits, [0] * len(columns), columns, piece.ids[begin + 1 : end + 1])
        return tokens

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """int64 [N, F] and its mask, None if all rows have equal length."""
        longest = max(map(len, rows))
        feed = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.forward.device)
        if all(len(row) == longest for row in rows):
            return feed, None
        lengths = torch.tensor([len(row) for row in rows], device=self.forward.device)
        return feed, (torch.arange(longest, device=self.forward.device)[None] < lengths[:, None]).long()

    def _measure(
        self, logits: Tensor, rows: Sequence[int], columns: Sequence[int], targets: Sequence[int]
    ) -> list[Token]:
        """Look up each target. logits f32 [N, K, V]; rows, columns, targets are equally long."""
        vocabulary = logits.shape[-1]
        if any(target >= vocabulary for target in targets):
            raise ModelError(f"the text has an id above {vocabulary - 1}, which the model reads but never writes")
        tokens: list[Token] = []
        step = max(AT_ONCE // vocabulary, 1)
        for at in range(0, len(targets), step):
            part = slice(at, at + step)
            ids = targets[part]
            selected = logits[list(rows[part]), list(columns[part])]  # f32 [c, V]
            column = torch.tensor(ids, device=selected.device)[:, None]
            normalised = log_softmax(selected)
            logprobs = normalised.gather(1, column)[:, 0].tolist()
            for id, value in zip(ids, logprobs, strict=True):
                if value != value:
                    raise damaged(f"where the text has the token with id {id}")
            ranks: list[int | None] = [None] * len(ids)
            entropies: list[float | None] = [None] * len(ids)
            if self.detail.ranks:
                ranks = (1 + (selected > selected.gather(1, column)).sum(-1)).tolist()
                entropies = entropy(normalised).tolist()
            tops: list[tuple[tuple[int, str, float], ...]] = [()] * len(ids)
            if self.detail.top:
                best = selected.topk(min(self.detail.top, vocabulary))
                values = normalised.gather(1, best.indices).tolist()
                tops = [
                    tuple((id, "", value) for id, value in zip(*pair, strict=True))
                    for pair in zip(best.indices.tolist(), values, strict=True)
                ]
            tokens += [
                Token(id, logprob, "", rank, entropy, top)
                for id, logprob, rank, entropy, top in zip(ids, logprobs, ranks, entropies, tops, strict=True)
            ]
        return tokens


def _split(tokens: Sequence[Token], lengths: Sequence[int]) -> list[list[Token]]:
    parts, at = [], 0
    for length in lengths:
        parts.append(list(tokens[at : at + length]))
        at += length
    return parts
