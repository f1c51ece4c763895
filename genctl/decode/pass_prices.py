"""What a pass costs: over several tokens of one row, and beside the pass of another model.

A pass over a few tokens reads the weights once, as a step of one token does, so it costs hardly more. The prices are a
table that was measured once (docs/performance.md), not the times of this run: with it the number of drafted tokens
(`strategies.assisted`) is the same in every run of one machine. Where lanes are narrow (AVX2 and below, NEON) each
further token is dearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

Points = Sequence[tuple[int, float]]

# How the weights are held -> (tokens in a pass, its price in steps of one token). Between two points prices are linear,
# beyond the last they rise with the number of tokens.
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
    "torch": ((1, 1.0), (2, 1.6), (6, 2.2), (13, 3.4), (21, 4.0)),  # torch's products on the CPU
    "gpu": ((1, 1.0), (21, 1.2)),
    # weights that stay in the CPU's caches, of any type: each token is computed, and nothing is read from memory
    "cached": ((1, 1.0), (2, 1.06), (3, 1.2), (6, 1.6), (8, 2.0), (13, 2.75), (21, 4.0)),
}
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.6}
CACHED = 16e6  # bytes of weights that stay in the caches
# As the bytes of weights that are read in that time, what a layer and a pass take beside the products,
OVERHEAD = 1e6
# and what is done for a draft beside the pass that checks it.
DRAFT_OVERHEAD = 3e6
GAIN = 0.02  # of a token that a draft must promise: less is lost beside the passes
LEAST = 1.15  # the speed that drafts must give which are always right, or none is tried
MOST_TOKENS = 64  # in a pass that checks drafts


@dataclass(frozen=True)
class PassPrice:
    """The price of a model's passes."""

    form: str  # a key of `PRICES`
    step: float  # cost of a pass over one token; comparable between models
    experts: int = 1  # of a layer; 1: it has one MLP
    chosen: int = 1  # experts for each token

    @lru_cache(maxsize=1024)  # noqa: B019 — a model has one price
    def of(self, tokens: int) -> float:
        """A pass over `tokens` tokens of one row or of several, in steps of one token."""
        points = PRICES[self.form]
        (most, price) = points[-1]
        price *= tokens / most
        for (low, cheap), (high, dear) in pairwise(points):
            if tokens <= high:
                price = cheap + (dear - cheap) * (tokens - low) / (high - low)
                break
        if self.experts > self.chosen:  # the tokens of a pass choose experts of their own: so many are read
            share = 1.0 - self.chosen / self.experts
            price = max(price, self.experts / self.chosen * (1.0 - share**tokens))
        return price

    @property
    def draft_overhead(self) -> float:
        """What is done for a draft beside the pass that checks it, in steps of one token."""
        return DRAFT_OVERHEAD / self.step


class PassPlan:
    """What one pass reads and promises, as one lane after another adds its draft. Times are in steps of one token."""

    def __init__(self, price: PassPrice, rows: int, *, cached: bool) -> None:
        self.price, self.cached = price, cached
        self.rows = self.tokens = rows
        self.promised, self.added = float(rows), 0.0  # tokens to be written; time beside the model's own

    def best(self, promise: Sequence[float], cost: float = 0.0) -> int:
        """The number of drafted tokens that pays best, 0 if none does; each costs `cost` to draft.

        promise[d - 1]: how many of d tokens are expected to be right.
        """
        best, least = 0, self.rate(0, GAIN)
        if not promise or self.rate(1, promise[-1], cost) <= least:
            return 0  # not even if the whole draft cost no more than one token
        for count in range(1, min(len(promise), max(MOST_TOKENS - self.tokens, 0)) + 1):
            rate = self.rate(count, promise[count - 1], cost)
            if rate > least:
                least, best = rate, count
        return best

    def rate(self, count: int, right: float, cost: float = 0.0) -> float:
        """Tokens in the time of one step, with `count` more in the pass of which so many are right."""
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
    """Whether drafts that no setting turns on do not pay beside so many rows even if they are always right."""
    plan = PassPlan(price, rows, cached=True)
    count = plan.best([*map(float, range(1, MOST_TOKENS))])
    return plan.rate(count, count) < LEAST * plan.rate(0, 0)


def price_of(config: Any, form: str) -> PassPrice:
    """The prices of a model with this configuration, whose weights are held in `form`.

    A layer has about 12 H² weights, the head V H. A form without prices of its own has those of torch's products.
    """
    text = config.get_text_config(decoder=True)

    def size(name: str) -> int:
        value = getattr(text, name, None)
        return value if type(value) is int and value > 0 else 0

    hidden, layers = size("hidden_size"), size("num_hidden_layers")
    weights = 12 * layers * hidden**2 + size("vocab_size") * hidden
    experts = max(map(size, ("num_local_experts", "num_experts", "n_routed_experts")))
    chosen = max(size("num_experts_per_tok"), 1)
    stored = form.removeprefix("narrow ")
    read = weights * BYTES.get(stored, 4.0)
    if stored in BYTES and read < CACHED:
        form = "cached"
    return PassPrice(form if form in PRICES else "torch", read + (layers + 1) * OVERHEAD, max(experts, chosen), chosen)
