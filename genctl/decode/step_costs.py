"""The cost of a step, estimated from its work: how many threads have enough to do, and the price of several tokens.

A second thread helps only if both have enough to do. In a small model, threads wait for each other longer than they
compute.

A pass over a few tokens reads the weights once, as a step of one token does, so it costs hardly more. Prices come from
a table that was measured once (docs/performance.md), not from the times of this run, so the number of drafted tokens
(`strategies.assisted`) is the same in every run on one machine. With narrow SIMD (AVX2 and below, NEON) each further
token costs more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from genctl.errors import count, size

# -- threads -----------------------------------------------------------------------------------------------------------

TEXT = 32  # rows to assume for each text when whole texts are read
SHARE = 20 << 20  # bytes of weights that a thread reads in about 1 ms; a further thread costs some µs per product
LEAST = 5 * SHARE  # the least work for a second thread: two threads that wait for each other can be costly
_ROWS = 5  # so many rows take as long to multiply as the weights take to read
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torch reads them in this order


def cores() -> int:
    """The number of cores that this process may use, by its affinity and its cgroup's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(allowed, int(quota() or allowed)), 1)


def from_environment() -> tuple[int, str] | None:
    """The number of threads that an environment variable sets, and the variable's name."""
    for name in _VARIABLES:
        value = os.environ.get(name, "").partition(",")[0].strip()
        if value.isdecimal() and int(value):
            return int(value), name
    return None


def for_step(weights: int, rows: int) -> int:
    """The number of threads that have enough work in a forward pass of `rows` rows through `weights` bytes."""
    work = int(weights * (1 + rows / _ROWS))
    return work // SHARE if work >= LEAST else 1


def set_threads(number: int) -> None:
    """Set torch's number of threads. Only this function does."""
    import torch

    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


class Threads:
    """The number of threads of a job.

    `given` is the knob `threads`. Without it an environment variable decides, and without either the work and the cores
    (a worker has a `share` of them). Ranks keep the number that their launcher has set: all must compute alike.
    """

    def __init__(self, given: int | None = None, *, share: int | None = None) -> None:
        self.number: int | None = None  # None: torch's own
        self.reason = ""
        self.fixed = True
        self._share = share
        variable = from_environment() if share is None else None
        if given is not None:
            self.number, self.reason = given, "as set"
        elif variable is not None:
            self.number, self.reason = variable
        elif share is None and "WORLD_SIZE" in os.environ:
            self.reason = "one of several ranks"
        else:
            self.fixed = False

    def apply(self, weights: int, rows: int = 1, *, device: str = "cpu", recorded: int | None = None) -> None:
        """Set torch's threads for steps of this many rows. `recorded`: the number that an output was begun with.

        On a device other than the CPU, torch keeps its own number unless one is set or recorded.
        """
        if self.fixed:
            pass
        elif recorded is not None:
            self.number, self.reason = recorded, "as the output was begun"
        elif device != "cpu":
            self.number, self.reason = None, f"torch's own beside {device}"
        else:
            there = self._share or cores()
            self.number = min(for_step(weights, rows), there)
            self.reason = f"{count(there, 'core')}, {size(weights)} of weights, {count(rows, 'row')} at a step"
        if self.number is not None:
            set_threads(self.number)

    @property
    def note(self) -> str:
        """What was chosen and why, for --verbose."""
        import torch

        return f"threads: {self.number or torch.get_num_threads()} ({self.reason})"


def quota(system: Path = Path("/")) -> float | None:
    """The cores that this process's cgroup (version 2) and those above it allow; None without a limit."""
    limits = []
    try:
        groups = (system / "proc/self/cgroup").read_text("utf-8").splitlines()
        path = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), None)
        root = system / "sys/fs/cgroup"
        for folder in () if path is None else (root / path, *(root / path).parents):
            if (folder / "cpu.max").exists():
                allowed, period = (folder / "cpu.max").read_text("ascii").split()
                limits += [int(allowed) / int(period)] if allowed != "max" else []
            if folder == root:
                break
    except (OSError, ValueError):
        return None
    return min(limits, default=None)


# -- passes over several tokens, and beside another model's passes -----------------------------------------------------

Points = Sequence[tuple[int, float]]

