"""The 256 bytes as printable characters, as GPT-2 and all byte-level vocabularies write their tokens."""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)

STANDINS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


def bytes_of(token: str) -> bytes:
    """The bytes of a token; an added token is its own text."""
    if all(char in STANDINS for char in token):
        return bytes(STANDINS[char] for char in token)
    return token.encode()
