"""Forward passes over known tokens: log-probability, rank and entropy of each.

Rows of different lengths are padded on the right and masked. Logits are processed a few positions at a time, which
avoids a second tensor of their full size; a row whose own logits would be too large is read in pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.runtime import ModelRuntime, Pass
from genctl.decode.score import damaged
from genctl.decode.types import Source, join_sources
from genctl.engines.protocol import Detail
from genctl.errors import ModelError
from genctl.events import Token
from genctl.kernels.ops import entropy, log_softmax

LARGEST = 2**28  # maximum logits of one pass, 1 GiB
AT_ONCE = 2**24  # maximum logits processed at a time


@dataclass(frozen=True)
class Piece:
    """Tokens to read; those from `first` (at least 1) on are scored."""

    ids: tuple[int, ...]
    first: int
    source: tuple[int, ...] | None = None  # the encoder's input


class Passes:
    """Reads pieces with one model. The tokens that it returns have no text."""

    def __init__(self, forward: ModelRuntime, *, batch_size: int, detail: Detail | None = None) -> None:
        self.forward, self.batch_size, self.detail = forward, batch_size, detail or Detail()
        able = forward.abilities
        # whether several tokens in one pass may continue from a cache
        self.continues = (
            able.supports_cache
            and able.savable
            and not forward.new_cache().is_recurrent
            and able.together
            and not forward.wants_history(0)
            and forward.draft_room(sys.maxsize) > 0
        )

    def batches(self, pieces: Sequence[Piece]) -> Iterator[list[int]]:
        """Batches of pieces to read in one pass, by index: the longest first, each with at most `LARGEST` logits.

        Only a single piece may have more. Lengths differ within a batch only if the model reads padded rows exactly.
        """
        batch, first, able = list[int](), 0, self.forward.abilities
        lengths = [(len(piece.ids), len(piece.source or ())) for piece in pieces]
        for place in sorted(range(len(pieces)), key=lambda place: lengths[place], reverse=True):
            (longest, source), (length, own) = lengths[batch[0] if batch else place], lengths[place]
            fits = longest == length or (able.pads_behind and longest <= self.forward.bound)
            fits = fits and (source == own or able.pads_sources) and len(batch) < self.batch_size
            # the logits of all rows begin at the earliest scored token of any row
            first = min(first, pieces[place].first)
            if batch and not (fits and (len(batch) + 1) * (longest - first) * self.forward.vocab_size <= LARGEST):
                yield batch
                batch = []
            if not batch:
                first = pieces[place].first
            batch.append(place)
        if batch:
            yield batch

    def read(
        self, pieces: Sequence[Piece], source: Source | None = None, cache: Cache | None = None, past: int = 0
    ) -> list[list[Token]]:
        """Read pieces in one pass; returns the scored tokens of each. Raises ModelError if the model's scores are NaN.

        The pieces may share an encoded `source`, or a cache of one row with `past` tokens, which is not changed.
        """
        forward, width = self.forward, max(len(piece.ids) for piece in pieces) - 1
        lengths = torch.tensor([len(piece.ids) - 1 for piece in pieces])
        feed = torch.tensor(
            [[*piece.ids[:-1], *[0] * (width + 1 - len(piece.ids))] for piece in pieces], device=forward.device
        )
        mask = None
        if int(lengths.min()) < width:
            mask = (torch.arange(width) < lengths[:, None]).long().to(forward.device)
        sources = None
        if source is not None:
            sources = join_sources([source], [None], [len(pieces)])
        elif forward.is_encoder_decoder:
            encoded = [forward.encode(piece.source or ()) for piece in pieces]
            sources = join_sources(encoded, [None] * len(encoded), [1] * len(encoded))
        start = min(piece.first for piece in pieces) - 1  # the first position whose logits are needed
        step = width
        if cache is not None:
            cache = cache.select(feed.new_zeros(len(pieces)), room=width)
            mask = None if mask is None else torch.cat([mask.new_ones(len(pieces), past), mask], 1)
        elif len(pieces) == 1 and (width - start) * forward.vocab_size > LARGEST and self.continues and not sources:
            cache, step = forward.new_cache(room=width), max(LARGEST // forward.vocab_size, 1)
        positions = torch.arange(past, past + width, device=feed.device).expand(len(pieces), -1)
        tokens: list[list[Token]] = [[] for _ in pieces]
        for at in range(0, width, step):
            end = min(at + step, width)
            begin = min(max(at, start), end - 1)
            given = Pass(feed[:, at:end], cache, mask, positions[:, at:end], sources, past + at == 0, end - begin)
            rows, columns, targets = list[int](), list[int](), list[int]()
            for row, piece in enumerate(pieces):
                scored = range(max(piece.first, at + 1), min(len(piece.ids), end + 1))
                rows += [row] * len(scored)
                columns += [place - 1 - begin for place in scored]
                targets += piece.ids[scored.start : scored.stop]
            for row, token in zip(rows, self._measure(forward(given).logits, rows, columns, targets), strict=True):
                tokens[row].append(token)
        return tokens

    def continuations(
        self, context: Sequence[int], endings: Sequence[tuple[int, ...]], source: Sequence[int] | None = None
    ) -> list[list[Token]]:
        """Score all tokens of several endings (none empty) of one context. The context is read once.

        For an encoder-decoder, `source` is read once, and `context` is the decoder's start. A model that cannot
        continue its cache by several tokens at a time (a recurrent state) reads the context with each ending.
        """
        pieces, shared = [Piece((*context, *ending), len(context)) for ending in endings], dict[str, Any]()
        results: list[list[Token]] = [[] for _ in endings]
        if source is not None:
            shared = {"source": self.forward.encode(source)}
        elif self.continues:
            prefix, nothing = self.forward.prefill(context, None), [0] * len(endings)
            begun = self._measure(prefix.logits[:, None], nothing, nothing, [ending[0] for ending in endings])
            results = [[token] for token in begun]
            pieces, shared = [Piece(ending, 1) for ending in endings], {"cache": prefix.cache, "past": len(context)}
        wanted = [place for place, piece in enumerate(pieces) if len(piece.ids) > piece.first]
        for batch in self.batches([pieces[place] for place in wanted]):
            places = [wanted[at] for at in batch]
            for place, tokens in zip(places, self.read([pieces[place] for place in places], **shared), strict=True):
                results[place] += tokens
        return results

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
            ids = targets[at : at + step]
            selected = logits[list(rows[at : at + step]), list(columns[at : at + step])]  # f32 [c, V]
            column = torch.tensor(ids, device=selected.device)[:, None]
            normalised = log_softmax(selected)
            figures: dict[str, Sequence[Any]] = {"logprob": normalised.gather(1, column)[:, 0].tolist()}
            for id, value in zip(ids, figures["logprob"], strict=True):
                if value != value:
                    raise damaged(f"where the text has the token with id {id}")
            if self.detail.ranks:
                figures["rank"] = (1 + (selected > selected.gather(1, column)).sum(-1)).tolist()
                figures["entropy"] = entropy(normalised).tolist()
            if self.detail.top:
                best = selected.topk(min(self.detail.top, vocabulary)).indices
                pairs = zip(best.tolist(), normalised.gather(1, best).tolist(), strict=True)
                figures["top"] = [tuple((id, "", value) for id, value in zip(*pair, strict=True)) for pair in pairs]
            for id, values in zip(ids, zip(*figures.values(), strict=True), strict=True):
                tokens.append(Token(id, **dict(zip(figures, values, strict=True))))
        return tokens
