"""Tokens given by their text or their id, for --watch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from genctl.errors import InputError, UsageError
from genctl.models import text

if TYPE_CHECKING:
    from genctl.models.hub import LoadedModel


def watched_ids(loaded: LoadedModel, tokens: Sequence[str]) -> tuple[int, ...]:
    """The ids of `tokens`, each a text or `id:N`, without repetition. Raises UsageError."""
    return tuple(dict.fromkeys(_id(loaded, token) for token in tokens))


def _id(loaded: LoadedModel, token: str) -> int:
    number = token.removeprefix("id:")
    if number != token and number.isascii() and number.isdigit():
        # a number of too many digits is no int (`sys.set_int_max_str_digits`)
        if len(number) > 18 or int(number) >= loaded.vocab_size:
            raise UsageError(f"--watch {token}: the ids of {loaded.name} are 0 to {loaded.vocab_size - 1}")
        return int(number)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise UsageError(f"--watch {token!r}: {loaded.name} has no tokenizer", hint="--watch id:N names a token's id")
    words = text.detokenizer(tokenizer)
    try:
        ids = _ids(tokenizer, words, token) if token else []
    except InputError as error:
        raise UsageError(f"--watch {token!r}: {error.message}") from None
    if len(ids) != 1:
        parts = ", ".join(f"{words.piece(id)!r} (id:{id})" for id in ids)
        raise UsageError(
            f"--watch {token!r} is not one token of {loaded.name}" + (f" but {len(ids)}: {parts}" if ids else ""),
            hint="name one of them: a space before a word belongs to its token" if ids else "",
        )
    unknown = tokenizer.unk_token_id
    if ids[0] == unknown and token.strip() != tokenizer.unk_token:
        raise UsageError(f"--watch {token!r}: the tokenizer of {loaded.name} does not know it and reads id:{unknown}")
    if ids[0] >= loaded.vocab_size:
        raise UsageError(f"--watch {token!r} is id:{ids[0]}, but {loaded.name} has only {loaded.vocab_size} ids")
    return ids[0]


def _ids(tokenizer: Any, words: text.Words, token: str) -> list[int]:
    """The ids of a text: as it stands alone, or behind other text where only so it is one token."""
    alone = text.encode(tokenizer, token, add_special_tokens=False)
    if len(alone) == 1 and (words.piece(alone[0]) == token or not token[0].isspace()):
        return alone
    behind = text.continuation(tokenizer, token)
    return behind if len(behind) == 1 and words.piece(behind[0]) == token else alone
