"""Sides take turns, round by round; what is compared was measured within the same round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .rows import Case
from .sides import GENCTL, GENERATE, UNDRAFTED, Process
from .work import Ask, Ran, Side, Unavailable, Work

WARM_UP = 4  # tokens written before anything counts
BRIEF = 8.0  # seconds; work that takes no longer is done once, whole, before it counts
PATIENCE = 60.0  # seconds for that; a side that takes longer would take many minutes for the case, and is left out
Say = Callable[[str], None]


@dataclass
class Measured:
    """What a case came to. Lists hold one entry a round; sides that could not are in `absent`."""

    case: Case
    speeds: dict[str, list[float]] = field(default_factory=dict)  # the case's figure
    rans: list[Ran] = field(default_factory=list)  # genctl's
    tokens: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # side -> why
    failed: dict[str, str] = field(default_factory=dict)  # side -> with what; a fault, where absence is none

    def ratios(self, side: str) -> list[float]:
        """How many times faster genctl is, or how many times less it takes, round by round; [] where one is absent."""
        mine, theirs = self.speeds.get(GENCTL), self.speeds.get(side)
        if not mine or not theirs:
            return []
        if self.case.less_is_better:
            mine, theirs = theirs, mine
        return [a / b for a, b in zip(mine, theirs, strict=True)]

    def share(self, bandwidth: float) -> float | None:
        """genctl's median share of what reading weights and cache allows; None where that does not bound it."""
        if not self.speeds.get(GENCTL):
            return None
        shares = [share for ran in self.rans if (share := self.case.share(ran, bandwidth)) is not None]
        return statistics.median(shares) if shares else None

    def same(self, side: str) -> bool | None:
        """Whether a side wrote the tokens of generate(), all of them in every round; None if nobody can say."""
        if self.case.equal is None:
            return None
        if side not in self.tokens or GENERATE not in self.tokens:
            return None
        return self.tokens[side] == self.tokens[GENERATE]

    def kept(self) -> tuple[int, int] | None:
        """How many texts are with drafts what they are without, and of how many; None if nobody can say."""
        plain = self.tokens.get(UNDRAFTED)
        if not plain or GENCTL not in self.tokens:  # or plain texts differ from round to round
            return None
        return sum(one == other for one, other in zip(plain, self.tokens[GENCTL], strict=False)), len(plain)

    @property
    def wrong(self) -> bool:
        """Whether genctl's tokens had to be generate()'s and are not."""
        return bool(self.case.equal) and self.same(GENCTL) is False

    def missed(self) -> dict[str, float]:
        """Targets that the median ratio does not reach: side -> the target."""
        return {
            side: least
            for side, least in self.case.targets.items()
            if (found := self.ratios(side)) and statistics.median(found) < least
        }


def measure(case: Case, sides: Mapping[str, Side], rounds: int, say: Say = lambda _: None) -> Measured:
    """Run a case, every side once a round, each round beginning with another side.

    A side that cannot, or would take minutes, is left out.
    """
    measured = Measured(case)
    able = {name: side for name, side in sides.items() if _tried(measured, name, partial(_warm_up, case, side))}
    for number in range(rounds):
        names = [name for name in able if name not in measured.absent]
        start = number % max(len(names), 1)
        for name in (*names[start:], *names[:start]):
            _tried(measured, name, partial(_once, measured, name, able[name]))
        say(f"{case.key}: round {number + 1} of {rounds}")
    for name in measured.absent:  # what it did before it failed has no partner in every round
        measured.tokens.pop(name, None)
        measured.speeds.pop(name, None)
    return measured


def _tried(measured: Measured, name: str, act: Callable[[], None]) -> bool:
    """Whether a side did it; if not, why is noted."""
    try:
        act()
    except Unavailable as error:
        measured.absent[name] = str(error)
    except (RuntimeError, ValueError, OSError) as error:
        measured.absent[name] = measured.failed[name] = failure(error)
    return name not in measured.absent


def failure(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"failed: {lines[-1] if lines else type(error).__name__}"


def _warm_up(case: Case, side: Side) -> None:
    if case.manner == "fresh":  # nothing is kept, and memory does not warm up
        return
    if case.manner == "command":  # fills the file cache
        side.run(case.work)
        return
    work = _short(case.work)
    ran = side.run(work, PATIENCE) if isinstance(side, Process) else side.run(work)
    first = ran.first_s or 0.0
    whole = first + (ran.seconds - first) * case.work.new_tokens / work.new_tokens
    if work != case.work and whole <= BRIEF:  # what a side prepares for longer texts is ready then
        side.run(case.work)


def _once(measured: Measured, name: str, side: Side) -> None:
    ran = side.run(measured.case.work)
    value = measured.case.value(ran)
    if value is None:
        raise Unavailable(f"it does not say: {measured.case.figure}")
    measured.speeds.setdefault(name, []).append(value)
    if name == GENCTL:
        measured.rans.append(ran)
    if ran.tokens:
        _keep(measured, name, ran)


def _keep(measured: Measured, name: str, ran: Ran) -> None:
    known = measured.tokens.setdefault(name, ran.tokens)
    if known != ran.tokens:  # a round that differs from the first is a difference from everyone
        measured.tokens[name] = ()


def _short(work: Work) -> Work:
    """The same work with few tokens, for warming up: caches are made, kernels chosen, pages touched."""
    return replace(work, asks=tuple(Ask(ask.prompt, min(ask.new, WARM_UP), ask.knobs) for ask in work.asks))


def run(
    chosen: Iterable[Case],
    open_side: Callable[[Case, str], Side],
    rounds: int,
    say: Say = lambda _: None,
) -> list[Measured]:
    """Every case. `open_side` loads a side for a case, or raises Unavailable; sides are kept while cases need them.

    A side that fails is said and left out of its case.
    """
    pending = list(chosen)
    held: dict[tuple[Any, ...], Side] = {}
    results = []
    while pending:
        case = pending.pop(0)
        sides: dict[str, Side] = {}
        absent: dict[str, str] = {}
        failed: dict[str, str] = {}
        for name in case.sides:
            key = _key(case, name)
            try:
                if key not in held:
                    held[key] = open_side(case, name)
                sides[name] = held[key]
            except Unavailable as error:
                absent[name] = str(error)
            except Exception as error:  # a conversion or a library: the others go on
                absent[name] = failed[name] = failure(error)
        measured = measure(case, sides, rounds, say)
        measured.absent.update(absent)
        measured.failed.update(failed)
        results.append(measured)
        say(f"{case.key}: {_told(measured)}")
        wanted = {_key(later, name) for later in pending for name in later.sides}
        wanted -= {_key(case, name) for name in measured.failed}  # begin anew with the next case
        wanted -= {key for key, side in held.items() if isinstance(side, Process) and not side.process.is_alive()}
        for key in [key for key in held if key not in wanted]:
            side = held.pop(key)
            if isinstance(side, Process):
                side.close()
    return results


def _told(measured: Measured) -> str:
    speeds = {name: statistics.median(found) for name, found in measured.speeds.items()}
    return ", ".join(f"{name} {speed:.4g} {measured.case.figure}" for name, speed in speeds.items()) or "nothing"


def _key(case: Case, name: str) -> tuple[Any, ...]:
    return name, case.manner, case.size.name, case.dtype_of(name)
