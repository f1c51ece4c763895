"""How a step grows with the context and with the rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from .checkpoints import Size, gpt2
from .measuring import failure
from .rows import ALL, Case, Plan
from .sides import Process
from .table import Curve
from .work import Ran, Side, Unavailable, Work

CONTEXTS, ROWS = (16, 64, 256, 1024, 4096), (1, 2, 4, 8, 16, 32, 64)
STEPS, WARM = 16, 64  # steps that are timed at each point, and steps before the first


@dataclass(frozen=True)
class Bench:
    """What the curves need of the outside."""

    open_side: Callable[[Case, str], Side]
    plan: Plan
    rounds: int
    quick: bool
    say: Callable[[str], None]


def context(bench: Bench) -> Iterator[Curve]:
    """A step after prompts of growing length."""
    points = CONTEXTS[:3] if bench.quick else CONTEXTS
    size = replace(gpt2("gpt2-long", positions=points[-1] + 64), fields=_longer(bench.plan.causal, points[-1] + 64))
    works = [(point, size, bench.plan.rows(1, point, STEPS + 1)) for point in points]
    yield _steps(bench, "context", "a step as the context grows", "tokens of the prompt", works, ALL)


def _longer(size: Size, positions: int) -> dict[str, Any]:
    return {**size.fields, "n_positions": positions}


def rows(bench: Bench) -> Iterator[Curve]:
    """A step of ever more prompts at once."""
    points = ROWS[:4] if bench.quick else ROWS
    works = [
        (point, bench.plan.causal, bench.plan.rows(point, bench.plan.lengths.short, STEPS + 1)) for point in points
    ]
    yield _steps(bench, "rows", "a step as rows grow", "rows", works, ALL)


def _steps(
    bench: Bench, key: str, title: str, across: str, works: Sequence[tuple[int, Size, Work]], sides: Sequence[str]
) -> Curve:
    """Milliseconds per step at each point, the sides taking turns."""
    lines: dict[str, list[float | None]] = {name: [] for name in sides}
    held: dict[tuple[str, str], Side | None] = {}
    with ExitStack() as stack:
        for place, (point, size, work) in enumerate(works):
            case = Case(key, title, size, work, figure="tokens/s after the first")
            times: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(bench.rounds + 1):  # the first round warms up
                for name in sides:
                    if (name, size.name) not in held:
                        held[name, size.name] = _opened(bench, case, name, stack)
                    side = held[name, size.name]
                    ran = None if side is None else _ran(bench, name, side, work)
                    if number and ran is not None and ran.first_s is not None:
                        times[name].append((ran.seconds - ran.first_s) / STEPS * 1e3)
            for name in sides:
                lines[name].append(statistics.median(times[name]) if times[name] else None)
            bench.say(f"{key}: {point}")
            if place + 1 < len(works) and works[place + 1][1].name != size.name:
                stack.close()  # checkpoints of other sizes are not needed any more
                held.clear()
    lines = {name: values for name, values in lines.items() if any(value is not None for value in values)}
    return Curve(key, title, across, tuple(point for point, _, _ in works), "ms", lines)


def _opened(bench: Bench, case: Case, name: str, stack: ExitStack) -> Side | None:
    try:
        side = bench.open_side(case, name)
    except Unavailable:
        return None
    except Exception as error:
        bench.say(f"{case.key}: {name} {failure(error)}")
        return None
    if isinstance(side, Process):
        stack.callback(side.close)
    # what a side prepares once a text has grown long (a record, a compiled step) is ready when steps are timed
    short = bench.plan.lengths.short
    room = case.size.fields.get("n_positions", short + WARM) - short
    _ran(bench, name, side, replace(bench.plan, causal=case.size).rows(1, short, min(WARM, room)))
    return side


def _ran(bench: Bench, name: str, side: Side, work: Work) -> Ran | None:
    try:
        return side.run(work)
    except Unavailable:
        return None
    except (RuntimeError, ValueError, OSError) as error:
        bench.say(f"{name} {failure(error)}")
        return None


CURVES: dict[str, Callable[[Bench], Iterator[Curve]]] = {
    "context": context,
    "rows": rows,
}
