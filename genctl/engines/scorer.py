"""Score texts, in input order: tokenise them, read them in batches, and sum the log-probabilities of their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from genctl.engines.protocol import Key, Scored, ScoringOptions, TextToScore, ranked
from genctl.engines.score_passes import Passes, Piece
from genctl.errors import ContractError, GenctlError, InputError, ModelError, UsageError, count
from genctl.events import Token
from genctl.models import text as texts
from genctl.models.config_limits import source_context_of

if TYPE_CHECKING:
    from genctl.engines.planner import Planner
    from genctl.engines.protocol import Outcome
    from genctl.models.hub import LoadedModel

Result = TypeVar("Result")

# -- texts to score as token ids: where the text begins, which tokens are scored, and their bytes ----------------------
# A causal model has no score for the first token that it reads. If the tokenizer puts BOS in front, that is BOS, and
# every token of the text is scored; otherwise the text's own first token has no score.


@dataclass(frozen=True)
class EncodedText(Piece):
    """One text as token ids, after its context or the decoder's start. `ids[begin:]` are its own tokens."""

    text: str = ""  # the text of `ids[begin:]`
    begin: int = 0
    bytes: int = 0  # UTF-8 bytes of the scored tokens' characters


class TextReader:
    """Encodes texts for one checkpoint. Raises ModelError for a checkpoint that cannot score them."""

    def __init__(self, loaded: LoadedModel, *, eos: int | None, start: int | None, add_eos: bool) -> None:
        if loaded.tokenizer is None:
            raise ModelError(f"{loaded.name} has no tokenizer, so no text can be scored")
        self.tokenizer: Any = loaded.tokenizer
        self.is_encoder_decoder, self.vocab_size = loaded.is_encoder_decoder, loaded.vocab_size
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
            # a character that is split between the first and the second token is counted
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

        The context is tokenised alone. The text has the tokens that follow when both are tokenised together; if a token
        crosses the boundary, the text is tokenised alone. Raises InputError if there is neither a context nor a BOS.
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
        return EncodedText(tuple(ids), first, source, text, begin, size)

    def _encode(self, text: str) -> list[int]:
        return texts.encode(self.tokenizer, text, add_special_tokens=True)


# -- scores, in input order --------------------------------------------------------------------------------------------


