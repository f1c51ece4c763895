"""Diagnose an engine from its log alone: causes are tried on a reference that reads the same tokens.

Each cause predicts the logged numbers: texts are read another way (prompt, arithmetic, model), or the reference's
distributions give another number. docs/audit.md says when a cause is named. M positions, E entries, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from genctl.errors import GenctlError, percent
from genctl.parity import ways
from genctl.parity.causes import FORMS, GGUF, Audit, AuditPosition, Form, TriedCause, cause
from genctl.parity.numbers import RAW, Number, numbers, remains
from genctl.parity.prompts import AuditPrompts, AuditRow
from genctl.parity.rereading import Rereader
from genctl.parity.sides import LocalSide
from genctl.parity.ways import (
    ERROR_RATE,
    PLAIN,
    Explanation,
    Way,
    beats,
    contains,
    excess,
    likelihood,
    other_models,
    slope,
)

SAMPLE = 200  # most positions of the sample on which causes are tried, unless its only row has more
WAYS, DEAR_WAYS = 10, 3  # readings that are combined with every kind of number; for a large model
BEST = 6  # readings that are tried in pairs
MOVED = 10  # a cause must move at least this many positions
RESOLVED = 4.0  # by more than this multiple of the noise
TINY = 1e-9  # nats: a smaller change is none
OFF = 0.3  # share of a form's effect that may be left: engines round in other orders
HALF = 0.5  # share of the codes' effect that an additional cause may leave
TAIL = 0.9  # a hypothesis fits if this share of positions is within the largest ratio of noise
SURE = 10  # times the bound: a cheap cause with this much evidence makes expensive ones unnecessary
LEFT = 0.1  # a named cause may leave this share of rows unexplained
LEFT_TOKENS = 0.02  # or more rows, if at most this share of tokens is beyond noise
FLASH = Way(cause("flash-float16"), form=FORMS["flash-float16"][0])


class Auditor(Rereader):
    """Diagnoses an engine from its trace."""

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
        """`others`: checkpoints that the engine may have run instead. `how`: arguments of `Rereader`."""
        super().__init__(side, rows, **how)
        self._prompts, self._others, self._stage = prompts, others, on_stage
        self._codes = 0.0  # nats of noise from the engine's own codes, in addition to a cause
        self._count = 0  # hypotheses tried so far
        self._notes: dict[str, None] = {}
        self._beaten: list[Explanation] = []  # dropped on the most telling row, not tried on others
        self._most = 0.0  # the largest gain of a hypothesis on that row
        self._cut = torch.zeros(len(self.places.token), dtype=torch.float64)  # effect of cut digits on each position
        self._known: dict[Any, Tensor] = {}  # residuals by base form, rows, ways and number
        self._held: tuple[Any, Tensor] | None = None  # the logits of the latest reading, with their key

    def run(self, name: str) -> Audit:
        """Return the verdict on the trace `name`. Raises ModelError."""
        self._name = name
        self._stage("reading")
        found: list[tuple[Form | None, Explanation]] = []
        forms: Sequence[Form | None] = ways.declared(self._declared) or [None]
        for form in forms:  # engines code a declared format differently
            self._base = form
            nothing = self._plainly()
            if self._is_within(nothing, self._every):
                return self._same(nothing)
            found.append((form, nothing))
        for form in () if self._declared else ways.honest(self._oracle):
            nothing = self._plainly(found[0][1], Way(form=form))
            if self._is_within(nothing, self._every):
                self._notes["rows are rounded for products with weights in codes, as llama.cpp does: no cause"] = None
                return self._same(nothing)
            found.append((form, nothing))
        coded = [pair for pair in found if self._declared or (pair[0] and pair[0].weights in ("file", *GGUF))]
        if coded:
            self._base, nothing = min(coded, key=lambda pair: pair[1].median)
            if (audit := self._beside_codes(nothing)) is not None:
                return audit
        found.sort(key=lambda pair: pair[1].median)
        with ExitStack() as self._folders:
            audits = (self._explained(*pair) for pair in (found[:1] if self._declared else found))
            first = next(audits)
            return first if first.verdict == "explained" else next(
                (audit for audit in audits if audit.verdict == "explained"), first)  # fmt: skip

    def _explained(self, form: Form | None, nothing: Explanation) -> Audit:
        """The verdict if honest rounding is not enough. `form`: how the engine rounds, in addition to any cause."""
        self._base, self._codes, self._beaten, self._most = form, nothing.off, [], 0.0
        if self.grid is not None:
            self._cut = self.places.sizes(self._resolution)
            again = self._plainly(nothing)
            if self._is_within(again, self._every):
                again.causes, again.explained = (cause(*self.grid),), 1.0
                return self._found(nothing, again, [again])
            nothing = again
        sample, first = self._begun(nothing)
        tried = self._rated(self._singles(sample, first), first, sample)
        if not any(map(self._fits, tried)):
            tried += self._rated(self._pairs([*tried, *self._beaten], sample, first), first, sample)
        return self._concluded(nothing, first, tried)

    def _beside_codes(self, nothing: Explanation) -> Audit | None:
        """The verdict if an engine's codes differ from those of the form `_base`; None if that does not explain all.

        Their effect then counts as noise. A number or a prompt that leaves less than half of it is still a cause.
        """
        form, self._base = self._base, None
        plain, self._base = self._left(self._every), form
        moved = self.places.sizes(self._left(self._every) - plain)[self.places.known]  # the effect of the codes
        codes, most, own = float(moved.median()), float(moved.square().mean().sqrt()), nothing.scale
        nothing.scale, nothing.plausible = (own.square() + most**2).sqrt(), True
        self._rated([nothing], nothing, self._every)
        is_same = self._is_within(nothing, self._every)
        beside = replace(nothing, scale=(own.square() + codes**2).sqrt(), off=codes)
        self._codes = codes
        if not is_same:
            nothing.scale, nothing.off = beside.scale, codes
            return None
        sample, first = self._begun(beside)
        tried = self._rated(self._singles(sample, first, families=("number", "prompt")), first, sample)
        best = max(tried, key=lambda one: one.total, default=first)  # all may have been dropped on a row
        if best.median > HALF * first.median or not beats(best, first, self._count):
            return self._same(nothing)
        self._codes = most
        return self._concluded(beside, first, tried)

    def _plainly(self, nothing: Explanation | None = None, *tried: Way) -> Explanation:
        """All rows read as declared (and by `tried`), with raw log-probabilities, rated against `nothing` or itself."""
        one = self._try(tried, [RAW], self._every, exact=True)[0]
        return self._rated([one], nothing or one, self._every)[0]

    def _begun(self, nothing: Explanation) -> tuple[list[int], Explanation]:
        """The sample of most telling rows, within `COST` and `SAMPLE`, and what `nothing` leaves there."""
        sample: list[int] = []
        tokens = positions = 0
        for row in self._telling(nothing, self._every):
            text = self._rows[row].text
            tokens += len(text.prompt_ids) + len(text.token_ids)
            positions += len(text.token_ids)
            if sample and (tokens > self._tokens or positions > SAMPLE):
                break
            sample.append(row)
        sample.sort()
        return sample, self._rated([first := nothing.nothing_at(self._at(sample))], first, sample)[0]

    # -- hypotheses ----------------------------------------------------------------------------------------------------

    def _left(self, rows: Sequence[int], tried: tuple[Way, ...] = (), number: Number = RAW) -> Tensor:
        """Written less predicted with texts read by `tried`, f64 [E]; cached."""
        key = self._base, tuple(rows), tried, number
        if key not in self._known:
            parts = [remains(number, self._read_as(tried, group), self._few(group)) for group in self._groups(rows)]
            self._known[key] = torch.cat(parts)
        return self._known[key]

    def _read_as(self, tried: tuple[Way, ...], rows: Sequence[int], *, exact: bool = False) -> Tensor:
        """Logits f64 [K, V] with texts read by `tried`; the latest are cached."""
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
        """The residuals with texts read by `tried`: for each of `wanted`, or for all numbers that fit (None).

        Hypotheses that move no number beyond noise, such as a temperature of 1, are left out unless `exact` is set.
        """
        groups = [*self._groups(rows)]
        if wanted is None:  # fit parameters on the rows that fit into memory
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
        """Set the noise of a hypothesis, and whether the data confirm the direction of its rounding."""
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
                one.off = OFF * float(sizes[few.known].square().mean().sqrt())
                off = torch.where(sizes > TINY, one.off, 0.0)  # numbers that the form does not move are exact
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
        """Fill in the figures of hypotheses that were tried on `rows`, and return them."""
        known = self.places.known[self._at(rows)]
        whole, count = excess(nothing, known), int(known.sum())
        for one in tried:
            penalty = len(one.number.fitted) * 0.5 * math.log(max(count, 2))
            one.likelihood = likelihood(one, known) - penalty / max(count, 1)
            ratios, before = ((each.sizes / each.scale)[known] for each in (one, nothing))
            telling = torch.maximum(ratios, before) > self.noise(self._dtype).typical_allowed
            ratios = ratios[telling] if one is not nothing and bool(telling.any()) else ratios
            one.ratio, one.tail = float(ratios.median()), float(ratios.quantile(TAIL))
            one.median = float(one.sizes[known].median())
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
        noise, at, known = self.noise(self._dtype), self._at(rows), self.places.known
        most = (noise.most / noise.typical[known].median())[at] * one.scale[known[at]].median()
        beyond = (one.sizes > noise.allowed * torch.maximum(one.scale, most)) & known[at]
        return [row for row, own in self._spans(rows) if bool(beyond[own].any())]

    def _telling(self, nothing: Explanation, rows: Sequence[int]) -> list[int]:
        """The rows that `nothing` was tried on, the most telling first."""
        ratios = (nothing.sizes / nothing.scale).clamp(max=1e3)
        worst = {row: float(ratios[own].sum()) / max(len(ratios[own]), 1) ** 0.5 for row, own in self._spans(rows)}
        return sorted(rows, key=lambda row: -worst[row])

    # -- causes, alone and in pairs ------------------------------------------------------------------------------------

    def _singles(
        self, sample: Sequence[int], first: Explanation, families: Sequence[str] = ("prompt", "arithmetic", "model")
    ) -> list[Explanation]:
        """Try all numbers, and every cause of `families`, on the sample.

        For a large model each is first tried on the most telling row. If one explains all, later families are skipped.
        """
        self._stage("trying causes")
        tried, sure = self._screened((), None, sample, first), False
        for way in self._ways(families):
            assert way.cause is not None
            if self._is_dear and tried and not sure:
                self._rated([first, *tried], first, sample)
                best = max(tried, key=lambda one: one.total)
                gain = float((best.likelihood - first.likelihood).sum())
                sure = self._fits(best) and gain > SURE * math.log(self._count / ERROR_RATE)
            if sure and way.cause.family not in {one.family for one in best.causes}:
                self._notes[f"{best.words} explains all, so that not every cause is tried"] = None
                break
            try:
                tried += self._screened((way,), [RAW], sample, first)
            except (GenctlError, ValueError, RuntimeError) as error:
                if way.load is None:
                    raise
                why = error.message if isinstance(error, GenctlError) else "it has another vocabulary"
                self._notes[f"{way.cause.sentence} is not tried: {why}"] = None
        self._loaded = (None, self._side)
        return tried

    def _ways(self, families: Sequence[str]) -> Iterator[Way]:
        """The other ways in which an engine may have read texts, the cheapest first."""
        yield from (Way(cause(key, more), prompts=tuple(ids)) for key, more, ids in self._prompts.changes(self._rows))
        if "arithmetic" in families:
            yield from ways.arithmetic(self._oracle, self._dtype, self._declared, tokens=self._tokens)
        if "model" in families:
            models = other_models(self._side, self._others, self._folders)
            yield from (Way(cause(key, more), load=load) for key, more, load in models)

    def _screened(
        self, tried: tuple[Way, ...], wanted: Sequence[Number] | None, sample: Sequence[int], first: Explanation
    ) -> list[Explanation]:
        """`_try` on the sample; for a large model only what fits, or is not beaten, on the most telling row."""
        if not self._is_dear or len(sample) == 1:
            return self._try(tried, wanted, sample)
        few = self._telling(first, sample)[:1]
        begin = first.nothing_at(torch.isin(self._at(sample), self._at(few)))
        some = self._rated([begin, *self._try(tried, wanted, few)], begin, few)[1:]
        self._most = max([self._most, *(one.total - begin.total for one in some)])
        least = max(self._most - math.log(self._count / ERROR_RATE), 0.0)
        retained = [one.number for one in some if one.total - begin.total >= least or self._fits(one)]
        self._beaten += [one for one in some if one.number not in retained]
        return self._try(tried, retained, sample) if retained else []

    def _pairs(self, singles: Sequence[Explanation], sample: Sequence[int], first: Explanation) -> list[Explanation]:
        """Pairs of causes: the best readings with every number, and readings that change different things.

        llama.cpp's float16 attention is always among them: it hides behind every other cause.
        """
        self._stage("trying pairs of causes")
        best = [one.ways[0] for one in sorted(singles, key=lambda one: one.median) if one.ways and one.number == RAW]
        best = [FLASH, *(way for way in best if way.cause != FLASH.cause)]
        pairs = list[Explanation]()
        for way in [way for way in best if way.load is None][: DEAR_WAYS if self._is_dear else WAYS]:
            pairs += self._screened((way,), None, sample, first)
        best = best[: DEAR_WAYS if self._is_dear else BEST]
        for place, way in enumerate(best):
            for other in best[place + 1 :]:
                if _are_apart(way, other):
                    pairs += self._screened((way, other), [RAW], sample, first)
        return pairs + [one for way in self._truncations(sample) for one in self._try((way,), [RAW], sample)]

    def _truncations(self, sample: Sequence[int]) -> Iterator[Way]:
        """The prompt limit that best explains the first tokens after the longest prompt."""
        row = max(sample, key=lambda row: len(self._rows[row].text.prompt_ids))
        text, length = self._rows[row].text, len(self._rows[row].text.prompt_ids)
        few = min(len(text.token_ids), 4)
        places = self.places.few(self._at([row])[:few])
        if length < 3 or not bool(places.known.any()):
            return
        sizes: dict[tuple[int, bool], float] = {}
        for limit in range(1, length, max(length * length // (8 * self._tokens), 1)):
            for keeps_first in (False, True):
                shorter = replace(text, prompt_ids=ways.cut(text.prompt_ids, limit, keeps_first=keeps_first))
                rows = [logits.double().cpu() for _, logits in self._side.whole_text(shorter, range(few))]
                sizes[limit, keeps_first] = float(places.sizes(remains(RAW, torch.stack(rows), places)).mean())
        limit, keeps_first = min(sizes, key=lambda key: sizes[key])
        every = (each.text.prompt_ids for each in self._rows)
        prompts = [ways.cut(ids, limit, keeps_first=keeps_first) if len(ids) > limit else ids for ids in every]
        self._count += len(sizes)
        yield Way(cause("truncated", str(limit)), prompts=tuple(prompts))

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _same(self, nothing: Explanation) -> Audit:
        return self._audit("same", f"the difference is {nothing.ratio:.2g} × rounding error", nothing)

    def _concluded(self, nothing: Explanation, first: Explanation, tried: list[Explanation]) -> Audit:
        tried.sort(key=lambda one: one.total, reverse=True)
        best = next((one for one in tried if self._fits(one)), first)
        if best is first or not beats(best, first, self._count):
            reason = "no cause that was tried explains the difference"
            if tried and tried[0].explained > 0.2:
                reason += f"; the nearest is {tried[0].words} ({percent(tried[0].explained)} of it)"
            return self._audit("unexplained", reason, nothing, tried=tried)
        parts = (one for one in tried if contains(best, one) and self._fits(one) and not beats(best, one, self._count))
        best = next(parts, best)  # the numbers do not support more causes
        rivals = [one for one in tried if one.keys != best.keys and not contains(one, best)]
        doubtful = [one for one in rivals if one.plausible and not beats(best, one, self._count)]
        if doubtful:
            candidates = [best, *doubtful]
            words = ", or ".join(dict.fromkeys(one.words for one in candidates[:4]))
            reason = f"these explain it equally well: {words}"
            return self._audit("unexplained", reason, nothing, tried=tried, candidates=candidates)
        whole = self._try(best.ways, [best.number], self._every, exact=True)[0]
        self._loaded = (None, self._side)
        self._rated([whole], nothing, self._every)
        noise, left = self.noise(self._dtype), len(self.rows_left(whole, self._every))
        beyond = float((whole.sizes > noise.allowed * whole.scale)[self.places.known].double().mean())
        if (left > LEFT * len(self._rows) and beyond > LEFT_TOKENS) or whole.ratio > noise.typical_allowed:
            reason = f"{whole.words} explains the sample, and leaves {left} of {len(self._rows)} rows"
            return self._audit("unexplained", reason, nothing, tried=tried)
        return self._found(nothing, whole, tried)

    def _found(self, nothing: Explanation, best: Explanation, tried: Sequence[Explanation]) -> Audit:
        left = len(self.rows_left(best, self._every))
        of = f"{left} of {len(self._rows)} rows left" if left else "no row left"
        reason = f"{best.words} ({percent(best.explained)} of the difference; {of})"
        return self._audit("explained", reason, nothing, best, tried)

    def _audit(
        self, verdict: str, reason: str, nothing: Explanation, best: Explanation | None = None,
        tried: Sequence[Explanation] = (), candidates: Sequence[Explanation] = (),
    ) -> Audit:  # fmt: skip
        noise, places, best = self.noise(self._dtype), self.places, best or nothing
        own = places.chosen
        written = (part[own].tolist() for part in (places.position, places.value, nothing.left))
        chosen = {place: (value, value - left) for place, value, left in zip(*written, strict=True)}
        upper = torch.maximum(nothing.scale, noise.most)
        tokens = [(row.text.id, index, token) for row in self._rows for index, token in enumerate(row.text.token_ids)]
        positions: list[AuditPosition] = []
        first = None
        for place in places.known.nonzero()[:, 0].tolist():
            before, after = float(nothing.sizes[place]), float(best.sizes[place])
            ratios = before / float(nothing.scale[place]), after / float(best.scale[place])
            numbers = chosen.get(place, (math.nan, math.nan))
            id, index, token = tokens[place]
            positions.append(AuditPosition(id, index, token, *numbers, before, after, *ratios))
            if first is None and verdict != "same" and before > noise.allowed * float(upper[place]):
                first = id, index

        def line(one: Explanation) -> TriedCause:
            more = one.total - nothing.total * len(one.likelihood) / max(len(nothing.likelihood), 1)
            return TriedCause(tuple(each.key for each in one.causes), one.words, one.explained, more, one.ratio)

        notes = [*self._notes]
        if self._prompts.dropped:
            notes.append(f"{self._prompts.dropped} listed tokens are left out: several tokens have their text")
        if self.grid is not None and verdict != "same" and best.keys.isdisjoint(("digits", "dtype")):
            notes.append(f"the trace has {cause(*self.grid).sentence}: this counts as noise")
        is_explained = verdict == "explained"
        beaten = sorted(self._beaten, key=lambda one: -one.explained)
        return Audit(
            self._name, self._side.name, verdict, reason, best.causes if is_explained else (),
            tuple(map(line, candidates)), tuple(map(line, [*tried, *beaten])), tuple(positions),
            tuple(row.text for row in self._rows), best.explained if is_explained else 0.0,
            len(self.rows_left(best, self._every)), first, nothing.ratio, noise.typical_allowed,
            float(noise.typical[places.known].median()), tuple(notes),
        )  # fmt: skip


def _are_apart(one: Way, other: Way) -> bool:
    """Whether two ways change different things; another model is only paired with llama.cpp's attention."""
    if (one.load or other.load) and one is not FLASH:
        return False
    if one.form and other.form:
        return bool(one.form.weights) != bool(other.form.weights)
    return one.cause != other.cause and (one.cause and one.cause.family) != (other.cause and other.cause.family)
