"""The token sequences that a tokenizer produces for a text.

A text without a leading space matches at the start, after other text and after a space; a text with a leading space
matches only after a space.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from genctl.errors import UsageError

# Text that may precede a word without a space.
_BEFORE = ("(", '"', "\n")
_WORD = "a"

_texts: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def variants(tokenizer: Any, text: str, knob: str) -> list[tuple[int, ...]]:
    """Every sequence of ids that the tokenizer produces for `text`, alone, after other text and after a space.

    Raises UsageError without a tokenizer, for an empty text, or if the tokenizer cannot encode it.
    """
    if tokenizer is None:
        raise UsageError(f"{knob}: {text!r} is text, but the checkpoint has no tokenizer", hint="give ids instead")
    if not text:
        raise UsageError(f"{knob}: the text is empty")
    after_space = _after(tokenizer, _WORD, text if text.startswith(" ") else f" {text}")
    candidates = [after_space]
    if not text.startswith(" "):
        candidates += [_encode(tokenizer, text), *(_after(tokenizer, before, text) for before in _BEFORE)]
    elif not after_space:  # this tokenizer merges it with the text before
        candidates.append(_encode(tokenizer, text))
    unknown = getattr(tokenizer, "unk_token_id", None)
    spelled = [ids for ids in candidates if ids and not (unknown in ids and text.strip() != tokenizer.unk_token)]
    if not spelled:
        raise UsageError(f"{knob}: the checkpoint's tokenizer has no tokens for {text!r}")
    return list(dict.fromkeys(spelled))


def bias_of(tokenizer: Any, biases: dict[str, float]) -> dict[tuple[int, ...], float]:
    """`logit_bias` as sequences of ids, each with the bias for the score of its last one.

    "#123" is the token with the id 123. A text with a leading space is more specific than one without, and has priority
    after a space. Raises UsageError for a text that cannot be encoded.
    """
    plain: dict[tuple[int, ...], float] = {}
    exact: dict[tuple[int, ...], float] = {}
    for text, bias in biases.items():
        if text.startswith("#") and text[1:].isdecimal():
            exact[(int(text[1:]),)] = float(bias)
        else:
            into = exact if text.startswith(" ") else plain
            into.update(dict.fromkeys(variants(tokenizer, text, "logit_bias"), float(bias)))
    return plain | exact


def containing(tokenizer: Any, text: str, knob: str) -> set[tuple[int, ...]]:
    """Single tokens whose text contains `text`, and the sequences of several tokens that spell it.

    Raises UsageError as `variants` does.
    """
    if tokenizer is None:
        raise UsageError(f"{knob}: {text!r} is text, but the checkpoint has no tokenizer", hint="give an empty list")
    singles = {token for token, spelling in enumerate(_vocabulary(tokenizer)) if text in spelling}
    try:
        spelled = variants(tokenizer, text, knob)
    except UsageError:
        if not text or not singles:
            raise
        spelled = []
    return {(token,) for token in singles} | {ids for ids in spelled if not singles.intersection(ids)}


def _vocabulary(tokenizer: Any) -> list[str]:
    """The text of each token."""
    if tokenizer not in _texts:
        ids = [[token] for token in range(len(tokenizer))]
        _texts[tokenizer] = list(tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False))
    return _texts[tokenizer]


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _after(tokenizer: Any, before: str, text: str) -> tuple[int, ...]:
    """The ids of `text` after `before`; empty if a token crosses the boundary."""
    lead, joined = _encode(tokenizer, before), _encode(tokenizer, before + text)
    return joined[len(lead) :] if lead and joined[: len(lead)] == lead else ()
