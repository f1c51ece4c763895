"""The ways in which an engine may have read texts: other prompts, other roundings, a context that it shifted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from genctl.parity.causes import FORMS, GGUF, SEARCHED, ContextShift, Form, cause
from genctl.parity.oracle import Oracle
from genctl.parity.prompts import AuditPrompts, AuditRow, Ids
from genctl.parity.trial import Way

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CONTEXTS = 256  # llama.cpp's contexts are multiples of it
_CODES = "rows are rounded for products with weights in codes"
_TABLE = "GELU is read from a table in float16"


def declared(key: str | None) -> list[Form]:
    """The forms of what an engine is said to compute in."""
    return [form for name, forms in FORMS.items() if key and name.startswith(key) for form in forms]


def honest(oracle: Oracle) -> Iterator[tuple[Form, str]]:
    """How llama.cpp rounds where it computes what it should, with a note; the most likely first."""
    spec: Any = getattr(oracle.side.session.loaded.model, "spec", None)
    has_table = spec is not None and "gelu" in spec.activation and "quick" not in spec.activation
    held = Form(weights="file") if any(part.type for part in oracle.parts.values()) else next(
        (form for form in chain.from_iterable(FORMS.values()) if form.weights and oracle.holds(form)), None
    )  # fmt: skip
    if held is not None and (held.activations or held.weights in ("file", *GGUF)):
        if has_table:
            yield held.and_(Form(gelu=True)), f"{_CODES}, and {_TABLE}"
        yield held, _CODES
    if has_table:
        yield Form(gelu=True), _TABLE


def prompts(changes: AuditPrompts, rows: Sequence[AuditRow]) -> Iterator[Way]:
    """Other prompts."""
    for key, parameter, changed in changes.changes(rows):
        yield Way(cause(key, parameter), prompts=tuple(changed))


def arithmetic(oracle: Oracle, dtype: torch.dtype, said: str | None, *, dear: bool, searched: bool) -> Iterator[Way]:
    """Other roundings than in `dtype`; `said`: what is declared. `searched`: codes that are searched for, too."""
    model: Any = oracle.side.session.loaded.model
    is_wide = torch.float32 in oracle.stored and dtype == torch.float32
    heads = getattr(getattr(model, "spec", None), "head_dim", 1)
    for key in ("bfloat16", "float16"):
        if is_wide and not oracle.holds(FORMS[key][0]):  # else it would only allow for more rounding
            yield Way(cause(key), dtype=DTYPES[key])
    alike: dict[tuple[str, ...], list[str]] = {}  # files whose matrices have the same types
    for key in GGUF:
        alike.setdefault(oracle.types(FORMS[key][0]) if oracle.parts else (key,), []).append(key)
    others = {first: more for first, *more in alike.values()}
    for key, forms in FORMS.items():
        if (said and key.startswith(said)) or (key in DTYPES and not is_wide) or (key in GGUF and key not in others):
            continue
        for form in forms:
            slow = (form.overflows and dear) or (form.weights in SEARCHED and not searched)
            if slow or (form.rotated and heads % 64) or (form.weights and oracle.holds(form)):
                continue  # a form that the weights have already is what the reference is
            more = " and ".join(map(str.upper, others.get(key, ())))
            yield Way(cause(key, form.parameter or (more and f" (or {more}, the same here)")), form=form)


def shifted(rows: Sequence[AuditRow], parts: int | None) -> Iterator[Way]:
    """A context that was shifted. `parts`: the first token of a text whose number differs, counted with the prompt."""
    longest = max(len(row.text.prompt_ids) + len(row.text.token_ids) for row in rows)
    prompt = max(len(row.text.prompt_ids) for row in rows)
    firsts = {row.text.prompt_ids[0] for row in rows}
    sizes = {*range(CONTEXTS, longest, CONTEXTS), *(() if parts is None else (parts,))}
    for size in sorted(sizes)[:4]:
        if prompt < size < longest and size > 8:
            for first in (*firsts, None) if len(firsts) == 1 else (None,):
                yield Way(cause("context-shifted", str(size)), form=Form(shift=ContextShift(size - 1, first, longest)))


def cut(prompt: Ids, limit: int, *, keeps_first: bool) -> Ids:
    """A prompt without its beginning."""
    return (*prompt[:1], *prompt[len(prompt) - limit + 1 :]) if keeps_first and limit > 1 else prompt[-limit:]
