"""Forward passes over known tokens: log-probability, rank and entropy of each.

Rows of different lengths are padded on the right and masked. Logits are processed a few positions at a time, so that no
copy of their full size is made; a row whose own logits would be too large is read in pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genctl.decode.cache.cache import Cache
from genctl.decode.runtime import ModelRuntime, Pass, join_sources
from genctl.decode.score import damaged
from genctl.decode.types import Source
from genctl.engines.protocol import Detail
from genctl.errors import InputError, ModelError
from genctl.events import Token
from genctl.kernels.ops import entropy, log_softmax
from genctl.models import text as texts

if TYPE_CHECKING:
    from genctl.models.hub import LoadedModel

# -- texts to score as token ids, with the place of a text among them, its scored tokens and its bytes -----------------
# A causal model has no score for the first token that it reads. If the tokenizer puts BOS in front, that is BOS, and
# every token of the text is scored; otherwise the text's own first token is not.


@dataclass(frozen=True)
class EncodedText:
    """One text as token ids. `ids[begin:]` are its own tokens, of which `ids[first:]` are scored."""

    text: str  # the text of `ids[begin:]`
    ids: tuple[int, ...]  # context or decoder start first
    begin: int
    first: int  # at least 1
    bytes: int  # UTF-8 bytes of the scored tokens' characters
    source: tuple[int, ...] | None = None  # the encoder's input


class TextReader:
    """Encodes texts for one checkpoint. Raises ModelError for a checkpoint that cannot score them."""

    def __init__(self, loaded: LoadedModel, *, eos: int | None, start: int | None, add_eos: bool) -> None:
        if loaded.tokenizer is None:
            raise ModelError(f"{loaded.name} has no tokenizer, so no text can be scored")
        self.tokenizer: Any = loaded.tokenizer
        self.is_encoder_decoder = loaded.is_encoder_decoder
        self.vocab_size = loaded.vocab_size
        own = self.tokenizer.eos_token_id
        self.end = (own if own is not None else eos) if add_eos else None
        if add_eos and self.end is None:
            raise ModelError(f"{loaded.name} names no EOS, so --add-eos has nothing to add")
        if self.is_encoder_decoder and start is None:
            raise ModelError(f"{loaded.name} names no decoder_start_token_id, so its decoder cannot begin")
        self.start = start
        # the special tokens that the tokenizer puts before and after every text
        self.before, self.after = list[int](), list[int]()
        bare, framed = texts.encode(self.tokenizer, "a", add_special_tokens=False), self._encode("a")
        for at in range(len(framed) - len(bare) + 1):
            if framed[at : at + len(bare)] == bare:
                self.before, self.after = framed[:at], framed[at + len(bare) :]
                break

    def plain(self, text: str) -> EncodedText:
        """A text by itself, for a causal model. Raises InputError if none of its tokens has a score."""
        ids = self._encode(text)
        first, size = len(self.before) or 1, len(text.encode())
        if not self.before and getattr(self.tokenizer, "is_fast", False):
            offsets = self.tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
            # a character that the first token shares with the second one is counted
            size = len(text[min([offsets[0][1], *(begin for begin, _ in offsets[1:2])]) :].encode())
        elif not self.before:
            size = max(size - len(texts.decode(self.tokenizer, ids[:1]).encode()), 0)
        encoded = self._encoded(text, ids, 0, first, size)
        if len(encoded.ids) <= first:
            problem = "the text is a single token, and a causal model has no score for the first one"
            raise InputError(f"{problem}; give what comes before it with --context")
        return encoded

    def after_context(self, context: str, text: str) -> EncodedText:
        """A text that continues `context` directly: all of its tokens are scored.

        The context has the same tokens as alone. The text has the tokens that follow them when both are tokenised
        together; if a token crosses the boundary, the text is tokenised alone. Raises InputError without a context and
        a BOS.
        """
        if not context and not self.before:
            raise InputError("there is no context, and this tokenizer puts no BOS in front to begin with")
        head = self._encode(context) if context else [*self.before, *self.after]
        head = head[: len(head) - len(self.after)]
        joint = self._encode(context + text)
        rest = joint[len(head) :]
        if joint[: len(head)] != head or len(rest) <= len(self.after):
            rest = [*texts.continuation(self.tokenizer, text), *self.after]
        return self._encoded(text, [*head, *rest], len(head), len(head), len(text.encode()))

    def target(self, source: str, target: str) -> EncodedText:
        """A target for an encoder-decoder, after the decoder start token, which has no score. Raises InputError."""
        assert self.start is not None
        read = self._encode(source)
        texts.check_ids(read, self.vocab_size)
        self._encode(target)  # raises InputError for an invalid text
        ids = list(self.tokenizer(text_target=target, verbose=False)["input_ids"])
        if not ids:
            raise InputError("the target tokenises to nothing")
        return self._encoded(target, [self.start, *ids], 1, 1, len(target.encode()), tuple(read))

    def _encoded(
        self, text: str, ids: list[int], begin: int, first: int, size: int, source: tuple[int, ...] | None = None
    ) -> EncodedText:
        if self.end is not None and ids[-1] != self.end:
            ids = [*ids, self.end]
        texts.check_ids(ids, self.vocab_size)
        return EncodedText(text, tuple(ids), begin, first, size, source)

    def _encode(self, text: str) -> list[int]:
        return texts.encode(self.tokenizer, text, add_special_tokens=True)


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
        """Places of pieces to be read together: the longest first, and never more logits than `LARGEST`.

        Lengths differ within a batch only if the model reads padded rows exactly.
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
        """Read pieces together; returns the scored tokens of each. Raises ModelError if the model's scores are NaN.

        They may share an encoded `source`, or a cache of one row with `past` tokens, which does not change.
        """
        lengths = [len(piece.ids) - piece.first for piece in pieces]
        huge = len(pieces) == 1 and lengths[0] * self.forward.vocab_size > LARGEST and cache is None
        if huge and self.continues and not self.forward.is_encoder_decoder:
            return [self._read_long(pieces[0])]
        sources = None
        if source is not None:
            sources = join_sources([source], [None], [len(pieces)])
        elif self.forward.is_encoder_decoder:
            encoded = [self.forward.encode(piece.source or ()) for piece in pieces]
            sources = join_sources(encoded, [None] * len(encoded), [1] * len(encoded))
        feed, mask = self._padded([piece.ids[:-1] for piece in pieces])
        if mask is not None and cache is not None:
            mask = torch.cat([mask.new_ones(len(pieces), past), mask], 1)
        start = min(piece.first for piece in pieces) - 1  # the first position whose logits are needed
        positions = torch.arange(past, past + feed.shape[1], device=feed.device).expand(feed.shape[0], -1)
        given = Pass(feed, None, mask, positions, sources=sources, first=True, keep=feed.shape[1] - start)
        if cache is not None:
            nothing = torch.zeros(len(pieces), dtype=torch.long, device=feed.device)
            given = replace(given, cache=cache.select(nothing, room=feed.shape[1]), first=False, keep=0)
        rows, columns, targets = list[int](), list[int](), list[int]()
        for row, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
            rows += [row] * length
            columns += range(piece.first - 1 - start, piece.first - 1 - start + length)
            targets += piece.ids[piece.first :]
        tokens = iter(self._measure(self.forward(given).logits, rows, columns, targets))
        return [list(islice(tokens, length)) for length in lengths]

    def continuations(
        self, context: Sequence[int], endings: Sequence[tuple[int, ...]], source: Sequence[int] | None = None
    ) -> list[list[Token]]:
        """Several endings (none empty) of one context, all of their tokens scored. The context is read once.

        For an encoder-decoder `source` is read once, and `context` is the decoder's start. A model with a recurrent
        state cannot continue from it by several tokens at a time, and reads the context with each ending.
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
        device, lengths = self.forward.device, torch.tensor([len(row) for row in rows])
        feed = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        if int(lengths.min()) == longest:
            return feed, None
        return feed, (torch.arange(longest) < lengths[:, None]).long().to(device)

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
            logprobs = normalised.gather(1, column)[:, 0].tolist()
            for id, value in zip(ids, logprobs, strict=True):
                if value != value:
                    raise damaged(f"where the text has the token with id {id}")
            ranks: Iterable[int | None] = repeat(None, len(ids))
            entropies: Iterable[float | None] = repeat(None, len(ids))
            tops: Iterable[tuple[tuple[int, str, float], ...]] = repeat((), len(ids))
            if self.detail.ranks:
                ranks = (1 + (selected > selected.gather(1, column)).sum(-1)).tolist()
                entropies = entropy(normalised).tolist()
            if self.detail.top:
                best = selected.topk(min(self.detail.top, vocabulary)).indices
                pairs = zip(best.tolist(), normalised.gather(1, best).tolist(), strict=True)
                tops = [tuple((id, "", value) for id, value in zip(*pair, strict=True)) for pair in pairs]
            tokens += map(Token, ids, logprobs, repeat(""), ranks, entropies, tops)
        return tokens
