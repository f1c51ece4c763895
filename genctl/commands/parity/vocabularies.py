"""Whether two sides read and write the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from genctl.errors import GenctlError, ModelError, quote
from genctl.models.text import encode

if TYPE_CHECKING:
    from genctl.models.hub import LoadedModel

HINT = "--by-text compares bits per byte of the texts alone"


def check_same(reference: LoadedModel, other: LoadedModel, texts: Iterable[tuple[str, str]]) -> None:
    """Raises ModelError, which names the first difference, for tokenizers that are not the same on `texts`.

    A text comes with its name.
    """
    names = f"{reference.name} and {other.name}"
    if reference.is_encoder_decoder != other.is_encoder_decoder:
        kinds = ["a causal model", "an encoder-decoder"]
        raise ModelError(
            f"{reference.name} is {kinds[reference.is_encoder_decoder]}, and {other.name} is "
            f"{kinds[other.is_encoder_decoder]}: they have no tokens in common",
        )
    if reference.tokenizer is None or other.tokenizer is None:
        return  # token ids are compared; the sizes of both vocabularies are checked with the first logits
    mine, theirs = (
        {id: token for token, id in tokenizer.get_vocab().items()}
        for tokenizer in (reference.tokenizer, other.tokenizer)
    )
    for id in sorted(mine.keys() | theirs.keys()):
        if mine.get(id) != theirs.get(id):
            shown = [_token(tokens.get(id)) for tokens in (mine, theirs)]
            raise ModelError(f"{names} have different vocabularies: id {id} is {' and '.join(shown)}", hint=HINT)
    for name, text in texts:
        try:
            ids = [encode(one.tokenizer, text, add_special_tokens=True) for one in (reference, other)]
        except GenctlError:
            continue  # whoever reads this text says so
        if ids[0] != ids[1]:
            at = next((at for at, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), min(map(len, ids)))
            shown = [
                _token(tokens.get(row[at]) if at < len(row) else None)
                for tokens, row in zip((mine, theirs), ids, strict=True)
            ]
            raise ModelError(
                f"{names} have different tokenizers: token {at + 1} of text {name} is {' and '.join(shown)}",
                hint=HINT,
            )


def _token(token: str | None) -> str:
    return "missing" if token is None else quote(token)
