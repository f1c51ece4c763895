"""Hypotheses about an engine, tried on rows: alone, in pairs, each a reading or a number of its own.

docs/audit.md says which are tried where. M positions, E entries, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from genctl.errors import GenctlError
from genctl.parity.causes import Cause, cause
from genctl.parity.forms import FORMS
from genctl.parity.numbers import RAW, Number, numbers, remains, several
from genctl.parity.other_models import OtherModels
from genctl.parity.prompts import AuditPrompts, AuditRow, Ids
from genctl.parity.rereading import LOGITS, Rereader, RowNoise
from genctl.parity.sides import LocalSide
from genctl.parity.trial import ERROR_RATE, PLAIN, Tried, Way, excess, likelihood, slope

SAMPLE = 200  # positions of the sample on which causes are tried, at most, once there is a row
SUMMED = 800  # where a number is the sum of several
FEWER = 60  # positions on which pairs are tried first
WAYS = 10  # of reading, to which numbers are fitted
PAIRS = 12  # of them are tried on the sample
SURE = 10  # times the bound: a cheap cause that explains all so well leaves nothing to dear ones
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
Base: TypeAlias = Callable[[Number], Tensor]  # what is left of a number, f64 [E]


class Hypotheses(Rereader):
    """Tries causes on rows."""

    def __init__(
        self,
        side: LocalSide,
        rows: Sequence[AuditRow],
        prompts: AuditPrompts,
        *,
        others: Sequence[str] = (),
        on_stage: Callable[[str], object] = lambda stage: None,
        **how: Any,
    ) -> None:
        """`others`: checkpoints that may run in place of this one. `how`: of the `Rereader`."""
        super().__init__(side, rows, **how)
        self._prompts, self._others, self._stage = prompts, others, on_stage
        self._declared = self._form
        self._codes = 0.0  # nats, by which codes of a declared form may differ
        self._count = 0  # hypotheses
        self._notes: list[str] = []
        self._own_noise: dict[tuple[Cause, ...], RowNoise] = {}  # of other models
        self._beaten: list[Tried] = []  # on a row, and not tried on others
        self._cut = torch.zeros(len(self.places.token), dtype=torch.float64)  # what cut digits may change

    def _try(self, ways: tuple[Way, ...], wanted: Sequence[Number] | None, rows: Sequence[int], base: Base | None,
             *, exact: bool = False) -> list[Tried]:  # fmt: skip
        """What is left where texts are read in `ways`: for each of `wanted`, or for all numbers that fit (None).

        `base` gives what a number leaves without another way of reading, with which directions are compared.
        """
        way = PLAIN
        for each in ways:
            way = each.and_(way)
        groups = [*self._groups(rows)]
        logits = self._logits(way, groups[0], exact=exact)
        if wanted is None:  # parameters are fitted on what fits into memory
            wanted = [*numbers(logits, self._few(groups[0]))]
        parts: list[list[Tensor]] = [[] for _ in wanted]
        for group in groups:
            logits = logits if group is groups[0] else self._logits(way, group, exact=exact)
            places = self._few(group)
            for part, number in zip(parts, wanted, strict=True):
                part.append(remains(number, logits, places))
        del logits
        at, own_places = self._at(rows), self._few(rows)
        found: list[Tried] = []
        for number, part in zip(wanted, parts, strict=True):
            left = torch.cat(part)
            found.append(Tried((), ways, number, own_places.sizes(left), torch.zeros(0), left))
        known, noise = own_places.known, self.noise(way.dtype or self._dtype)
        cut = self._cut[at]
        for one in found:
            own = tuple(each.cause for each in ways if each.cause) + tuple(cause(*each) for each in one.number.causes)
            one.causes = own
            scale = noise.typical[at] / one.number.temperature
            if way.form is not None and base is not None:
                before = base(one.number)
                moved = before - one.left
                one.plausible = 0.5 <= slope(before, moved) <= 1.6
                scale = (scale.square() + (0.3 * own_places.sizes(moved)[known]).square().mean()).sqrt()
            elif way.dtype is not None and base is not None:
                before = base(one.number)
                one.plausible = 0.3 <= slope(before, before - one.left) <= 3.0
            one.scale = (scale.square() + cut.square() + self._codes**2).sqrt()
        self._count += len(found)
        return found

    def _judged(self, tried: Sequence[Tried], nothing: Tried, at: Tensor) -> None:
        """Fill in the figures of hypotheses on positions [K]."""
        known = self.places.known[at]
        whole = excess(nothing, known)
        for one in tried:
            one.likelihood = likelihood(one, known)
            penalty = one.number.parameters * 0.5 * math.log(max(int(known.sum()), 2))
            one.likelihood = one.likelihood - penalty / max(int(known.sum()), 1)
            ratios = (one.sizes / one.scale)[known]
            one.ratio = float(ratios.median())
            one.explained = 1 - excess(one, known) / whole if whole > 0 else 0.0

    def _fits(self, one: Tried) -> bool:
        noise = self.noise(self._dtype)
        return one.ratio <= noise.typical_allowed and one.plausible

    def _is_within(self, one: Tried, rows: Sequence[int]) -> bool:
        return self._fits(one) and not self.rows_left(one, rows)

    def rows_left(self, one: Tried, rows: Sequence[int]) -> list[int]:
        """Rows with a position that is beyond noise."""
        noise, at = self._own_noise.get(one.causes) or self.noise(self._dtype), self._at(rows)
        scale = torch.maximum(one.scale, noise.typical[at]) if one.causes in self._own_noise else one.scale
        known = self.places.known
        most = (noise.most / noise.typical[known].median())[at] * scale[known[at]].median()
        beyond = (one.sizes > noise.allowed * torch.maximum(scale, most)) & known[at]
        return [row for row, own in self._spans(rows) if bool(beyond[own].any())]

    def _typical(self, one: Tried, rows: Sequence[int]) -> float:
        """What typically remains at the positions of rows that have a number."""
        return float(one.sizes[self.places.known[self._at(rows)]].median())

    def _left(self, rows: Sequence[int], number: Number = RAW) -> Tensor:
        parts = [remains(number, self._logits(PLAIN, group), self._few(group)) for group in self._groups(rows)]
        return torch.cat(parts)

    def _base(self, rows: Sequence[int]) -> Base:
        """What numbers leave where texts are read as they should be; each is read once."""
        found: dict[Number, Tensor] = {}
        groups = [*self._groups(rows)]
        logits = self._logits(PLAIN, rows) if len(groups) == 1 else None
        places = self._few(rows)

        def base(number: Number) -> Tensor:
            if number not in found:
                found[number] = self._left(rows, number) if logits is None else remains(number, logits, places)
            return found[number]

        return base

    def _sample(self, nothing: Tried) -> list[int]:
        """Rows on which causes are tried, the most telling first, as many as `COST` allows."""
        chosen: list[int] = []
        tokens = positions = 0
        most = SAMPLE if self.places.owner is None else SUMMED
        for row in self._telling(nothing, self._every):
            text = self._rows[row].text
            tokens += len(text.prompt_ids) + len(text.token_ids)
            positions += len(text.token_ids)
            if chosen and (tokens > self._tokens or positions > most):
                break
            chosen.append(row)
        return sorted(chosen)

    def _telling(self, nothing: Tried, rows: Sequence[int]) -> list[int]:
        """The rows that `nothing` was tried on, the most telling first."""
        ratios = (nothing.sizes / nothing.scale).clamp(max=1e3)
        worst = {row: float(ratios[own].sum()) / max(len(ratios[own]), 1) ** 0.5 for row, own in self._spans(rows)}
        return sorted(rows, key=lambda row: -worst[row])

    def _prompt_ways(self) -> Iterator[Way]:
        for key, parameter, prompts in self._prompts.changes(self._rows):
            yield Way(cause(key, parameter), prompts=tuple(prompts))

    def _ways(self) -> Iterator[Way]:
        stored = {tensor.dtype for _, tensor in self._floats()}
        for key in ("bfloat16", "float16"):
            if DTYPES[key] != self._dtype and torch.float32 in stored and self._dtype == torch.float32:
                yield Way(cause(key), dtype=DTYPES[key])
        for key, form in FORMS.items():
            is_declared = self._declared is not None and key.startswith(self._declared)
            if not is_declared and not key.startswith("gguf") and not (form.overflows and self._is_dear):
                words = ", whose sums overflow 16 bits" if form.overflows else ""
                yield Way(cause(key.partition(":")[0], words), form=form)

    def _singles(
        self, sample: Sequence[int], base: Base, first: Tried, only: Iterator[Way] | None = None
    ) -> list[Tried]:
        """Every cause alone, or all numbers and `only` some ways of reading, on the sample.

        Of a large model each is first tried on the most telling row. Once one explains all, its family is the last.
        """
        self._stage("hypotheses")
        at, few = self._at(sample), self._telling(first, sample)[:1]
        screens = self._is_dear and len(sample) > 1
        begun, part = self._base(few) if screens else base, torch.isin(at, self._at(few))
        begin = Tried((), (), RAW, first.sizes[part], first.scale[part])
        own = part[self.places.known[at]]  # of positions with a number
        tried: list[Tried] = []

        def found(ways: tuple[Way, ...], wanted: Sequence[Number] | None) -> list[Tried]:
            if not screens:
                return self._try(ways, wanted, sample, base)
            some = self._try(ways, wanted, few, begun)
            self._judged([begin, *some], begin, self._at(few))
            self._judged(tried, first, at)
            rivals = [one.likelihood[own] for one in tried] or [one.likelihood for one in some]
            least = max(float(one.sum()) for one in rivals) - math.log(self._count / ERROR_RATE)
            least = max(least, begin.total)
            keep = [one.total >= least or self._fits(one) for one in some]
            self._beaten += [one for one, kept in zip(some, keep, strict=True) if not kept]
            left = [one.number for one, kept in zip(some, keep, strict=True) if kept]
            return self._try(ways, left, sample, base) if left else []

        tried += found((), None)
        sure = False
        with OtherModels(self._side, self._others) as models:
            others = (Way(cause(key, parameter), load=load) for key, parameter, load in models.all())
            for way in only or chain(self._prompt_ways(), self._ways(), others):
                if self._is_dear and tried and not sure:
                    self._judged([first, *tried], first, at)
                    best = max(tried, key=lambda one: one.total)
                    gain = float((best.likelihood - first.likelihood).sum())
                    sure = self._fits(best) and gain > SURE * math.log(self._count / ERROR_RATE)
                assert way.cause is not None
                # a factor of the logits is the same as a temperature
                is_alike = sure and way.cause.key == "scale-ignored" and best.number.temperature != 1.0
                if sure and not is_alike and way.cause.family not in {one.family for one in best.causes}:
                    note = f"{best.words} explains all, so that not every cause is tried"
                    self._notes += [note] * (note not in self._notes)
                    continue
                try:
                    tried += found((way,), [RAW])
                except (GenctlError, ValueError, RuntimeError) as error:
                    if way.load is None:
                        raise
                    why = error.message if isinstance(error, GenctlError) else "it has another vocabulary"
                    self._notes.append(f"{way.cause.sentence} is not tried: {why}")
            self._loaded = (None, self._side)
        return tried

    def _pairs(
        self, singles: Sequence[Tried], sample: Sequence[int], base: Base, first: Tried, at: Tensor
    ) -> list[Tried]:
        """Causes together: every way of reading with every number, and the best ways of different families."""
        self._stage("pairs")
        pairs: list[Tried] = []
        first_row, *rest = self._telling(first, sample)

        def typical(one: Tried) -> float:  # beaten ones were tried on a row
            return self._typical(one, sample if len(one.sizes) == len(at) else [first_row])

        best = sorted((one for one in singles if one.ways), key=typical)
        first_ways = [one.ways[0] for one in best if one.ways[0].prompts is not None]
        others = [one.ways[0] for one in best if one.ways[0].prompts is None and one.ways[0].load is None]
        ways = first_ways + others[: 0 if self._is_dear else 3]
        small = self._side.vocabulary * FEWER <= LOGITS
        few = [first_row]
        for row in rest:
            if sum(len(self._rows[each].text.token_ids) for each in few) < (0 if self._is_dear else FEWER):
                few.append(row)
        few.sort()  # as the positions of the sample are
        part = torch.isin(at, self._at(few))
        screened: list[Tried] = []
        begun = self._base(few)
        for way in ways[: WAYS if small or self._is_dear else WAYS // 2]:
            screened += self._try((way,), None, few, begun)
        few_best = 2 if self._is_dear else 6
        for place, one in enumerate(best[:few_best]):
            for other in best[place + 1 : few_best]:
                both = one.ways[0], other.ways[0]
                if len({each.cause.family for each in both if each.cause}) == 2 and not any(way.load for way in both):
                    screened += self._try(both, [RAW], few, begun)
        group = next(self._groups(few))
        logits, places = self._logits(PLAIN, group), self._few(group)
        more = [two for one in singles if not one.ways for two in several(one.number, logits, places)]
        del logits
        screened += self._try((), more, few, begun) if more else []
        begin = Tried((), (), RAW, first.sizes[part], first.scale[part])
        self._judged([begin, *screened], begin, self._at(few))
        screened.sort(key=lambda one: -one.total)
        for one in screened[: 2 if self._is_dear else PAIRS]:
            pairs += self._try(one.ways, [one.number], sample, base)
        for key, parameter, prompts in self._truncations(sample):
            pairs += self._try((Way(cause(key, parameter), prompts=prompts),), [RAW], sample, base)
        self._judged(pairs, first, at)
        return pairs

    def _truncations(self, sample: Sequence[int]) -> Iterator[tuple[str, str, tuple[Ids, ...]]]:
        """The limit of the prompt that explains the first tokens of the longest prompt best."""
        row = max(sample, key=lambda row: len(self._rows[row].text.prompt_ids))
        text, length = self._rows[row].text, len(self._rows[row].text.prompt_ids)
        few = min(len(text.token_ids), 4)
        places = self.places.few(self._at([row])[:few])
        if length < 3 or not bool(places.known.any()):
            return
        step = max(length * length // (8 * self._tokens), 1)
        sizes: dict[tuple[int, bool], float] = {}
        for limit in range(1, length, step):
            for keeps_first in (False, True):
                prompt = _truncated(text.prompt_ids, limit, keeps_first)
                shorter = replace(text, prompt_ids=prompt)
                rows = [logits.double().cpu() for _, logits in self._side.whole_text(shorter, range(few))]
                sizes[limit, keeps_first] = float(places.sizes(remains(RAW, torch.stack(rows), places)).mean())
        limit, keeps_first = min(sizes, key=lambda key: sizes[key])
        prompts = tuple(
            _truncated(each.text.prompt_ids, limit, keeps_first) if len(each.text.prompt_ids) > limit
            else each.text.prompt_ids
            for each in self._rows
        )  # fmt: skip
        self._count += len(sizes)
        yield "truncated", str(limit), prompts


def _truncated(prompt: Ids, limit: int, keeps_first: bool) -> Ids:
    return (*prompt[:1], *prompt[len(prompt) - limit + 1 :]) if keeps_first and limit > 1 else prompt[-limit:]
