"""Score texts in the order in which they come."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from genctl.engines.protocol import Key, Scored, ScoringOptions, TextToScore, ranked
from genctl.engines.score_passes import EncodedText, Passes, Piece, TextReader
from genctl.errors import ContractError, GenctlError, InputError, ModelError, UsageError, count
from genctl.events import Token
from genctl.models.config_limits import source_context_of

if TYPE_CHECKING:
    from genctl.engines.planner import Planner
    from genctl.engines.protocol import Outcome

P = ParamSpec("P")
Result = TypeVar("Result")


# -- overlapping windows over a text longer than the model's context, in which each token is scored once ---------------


def windows(total: int, window: int, stride: int, first: int = 1) -> Iterator[tuple[int, int, int]]:
    """(begin, end, scored) of each window: it reads tokens begin..end-1 and scores those from `scored` on.

    Windows begin `stride` tokens apart, so that all but the first `window` tokens are scored with at least window -
    stride tokens before them (https://huggingface.co/docs/transformers/perplexity). Tokens before `first` (at least 1)
    are not scored, and windows that would score nothing are left out. `stride` is in 1..window-1.
    """
    done = first
    for begin in range(0, total, stride):
        end = min(begin + window, total)
        if end > done:
            yield begin, end, done
            done = end
        if end == total:
            return


class Scorer:
    """Scores texts with a loaded checkpoint.

    Raises UsageError or ModelError for options that this checkpoint does not support.
    """

    def __init__(self, planner: Planner, options: ScoringOptions) -> None:
        loaded = planner.loaded
        self.loaded = loaded
        self.options = options
        self.is_encoder_decoder = planner.forward.is_encoder_decoder
        self.context, self.trained = planner.context, planner.trained
        self.source_context = source_context_of(loaded.config) if self.is_encoder_decoder else None
        start = planner.decoder_start if planner.decoder_start is not None else planner.bos
        self.reader = TextReader(
            loaded, eos=planner.eos[0] if planner.eos else None, start=start, add_eos=options.add_eos
        )
        self.passes = Passes(planner.forward, batch_size=options.batch_size, detail=options.detail)
        self.window = self._window()
        if options.target is not None and not self.is_encoder_decoder:
            problem = f"--target is for encoder-decoders, and {loaded.name} is a causal model"
            raise UsageError(f"{problem}; --context gives the text before")
        if options.context is not None and self.is_encoder_decoder and not options.rank:
            problem = f"--context is for causal models, and {loaded.name} is an encoder-decoder"
            raise UsageError(f"{problem}; the text is its source, and --target is scored")

    def _window(self) -> int | None:
        options, context, name = self.options, self.context, self.loaded.name
        if options.stride is None:
            return None
        if self.is_encoder_decoder:
            raise ModelError(f"--stride slides over a text, and {name} is an encoder-decoder, which reads it whole")
        window = options.window or context or self.trained
        if window is None:
            raise UsageError(f"{name} has no bound on its context: set --window N, the tokens that a window reads")
        if context is not None and window > context:
            raise UsageError(f"--window {window} is more than the context of {name}, {context} tokens")
        if options.stride >= window:
            raise UsageError(f"--stride {options.stride} must be less than the window of {window} tokens")
        return window

    def score(
        self, items: Iterable[tuple[Key, TextToScore]], interrupted: Callable[[], object] = lambda: False
    ) -> Iterator[tuple[Key, Outcome]]:
        """One outcome for each text, in order: its score, its candidates' (best first), or its error.

        Texts are read lazily, a chunk at a time. Stops when `interrupted` returns true.
        """
        incoming = iter(items)
        while chunk := list(islice(incoming, self.options.chunk)):
            texts = [_caught(self._encoded, item) for _, item in chunk]
            pieces = [
                (place, piece)
                for place, (encoded, (_, item)) in enumerate(zip(texts, chunk, strict=True))
                if not isinstance(encoded, GenctlError) and not item.candidates
                for piece in self._pieces(encoded[0])
            ]
            read: list[list[Token] | GenctlError] = [[] for _ in pieces]
            for batch in self.passes.batches([piece for _, piece in pieces]):
                if interrupted():
                    return
                for place, tokens in zip(batch, self._read([pieces[place][1] for place in batch]), strict=True):
                    read[place] = tokens
            for place, ((key, item), encoded) in enumerate(zip(chunk, texts, strict=True)):
                parts = [part for (owner, _), part in zip(pieces, read, strict=True) if owner == place]
                outcome: Outcome = (
                    encoded if isinstance(encoded, GenctlError) else _caught(self._scores, item, encoded, parts)
                )
                if interrupted():
                    return
                yield key, outcome

    def _encoded(self, item: TextToScore) -> list[EncodedText]:
        """The text, or the candidates, as token ids. Raises InputError."""
        if not item.candidates:
            return [self._text(item)]
        if self.options.stride is not None:
            raise InputError("--stride slides over one text; candidates share a context and must fit with it")
        encoded = []
        for place, candidate in enumerate(item.candidates, 1):
            try:
                if not self.is_encoder_decoder:
                    encoded.append(self._text(TextToScore(candidate, item.context or "")))
                elif item.context:
                    encoded.append(self._text(TextToScore(item.context, target=candidate)))
                else:
                    raise InputError("an encoder-decoder ranks targets given their source: there is no context")
            except InputError as error:
                raise InputError(f"candidate {place}: {error.message}") from error
        return encoded

    def _text(self, item: TextToScore) -> EncodedText:
        """A text, with what it continues or answers, if that fits into the context."""
        if self.is_encoder_decoder:
            if item.target is None:
                raise InputError("an encoder-decoder scores a target given its source: there is no target (--target)")
            if item.context is not None:
                raise InputError("an encoder-decoder scores a target given its source, and has no place for a context")
            encoded = self.reader.target(item.text, item.target)
            read, length = len(encoded.source or ()), len(encoded.ids) - 1  # the last one is only predicted
            for side, tokens, most in (("source", read, self.source_context), ("target", length, self.context)):
                if most is not None and tokens > most:
                    raise InputError(f"the {side} has {count(tokens, 'token')}, but the model's context is {most}")
            return encoded
        if item.target is not None:
            raise InputError("a target is for encoder-decoders; what a causal model's text continues is its context")
        if item.context is None:
            encoded = self.reader.plain(item.text)
        else:
            encoded = self.reader.after_context(item.context, item.text)
        if self.window is None and self.context is not None and len(encoded.ids) > self.context:
            subject = "text and context together have" if encoded.begin else "the text has"
            problem = f"{subject} {len(encoded.ids)} tokens, but the model's context is {self.context}"
            raise InputError(f"{problem}; --stride {max(self.context // 2, 1)} scores it in overlapping windows")
        return encoded

    def _pieces(self, encoded: EncodedText) -> Iterator[Piece]:
        """What is read of a text: all of it, or windows."""
        if self.window is None:
            yield Piece(encoded.ids, encoded.first, encoded.source)
            return
        for begin, end, scored in windows(len(encoded.ids), self.window, self.options.stride or 1, encoded.first):
            yield Piece(encoded.ids[begin:end], scored - begin)

    def _read(self, pieces: Sequence[Piece]) -> Sequence[list[Token] | GenctlError]:
        """The tokens of each piece; if the batch fails, each is read alone, so that none fails because of another."""
        read = _caught(self.passes.read, pieces)
        if not isinstance(read, GenctlError):
            return read
        return [read] if len(pieces) == 1 else [self._read([piece])[0] for piece in pieces]

    def _scores(
        self, item: TextToScore, encoded: list[EncodedText], parts: Sequence[list[Token] | GenctlError]
    ) -> list[Scored]:
        """The score of a text from its parts, or of all candidates, the best first; equal ones in their order."""
        first, tokens = encoded[0], list[Token]()
        for part in parts:
            if isinstance(part, GenctlError):
                raise part
            tokens += part
        if not item.candidates:
            return [self._scored(first, tokens, len(parts))]
        endings = [one.ids[one.begin :] for one in encoded]
        scores = self.passes.continuations(first.ids[: first.begin], endings, first.source)
        return ranked([self._scored(*pair) for pair in zip(encoded, scores, strict=True)], self.options.by)

    def _scored(self, encoded: EncodedText, tokens: Sequence[Token], count: int = 1) -> Scored:
        lead, with_text = self._with_text(encoded, tokens) if self.options.captions else ("", tuple(tokens))
        nll = math.fsum(-token.logprob for token in tokens) + 0.0
        own = encoded.ids[encoded.begin :]
        length = len(encoded.ids) if self.window is None else min(len(encoded.ids), self.window)
        return Scored(encoded.text, own, nll, len(tokens), encoded.bytes, with_text, lead, count, length)

    def _with_text(self, encoded: EncodedText, tokens: Sequence[Token]) -> tuple[str, tuple[Token, ...]]:
        """The characters before the first scored token, and the tokens with their text."""
        from genctl.models.text import Detokenizer

        # the text of an encoder-decoder begins from nothing
        before = encoded.ids[: encoded.begin] if encoded.source is None else ()
        words = Detokenizer(self.reader.tokenizer).after(before)
        shows_pieces = words.vocabulary.mode == "whole"  # such a tokenizer decodes only complete texts

        def added(id: int) -> str:
            # special tokens are shown, although they are not part of the text
            return words.piece(id) if shows_pieces or not words.writes(id) else words.push(id)

        lead = "".join([words.push(id) for id in encoded.ids[encoded.begin : encoded.first]])
        with_text = [
            dataclasses.replace(
                token, text=added(token.id), top=tuple((id, words.piece(id), logprob) for id, _, logprob in token.top)
            )
            for token in tokens
        ]
        if with_text and not shows_pieces:
            with_text[-1] = dataclasses.replace(with_text[-1], text=with_text[-1].text + words.flush())
        return lead, tuple(with_text)


def _caught(function: Callable[P, Result], *arguments: P.args, **named: P.kwargs) -> Result | GenctlError:
    """The result of a function, or its error, unless that is one of the model's code."""
    try:
        return function(*arguments, **named)
    except ContractError:
        raise
    except GenctlError as error:
        return error