def windows(total: int, window: int, stride: int, first: int = 1) -> Iterator[tuple[int, int, int]]:
    """(begin, end, scored) of each window: it reads tokens begin..end-1 and scores those from `scored` on.

    Windows begin `stride` tokens apart: all but the first `window` tokens are scored with at least window - stride
    tokens before them (https://huggingface.co/docs/transformers/perplexity). Tokens before `first` (at least 1)
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
        self.options, self.context = options, planner.context
        name, self.is_encoder_decoder = planner.loaded.name, planner.forward.is_encoder_decoder
        self.source_context = source_context_of(planner.loaded.config) if self.is_encoder_decoder else None
        start = planner.decoder_start if planner.decoder_start is not None else planner.bos
        eos = planner.eos[0] if planner.eos else None
        self.reader = TextReader(planner.loaded, eos=eos, start=start, add_eos=options.add_eos)
        self.passes = Passes(planner.forward, batch_size=options.batch_size, detail=options.detail)
        self.window: int | None = None  # tokens of overlapping windows
        if options.stride is not None:
            if self.is_encoder_decoder:
                raise ModelError(f"--stride slides over a text, and {name} is an encoder-decoder, which reads it whole")
            self.window = options.window or self.context or planner.trained
            if self.window is None:
                raise UsageError(f"{name} has no bound on its context: set --window N, the tokens that a window reads")
            if self.context is not None and self.window > self.context:
                raise UsageError(f"--window {self.window} is more than the context of {name}, {self.context} tokens")
            if options.stride >= self.window:
                raise UsageError(f"--stride {options.stride} must be less than the window of {self.window} tokens")
        if options.target is not None and not self.is_encoder_decoder:
            problem = f"--target is for encoder-decoders, and {name} is a causal model"
            raise UsageError(f"{problem}; --context gives the text before")
        if options.context is not None and self.is_encoder_decoder and not options.rank:
            problem = f"--context is for causal models, and {name} is an encoder-decoder"
            raise UsageError(f"{problem}; the text is its source, and --target is scored")

    def score(
        self, items: Iterable[tuple[Key, TextToScore]], interrupted: Callable[[], object] = lambda: False
    ) -> Iterator[tuple[Key, Outcome]]:
        """One outcome for each text, in order: its score, the scores of its candidates (best first), or its error.

        Texts are read lazily, a chunk at a time. Stops when `interrupted` returns true.
        """
        incoming = iter(items)
        while chunk := list(islice(incoming, self.options.chunk)):
            encoded = [_caught(self._encoded, item) for _, item in chunk]
            pieces = [
                (place, piece)
                for place, (one, (_, item)) in enumerate(zip(encoded, chunk, strict=True))
                if not isinstance(one, GenctlError) and not item.candidates
                for piece in self._pieces(one[0])
            ]
            read: list[list[Token] | GenctlError] = [[] for _ in pieces]
            for batch in self.passes.batches([piece for _, piece in pieces]):
                if interrupted():
                    return
                for place, tokens in zip(batch, self._read([pieces[place][1] for place in batch]), strict=True):
                    read[place] = tokens
            for place, ((key, item), one) in enumerate(zip(chunk, encoded, strict=True)):
                parts = [part for (owner, _), part in zip(pieces, read, strict=True) if owner == place]
                outcome: Outcome = one if isinstance(one, GenctlError) else _caught(self._scores, item, one, parts)
                if interrupted():
                    return
                yield key, outcome

    def _encoded(self, item: TextToScore) -> list[EncodedText]:
        """The text, or each candidate, as token ids. Raises InputError."""
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
        """A text, with its context or source, as token ids. Raises InputError if the model's context is too short."""
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
        """The pieces to read: the whole text, or its windows."""
        if self.window is None:
            yield encoded
            return
        for begin, end, scored in windows(len(encoded.ids), self.window, self.options.stride or 1, encoded.first):
            yield Piece(encoded.ids[begin:end], scored - begin)

    def _read(self, pieces: Sequence[Piece]) -> Sequence[list[Token] | GenctlError]:
        """The tokens of each piece. If the batch fails, each piece is read alone, so none fails because of another."""
        read = _caught(self.passes.read, pieces)
        if not isinstance(read, GenctlError):
            return read
        return [read] if len(pieces) == 1 else [self._read([piece])[0] for piece in pieces]

    def _scores(
        self, item: TextToScore, encoded: list[EncodedText], parts: Sequence[list[Token] | GenctlError]
    ) -> list[Scored]:
        """The score of a text from its parts, or of all candidates, best first; equal ones keep their order."""
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
        # the text of an encoder-decoder continues nothing
        before = encoded.ids[: encoded.begin] if encoded.source is None else ()
        words = texts.Detokenizer(self.reader.tokenizer).after(before)
        shows_pieces = words.vocabulary.mode == "whole"  # such a tokenizer decodes only complete texts
        lead = "".join([words.push(id) for id in encoded.ids[encoded.begin : encoded.first]])
        with_text = []
        for token in tokens:
            # special tokens are shown, although they are not part of the text
            is_piece = shows_pieces or not words.writes(token.id)
            text = words.piece(token.id) if is_piece else words.push(token.id)
            top = tuple((id, words.piece(id), logprob) for id, _, logprob in token.top)
            with_text.append(replace(token, text=text, top=top))
        if with_text and not shows_pieces:
            with_text[-1] = replace(with_text[-1], text=with_text[-1].text + words.flush())
        return lead, tuple(with_text)


def _caught(function: Callable[..., Result], *arguments: Any) -> Result | GenctlError:
    """The result of a function, or its error. A ContractError is raised."""
    try:
        return function(*arguments)
    except ContractError:
        raise
    except GenctlError as error:
        return error
