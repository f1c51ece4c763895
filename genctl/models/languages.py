"""Languages of multilingual tokenizers (NLLB, mBART, M2M-100): each has a token, which a source and a translation have.

As in transformers' translation pipeline: the tokenizer writes the token of `src_lang` beside a source, and the token of
`tgt_lang` is the first that the decoder is made to write (`forced_bos_token_id`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from genctl.errors import UsageError, nearest, quote

_CODE = re.compile(r"[a-z]{2,3}(_[A-Za-z]{2,4})?")  # "en", "en_XX", "eng_Latn"


def languages_of(tokenizer: Any) -> dict[str, int]:
    """The id of the token of each language, by the tokenizer's own names; {} where it has none."""
    if not hasattr(type(tokenizer), "src_lang"):
        return {}
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    codes = getattr(tokenizer, "lang_code_to_id", None) or filter(_CODE.fullmatch, (one.strip("_") for one in added))
    found: dict[str, int] = {}
    for name in (code.strip("_") for code in codes):
        for token in (f"__{name}__", name):
            id = tokenizer.convert_tokens_to_ids(token)
            if id is not None and id != tokenizer.unk_token_id:
                found.setdefault(name, int(id))
    return found


def language_id(tokenizer: Any, setting: str, name: str, checkpoint: str) -> int:
    """The id of the token of a language; `setting` names it with its place. Raises UsageError where there is none."""
    languages = languages_of(tokenizer)
    if not languages:
        raise UsageError(f"{setting}: the tokenizer of {checkpoint} has no languages")
    if name in languages:
        return languages[name]
    near = nearest(name, languages)
    names = sorted(languages)
    shown = ", ".join(names[:8]) + (f" … ({len(names)} in all)" if len(names) > 8 else "")
    raise UsageError(
        f"{setting}: {checkpoint} has no language {quote(name)}" + (f"; did you mean {near}?" if near else ""),
        hint=f"its languages are {shown}",
    )


@contextmanager
def reading(tokenizer: Any, language: str | None) -> Iterator[None]:
    """Texts that are read meanwhile are in `language`; None: in the tokenizer's own."""
    if language is None:
        yield
        return
    before = tokenizer.src_lang
    tokenizer.src_lang = language
    try:
        yield
    finally:
        tokenizer.src_lang = before
