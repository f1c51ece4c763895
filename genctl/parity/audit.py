"""What an engine computed, from what it wrote alone: causes are tried on a reference that reads the same tokens.

Each cause predicts the written numbers: read again in another way (prompt, arithmetic, model), or the reference's own
distributions turned into another number. docs/audit.md says when one is named. M positions, E entries, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from genctl.engines.protocol import never
from genctl.errors import GenctlError, ModelError
from genctl.parity.causes import Cause, cause
from genctl.parity.forms import FORMS, Form
from genctl.parity.noise import ALLOWANCE, SEEDS, left_out
from genctl.parity.numbers import CAP, RAW, Number, Places, numbers, remains, resolution, several
from genctl.parity.oracle import Oracle, Reading
from genctl.parity.other_models import OtherModels
from genctl.parity.prompts import AuditRow, Ids, Prompts, with_prompts
from genctl.parity.sides import LocalSide
from genctl.parity.values import Text

ERROR_RATE = 0.01  # of naming a wrong cause, over all that are tried
CHECKED = 128  # positions on which noise is measured
LOGITS = 2**23  # logits of a group of rows that are in memory: 64 MiB
COST = 2**37  # weights times tokens that are read for a cause; at least one row
FEW = 64  # tokens of the sample, at least
SAMPLE = 200  # positions of it, at most, once there is a row
FEWER = 60  # positions on which pairs are tried first
WAYS = 10  # of reading, to which numbers are fitted
PAIRS = 12  # of them are tried on the sample
LEFT = 0.1  # of all rows may be left unexplained, where a cause is named
FREEDOM = 4.0  # of Student's t, by which rounding is distributed: a few positions count little
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Way:
    """How the texts are read: another prompt for each row, another arithmetic, another model."""

    cause: Cause | None = None
    prompts: tuple[Ids, ...] | None = None  # of all rows
    dtype: torch.dtype | None = None
    form: Form | None = None
    load: Callable[[], LocalSide] | None = None

    def and_(self, other: Way) -> Way:
        """Both; the causes stay those of `self`."""
        return replace(
            self, prompts=self.prompts or other.prompts, dtype=self.dtype or other.dtype,
            form=self.form or other.form, load=self.load or other.load,
        )  # fmt: skip


PLAIN = Way()
Base: TypeAlias = Callable[[Number], Tensor]  # what is left of a number, f64 [E]


@dataclass
class Tried:
    """A hypothesis with what it leaves, [M] of the rows that it was tried on."""

    causes: tuple[Cause, ...]
    ways: tuple[Way, ...]
    number: Number
    sizes: Tensor  # f64, nats
    scale: Tensor  # f64, of the noise
    likelihood: Tensor = field(default_factory=lambda: torch.zeros(0))  # f64, its logarithm
    ratio: float = math.nan  # median of sizes to noise
    explained: float = 0.0  # of the difference
    plausible: bool = True  # the direction of what it changes is in the data, not only the size

    @property
    def words(self) -> str:
        """The causes."""
        return " and ".join(one.sentence for one in self.causes) or "nothing"


@dataclass(frozen=True)
class AuditPosition:
    """A token before and after the explanation, in nats and in units of the noise."""

    id: str
    index: int
    token: int
    number: float  # as written
    reference: float  # the log-probability in the reference
    before: float
    after: float
    ratio: float  # of `before` to noise
    ratio_after: float


@dataclass(frozen=True)
class Hypothesis:
    """A line of the report."""

    causes: tuple[str, ...]
    words: str
    explained: float
    log_likelihood: float  # over that of no cause
    ratio: float


@dataclass(frozen=True)
class Audit:
    """All that is found about a trace."""

    trace: str
    reference: str
    verdict: str  # same, explained, unexplained
    reason: str
    causes: tuple[Cause, ...]
    candidates: tuple[Hypothesis, ...]  # that cannot be told apart
    tried: tuple[Hypothesis, ...]
    positions: tuple[AuditPosition, ...]
    texts: tuple[Text, ...]
    explained: float
    rows_left: int
    first: tuple[str, int] | None  # the first position with a difference
    ratio: float  # median of the difference to noise, before an explanation
    allowed: float
    noise: float  # nats, median
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Noise:
    """Rounding at each position of all rows [M]: typical where it is not measured, and the most."""

    typical: Tensor
    most: Tensor
    allowed: float
    typical_allowed: float


class Auditor:
    """Reads rows in one way after another."""

    def __init__(
        self,
        side: LocalSide,
        rows: Sequence[AuditRow],
        prompts: Prompts,
        *,
        dtype: torch.dtype,
        form: str | None = None,
        others: Sequence[str] = (),
        interrupted: Callable[[], str] = never,
        on_stage: Callable[[str], object] = lambda stage: None,
    ) -> None:
        """`dtype` and `form`: what the engine is said to compute in."""
        kind = side.session.forward.kind
        self._side, self._rows, self._prompts = side, tuple(rows), prompts
        self._oracle = Oracle(side, kind)  # type: ignore[arg-type]  # the literal of a runtime
        self._dtype, self._form, self._others = dtype, form, others
        self._interrupted, self._stage = interrupted, on_stage
        self._loaded: tuple[Callable[[], LocalSide] | None, LocalSide] = (None, side)
        self.places = places_of(self._rows)
        self._starts = [0]
        for row in self._rows:
            self._starts.append(self._starts[-1] + len(row.text.token_ids))
        weights = getattr(side.session.loaded.model, "num_parameters", None)
        size = weights() if callable(weights) else side.session.loaded.checkpoint.weights.bytes / 2  # type: ignore[union-attr]
        self._tokens = max(int(COST / max(size, 1)), FEW)
        # whether the session has the weights as the engine does: then it reads in float32 what is tried
        stored = {tensor.dtype for _, tensor in self._floats()}
        self._is_whole = side.session.forward.dtype == torch.float32 and stored <= {dtype, torch.bfloat16, torch.float16}
        self._is_whole = self._is_whole and all(torch.promote_types(one, dtype) == dtype for one in stored)
        self.grid, self._resolution = resolution(self.places)
        self._count = 0  # hypotheses
        self._noises: dict[torch.dtype, _Noise] = {}

    # -- reading -------------------------------------------------------------------------------------------------------

    def _side_of(self, way: Way) -> LocalSide:
        if way.load is None:
            return self._side
        if self._loaded[0] is not way.load:
            self._loaded = (way.load, way.load())
        return self._loaded[1]

    def _groups(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Rows whose logits fit `LOGITS`."""
        group: list[int] = []
        held = 0
        for row in rows:
            size = len(self._rows[row].text.token_ids) * self._side.vocabulary
            if group and held + size > LOGITS:
                yield group
                group, held = [], 0
            group.append(row)
            held += size
        if group:
            yield group

    def _at(self, rows: Iterable[int]) -> Tensor:
        """The positions of rows, int64 [K]."""
        return torch.cat([torch.arange(self._starts[row], self._starts[row + 1]) for row in rows])

    def _logits(self, way: Way, rows: Sequence[int], *, exact: bool = False) -> Tensor:
        """Logits f64 [K, V] at all positions of rows: in float32 where that has the weights. Raises ModelError."""
        if self._interrupted():
            raise SystemExit(self._interrupted())
        texts = [self._rows[row].text for row in rows]
        if way.prompts is not None:
            texts = with_prompts([self._rows[row] for row in rows], [way.prompts[row] for row in rows])
        side = self._side_of(way)
        form = way.form or (FORMS[self._form] if self._form else None)
        if not exact and form is None and way.dtype is None and self._is_whole:
            return _read(side, texts)
        oracle = self._oracle if way.load is None else Oracle(side, side.session.forward.kind)
        return oracle.exactly(way.dtype or self._dtype, lambda: _read(oracle.side, texts), form)

    # -- noise ---------------------------------------------------------------------------------------------------------

    def noise(self, dtype: torch.dtype) -> _Noise:
        """What rounding of a dtype does to the numbers, by readings whose rounding is moved at random."""
        if dtype not in self._noises:
            self._noises[dtype] = self._measured(dtype)
        return self._noises[dtype]

    def _measured(self, dtype: torch.dtype) -> _Noise:
        known = self.places.counts > 0
        order = sorted(range(len(self._rows)), key=lambda row: len(self._rows[row].text.prompt_ids))
        step = max(len(order) // 4, 1)
        most = max(min(CHECKED, 2**21 // self._side.vocabulary), 16)
        readings, at = [], []
        for row in sorted(order[::step][:4]):
            begin, end = self._starts[row], self._starts[row + 1]
            places = [place for place in range(begin, end) if known[place]]
            share = places[:: max(-(-len(places) * 4 // most), 1)]
            if share:
                readings.append(Reading(self._rows[row].text, tuple(place - begin for place in share)))
                at += share
        keep = torch.tensor(at)
        few = self.places.few(keep)
        few = replace(few, owner=None)
        exact = self._oracle.exact(readings, dtype).log_softmax(-1)[few.position, few.entry]
        shaken = torch.stack([
            few.sizes(self._oracle.shaken(readings, dtype, seed).log_softmax(-1)[few.position, few.entry] - exact)
            for seed in range(SEEDS)
        ])  # fmt: skip
        tiny = torch.finfo(torch.float64).tiny
        eps = torch.finfo(torch.float32).eps  # of numbers as they are written
        own = shaken.square().mean(0).sqrt()
        spread = left_out(shaken, tiny)
        typical = torch.full((len(self.places.token),), float(own.square().mean().sqrt()), dtype=torch.float64)
        typical[keep] = own
        written = self.places.sizes(self.places.value) * eps
        typical = (typical.square() + written.square()).sqrt().clamp(min=eps)
        upper = torch.maximum(typical, own.max())
        return _Noise(
            typical,
            upper,
            ALLOWANCE * float(spread.max()),
            ALLOWANCE * max(float(spread.median(dim=1).values.max()), 1.0),
        )

    # -- hypotheses ----------------------------------------------------------------------------------------------------

    def _try(self, ways: tuple[Way, ...], wanted: Sequence[Number] | None, rows: Sequence[int], base: Base | None,
             *, exact: bool = False) -> list[Tried]:  # fmt: skip
        """What is left where texts are read in `ways`: for each of `wanted`, or for all numbers that fit (None).

        `base` gives what a number leaves without another way of reading, with which directions are compared.
        """
        way = PLAIN
        for one in ways:
            way = one.and_(way)
        logits: list[Tensor] = []
        groups = [*self._groups(rows)]
        found: list[Tried] = []
        if wanted is None:
            # parameters are fitted on what fits into memory
            part = groups[0]
            some = self._logits(way, part)
            places = self.places.few(self._at(part))
            wanted = [*numbers(some, places)]
            del some
        for number in wanted:
            found.append(Tried((), ways, number, torch.zeros(0), torch.zeros(0)))
        left: list[list[Tensor]] = [[] for _ in found]
        sizes: list[list[Tensor]] = [[] for _ in found]
        for group in groups:
            logits = [self._logits(way, group, exact=exact)]
            places = self.places.few(self._at(group))
            for place, one in enumerate(found):
                left[place].append(remains(one.number, logits[0], places))
                sizes[place].append(places.sizes(left[place][-1]))
        at = self._at(rows)
        noise = self.noise(way.dtype or self._dtype)
        cut = self._cut[at]
        for place, one in enumerate(found):
            own = tuple(each.cause for each in ways if each.cause) + tuple(cause(*each) for each in one.number.causes)
            one.causes, one.sizes = own, torch.cat(sizes[place])
            scale = noise.typical[at] / one.number.temperature
            if way.form is not None and base is not None:
                before = base(one.number)
                moved = before - torch.cat(left[place])
                direction = _slope(before, moved)
                one.plausible = 0.5 <= direction <= 1.6
                known_places = self.places.few(at)
                scale = (scale.square() + (0.3 * known_places.sizes(moved)).square().mean()).sqrt()
            elif way.dtype is not None and base is not None:
                before = base(one.number)
                direction = _slope(before, before - torch.cat(left[place]))
                one.plausible = 0.3 <= direction <= 3.0
            one.scale = (scale.square() + cut.square()).sqrt()
        self._count += len(found)
        return found

    def _judged(self, tried: Sequence[Tried], nothing: Tried, at: Tensor) -> None:
        """Fill in the figures of hypotheses on positions [K]."""
        known = self.places.counts[at] > 0
        excess = _excess(nothing, known)
        for one in tried:
            one.likelihood = _likelihood(one, known)
            penalty = one.number.parameters * 0.5 * math.log(max(int(known.sum()), 2))
            one.likelihood = one.likelihood - penalty / max(int(known.sum()), 1)
            ratios = (one.sizes / one.scale)[known]
            one.ratio = float(ratios.median())
            one.explained = 1 - _excess(one, known) / excess if excess > 0 else 0.0

    def _fits(self, one: Tried) -> bool:
        noise = self.noise(self._dtype)
        return one.ratio <= noise.typical_allowed and one.plausible

    def rows_left(self, one: Tried, rows: Sequence[int]) -> list[int]:
        """Rows with a position that is beyond noise."""
        noise = self.noise(self._dtype)
        at = self._at(rows)
        upper = torch.maximum(one.scale, (noise.most / noise.typical.median())[at] * one.scale.median())
        beyond = (one.sizes > noise.allowed * upper) & (self.places.counts[at] > 0)
        left, start = [], 0
        for row in rows:
            end = start + len(self._rows[row].text.token_ids)
            if bool(beyond[start:end].any()):
                left.append(row)
            start = end
        return left

    def run(self, name: str) -> Audit:
        """The verdict. Raises ModelError."""
        everything = [*range(len(self._rows))]
        self._cut = torch.zeros(len(self.places.token), dtype=torch.float64)
        self._stage("reading")
        nothing = self._try((), [RAW], everything, None, exact=True)[0]
        if self._form is not None:
            nothing.scale = self._with_form(nothing, everything)
        self._judged([nothing], nothing, self._at(everything))
        if self._fits(nothing) and not self.rows_left(nothing, everything):
            return self._same(name, nothing)
        if self.grid is not None:
            self._cut = self.places.sizes(self._resolution)
            again = self._try((), [RAW], everything, None, exact=True)[0]
            self._judged([again], nothing, self._at(everything))
            if self._fits(again) and not self.rows_left(again, everything):
                again.causes = (cause(*self.grid),)
                again.explained = 1.0
                return self._found(name, nothing, again, [], everything)
            nothing = again
        sample = self._sample(nothing)
        at = self._at(sample)
        base = self._base(sample)
        first = Tried((), (), RAW, nothing.sizes[at], nothing.scale[at])
        tried = self._singles(sample, base)
        self._judged([first, *tried], first, at)
        if not any(self._fits(one) for one in tried):
            tried += self._pairs(tried, sample, base, first, at)
        tried.sort(key=lambda one: float(one.likelihood.sum()), reverse=True)
        return self._concluded(name, nothing, first, tried, sample)

    def _left(self, rows: Sequence[int], number: Number = RAW) -> Tensor:
        parts = [
            remains(number, self._logits(PLAIN, group), self.places.few(self._at(group)))
            for group in self._groups(rows)
        ]
        return torch.cat(parts)

    def _base(self, rows: Sequence[int]) -> Base:
        """What numbers leave where texts are read as they should be; each is read once."""
        found: dict[Number, Tensor] = {}
        groups = [*self._groups(rows)]
        logits = self._logits(PLAIN, rows) if len(groups) == 1 else None
        places = self.places.few(self._at(rows))

        def base(number: Number) -> Tensor:
            if number not in found:
                found[number] = self._left(rows, number) if logits is None else remains(number, logits, places)
            return found[number]

        return base

    def _with_form(self, nothing: Tried, rows: Sequence[int]) -> Tensor:
        """The noise of a declared form: engines have other codes, so what codes change counts as noise."""
        declared, self._form = self._form, None
        plain = self._left(rows)
        self._form = declared
        own = self._left(rows)
        moved = self.places.few(self._at(rows)).sizes(own - plain)
        return (nothing.scale.square() + moved.square().mean()).sqrt()

    def _sample(self, nothing: Tried) -> list[int]:
        """Rows on which causes are tried, the most telling first, as many as `COST` allows."""
        ratios = nothing.sizes / nothing.scale
        worst = [
            float(ratios[begin:end].clamp(max=1e3).sum()) / (end - begin) ** 0.5 if end > begin else 0.0
            for begin, end in pairwise(self._starts)
        ]
        chosen: list[int] = []
        tokens = positions = 0
        for row in sorted(range(len(self._rows)), key=lambda row: -worst[row]):
            text = self._rows[row].text
            tokens += len(text.prompt_ids) + len(text.token_ids)
            positions += len(text.token_ids)
            if chosen and (tokens > self._tokens or positions > SAMPLE):
                break
            chosen.append(row)
        return sorted(chosen)

    def _ways(self) -> Iterator[Way]:
        for key, parameter, prompts in self._prompts.changes(self._rows):
            yield Way(cause(key, parameter), prompts=tuple(prompts))
        stored = {tensor.dtype for _, tensor in self._floats()}
        for key in ("bfloat16", "float16"):
            if DTYPES[key] != self._dtype and torch.float32 in stored and self._dtype == torch.float32:
                yield Way(cause(key), dtype=DTYPES[key])
        for key, form in FORMS.items():
            if key != self._form:
                yield Way(cause(key), form=form)

    def _floats(self) -> list[tuple[str, Tensor]]:
        model = self._oracle.side.session.loaded.model
        named = model.named_tensors() if hasattr(model, "named_tensors") else model.named_parameters()
        return [(name, tensor) for name, tensor in named if tensor.is_floating_point()]

    def _singles(self, sample: Sequence[int], base: Base) -> list[Tried]:
        self._stage("hypotheses")
        tried = self._try((), None, sample, base)
        for way in self._ways():
            tried += self._try((way,), [RAW], sample, base)
        with OtherModels(self._side, self._others) as models:
            for key, parameter, load in models.all():
                try:
                    tried += self._try((Way(cause(key, parameter), load=load),), [RAW], sample, base)
                except (GenctlError, ValueError, RuntimeError):
                    continue  # a checkpoint that is none
            self._loaded = (None, self._side)
        return tried

    def _pairs(
        self, singles: Sequence[Tried], sample: Sequence[int], base: Base, first: Tried, at: Tensor
    ) -> list[Tried]:
        """Causes together: every way of reading with every number, and the best ways of different families."""
        self._stage("pairs")
        pairs: list[Tried] = []
        best = sorted((one for one in singles if one.ways), key=lambda one: float(one.sizes.median()))
        prompts = [one.ways[0] for one in best if one.ways[0].prompts is not None]
        ways = prompts + [one.ways[0] for one in best if one.ways[0].prompts is None and one.ways[0].load is None][:3]
        small = self._side.vocabulary * FEWER <= LOGITS
        few = [*sample[:1]]
        for row in sample[1:]:
            if sum(len(self._rows[each].text.token_ids) for each in few) < FEWER:
                few.append(row)
        part = torch.cat([torch.isin(at, self._at(few)).nonzero()[:, 0]])
        screened: list[Tried] = []
        begun = self._base(few)
        for way in ways[: WAYS if small else WAYS // 2]:
            screened += self._try((way,), None, few, begun)
        for place, one in enumerate(best[:6]):
            for other in best[place + 1 : 6]:
                both = one.ways[0], other.ways[0]
                if len({each.cause.family for each in both if each.cause}) == 2 and not any(way.load for way in both):
                    screened += self._try(both, [RAW], few, begun)
        group = next(self._groups(few))
        logits, places = self._logits(PLAIN, group), self.places.few(self._at(group))
        more = [two for one in singles if not one.ways for two in several(one.number, logits, places)]
        del logits
        screened += self._try((), more, few, begun) if more else []
        begin = Tried((), (), RAW, first.sizes[part], first.scale[part])
        self._judged([begin, *screened], begin, self._at(few))
        screened.sort(key=lambda one: -float(one.likelihood.sum()))
        for one in screened[:PAIRS]:
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
        if length < 3 or not bool((places.counts > 0).any()):
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

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _same(self, name: str, nothing: Tried) -> Audit:
        reason = f"what differs is {nothing.ratio:.2g} of rounding error"
        return self._audit(name, "same", reason, nothing, nothing, [], [])

    def _concluded(
        self, name: str, nothing: Tried, first: Tried, tried: list[Tried], sample: Sequence[int]
    ) -> Audit:
        fitting = [one for one in tried if self._fits(one)]
        everything = [*range(len(self._rows))]
        if not fitting:
            return self._unexplained(name, nothing, tried, [])
        best = fitting[0]
        rivals = [one for one in tried if one is not best and not _contains(one, best)]
        doubtful = [one for one in rivals if one.plausible and not self._beats(best, one)]
        if not self._beats(best, first):
            return self._unexplained(name, nothing, tried, [])
        if doubtful:
            return self._unexplained(name, nothing, tried, [best, *doubtful])
        whole = self._again(best, everything) if len(sample) < len(everything) else best
        self._judged([whole], nothing, self._at(everything))
        left = self.rows_left(whole, everything)
        if len(left) > LEFT * len(everything) or whole.ratio > self.noise(self._dtype).typical_allowed:
            return self._unexplained(name, nothing, tried, [])
        return self._found(name, nothing, whole, tried, everything)

    def _again(self, one: Tried, rows: Sequence[int]) -> Tried:
        with OtherModels(self._side, self._others) as models:
            ways = one.ways
            for key, parameter, load in models.all():
                if any(way.load is not None and way.cause == cause(key, parameter) for way in ways):
                    ways = tuple(replace(way, load=load) if way.load is not None else way for way in ways)
            found = self._try(ways, [one.number], rows, self._base(rows), exact=True)[0]
            self._loaded = (None, self._side)
        return found

    def _beats(self, one: Tried, other: Tried) -> bool:
        """Whether a hypothesis is better than another: by its likelihood, and at most positions that tell them apart.

        The likelihood of a wrong hypothesis is 1/p times that of the true one with a chance of p at most (Ville 1939).
        A sign test does not rely on the distribution of rounding.
        """
        bound = math.log(max(self._count, 1) / ERROR_RATE)
        gain = one.likelihood - other.likelihood
        if float(gain.sum()) < bound:
            return False
        telling = gain[gain.abs() > 0.05]
        wins, trials = int((telling > 0).sum()), len(telling)
        return _sign_test(wins, trials) <= -bound

    def _unexplained(self, name: str, nothing: Tried, tried: Sequence[Tried], candidates: Sequence[Tried]) -> Audit:
        if candidates:
            words = ", or ".join(dict.fromkeys(one.words for one in candidates[:4]))
            reason = f"these explain it alike: {words}"
        else:
            reason = "no cause that was tried explains the difference"
            if tried and tried[0].explained > 0.2:
                reason += f"; the nearest is {tried[0].words} ({percent(tried[0].explained)} of it)"
        return self._audit(name, "unexplained", reason, nothing, nothing, tried, candidates)

    def _found(
        self, name: str, nothing: Tried, best: Tried, tried: Sequence[Tried], rows: Sequence[int]
    ) -> Audit:
        left = len(self.rows_left(best, rows))
        of = f"{left} of {len(rows)} rows left" if left else "no row left"
        reason = f"{best.words} ({percent(best.explained)} of the difference; {of})"
        return self._audit(name, "explained", reason, nothing, best, tried, [])

    def _audit(
        self, name: str, verdict: str, reason: str, nothing: Tried, best: Tried, tried: Sequence[Tried],
        candidates: Sequence[Tried],
    ) -> Audit:  # fmt: skip
        noise = self.noise(self._dtype)
        known = (self.places.counts > 0).tolist()
        chosen: dict[int, float] = {}
        for place, value in zip(self.places.position[self.places.chosen].tolist(),
                                self.places.value[self.places.chosen].tolist(), strict=True):  # fmt: skip
            chosen[place] = value
        reference = self._chosen()
        upper = torch.maximum(nothing.scale, noise.most)
        positions: list[AuditPosition] = []
        place, first = 0, None
        for row in self._rows:
            for index, token in enumerate(row.text.token_ids):
                if known[place]:
                    before, after = float(nothing.sizes[place]), float(best.sizes[place])
                    positions.append(
                        AuditPosition(
                            row.text.id, index, token, chosen.get(place, math.nan), reference[place], before, after,
                            before / float(nothing.scale[place]), after / float(best.scale[place]),
                        )
                    )  # fmt: skip
                    if first is None and verdict != "same" and before > noise.allowed * float(upper[place]):
                        first = (row.text.id, index)
                place += 1
        every = [*range(len(self._rows))]
        left = len(self.rows_left(best, every))
        gain = float(nothing.likelihood.sum()) if len(nothing.likelihood) else 0.0

        def line(one: Tried) -> Hypothesis:
            more = float(one.likelihood.sum()) - gain * len(one.likelihood) / max(len(nothing.likelihood), 1)
            return Hypothesis(tuple(each.key for each in one.causes), one.words, one.explained, more, one.ratio)

        notes = []
        if self._prompts.dropped:
            notes.append(f"{self._prompts.dropped} listed tokens are left out: several tokens have their text")
        if self.grid is not None and verdict != "same" and not any(one.key in ("digits", "dtype") for one in best.causes):
            notes.append(f"the trace has {cause(*self.grid).sentence}: this counts as noise")
        return Audit(
            name, self._side.name, verdict, reason, best.causes if verdict == "explained" else (),
            tuple(map(line, candidates)), tuple(map(line, tried)), tuple(positions),
            tuple(row.text for row in self._rows), best.explained if verdict == "explained" else 0.0,
            left, first, nothing.ratio, noise.typical_allowed, float(noise.typical.median()), tuple(notes),
        )  # fmt: skip

    def _chosen(self) -> list[float]:
        """The reference's log-probability of every chosen token."""
        found: list[float] = []
        for group in self._groups([*range(len(self._rows))]):
            places = self.places.few(self._at(group))
            logprobs = self._logits(PLAIN, group).log_softmax(-1)
            found += logprobs.gather(1, places.token[:, None])[:, 0].tolist()
        return found


def _read(side: LocalSide, texts: Sequence[Text]) -> Tensor:
    """Logits f64 [K, V] at all positions of texts."""
    rows = [logits.double().cpu().clone() for text in texts for _, logits in side.whole_text(text, range(len(text.token_ids)))]
    return torch.stack(rows)


def percent(share: float) -> str:
    """A share of the difference."""
    return f"{100 * share:.1f} %"


def _truncated(prompt: Ids, limit: int, keeps_first: bool) -> Ids:
    return (*prompt[:1], *prompt[len(prompt) - limit + 1 :]) if keeps_first and limit > 1 else prompt[-limit:]


def _contains(one: Tried, other: Tried) -> bool:
    """Whether a hypothesis has all causes of another, and more: where that fits, it is the simpler one."""
    keys, others = ({each.key for each in tried.causes} for tried in (one, other))
    return others < keys


def _slope(base: Base, moved: Tensor) -> float:
    """How much of what a cause changes is in the data: 1 where all of it is."""
    there = base.isfinite() & moved.isfinite()
    size = moved[there].abs().median() * 8 + 1e-30
    x, y = moved[there].clamp(-size, size), base[there].clamp(-size, size)
    return float((x * y).sum() / x.square().sum().clamp(min=1e-300))


def _excess(one: Tried, known: Tensor) -> float:
    """What is beyond noise, in nats."""
    return float((one.sizes[known].clamp(max=CAP) - 2 * one.scale[known]).clamp(min=0).sum())


def _likelihood(one: Tried, known: Tensor) -> Tensor:
    """The logarithm of the density of what is left at each known position, for the scale that suits it best."""
    size = one.sizes[known] + 1e-12
    best: Tensor | None = None
    for factor in (0.35, 0.5, 0.7, 1.0, 1.4, 2.0):
        scale = one.scale[known] * factor
        found = -scale.log() - (FREEDOM + 1) / 2 * (1 + (size / scale).square() / FREEDOM).log()
        if best is None or float(found.sum()) > float(best.sum()):
            best = found
    assert best is not None
    return best


def _sign_test(wins: int, trials: int) -> float:
    """The logarithm of the chance of so many wins, if each were a matter of luck."""
    if not trials:
        return 0.0
    terms = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) - trials * math.log(2)
        for k in range(wins, trials + 1)
    ]
    most = max(terms)
    return most + math.log(math.fsum(math.exp(term - most) for term in terms))


def places_of(rows: Sequence[AuditRow]) -> Places:
    """The positions and entries of rows."""
    token: list[int] = []
    follows: list[bool] = []
    entries: list[tuple[int, int, bool, float, int]] = []
    before = []
    for row in rows:
        begin, ids = len(token), row.text.token_ids
        for index, id in enumerate(ids):
            place = len(token)
            token.append(id)
            follows.append(index > 0)
            before.append((row.text.prompt_ids, ids[:index]))
            if row.total == row.total:  # one number for the row, in equal parts
                entries.append((place, id, True, row.total / len(ids), begin))
                continue
            if row.numbers[index] == row.numbers[index]:
                entries.append((place, id, True, row.numbers[index], -1))
            entries += [(place, other, False, value, -1) for other, value in row.tops[index].items()]
    if not entries:
        raise ModelError("no row has a number that can be compared")
    owner = [place for *_, place in entries]
    return Places(
        torch.tensor(token),
        torch.tensor(follows),
        torch.tensor([place for place, *_ in entries]),
        torch.tensor([id for _, id, *_ in entries]),
        torch.tensor([chosen for _, _, chosen, *_ in entries]),
        torch.tensor([value for *_, value, _ in entries], dtype=torch.float64),
        tuple(before),
        torch.tensor(owner) if any(place >= 0 for place in owner) else None,
    )
