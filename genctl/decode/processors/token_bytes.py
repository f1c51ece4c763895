"""The bytes that each id of a vocabulary adds to the text, and llguidance's view of them.

The text of new tokens is the concatenation of their `pieces`; at the start of a text, the first one has its `first`.
The bytes are exact for byte-level and byte-fallback vocabularies, and taken from the decoder's output for metaspace and
WordPiece ones. Tokenizers whose text is not the sum of its tokens are refused: single tokens could not be checked. This
file does not import torch.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from genctl.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# -- how a tokenizer decodes; the 256 bytes as characters, as GPT-2 and all byte-level vocabularies write them ---------

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)

STANDINS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


def bytes_of(token: str) -> bytes:
    """The bytes of a token; an added token is its own text."""
    if all(char in STANDINS for char in token):
        return bytes(STANDINS[char] for char in token)
    return token.encode()


def is_byte(token: str | None) -> bool:
    """Whether a token is one byte (<0xE2>) of a byte-fallback vocabulary."""
    return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def special_of(backend: Any) -> frozenset[int]:
    """The ids of special tokens, which decoding skips."""
    return frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)


def steps_of(backend: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder in the form of tokenizer.json; empty if it has no decoder.

    They are serialised with a tokenizer that has no vocabulary: a large one takes much time and memory.
    """
    from tokenizers import Tokenizer, models

    empty = Tokenizer(models.BPE())
    if backend.decoder is not None:
        empty.decoder = backend.decoder
    steps = [json.loads(empty.to_str())["decoder"]]
    while any(step is not None and "decoders" in step for step in steps):
        steps = [inner for step in steps for inner in step.get("decoders", [step])]
    return [step for step in steps if step is not None]


