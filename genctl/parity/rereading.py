"""Rows of a trace, reread by the reference in various ways, and the noise of their numbers.

M positions, E entries, K positions of some rows, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from genctl.engines.protocol import never
from genctl.errors import ModelError
from genctl.parity.causes import Form
from genctl.parity.noise import SEEDS, TINY, mean_of_others, reached
from genctl.parity.numbers import Entries, resolution
from genctl.parity.oracle import Oracle, Reading
from genctl.parity.prompts import AuditRow, with_prompts
from genctl.parity.sides import LONGEST, LocalSide
from genctl.parity.values import Text
from genctl.parity.ways import Way

CHECKED = 128  # positions on which noise is measured
LOGITS = 2**23  # logits that a group of rows holds in memory: 64 MiB
PADDED = 2 * LOGITS  # float32 logits of a pass, including unused ones: 64 MiB
COST = 2**37  # weights times tokens that may be read for a cause, but at least one row
FEW = 64  # and at least this many tokens
DEAR = 2**27  # weights beyond which a reading takes seconds


@dataclass(frozen=True)
class RowNoise:
    """Rounding at each position of all rows [M]: `typical` (estimated where it is not measured) and `most`."""

    typical: Tensor
    most: Tensor
    allowed: float
    typical_allowed: float


class Rereader:
    """Reads rows in various ways."""

    def __init__(
        self,
        side: LocalSide,
        rows: Sequence[AuditRow],
        *,
        dtype: torch.dtype,
        form: str | None = None,
        interrupted: Callable[[], str] = never,
    ) -> None:
        """`dtype` and `form`: what the engine is declared to compute in."""
        self._side, self._rows = side, tuple(rows)
        self._oracle = Oracle(side, kind_of(side))
        self._dtype, self._declared = dtype, form
        self._base: Form | None = None  # how the engine rounds, in addition to what is tried
        self._interrupted = interrupted
        self._loaded: tuple[Callable[[], LocalSide] | None, LocalSide] = (None, side)
        self._every = range(len(self._rows))
        self.places = places_of(self._rows)
        self._starts = [0]
        for row in self._rows:
            self._starts.append(self._starts[-1] + len(row.text.token_ids))
        loaded: Any = side.session.loaded
        weights = getattr(loaded.model, "num_parameters", None)
        size = weights() if callable(weights) else loaded.checkpoint.weights.bytes / 2
        self._tokens = max(int(COST / max(size, 1)), FEW)
        self._is_dear = size > DEAR
        # whether the session has the same weights as the engine: then it reads trials itself, in float32
        stored = self._oracle.stored
        self._is_whole = (
            side.session.forward.dtype == torch.float32
            and stored <= {dtype, torch.bfloat16, torch.float16}
            and all(torch.promote_types(one, dtype) == dtype for one in stored)
        )
        # rounding of float32 is negligible beside that of a narrow dtype
        self._is_narrow = torch.finfo(dtype).eps > 1e-4
        self.grid, self._resolution = resolution(self.places)
        self._noises: dict[torch.dtype, RowNoise] = {}

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

    def _few(self, rows: Iterable[int]) -> Entries:
        """The entries of rows."""
        return self.places.few(self._at(rows))

    def _spans(self, rows: Iterable[int]) -> Iterator[tuple[int, slice]]:
        """Each of these rows, with the slice of its positions in those of all rows given."""
        begin = 0
        for row in rows:
            end = begin + len(self._rows[row].text.token_ids)
            yield row, slice(begin, end)
            begin = end

    def _logits(self, way: Way, rows: Sequence[int], *, exact: bool = False) -> Tensor:
        """Logits f64 [K, V] at all positions of rows, computed in float32 if that suffices. Raises ModelError."""
        if self._interrupted():
            raise SystemExit(self._interrupted())
        texts = [self._rows[row].text for row in rows]
        if way.prompts is not None:
            texts = with_prompts([self._rows[row] for row in rows], [way.prompts[row] for row in rows])
        side = self._side_of(way)
        form = way.form.and_(self._base) if way.form and self._base else way.form or self._base
        if (self._is_narrow or self._is_dear or not exact) and form is None and way.dtype is None and self._is_whole:
            return _read(side, texts)
        # the compiled attention takes float32, and does not round cached values
        is_wide = form is not None and form.is_wide
        wide = torch.float32 if (self._is_dear or self._is_narrow) and not is_wide else torch.float64
        oracle = self._oracle if way.load is None else Oracle(side, kind_of(side))
        return oracle.exactly(way.dtype or self._dtype, lambda: _read(oracle.side, texts), form, wide)

    # -- noise ---------------------------------------------------------------------------------------------------------

    def noise(self, dtype: torch.dtype) -> RowNoise:
        """The effect of rounding to a dtype on the numbers, from readings with random rounding."""
        if dtype not in self._noises:
            self._noises[dtype] = self._measured(dtype, self._oracle, self._side)
        return self._noises[dtype]

    def _measured(self, dtype: torch.dtype, oracle: Oracle, side: LocalSide) -> RowNoise:
        order = sorted(range(len(self._rows)), key=lambda row: len(self._rows[row].text.prompt_ids))
        count = 1 if self._is_dear else 4
        step = max(len(order) // count, 1)
        most = max(min(CHECKED, 2**21 // self._side.vocabulary), 16)
        readings, at = [], []
        for row in sorted(order[::step][:count]):
            begin, end = self._starts[row], self._starts[row + 1]
            places = [place for place in range(begin, end) if self.places.known[place]]
            share = places[:: max(-(-len(places) * count // most), 1)]
            if share:
                readings.append(Reading(self._rows[row].text, tuple(place - begin for place in share)))
                at += share
        keep = torch.tensor(at)
        few = self.places.few(keep)
        if torch.finfo(dtype).eps > 1e-4 and dtype == self._dtype and self._is_whole:
            logits = _read(side, [one.text for one in readings])
            begins = [0, *itertools.accumulate(len(one.text.token_ids) for one in readings)]
            logits = torch.cat([logits[[begin + index for index in one.indices]]
                                for begin, one in zip(begins, readings, strict=False)])  # fmt: skip
        else:
            logits = oracle.exact(readings, dtype)
        exact = logits.log_softmax(-1)[few.position, few.entry]
        if SEEDS * max(len(one.text.token_ids) for one in readings) * side.vocabulary <= 4 * LOGITS:
            rows = []  # all seeds in one batch: reading weights takes most of the time
            for place, one in enumerate(readings):
                read = partial(oracle.side.together, [one.text] * SEEDS)
                rows.append(torch.stack(oracle.shakily(dtype, place, read))[:, [*one.indices]])
            logits = torch.cat(rows, 1).double().cpu()
        else:
            logits = torch.stack([oracle.shaken(readings, dtype, seed) for seed in range(SEEDS)])
        moved = [row.log_softmax(-1)[few.position, few.entry] - exact for row in logits]
        shaken = torch.stack([few.sizes(one) for one in moved])
        eps = torch.finfo(torch.float32).eps  # for the logged numbers
        own = shaken.square().mean(0).sqrt()
        others = mean_of_others(shaken).sqrt().clamp(min=TINY)
        spread = (shaken / others)[:, few.known]
        typical = torch.full((len(self.places.token),), float(own.square().mean().sqrt()), dtype=torch.float64)
        typical[keep] = own
        written = self.places.sizes(self.places.value) * eps
        typical = (typical.square() + written.square()).sqrt().clamp(min=eps)
        upper = torch.maximum(typical, own.max())
        return RowNoise(typical, upper, *reached(spread))


def kind_of(side: LocalSide) -> Any:
    """The runtime of a side."""
    return side.session.forward.kind


def _read(side: LocalSide, texts: Sequence[Text]) -> Tensor:
    """Logits f64 [K, V] at all positions of texts; short texts are batched."""
    texts = [text for text in texts if text.token_ids]
    if not texts:
        return torch.zeros(0, side.vocabulary, dtype=torch.float64)
    longest = max(len(text.prompt_ids) + len(text.token_ids) for text in texts)
    if side.session.forward.kind == "native" and longest <= LONGEST:
        read: dict[int, Tensor] = {}
        for some in _batches(texts, side.vocabulary):
            read.update(zip(some, side.together([texts[place] for place in some]), strict=True))
        return torch.cat([read[place] for place in range(len(texts))]).double().cpu()
    rows = [
        logits.double().cpu().clone()
        for text in texts
        for _, logits in side.whole_text(text, range(len(text.token_ids)))
    ]
    return torch.stack(rows)


def _batches(texts: Sequence[Text], vocabulary: int) -> Iterator[list[int]]:
    """Batches of texts, by index: a pass has logits from the end of the shortest prompt to that of the longest text."""
    batch: list[int] = []
    begin = end = 0
    for place in sorted(range(len(texts)), key=lambda place: len(texts[place].prompt_ids)):
        prompt, tokens = len(texts[place].prompt_ids), len(texts[place].token_ids)
        if batch and (len(batch) + 1) * (max(end, prompt + tokens) - begin) * vocabulary > PADDED:
            yield batch
            batch = []
        if not batch:
            begin, end = prompt, 0
        batch.append(place)
        end = max(end, prompt + tokens)
    yield batch


def places_of(rows: Sequence[AuditRow]) -> Entries:
    """The positions and entries of rows."""
    token: list[int] = []
    follows: list[bool] = []
    entries: list[tuple[int, int, bool, float]] = []
    before = []
    for row in rows:
        ids = row.text.token_ids
        for index, id in enumerate(ids):
            place = len(token)
            token.append(id)
            follows.append(index > 0)
            before.append((row.text.prompt_ids, ids[:index]))
            if row.numbers[index] == row.numbers[index]:
                entries.append((place, id, True, row.numbers[index]))
            entries += [(place, other, False, value) for other, value in row.tops[index].items()]
    if not entries:
        raise ModelError("no row has a number that can be compared")
    position, entry, chosen, value = map(list, zip(*entries, strict=True))
    return Entries(
        torch.tensor(token), torch.tensor(follows), torch.tensor(position), torch.tensor(entry), torch.tensor(chosen),
        torch.tensor(value, dtype=torch.float64), tuple(before),
    )  # fmt: skip
