"""The thinking budget: after so many tokens between the thinking tags, the closing tag is forced.

The tags come from `thinking_tags`, the chat template or the vocabulary; each is a single token or spelled out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from genctl.decode.processors import ByHistory
from genctl.decode.processors.build import ProcessorContext
from genctl.decode.processors.grammar import begins
from genctl.decode.processors.token_bytes import Spelling, special_of, spelling
from genctl.decode.stopping.stops import Tags, tags_of
from genctl.errors import UsageError, quote


class Thought(NamedTuple):
    """The thinking state of a row."""

    is_open: bool = False
    tokens: int = 0  # thinking tokens, tags not counted
    cut: bool = False  # whether the budget ended the thinking
    left: tuple[int, ...] = ()  # tokens that are forced next
    recent: tuple[bytes, ...] = ()  # bytes of the last tokens, in which a tag may have begun


@dataclass(eq=False)
class Thinking:
    """history int64 [R, T], scores f32 [R, V] -> scores; a row that has used up its budget keeps only the forced token.

    That token keeps its score, so beams compare the model's scores; other processors cannot bar it.
    """

    budget: int
    tags: Tags
    end: Sequence[int]  # the tokens that close the thinking
    texts: Sequence[bytes]  # of all ids, special ones included
    words: Spelling
    prompt_len: int
    eos: Sequence[int]
    is_open: bool  # whether the new text begins inside the thinking tags

    def __post_init__(self) -> None:
        self.opening, self.closing = self.tags.opening.encode(), self.tags.closing.encode()
        self.first = self._forced(Thought(self.is_open))
        self._known: ByHistory[Thought] = ByHistory()

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        written = history[:, self.prompt_len :].to("cpu", torch.int64).contiguous().numpy()
        output = scores
        for row, tokens in enumerate(written):
            thought = self._known.get(tokens.tobytes())
            if thought is None:
                above = self._known.get(tokens[:-1].tobytes())
                thought = self.of(tokens.tolist()) if above is None else self._after(above, int(tokens[-1]))
                self._known.put(tokens.tobytes(), thought, len(written))
            if thought.left:
                output, token = scores.clone() if output is scores else output, thought.left[0]
                output[row] = -torch.inf
                output[row, token] = scores[row, token].clamp(min=-1e9)
        return output

    def of(self, tokens: Sequence[int]) -> Thought:
        """The thinking state of a row with these new tokens."""
        thought = self.first
        for token in tokens:
            thought = self._after(thought, token)
        return thought

    def _after(self, before: Thought, token: int) -> Thought:
        if token in self.eos:
            return before
        if before.left and token == before.left[0]:
            left = before.left[1:]
            return before._replace(is_open=bool(left), left=left, recent=())
        tag = self.closing if before.is_open else self.opening
        recent = (*before.recent, self.texts[token] if token < len(self.texts) else b"")
        while sum(map(len, recent[1:])) >= len(tag):
            recent = recent[1:]
        tokens = before.tokens + before.is_open
        at = b"".join(recent).find(tag)
        if at >= 0:
            tokens -= before.is_open * _from(recent, at)
            return self._forced(Thought(not before.is_open, tokens, before.cut))
        return self._forced(Thought(before.is_open, tokens, before.cut, (), recent))

    def _forced(self, now: Thought) -> Thought:
        """The state, with the tokens that close it once the budget is used up. Completing a closing tag is no cut."""
        if not now.is_open or now.tokens < self.budget:
            return now
        text = b"".join(now.recent)
        begun = next((n for n in range(len(self.closing) - 1, 0, -1) if text.endswith(self.closing[:n])), 0)
        left = (self.words.fewest(self.closing[begun:], self.eos) or ()) if begun else self.end
        if not left:  # no tokens complete the tag that was begun
            begun, left = 0, self.end
        inside = _from(now.recent, len(text) - begun) if begun else 0
        return now._replace(tokens=now.tokens - inside, cut=not begun, left=tuple(left))


def _from(pieces: Sequence[bytes], at: int) -> int:
    """The number of tokens that begin at or after byte `at`."""
    starts = [sum(map(len, pieces[:place])) for place in range(len(pieces))]
    return sum(start >= at for start in starts)


def thinking(m: ProcessorContext, budget: int) -> Thinking:
    """The processor of `thinking_budget`. Raises UsageError if no tags are known, or they cannot be written."""
    words = spelling(m.tokenizer, m.vocab_size, "thinking_budget")
    backend = m.tokenizer.backend_tokenizer
    named = m.generation.thinking_tags
    tags = tags_of(m.tokenizer) if named is None else Tags(*named)
    if tags is None:
        raise UsageError(
            "thinking_budget: neither the chat template nor the vocabulary of this checkpoint has tags of a thought "
            "that are known",
            hint='--set \'thinking_tags=["<think>", "</think>"]\' names them',
        )
    end = m.generation.thinking_end or tags.end or tags.closing
    if tags.closing not in end:
        raise UsageError(f"thinking_end: {quote(end)} does not hold the closing tag {quote(tags.closing)}")
    after = m.generation.grammar_after
    if after is not None and not end.endswith(after):
        raise UsageError(
            f"thinking_budget ends a thought with {quote(end)}, but the grammar begins after grammar_after = "
            f"{quote(after)}: the one must end with the other"
        )
    special = special_of(backend)
    texts = [str(backend.id_to_token(id)).encode() if id in special else p for id, p in enumerate(words.pieces)]
    ids: Sequence[int] = backend.encode(end, add_special_tokens=False).ids
    if any(id >= len(texts) for id in ids) or b"".join(texts[id] for id in ids) != end.encode():
        ids = words.fewest(end.encode(), m.eos) or ()
    if not ids:
        raise UsageError(f"thinking_end: this tokenizer cannot write {quote(end)}")
    is_open = not m.is_encoder_decoder and tags.is_open_in(m.opening)
    return Thinking(budget, tags, ids, texts, words, begins(m), m.eos, is_open=is_open)
