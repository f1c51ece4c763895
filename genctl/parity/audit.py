"""What an engine computed, from what it wrote alone: causes are tried on a reference that reads the same tokens.

Each cause predicts the written numbers: read again in another way (prompt, arithmetic, model), or the reference's own
distributions turned into another number. docs/audit.md says when one is named. M positions, E entries, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from genctl.errors import percent
from genctl.parity import ways
from genctl.parity.audit_values import Audit, AuditPosition, TriedCause
from genctl.parity.causes import CAUSES, GGUF, Form, cause
from genctl.parity.hypotheses import FLASH, Hypotheses
from genctl.parity.numbers import RAW
from genctl.parity.oracle import Oracle
from genctl.parity.other_models import OtherModels
from genctl.parity.rereading import kind_of
from genctl.parity.ways import Explanation, Way, beats, contains

HALF = 0.5  # of what codes change may be left by a cause beside them
BASES = 2  # forms of honest rounding beside which causes are tried, those that leave least
LEFT = 0.1  # of all rows may be left unexplained, where a cause is named
LEFT_TOKENS = 0.02  # of all tokens, where more rows are


class Auditor(Hypotheses):
    """Says what an engine computed."""

    def run(self, name: str) -> Audit:
        """The verdict on the trace of this name. Raises ModelError."""
        self._name = name
        self._stage("reading")
        found: list[tuple[Form | None, Explanation]] = []
        forms: list[Form | None] = [*ways.declared(self._declared)]  # engines have other codes
        for form in forms or [None]:
            self._base = form
            nothing = self._plainly()
            if self._is_within(nothing, self._every):
                return self._same(nothing)
            found.append((form, nothing))
        for form, words in () if self._declared else ways.honest(self._oracle):
            nothing = self._plainly(found[0][1], Way(form=form))
            if self._is_within(nothing, self._every):
                self._notes.append(f"{words}, as llama.cpp computes it: this is no cause")
                return self._same(nothing)
            found.append((form, nothing))
        coded = [pair for pair in found if self._declared or (pair[0] and pair[0].weights in ("file", *GGUF))]
        if coded:
            self._base, nothing = min(coded, key=lambda pair: self._typical(pair[1], self._every))
            if (audit := self._beside_codes(nothing)) is not None:
                return audit
        found.sort(key=lambda pair: self._typical(pair[1], self._every) * (1 if pair[0] is None else 2))
        return self._explained(found[: 1 if self._declared else BASES])

    def _explained(self, found: Sequence[tuple[Form | None, Explanation]]) -> Audit:
        """The verdict where honest rounding is not all. `found`: each form of it, and what it leaves."""
        best: tuple[float, Form | None, Explanation, list[Explanation]] | None = None
        for form, nothing in found:
            self._use(form, nothing)
            if self.grid is not None:
                self._cut = self.places.sizes(self._resolution)
                again = self._plainly(nothing)
                if self._is_within(again, self._every):
                    again.causes = (cause(*self.grid),)
                    again.explained = 1.0
                    return self._found(nothing, again, [again])
                nothing = again
            sample, first = self._begun(nothing)
            tried = self._rated(self._singles(sample, first), first, sample)
            tried += self._rated(self._beside_flash(tried, sample, first), first, sample)
            if any(self._fits(one) for one in tried):
                audit = self._concluded(nothing, first, [*tried], sample)
                if audit.verdict == "explained" or len(found) == 1:
                    return audit
            gain = max((one.total - first.total for one in tried), default=0.0)
            if best is None or gain > best[0]:
                best = gain, form, nothing, tried
        assert best is not None
        _, form, nothing, tried = best
        self._use(form, nothing)
        sample, first = self._begun(nothing)
        pairs = self._rated(self._pairs([*tried, *self._beaten], sample, first), first, sample)
        return self._concluded(nothing, first, [*tried, *pairs], sample)

    def _use(self, form: Form | None, nothing: Explanation) -> None:
        """Read from now on with what a form rounds."""
        self._base, self._codes = form, nothing.off

    def _plainly(self, nothing: Explanation | None = None, *tried: Way) -> Explanation:
        """All rows as they should be read and written; `nothing`: the same before."""
        one = self._try(tried, [RAW], self._every, exact=True)[0]
        self._rated([one], nothing or one, self._every)
        return one

    def _begun(self, nothing: Explanation) -> tuple[list[int], Explanation]:
        """A sample of rows, and what `nothing` leaves on it."""
        sample = self._sample(nothing)
        first = nothing.nothing_at(self._at(sample))
        self._rated([first], first, sample)
        return sample, first

    def _beside_codes(self, nothing: Explanation) -> Audit | None:
        """The verdict where an engine has other codes than those of the form that is declared; None: not the same.

        What codes change counts as noise then. A number or a prompt that leaves less than half of it is a cause still.
        """
        form, self._base = self._base, None
        plain, self._base = self._left(self._every), form
        moved, known = self.places.sizes(self._left(self._every) - plain), self.places.known  # [M], by the codes
        own, codes, most = nothing.scale, float(moved[known].median()), float(moved[known].square().mean().sqrt())
        nothing.scale, nothing.plausible = (own.square() + most**2).sqrt(), True
        self._rated([nothing], nothing, self._every)
        is_same = self._is_within(nothing, self._every)
        self._codes = nothing.off = codes
        scale = nothing.scale
        nothing.scale = (own.square() + codes**2).sqrt()
        if not is_same:
            return None
        sample, first = self._begun(nothing)
        tried = self._singles(sample, first, only=lambda cause: cause.family == "prompt")
        self._rated(tried, first, sample)
        best = max(tried, key=lambda one: one.total, default=first)  # all may be beaten on a row
        left, before = (self._typical(one, sample) for one in (best, first))
        if left > HALF * before or not beats(best, first, self._count):
            nothing.scale = scale
            return self._same(nothing)
        self._codes = most
        return self._concluded(nothing, first, tried, sample)

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _same(self, nothing: Explanation) -> Audit:
        if self._base is not None and self._base.overflows:
            self._notes.append("sums of int8 products overflow 16 bits there: a processor without VNNI")
        reason = f"the difference is {nothing.ratio:.2g} × rounding error"
        return self._audit("same", reason, nothing, nothing, [], [])

    def _concluded(
        self, nothing: Explanation, first: Explanation, tried: list[Explanation], sample: Sequence[int]
    ) -> Audit:
        tried.sort(key=lambda one: one.total, reverse=True)
        best = next((one for one in tried if self._fits(one)), first)
        if best is first or not beats(best, first, self._count):
            return self._unexplained(nothing, tried, [])
        parts = (one for one in tried if contains(best, one) and self._fits(one) and not beats(best, one, self._count))
        best = next(parts, best)  # the numbers do not show more causes
        more = (one for one in tried if one.ways[:1] == (FLASH,) and contains(one, best) and self._fits(one))
        if (beside := next(more, None)) is not None and not beats(best, beside, self._count):
            words = CAUSES["flash-float16"].words
            self._note(f"{words}, may be there, too: beside {best.words} it is not seen")
        rivals = [one for one in tried if one.keys != best.keys and not contains(one, best)]
        doubtful = [one for one in rivals if one.plausible and not beats(best, one, self._count)]
        if doubtful:
            return self._unexplained(nothing, tried, [best, *doubtful])
        is_other = any(way.load is not None for way in best.ways)
        whole = self._again(best) if is_other or len(sample) < len(self._rows) else best
        self._rated([whole], nothing, self._every)
        left = self.rows_left(whole, self._every)
        beyond = float((whole.sizes > self.noise(self._dtype).allowed * whole.scale)[self.places.known].double().mean())
        if (len(left) > LEFT * len(self._rows) and beyond > LEFT_TOKENS) or whole.ratio > self.noise(
            self._dtype
        ).typical_allowed:
            reason = f"{whole.words} explains the sample, and leaves {len(left)} of {len(self._rows)} rows"
            return self._audit("unexplained", reason, nothing, nothing, tried, [])
        return self._found(nothing, whole, tried)

    def _again(self, one: Explanation) -> Explanation:
        """The same on all rows."""
        with OtherModels(self._side, self._others) as models:
            again = one.ways
            for key, parameter, load in models.all():
                if any(way.load is not None and way.cause == cause(key, parameter) for way in again):
                    again = tuple(replace(way, load=load) if way.load is not None else way for way in again)
                    side = self._side_of(next(way for way in again if way.load is not None))
                    self._own_noise[one.causes] = self._measured(self._dtype, Oracle(side, kind_of(side)), side)
            found = self._try(again, [one.number], self._every, exact=True)[0]
            self._loaded = (None, self._side)
        return found

    def _unexplained(
        self, nothing: Explanation, tried: Sequence[Explanation], candidates: Sequence[Explanation]
    ) -> Audit:
        if candidates:
            words = ", or ".join(dict.fromkeys(one.words for one in candidates[:4]))
            reason = f"these explain it equally well: {words}"
        else:
            reason = "no cause that was tried explains the difference"
            if tried and tried[0].explained > 0.2:
                reason += f"; the nearest is {tried[0].words} ({percent(tried[0].explained)} of it)"
        return self._audit("unexplained", reason, nothing, nothing, tried, candidates)

    def _found(self, nothing: Explanation, best: Explanation, tried: Sequence[Explanation]) -> Audit:
        left = len(self.rows_left(best, self._every))
        of = f"{left} of {len(self._rows)} rows left" if left else "no row left"
        reason = f"{best.words} ({percent(best.explained)} of the difference; {of})"
        return self._audit("explained", reason, nothing, best, tried, [])

    def _audit(
        self, verdict: str, reason: str, nothing: Explanation, best: Explanation, tried: Sequence[Explanation],
        candidates: Sequence[Explanation],
    ) -> Audit:  # fmt: skip
        noise = self.noise(self._dtype)
        known = self.places.known.tolist()
        own = self.places.chosen
        written = (part[own].tolist() for part in (self.places.position, self.places.value, nothing.left))
        chosen = {place: (value, value - left) for place, value, left in zip(*written, strict=True)}
        upper = torch.maximum(nothing.scale, noise.most)
        positions: list[AuditPosition] = []
        place, first = 0, None
        for row in self._rows:
            for index, token in enumerate(row.text.token_ids):
                if known[place]:
                    before, after = float(nothing.sizes[place]), float(best.sizes[place])
                    positions.append(
                        AuditPosition(
                            row.text.id, index, token, *chosen.get(place, (math.nan, math.nan)), before, after,
                            before / float(nothing.scale[place]), after / float(best.scale[place]),
                        )
                    )  # fmt: skip
                    if first is None and verdict != "same" and before > noise.allowed * float(upper[place]):
                        first = (row.text.id, index)
                place += 1
        typical = float(noise.typical[self.places.known].median())
        left = len(self.rows_left(best, self._every))

        def line(one: Explanation) -> TriedCause:
            more = one.total - nothing.total * len(one.likelihood) / max(len(nothing.likelihood), 1)
            return TriedCause(tuple(each.key for each in one.causes), one.words, one.explained, more, one.ratio)

        self._beaten.sort(key=lambda one: -one.explained)
        notes = [*self._notes]
        if self._prompts.dropped:
            notes.append(f"{self._prompts.dropped} listed tokens are left out: several tokens have their text")
        if (
            self.grid is not None
            and verdict != "same"
            and not any(one.key in ("digits", "dtype") for one in best.causes)
        ):
            notes.append(f"the trace has {cause(*self.grid).sentence}: this counts as noise")
        return Audit(
            self._name, self._side.name, verdict, reason, best.causes if verdict == "explained" else (),
            tuple(map(line, candidates)), tuple(map(line, [*tried, *self._beaten])), tuple(positions),
            tuple(row.text for row in self._rows), best.explained if verdict == "explained" else 0.0,
            left, first, nothing.ratio, noise.typical_allowed, typical, tuple(notes),
        )  # fmt: skip