# How the weights are stored -> (tokens in a pass, its price in steps of one token). Between two points prices are
# linear; beyond the last they are proportional to the number of tokens.
PRICES: dict[str, Points] = {
    "float32": ((1, 1.0), (6, 1.17), (8, 1.37), (10, 1.5), (13, 1.68), (21, 2.2)),
    "bfloat16": ((1, 1.0), (2, 1.05), (6, 1.45), (8, 1.65), (12, 2.0), (13, 2.2), (21, 2.8)),
    "float16": ((1, 1.0), (2, 1.05), (6, 1.38), (8, 1.6), (13, 2.15), (21, 3.0)),
    "int8": ((1, 1.0), (2, 1.08), (6, 1.42), (8, 1.7), (13, 2.15), (21, 3.0)),
    "int4": ((1, 1.0), (4, 1.35), (8, 1.9), (13, 2.7), (21, 3.9)),
    "narrow float32": ((1, 1.0), (2, 1.03), (5, 1.18), (8, 1.45), (13, 2.0), (21, 2.85), (32, 4.1), (64, 6.5)),
    "narrow bfloat16": ((1, 1.0), (2, 1.1), (5, 1.45), (8, 1.85), (13, 2.6), (21, 4.2)),
    "narrow float16": ((1, 1.0), (2, 1.1), (5, 1.4), (8, 1.8), (13, 2.55), (21, 4.1)),
    "narrow int8": ((1, 1.0), (2, 1.38), (4, 1.57), (6, 2.1), (8, 2.6), (13, 4.1), (21, 6.2)),
    "narrow int4": ((1, 1.0), (2, 1.3), (4, 1.66), (6, 2.2), (8, 2.7), (13, 4.1), (21, 6.2)),
    "torch": ((1, 1.0), (2, 1.6), (6, 2.2), (13, 3.4), (21, 4.0)),  # torch's matrix products on the CPU
    "gpu": ((1, 1.0), (21, 1.2)),
    # weights of any type that stay in the CPU's caches: nothing is read from memory, so every token costs arithmetic
    "cached": ((1, 1.0), (2, 1.06), (3, 1.2), (6, 1.6), (8, 2.0), (13, 2.75), (21, 4.0)),
}
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.6}
CACHED = 16e6  # bytes of weights that stay in the caches
# Overheads, as the bytes of weights that are read in the same time: of each layer and of a pass beside the products,
OVERHEAD = 1e6
# and of a draft beside the pass that verifies it.
DRAFT_OVERHEAD = 3e6
GAIN = 0.02  # tokens that a draft must gain at least: a smaller gain is lost beside the passes
LEAST_GAIN = 1.15  # the speed-up that drafts must give if they are always right; otherwise none is tried
MOST_TOKENS = 64  # in a pass that verifies drafts


@dataclass(frozen=True)
class PassPrice:
    """The price of a model's passes."""

    form: str  # a key of `PRICES`
    step: float  # cost of a pass over one token; comparable between models
    experts: int = 1  # in each layer; 1: a single MLP
    chosen: int = 1  # experts for each token

    @lru_cache(maxsize=1024)  # noqa: B019 — a model has one price
    def of(self, tokens: int) -> float:
        """The price of a pass over `tokens` tokens, of one row or of several, in steps of one token."""
        points = PRICES[self.form]
        (most, price) = points[-1]
        price *= tokens / most
        for (low, cheap), (high, dear) in pairwise(points):
            if tokens <= high:
                price = cheap + (dear - cheap) * (tokens - low) / (high - low)
                break
        if self.experts > self.chosen:  # each token chooses its own experts: the expected number that are read
            share = 1.0 - self.chosen / self.experts
            price = max(price, self.experts / self.chosen * (1.0 - share**tokens))
        return price

    @property
    def draft_overhead(self) -> float:
        """The overhead of a draft beside the pass that verifies it, in steps of one token."""
        return DRAFT_OVERHEAD / self.step


class PassPlan:
    """The tokens and the expected gain of one pass, as lanes add their drafts. Times are in steps of one token."""

    def __init__(self, price: PassPrice, rows: int, *, cached: bool) -> None:
        self.price, self.cached = price, cached
        self.rows = self.tokens = rows
        self.promised, self.added = float(rows), 0.0  # expected new tokens; time beside the model's own

    def best(self, promise: Sequence[float], cost: float = 0.0) -> int:
        """The number of drafted tokens that pays best, 0 if none does; each costs `cost` to draft.

        promise[d - 1]: how many of d drafted tokens are expected to be accepted.
        """
        best, least = 0, self.rate(0, GAIN)
        if not promise or self.rate(1, promise[-1], cost) <= least:
            return 0  # it would not pay even if the whole draft cost no more than one token
        for drafted in range(1, min(len(promise), max(MOST_TOKENS - self.tokens, 0)) + 1):
            rate = self.rate(drafted, promise[drafted - 1], cost)
            if rate > least:
                least, best = rate, drafted
        return best

    def rate(self, count: int, right: float, cost: float = 0.0) -> float:
        """New tokens in the time of one step, if the pass has `count` more drafted tokens and `right` are accepted."""
        added = self.added + (cost * count + self.price.draft_overhead if count else 0.0)
        return (self.promised + right) / (self.price.of(self.tokens + count if self.cached else 1) + added)

    def take(self, promise: Sequence[float], cost: float = 0.0) -> None:
        """Add a draft of `len(promise)` tokens."""
        count = len(promise)
        self.tokens += count
        self.promised += promise[-1]
        self.added += cost * count + self.price.draft_overhead


@lru_cache(maxsize=256)
def never_pays(price: PassPrice, rows: int) -> bool:
    """Whether drafts do not pay with so many rows even if all are accepted. For drafts that no setting asks for."""
    plan = PassPlan(price, rows, cached=True)
    count = plan.best([*map(float, range(1, MOST_TOKENS))])
    return plan.rate(count, count) < LEAST_GAIN * plan.rate(0, 0)


def price_of(config: Any, form: str) -> PassPrice:
    """The prices of a model with this configuration and weights stored in `form`.

    A layer has about 12 H² weights, the head V H. A form without prices of its own has those of "torch".
    """
    text = config.get_text_config(decoder=True)

    def field(name: str) -> int:
        value = getattr(text, name, None)
        return value if type(value) is int and value > 0 else 0

    hidden, layers = field("hidden_size"), field("num_hidden_layers")
    weights = 12 * layers * hidden**2 + field("vocab_size") * hidden
    experts = max(map(field, ("num_local_experts", "num_experts", "n_routed_experts")))
    chosen = max(field("num_experts_per_tok"), 1)
    stored = form.removeprefix("narrow ")
    read = weights * BYTES.get(stored, 4.0)
    if stored in BYTES and read < CACHED:
        form = "cached"
    return PassPrice(form if form in PRICES else "torch", read + (layers + 1) * OVERHEAD, max(experts, chosen), chosen)
