"""llguidance's view of a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def llguidance_tokenizer(pieces: Sequence[bytes]) -> LLTokenizer:
    """Tokens with these bytes, and one more, `len(pieces)`, that ends a text."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_PiecesOnly(pieces)))


class _PiecesOnly:
    """The tokenizer interface of llguidance."""

    bos_token_id: int | None = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.tokens = [*pieces, b"\xff<end>"]
        self.eos_token_id = len(pieces)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: Any) -> list[int]:
        return []  # only used to force tokens, which the grammar's header turns off
