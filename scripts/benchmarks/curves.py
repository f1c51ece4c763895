"""How cost grows: memory, the first token of a process, and a step as context, rows and vocabulary grow."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoints import Size, gpt2
from .rows import ALL, Case, Plan
from .sides import CTRANSLATE2, GENCTL, GENERATE, Process
from .table import Curve
from .work import Side, Unavailable, Work

CONTEXTS, ROWS = (16, 64, 256, 1024, 4096), (1, 2, 4, 8, 16, 32, 64)
VOCABULARIES = (1000, 8192, 32768, 50257, 131072, 262144)
STEPS, WARM = 16, 64  # steps that are timed at each point, and steps before the first

# what a person would write who wants one greedy continuation
PLAIN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt")
made = model.generate(**inputs, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :]), flush=True)
"""


@dataclass(frozen=True)
class Bench:
    """What the curves need of the outside."""

    open_side: Callable[[Case, str], Side]
    folder: Callable[[Size], Path]  # the transformers form of a checkpoint, made if need be
    plan: Plan
    rounds: int
    device: str
    quick: bool
    say: Callable[[str], None]


def memory(bench: Bench) -> Iterator[Curve]:
    """Peak memory of a fresh process: load, then one prompt; greedy search and beam search."""
    lengths = bench.plan.lengths
    lines: dict[str, list[float | None]] = {}
    for name in ALL:
        values: list[float | None] = []
        for beams in (1, 5):
            knobs = {"num_beams": beams} if beams > 1 else {}
            work = bench.plan.rows(1, lengths.long, lengths.new, knobs)
            values.append(_peak(bench, Case("memory", "", bench.plan.causal, work), name))
        if values[0] is not None:
            values.append(None if values[1] is None else values[1] / values[0])
            lines[name] = values
    title, across = "peak memory of a fresh process", f"{lengths.long}-token prompt, {lengths.new} new"
    yield Curve("memory", title, across, ("greedy", "beam 5", "beam 5 / greedy"), "MB", lines)


def _peak(bench: Bench, case: Case, name: str) -> float | None:
    try:
        side = bench.open_side(case, name)
    except Unavailable:
        return None
    assert isinstance(side, Process)
    try:
        side.run(case.work)
        bench.say(f"memory: {name}")
        return side.peak() / 1e6
    except Unavailable:
        return None
    finally:
        side.close()


def first_token(bench: Bench) -> Iterator[Curve]:
    """Seconds from the start of a process to its first token on standard output."""
    folder = str(bench.folder(bench.plan.causal))
    prompt = " ".join(f"w{token}" for token in bench.plan.prompt(bench.plan.lengths.short))
    plain = [sys.executable, "-c", PLAIN, folder, prompt]
    ours = [sys.executable, "-m", "genctl", "run", "-m", folder, "-n", "1", "--device", bench.device, prompt]
    found: dict[str, list[float]] = {GENCTL: [], "a plain script": []}
    for _ in range(bench.rounds + 1):  # the first fills the file cache
        found[GENCTL].append(_until_output(ours))
        found["a plain script"].append(_until_output(plain))
        bench.say("first token")
    ratios = [a / b for a, b in zip(found[GENCTL][1:], found["a plain script"][1:], strict=True)]
    lines: dict[str, list[float | None]] = {
        name: [statistics.median(times[1:]), min(times[1:]), max(times[1:])] for name, times in found.items()
    }
    lines["genctl / plain script"] = [statistics.median(ratios), min(ratios), max(ratios)]
    across = f"`genctl run`, and Auto classes with `generate()`; {bench.plan.lengths.short}-token prompt"
    yield Curve("first-token", "process start to first token", across, ("median", "least", "greatest"), "s", lines)


def _until_output(command: Sequence[str]) -> float:
    """Seconds until a command writes its first byte. Raises RuntimeError if it writes none."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
    if not first or process.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])} … ended with {process.returncode}: {said[-1] if said else ''}")
    return seconds


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


def vocabulary(bench: Bench) -> Iterator[Curve]:
    """A step of models that differ in their vocabulary alone: greedy search, and top-p 0.9."""
    points = VOCABULARIES[:3] if bench.quick else VOCABULARIES
    nucleus = {"do_sample": True, "top_k": 0, "top_p": 0.9, "seed": 7}
    cases: list[tuple[str, dict[str, Any]]] = [("greedy", {}), ("top-p 0.9", nucleus)]
    sizes = {
        point: replace(
            bench.plan.causal,
            name=f"{bench.plan.causal.name}-{point}",
            fields={**bench.plan.causal.fields, "vocab_size": point},
        )
        for point in points
    }
    for title, knobs in cases:
        works = [
            (point, size, replace(bench.plan, causal=size).rows(1, bench.plan.lengths.short, STEPS + 1, knobs))
            for point, size in sizes.items()
        ]
        key = "vocabulary" if not knobs else "vocabulary-topp"
        sides = (GENCTL, GENERATE, CTRANSLATE2)
        yield _steps(bench, key, f"a step as the vocabulary grows, {title}", "tokens known", works, sides)


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
                    ran = None if side is None else _ran(side, work)
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
    if isinstance(side, Process):
        stack.callback(side.close)
    # what a side prepares once a text has grown long (a record, a compiled step) is ready when steps are timed
    short = bench.plan.lengths.short
    room = case.size.fields.get("n_positions", short + WARM) - short
    _ran(side, replace(bench.plan, causal=case.size).rows(1, short, min(WARM, room)))
    return side


def _ran(side: Side, work: Work) -> Any:
    try:
        return side.run(work)
    except Unavailable:
        return None


CURVES: dict[str, Callable[[Bench], Iterator[Curve]]] = {
    "memory": memory,
    "first-token": first_token,
    "context": context,
    "rows": rows,
    "vocabulary": vocabulary,
}
