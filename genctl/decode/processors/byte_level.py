"""How a tokenizer decodes; the 256 bytes as characters, as GPT-2 and all byte-level vocabularies write them."""

from __future__ import annotations

import json
from typing import Any

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)

STANDINS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


def bytes_of(token: str) -> bytes:
    """The bytes of a token; an added token is its own text."""
    if all(char in STANDINS for char in token):
        return bytes(STANDINS[char] for char in token)
    return token.encode()


def decoder_of(backend: Any) -> dict[str, Any] | None:
    """The decoder of a tokenizer as tokenizer.json writes it.

    It is written with a tokenizer that has no vocabulary: a large vocabulary takes long to write, and much memory.
    """
    from tokenizers import Tokenizer, models

    empty = Tokenizer(models.BPE())
    if backend.decoder is not None:
        empty.decoder = backend.decoder
    decoder: dict[str, Any] | None = json.loads(empty.to_str())["decoder"]
    return decoder
