"""Hypotheses about an engine, tried on rows: alone, in pairs, each a reading or a number of its own.

docs/audit.md says which are tried where. M positions, E entries, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from genctl.errors import GenctlError
from genctl.parity import ways
from genctl.parity.causes import FORMS, Cause, cause
from genctl.parity.fitting import numbers, several
from genctl.parity.numbers import RAW, Number, remains
from genctl.parity.other_models import OtherModels
from genctl.parity.prompts import AuditPrompts, AuditRow, Ids
from genctl.parity.rereading import LOGITS, Rereader, RowNoise
from genctl.parity.sides import LocalSide
from genctl.parity.ways import ERROR_RATE, PLAIN, Explanation, Way, excess, likelihood, slope

SAMPLE = 200  # positions of the sample on which causes are tried, at most, once there is a row
SUMMED = 800  # where a number is the sum of several
FEWER = 60  # positions on which pairs are tried first
WAYS = 10  # of reading, to which numbers are fitted
PAIRS = 12  # of them are tried on the sample
BESIDE = 12  # causes that are tried beside llama.cpp's attention
BESIDE_DEAR = 4  # the same of a large model
WITHIN = 3  # weights that fit, beside which it is tried
MOVED = 10  # positions that a cause moves, at least
RESOLVED = 4.0  # times the noise, by which it moves them
TINY = 1e-9  # nats: nothing is moved
OFF = 0.3  # of what a form changes may be left: engines round in other orders; all of it where a context was shifted
TAIL = 0.9  # of all positions are within the most that noise does, where a hypothesis fits
SURE = 10  # times the bound: a cheap cause that explains all so well leaves nothing to dear ones
FLASH = Way(cause("flash-float16"), form=FORMS["flash-float16"][0])


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
        self._codes = 0.0  # nats, by which what the engine rounds beside a cause may differ
        self._count = 0  # hypotheses
        self._notes: list[str] = []
        self._own_noise: dict[tuple[Cause, ...], RowNoise] = {}  # of other models
        self._beaten: list[Explanation] = []  # on a row, and not tried on others
        self._cut = torch.zeros(len(self.places.token), dtype=torch.float64)  # what cut digits may change
        self._known: dict[Any, Tensor] = {}  # what is left, by the base, rows, ways and number
        self._held: tuple[Any, Tensor] | None = None  # the logits that were read last

    def _note(self, note: str) -> None:
        """Add a note, once."""
        if note not in self._notes:
            self._notes.append(note)

    # -- what is left --------------------------------------------------------------------------------------------------

    def _left(self, rows: Sequence[int], tried: tuple[Way, ...] = (), number: Number = RAW) -> Tensor:
        """Written less predicted where texts are read in some ways, f64 [E]; each is read once."""
        key = self._base, tuple(rows), tried, number
        if key not in self._known:
            parts = [remains(number, self._read_as(tried, group), self._few(group)) for group in self._groups(rows)]
            self._known[key] = torch.cat(parts)
        return self._known[key]

    def _read_as(self, tried: tuple[Way, ...], rows: Sequence[int], *, exact: bool = False) -> Tensor:
        """Logits f64 [K, V]; those that were read last are kept."""
        way = PLAIN
        for each in tried:
            way = each.and_(way)
        key = self._base, tuple(rows), tried, exact
        if self._held is None or self._held[0] != key:
            self._held = None
            self._held = key, self._logits(way, rows, exact=exact)
        return self._held[1]

    def _try(
        self, tried: tuple[Way, ...], wanted: Iterable[Number] | None, rows: Sequence[int], *, exact: bool = False
    ) -> list[Explanation]:
        """What is left where texts are read in some ways: for each of `wanted`, or for all numbers that fit (None).

        Hypotheses that move no numbers beyond noise are left out, such as a temperature of 1.
        """
        groups = [*self._groups(rows)]
        if wanted is None:  # parameters are fitted on what fits into memory
            wanted = numbers(self._read_as(tried, groups[0], exact=exact), self._few(groups[0]))
        wanted = [*wanted]
        parts: list[list[Tensor]] = [[] for _ in wanted]
        for group in groups:
            logits, places = self._read_as(tried, group, exact=exact), self._few(group)
            for part, number in zip(parts, wanted, strict=True):
                part.append(remains(number, logits, places))
        self._count += len(wanted)
        found = []
        for number, part in zip(wanted, parts, strict=True):
            self._known[self._base, tuple(rows), tried, number] = left = torch.cat(part)
            own = tuple(way.cause for way in tried if way.cause) + tuple(cause(*each) for each in number.causes)
            one = Explanation(own, tried, number, self._few(rows).sizes(left), torch.zeros(0), left)
            self._scale(one, rows)
            if exact or self._moves(one, rows):
                found.append(one)
        return found

    def _scale(self, one: Explanation, rows: Sequence[int]) -> None:
        """The noise of a hypothesis, and whether the direction of what it rounds is in the data."""
        at, few = self._at(rows), self._few(rows)
        dtype = next((way.dtype for way in one.ways if way.dtype), self._dtype)
        scale = self.noise(dtype).typical[at] / one.number.temperature
        others = tuple(way for way in one.ways if not way.rounds)
        off: float | Tensor = 0.0
        if len(others) < len(one.ways):
            before = self._left(rows, others, one.number)
            moved = before - one.left
            if any(way.form for way in one.ways):
                one.plausible, sizes = 0.5 <= slope(before, moved) <= 1.6, few.sizes(moved)
                share = OFF if all(way.rounds for way in one.ways if way.form) else 1.0
                one.off = share * float(sizes[few.known].square().mean().sqrt())
                off = torch.where(sizes > TINY, one.off, 0.0)  # other numbers are exact
            else:
                one.plausible = 0.3 <= slope(before, moved) <= 3.0
        one.sharp = (scale.square() + self._cut[at].square()).sqrt()
        one.scale = (one.sharp.square() + off**2 + self._codes**2).sqrt()

    def _moves(self, one: Explanation, rows: Sequence[int]) -> bool:
        """Whether every part of a hypothesis moves numbers beyond noise."""
        few, least = self._few(rows), RESOLVED * self.noise(self._dtype).typical[self._at(rows)]
        fewer = [(*one.ways[:place], *one.ways[place + 1 :]) for place in range(len(one.ways))]
        without = [(some, one.number) for some in fewer] + ([(one.ways, RAW)] if one.number != RAW else [])
        for some, number in without:
            known = self._known.get((self._base, tuple(rows), some, number))
            if known is None and not some:
                known = self._left(rows, some, number)
            if known is not None:
                moved = (few.sizes(known - one.left) > least)[few.known]
                if int(moved.sum()) < min(MOVED, len(moved)):
                    return False
        return True

    def _rated(self, tried: list[Explanation], nothing: Explanation, rows: Sequence[int]) -> list[Explanation]:
        """Hypotheses that were tried on rows, with their figures."""
        known = self.places.known[self._at(rows)]
        whole = excess(nothing, known)
        for one in tried:
            one.likelihood = likelihood(one, known)
            penalty = one.number.parameters * 0.5 * math.log(max(int(known.sum()), 2))
            one.likelihood = one.likelihood - penalty / max(int(known.sum()), 1)
            ratios, before = ((each.sizes / each.scale)[known] for each in (one, nothing))
            telling = torch.maximum(ratios, before) > self.noise(self._dtype).typical_allowed
            ratios = ratios[telling] if one is not nothing and bool(telling.any()) else ratios
            one.ratio, one.tail = float(ratios.median()), float(ratios.quantile(TAIL))
            one.explained = 1 - excess(one, known) / whole if whole > 0 else 0.0
        return tried

    def _fits(self, one: Explanation) -> bool:
        noise = self.noise(self._dtype)
        is_near = one.tail <= noise.allowed or not one.causes
        return one.ratio <= noise.typical_allowed and is_near and one.plausible

    def _is_within(self, one: Explanation, rows: Sequence[int]) -> bool:
        return self._fits(one) and not self.rows_left(one, rows)

    def rows_left(self, one: Explanation, rows: Sequence[int]) -> list[int]:
        """Rows with a position that is beyond noise."""
        noise, at = self._own_noise.get(one.causes) or self.noise(self._dtype), self._at(rows)
        scale = torch.maximum(one.scale, noise.typical[at]) if one.causes in self._own_noise else one.scale
        known = self.places.known
        most = (noise.most / noise.typical[known].median())[at] * scale[known[at]].median()
        beyond = (one.sizes > noise.allowed * torch.maximum(scale, most)) & known[at]
        return [row for row, own in self._spans(rows) if bool(beyond[own].any())]

    def _typical(self, one: Explanation, rows: Sequence[int]) -> float:
        """What typically remains at the positions of rows that have a number."""
        return float(one.sizes[self.places.known[self._at(rows)]].median())

    def _sample(self, nothing: Explanation) -> list[int]:
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

    def _telling(self, nothing: Explanation, rows: Sequence[int]) -> list[int]:
        """The rows that `nothing` was tried on, the most telling first."""
        ratios = (nothing.sizes / nothing.scale).clamp(max=1e3)
        worst = {row: float(ratios[own].sum()) / max(len(ratios[own]), 1) ** 0.5 for row, own in self._spans(rows)}
        return sorted(rows, key=lambda row: -worst[row])

    # -- the causes ----------------------------------------------------------------------------------------------------

    def _parting(self, nothing: Explanation, rows: Sequence[int]) -> int | None:
        """The first token whose number differs, counted with the prompt; None where that is the first of a row."""
        beyond = nothing.sizes > self.noise(self._dtype).allowed * nothing.scale
        firsts = []
        for row, own in self._spans(rows):
            if bool(beyond[own].any()):
                firsts.append((int(beyond[own].nonzero()[0]), len(self._rows[row].text.prompt_ids)))
        return None if not firsts or min(firsts)[0] == 0 else min(index + prompt for index, prompt in firsts)

    def _singles(
        self, sample: Sequence[int], first: Explanation, *, only: Callable[[Cause], bool] = lambda cause: True,
        beside: tuple[Way, ...] = (),
    ) -> list[Explanation]:  # fmt: skip
        """Every cause alone, or all numbers and `only` some causes, on the sample; each `beside` others.

        Of a large model each is first tried on the most telling row. Once one explains all, its family is the last.
        """
        self._stage("trying causes")
        at, few = self._at(sample), self._telling(first, sample)[:1]
        part = torch.isin(at, self._at(few))
        begin = first.nothing_at(part)
        own = part[self.places.known[at]]  # of positions with a number
        tried: list[Explanation] = []

        def found(more: tuple[Way, ...], wanted: Sequence[Number] | None) -> list[Explanation]:
            if not self._is_dear or len(sample) == 1:
                return self._try((*beside, *more), wanted, sample)
            some = self._try((*beside, *more), wanted, few)
            self._rated([begin, *some], begin, few)
            self._rated(tried, first, sample)
            rivals = [one.likelihood[own] for one in tried] or [one.likelihood for one in some]
            least = max((float(one.sum()) for one in rivals), default=begin.total)
            least = max(least - math.log(self._count / ERROR_RATE), begin.total)
            keep = [one.total >= least or self._fits(one) for one in some]
            self._beaten += [one for one, kept in zip(some, keep, strict=True) if not kept]
            left = [one.number for one, kept in zip(some, keep, strict=True) if kept]
            return self._try((*beside, *more), left, sample) if left else []

        tried += found((), None)
        sure = False
        with OtherModels(self._side, self._others) as models:
            for way in chain(
                (Way(cause(key, more), prompts=tuple(ids)) for key, more, ids in self._prompts.changes(self._rows)),
                ways.shifted(self._rows, self._parting(first, sample)),
                ways.arithmetic(self._oracle, self._dtype, self._declared, is_dear=self._is_dear, tokens=self._tokens),
                (Way(cause(key, more), load=load) for key, more, load in models.all()),
            ):
                assert way.cause is not None
                if not only(way.cause) or (beside and way.form is not None and way.form.keys):  # the same cache
                    continue
                if self._is_dear and tried and not sure:
                    self._rated([first, *tried], first, sample)
                    best = max(tried, key=lambda one: one.total)
                    gain = float((best.likelihood - first.likelihood).sum())
                    sure = self._fits(best) and gain > SURE * math.log(self._count / ERROR_RATE)
                # a factor of the logits is the same as a temperature
                is_alike = sure and way.cause.key == "scale-ignored" and best.number.temperature != 1.0
                if sure and not is_alike and way.cause.family not in {one.family for one in best.causes}:
                    self._note(f"{best.words} explains all, so that not every cause is tried")
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

    def _beside_flash(
        self, tried: Sequence[Explanation], sample: Sequence[int], first: Explanation
    ) -> list[Explanation]:
        """The best causes, of an engine that computes llama.cpp's attention in float16.

        Where weights in codes fit already, these alone: what they change may hide the attention.
        """
        if not any(one.ways == (FLASH,) for one in [*tried, *self._beaten]):
            return []
        best = sorted((one for one in tried if one.ways and one.ways != (FLASH,)), key=lambda one: -one.total)
        if any(self._fits(one) for one in tried):
            more = [one for one in best if self._fits(one) and one.ways[0].rounds_weights][:WITHIN]
            return [two for one in more for two in self._try((FLASH, *one.ways), [one.number], sample)]
        causes = [one.ways[0].cause for one in best if one.ways[0].load is None or not self._is_dear]
        causes = causes[: BESIDE_DEAR if self._is_dear else BESIDE]
        return self._singles(sample, first, only=causes.__contains__, beside=(FLASH,))

    def _pairs(self, singles: Sequence[Explanation], sample: Sequence[int], first: Explanation) -> list[Explanation]:
        """Causes together: every way of reading with every number, and the best ways that change different things."""
        self._stage("trying pairs of causes")
        pairs, at = list[Explanation](), self._at(sample)
        first_row, *rest = self._telling(first, sample)

        def typical(one: Explanation) -> float:  # beaten ones were tried on a row
            return self._typical(one, sample if len(one.sizes) == len(at) else [first_row])

        best = sorted((one for one in singles if len(one.ways) == 1), key=typical)
        first_ways = [one.ways[0] for one in best if one.ways[0].prompts is not None]
        others = [one.ways[0] for one in best if one.ways[0].prompts is None and one.ways[0].load is None]
        some_ways = first_ways + others[: 0 if self._is_dear else 3]
        small = self._side.vocabulary * FEWER <= LOGITS
        few = [first_row]
        for row in rest:
            if sum(len(self._rows[each].text.token_ids) for each in few) < (0 if self._is_dear else FEWER):
                few.append(row)
        few.sort()  # as the positions of the sample are
        part = torch.isin(at, self._at(few))
        screened: list[Explanation] = []
        for way in some_ways[: WAYS if small or self._is_dear else WAYS // 2]:
            screened += self._try((way,), None, few)
        few_best = 2 if self._is_dear else 6
        for place, one in enumerate(best[:few_best]):
            for other in best[place + 1 : few_best]:
                both = one.ways[0], other.ways[0]
                if _are_apart(*both):
                    screened += self._try(both, [RAW], few)
        group = next(self._groups(few))
        logits, places = self._read_as((), group), self._few(group)
        more = [two for one in singles if not one.ways for two in several(one.number, logits, places)]
        screened += self._try((), more, few) if more else []
        begin = first.nothing_at(part)
        self._rated([begin, *screened], begin, few)
        screened.sort(key=lambda one: -one.total)
        for one in screened[: 2 if self._is_dear else PAIRS]:
            pairs += self._try(one.ways, [one.number], sample)
        for way in self._truncations(sample):
            pairs += self._try((way,), [RAW], sample)
        return pairs

    def _truncations(self, sample: Sequence[int]) -> Iterator[Way]:
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
                shorter = replace(text, prompt_ids=ways.cut(text.prompt_ids, limit, keeps_first=keeps_first))
                rows = [logits.double().cpu() for _, logits in self._side.whole_text(shorter, range(few))]
                sizes[limit, keeps_first] = float(places.sizes(remains(RAW, torch.stack(rows), places)).mean())
        limit, keeps_first = min(sizes, key=lambda key: sizes[key])
        prompts: tuple[Ids, ...] = tuple(
            ways.cut(ids, limit, keeps_first=keeps_first) if len(ids) > limit else ids
            for ids in (each.text.prompt_ids for each in self._rows)
        )
        self._count += len(sizes)
        yield Way(cause("truncated", str(limit)), prompts=prompts)


def _are_apart(one: Way, other: Way) -> bool:
    """Whether two ways change different things of a reading."""
    if one.load or other.load or not one.cause or not other.cause:
        return False
    if one.form and other.form:
        weights = [bool(form.weights) for form in (one.form, other.form)]
        return weights[0] != weights[1] and not (one.form.shift or other.form.shift)
    return one.cause.family != other.cause.family
