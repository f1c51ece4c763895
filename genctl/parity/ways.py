"""The ways in which an engine may have read texts, and hypotheses of these: how well each explains a trace.

docs/audit.md explains the test. M positions, E entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from genctl.parity.causes import FORMS, GGUF, SEARCHED, Cause, ContextShift, Form, cause
from genctl.parity.entries import CAP
from genctl.parity.numbers import RAW, Number
from genctl.parity.oracle import Oracle
from genctl.parity.prompts import AuditRow, Ids
from genctl.parity.sides import LocalSide

ERROR_RATE = 0.01  # of naming a wrong cause, over all that are tried
FREEDOM = 4.0  # of Student's t, by which rounding is distributed: a few positions count little
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SEARCH = 2**12  # tokens that the cost of a cause allows, for codes that are searched for
CONTEXTS = 256  # llama.cpp's contexts are multiples of it
_CODES = "rows are rounded for products with weights in codes"
_TABLE = "GELU is read from a table in float16"


@dataclass(frozen=True)
class Way:
    """How the texts are read: another prompt for each row, another arithmetic, another model."""

    cause: Cause | None = None
    prompts: tuple[Ids, ...] | None = None  # of all rows
    dtype: torch.dtype | None = None
    form: Form | None = None
    load: Callable[[], LocalSide] | None = None

    @property
    def rounds(self) -> bool:
        """Whether numbers are rounded otherwise: how exactly an engine does so is not known."""
        return self.dtype is not None or (self.form is not None and self.form.shift is None)

    @property
    def rounds_weights(self) -> bool:
        """Whether weights are rounded."""
        return self.dtype is not None or (self.form is not None and bool(self.form.weights))

    def and_(self, other: Way) -> Way:
        """Both; the causes stay those of `self`."""
        form = self.form and other.form and self.form.and_(other.form)
        return replace(
            self, prompts=self.prompts or other.prompts, dtype=self.dtype or other.dtype,
            form=form or self.form or other.form, load=self.load or other.load,
        )  # fmt: skip


PLAIN = Way()


def declared(key: str | None) -> list[Form]:
    """The forms of what an engine is declared to compute in."""
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


def arithmetic(
    oracle: Oracle, dtype: torch.dtype, declared: str | None, *, is_dear: bool, tokens: int
) -> Iterator[Way]:
    """Other roundings than in `dtype` and those that are declared. `tokens`: that the cost of a cause allows."""
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
        if (
            (declared and key.startswith(declared))
            or (key in DTYPES and not is_wide)
            or (key in GGUF and key not in others)
        ):
            continue
        for form in forms:
            slow = (form.overflows and is_dear) or (form.weights in SEARCHED and tokens < SEARCH)
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


# -- hypotheses ------------------------------------------------------------------------------------------------------


@dataclass
class Explanation:
    """A hypothesis with what it leaves, [M] of the rows that it was tried on."""

    causes: tuple[Cause, ...]
    ways: tuple[Way, ...]
    number: Number
    sizes: Tensor  # f64, nats
    scale: Tensor  # f64, of the noise
    left: Tensor = field(default_factory=lambda: torch.zeros(0))  # f64 [E], written less predicted
    likelihood: Tensor = field(default_factory=lambda: torch.zeros(0))  # f64, its logarithm
    ratio: float = math.nan  # median of sizes to noise
    tail: float = math.nan  # their quantile `hypotheses.TAIL`
    explained: float = 0.0  # of the difference
    off: float = 0.0  # nats, by which an engine may round otherwise than its form says
    sharp: Tensor = field(default_factory=lambda: torch.zeros(0))  # f64, the noise where it rounds just so
    plausible: bool = True  # the direction of what it changes is in the data, not only the size

    def nothing_at(self, keep: Tensor | slice) -> Explanation:
        """No hypothesis, with the same sizes and noise, at some of the positions."""
        return Explanation((), (), RAW, self.sizes[keep], self.scale[keep], sharp=self.sharp[keep])

    @property
    def total(self) -> float:
        """The logarithm of the likelihood of all that is left."""
        return float(self.likelihood.sum())

    @property
    def keys(self) -> frozenset[str]:
        """The causes without their parameters."""
        return frozenset(one.key for one in self.causes)

    @property
    def words(self) -> str:
        """The causes."""
        return " and ".join(one.sentence for one in self.causes) or "nothing"


def contains(one: Explanation, other: Explanation) -> bool:
    """Whether a hypothesis has all causes of another, and more: where that fits, it is the simpler one."""
    return other.keys < one.keys


def slope(base: Tensor, moved: Tensor) -> float:
    """How much of what a cause changes is in the data: 1 where all of it is."""
    there = base.isfinite() & moved.isfinite()
    size = moved[there].abs().median() * 8 + 1e-30
    x, y = moved[there].clamp(-size, size), base[there].clamp(-size, size)
    return float((x * y).sum() / x.square().sum().clamp(min=1e-300))


def excess(one: Explanation, known: Tensor) -> float:
    """What is beyond noise, in nats."""
    return float((one.sizes[known].clamp(max=CAP) - 2 * one.scale[known]).clamp(min=0).sum())


def likelihood(one: Explanation, known: Tensor) -> Tensor:
    """The logarithm of the density of what is left at each known position, for the scale that suits it best.

    Codes of an engine are those of its form at some positions, and once rounding moves one of them, others follow: half
    of the density is that of the noise alone.
    """
    size = one.sizes[known] + 1e-12
    scales = [one.scale[known], one.sharp[known] if len(one.sharp) else one.scale[known]]
    best: Tensor | None = None
    for factor in (0.35, 0.5, 0.7, 1.0, 1.4, 2.0):
        wide, sharp = (
            -(scale * factor).log() - (FREEDOM + 1) / 2 * (1 + (size / (scale * factor)).square() / FREEDOM).log()
            for scale in scales
        )
        found = torch.logaddexp(wide, sharp) - math.log(2)
        if best is None or float(found.sum()) > float(best.sum()):
            best = found
    assert best is not None
    return best


def sign_test(wins: int, trials: int) -> float:
    """The logarithm of the chance of so many wins, if each were a matter of luck."""
    if not trials:
        return 0.0
    terms = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) - trials * math.log(2)
        for k in range(wins, trials + 1)
    ]
    most = max(terms)
    return most + math.log(math.fsum(math.exp(term - most) for term in terms))


def beats(one: Explanation, other: Explanation, count: int) -> bool:
    """Whether a hypothesis is better than another: by its likelihood, and at most positions that tell them apart.

    The likelihood of a wrong hypothesis is 1/p times that of the true one with a chance of p at most (Ville 1939).
    A sign test does not rely on the distribution of rounding. `count` hypotheses are tried.
    """
    bound = math.log(max(count, 1) / ERROR_RATE)
    gain = one.likelihood - other.likelihood
    if float(gain.sum()) < bound:
        return False
    telling = gain[gain.abs() > 0.05]
    return sign_test(int((telling > 0).sum()), len(telling)) <= -bound
