"""Token healing: the prompt's last tokens are removed, and the new text must begin with their text.

A prompt that ends in "http:" was tokenised without the following "//"; ":" before "//" is rare in training data,
because "://" is one token. So the possible beginning of a longer token is removed from the prompt, and the model
writes it again in the tokens that it prefers.

transformers' `heal_tokens` has the same purpose and differs: it strips blanks from the prompt's ends; it removes one
token, and replaces it by one token that greedy search picks with 10 added to the scores of all that begin alike,
whatever the strategy. Here as many tokens are removed as a longer token could cover, nothing is stripped, the strategy
itself (sampling, beams) chooses, and the text is required, not preferred: it is spelled exactly, in any number of
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from genctl.decode.processors.token_bytes import Spelling, spelling


@dataclass(frozen=True, eq=False)
class HealedPrompt:
    """A prompt without its last tokens. `text` is their text; empty if there was nothing to heal."""

    ids: tuple[int, ...]
    text: str
    words: Spelling


def heal(tokenizer: Any, ids: Sequence[int], vocab_size: int, stops: Sequence[str] = ()) -> HealedPrompt:
    """Remove the tokens at the end of `ids` that a longer token could cover. At least one id stays.

    Nothing is removed across special tokens, inside a character, or where a stop string could begin. Raises UsageError
    if the tokenizer's text is not the sum of its tokens.
    """
    words = spelling(tokenizer, vocab_size, "token_healing")
    end = b""
    best = HealedPrompt(tuple(ids), "", words)
    for place in range(len(ids) - 1, 0, -1):
        token = ids[place]
        piece = words.pieces[token] if 0 <= token < len(words.pieces) else b""
        end = piece + end
        if not piece or len(end) >= words.longest:
            break
        if not any(len(words.pieces[longer]) > len(end) for longer in words.beginning(end)):
            continue
        try:
            text = end.decode()
        except UnicodeDecodeError:
            continue
        if not any(_overlaps(text, stop) for stop in stops):
            best = HealedPrompt(tuple(ids[:place]), text, words)
    return best


def _overlaps(text: str, stop: str) -> bool:
    """Whether `stop` is in `text`, or could begin there and continue after it."""
    return stop in text or any(text.endswith(stop[:n]) for n in range(1, len(stop)))