def is_byte_level(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether the text is the bytes of all tokens, concatenated."""
    return [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]


_SUMMED = ("ByteLevel", "ByteFallback", "Fuse", "Replace", "Metaspace", "WordPiece")


@dataclass(frozen=True, eq=False)
class Spelling:
    """V ids and their bytes; b"" for special and unknown ids."""

    pieces: tuple[bytes, ...]  # V, the bytes that an id adds after other text
    first: dict[int, bytes]  # ids that add other bytes at the beginning, where a blank is stripped
    memo: dict[Any, Any] = field(default_factory=dict)  # cached values that live as long as the tokenizer

    def at_first(self, token: int) -> bytes:
        """The bytes of an id at the beginning of a text."""
        return self.first.get(token, self.pieces[token])

    def spelled(self, piece: bytes, *, first: bool = False) -> Sequence[int]:
        """The ids that add exactly `piece`."""
        return self._table(first)[1].get(piece, ())

    def beginning(self, start: bytes, *, first: bool = False) -> Iterator[int]:
        """The ids whose bytes start with `start`."""
        ordered, ids = self._table(first)
        for place in range(bisect_left(ordered, start), len(ordered)):
            if not ordered[place].startswith(start):
                return
            yield from ids[ordered[place]]

    def fewest(self, text: bytes, barred: Collection[int], *, first: bool = False) -> tuple[int, ...] | None:
        """The fewest ids that spell `text`, none of them `barred`; None if none do. Of equally short spellings, the one
        with the longest pieces first. `first`: no other text is before it.
        """
        ways: list[tuple[int, ...] | None] = [*([None] * len(text)), ()]  # the ids from each place to the end
        for start in range(len(text) - 1, -1, -1):
            for end in range(min(len(text), start + self.longest), start, -1):
                way, rest = ways[start], ways[end]
                if rest is not None and (way is None or len(rest) + 1 < len(way)):
                    ids = self.spelled(text[start:end], first=first and start == 0)
                    token = next((token for token in ids if token not in barred), None)
                    ways[start] = way if token is None else (token, *rest)
        return ways[0]

    @cached_property
    def behind(self) -> Spelling:
        """The spelling after other text, where the first id adds the same bytes as anywhere else."""
        return Spelling(self.pieces, {})

    @cached_property
    def longest(self) -> int:
        """The length of the longest piece in bytes."""
        return max(map(len, self.pieces), default=0)

    def _table(self, first: bool) -> tuple[list[bytes], dict[bytes, list[int]]]:
        """All pieces, sorted, and the ids of each; `first`: those at the beginning of a text."""
        key = "table", first and bool(self.first)
        if key not in self.memo:
            ids: dict[bytes, list[int]] = {}
            for token, piece in enumerate(self.pieces):
                if piece := self.at_first(token) if key[1] else piece:
                    ids.setdefault(piece, []).append(token)
            self.memo[key] = sorted(ids), ids
        table: tuple[list[bytes], dict[bytes, list[int]]] = self.memo[key]
        return table


_known: WeakKeyDictionary[Any, dict[int, Spelling]] = WeakKeyDictionary()


def spelling(tokenizer: Any, vocab_size: int, knob: str, *, begun: bool = False) -> Spelling:
    """The spelling of ids 0 to `vocab_size` - 1, at the beginning of a text or, if `begun`, after other text.

    Raises UsageError, naming `knob`, if it cannot be determined.
    """
    if tokenizer is None:
        raise UsageError(f"{knob}: works on text, but the checkpoint has no tokenizer")
    sizes = _known.setdefault(tokenizer, {})
    if vocab_size not in sizes:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(f"{knob}: needs a fast tokenizer (tokenizer.json), which this checkpoint lacks")
        if getattr(tokenizer, "clean_up_tokenization_spaces", False) and type(backend.model).__name__ != "BPE":
            raise UsageError(
                f"{knob}: this tokenizer removes blanks from finished text (clean_up_tokenization_spaces), "
                "so that it cannot be followed token by token"
            )
        sizes[vocab_size] = _read(backend, vocab_size, knob)
    words = sizes[vocab_size]
    return words.behind if begun and words.first else words


def _read(backend: Any, size: int, knob: str) -> Spelling:
    steps = steps_of(backend)
    kinds = [step["type"] for step in steps]
    for step in steps:
        if step["type"] not in _SUMMED and not (step["type"] == "Strip" and not step["stop"]):
            raise UsageError(
                f"{knob}: the text of this tokenizer is not the sum of its tokens ({step['type']} decoder)"
            )
    if "Fuse" in kinds and any(kind == "Replace" for kind in kinds[kinds.index("Fuse") :]):
        raise UsageError(f"{knob}: the text of this tokenizer is not the sum of its tokens (its decoder rewrites it)")
    special = special_of(backend)
    names = [None if token in special else backend.id_to_token(token) for token in range(size)]
    if is_byte_level(steps):
        return Spelling(tuple(b"" if name is None else bytes_of(name) for name in names), {})
    fallback = "ByteFallback" in kinds
    ids = [token for token, name in enumerate(names) if name is not None]
    plain = (token for token in ids if str(names[token]).isalnum() and backend.decode([token]).strip())
    anchor = next(plain, ids[0] if ids else 0)
    lead = backend.decode([anchor])
    alone = dict(zip(ids, backend.decode_batch([[token] for token in ids]), strict=True))
    after = dict(zip(ids, backend.decode_batch([[anchor, token] for token in ids]), strict=True))
    pieces, first = [b""] * size, {}
    for token in ids:
        name = str(names[token])
        if fallback and is_byte(name) and int(name[3:5], 16) >= 0x80:
            pieces[token] = bytes([int(name[3:5], 16)])
        elif after[token].startswith(lead):
            pieces[token] = after[token][len(lead) :].encode()
            if alone[token].encode() != pieces[token]:
                first[token] = alone[token].encode()
    return Spelling(tuple(pieces), first)


def llguidance_tokenizer(pieces: Sequence[bytes]) -> LLTokenizer:
    """A tokenizer with these pieces and one more token, `len(pieces)`, that ends a text."""
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
