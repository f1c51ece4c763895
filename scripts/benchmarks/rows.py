"""What is measured: one function for each kind of work, one row of the table for each case."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .checkpoints import SPECIAL, Size, gpt2, t5
from .sides import CONTINUOUS, CTRANSLATE2, GENCTL, GENERATE, LLAMA
from .work import Ask, Ran, Work

Figure = Literal["tokens/s", "prompt tokens/s", "tokens/s after the first"]
ALL = (GENCTL, GENERATE, CTRANSLATE2, LLAMA)


@dataclass(frozen=True)
class Case:
    """One row: the same work for every side."""

    key: str  # for --only
    title: str
    size: Size
    work: Work
    dtype: str = "float32"
    sides: tuple[str, ...] = ALL
    figure: Figure = "tokens/s"
    equal: bool | None = False  # whether genctl must write the tokens of generate(); None: its luck is another
    baseline: Work | None = None  # what the work is to be compared with, side by side: the same without sampling
    other_dtypes: Mapping[str, str] = field(default_factory=dict)  # sides that take another type, said in the table
    targets: Mapping[str, float] = field(default_factory=dict)  # side -> least ratio

    def dtype_of(self, side: str) -> str:
        return self.other_dtypes.get(side, self.dtype)

    def speed(self, ran: Ran) -> float | None:
        """The case's figure; None where the side cannot tell when the first token came."""
        if self.figure == "prompt tokens/s":
            return self.work.prompt_tokens / ran.seconds
        if self.figure == "tokens/s":
            return self.work.new_tokens / ran.seconds
        if ran.first_s is None:
            return None
        return (self.work.new_tokens - len(self.work.asks)) / (ran.seconds - ran.first_s)


@dataclass(frozen=True)
class Lengths:
    """How much of everything: the table's own lengths, or short ones for a quick look."""

    new: int = 64
    long: int = 512  # tokens of a long prompt
    short: int = 32
    source: int = 128
    prompts: int = 32  # of mixed lengths, from `mixed_in` tokens to `mixed_out`
    mixed_in: tuple[int, int] = (8, 256)
    mixed_out: tuple[int, int] = (8, 128)


QUICK = Lengths(new=16, prompts=16, mixed_in=(8, 96), mixed_out=(8, 32))


@dataclass(frozen=True)
class Plan:
    """What the cases are made of."""

    lengths: Lengths = Lengths()
    causal: Size = field(default_factory=gpt2)
    seq2seq: Size = field(default_factory=t5)

    def prompt(self, tokens: int, number: int = 0, size: Size | None = None) -> tuple[int, ...]:
        """A prompt of random ids; equal arguments give the same one."""
        luck = random.Random(f"{tokens} {number}")
        return tuple(luck.randrange(len(SPECIAL), (size or self.causal).vocabulary) for _ in range(tokens))

    def rows(self, count: int, tokens: int, new: int, knobs: Mapping[str, Any] | None = None) -> Work:
        """`count` prompts of `tokens` tokens each, all at once."""
        asks = (Ask(self.prompt(tokens, number), new, knobs or {}) for number in range(count))
        return Work(tuple(asks), count)


def greedy(plan: Plan) -> Iterator[Case]:
    """One prompt of 32 tokens."""
    work = plan.rows(1, plan.lengths.short, plan.lengths.new)
    title = f"greedy, {plan.lengths.short}-token prompt"
    size = plan.causal
    float32 = {GENERATE: 2.3, CTRANSLATE2: 1.0, LLAMA: 0.95}
    yield Case("greedy-float32", f"{title}, float32", size, work, equal=True, targets=float32)
    yield Case("greedy-bfloat16", f"{title}, bfloat16", size, work, "bfloat16", targets={GENERATE: 3.3})
    yield Case("greedy-int8", f"{title}, int8", size, work, "int8", other_dtypes={GENERATE: "float32"})


def several(plan: Plan) -> Iterator[Case]:
    """Prompts side by side."""
    for count in (5, 16):
        work = plan.rows(count, plan.lengths.short, plan.lengths.new)
        targets = {GENERATE: 2.7} if count == 16 else {}
        float32 = {**targets, CTRANSLATE2: 1.0, LLAMA: 1.0}
        yield Case(f"rows{count}-float32", f"{count} rows, float32", plan.causal, work, equal=True, targets=float32)
        yield Case(f"rows{count}-bfloat16", f"{count} rows, bfloat16", plan.causal, work, "bfloat16", targets=targets)


def long(plan: Plan) -> Iterator[Case]:
    """A long prompt: reading it, and writing after it."""
    tokens, size = plan.lengths.long, plan.causal
    behind = {CTRANSLATE2: 1.0}
    yield Case(
        "prefill-float32", f"prefill {tokens}, float32", size, plan.rows(1, tokens, 1), figure="prompt tokens/s",
        equal=True, targets=behind,
    )  # fmt: skip
    yield Case(
        "decode-float32", f"decode after a {tokens}-token prompt, float32", size,
        plan.rows(1, tokens, plan.lengths.new), figure="tokens/s after the first", equal=True,
        targets={GENERATE: 2.3, **behind},
    )  # fmt: skip


def beams(plan: Plan) -> Iterator[Case]:
    """Beam search, causal and encoder-decoder."""
    tokens, sides = plan.lengths.long, (GENCTL, GENERATE, CTRANSLATE2)
    for dtype in ("float32", "bfloat16"):
        full = dtype == "float32"
        yield Case(
            f"beam5-{dtype}", f"beam 5, {tokens}-token prompt, {plan.lengths.new} new, {dtype}", plan.causal,
            plan.rows(1, tokens, plan.lengths.new, {"num_beams": 5}), dtype, sides, equal=full,
            targets={GENERATE: 5.0, CTRANSLATE2: 1.0} if full else {},
        )  # fmt: skip
    source = plan.prompt(plan.lengths.source, size=plan.seq2seq)
    work = Work((Ask(source, plan.lengths.new, {"num_beams": 4}),))
    title = f"T5-small size, beam 4, {plan.lengths.source} in, {plan.lengths.new} new, float32"
    yield Case(
        "t5-beam4", title, plan.seq2seq, work, sides=sides, equal=True, targets={GENERATE: 2.7, CTRANSLATE2: 1.0}
    )


def sampling(plan: Plan) -> Iterator[Case]:
    """Sampling, with greedy search beside it: what a draw costs."""
    nucleus: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 0.9, "seed": 7}
    cases: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
        ("topp", "top-p 0.9", nucleus, (1, 16)),
        ("topk-topp", "top-k 50, top-p 0.9", {**nucleus, "top_k": 50}, (1, 16)),
        ("topp-inverse-cdf", 'top-p 0.9, sampler = "inverse-cdf"', {**nucleus, "sampler": "inverse-cdf"}, (1, 16)),
    ]
    for key, title, knobs, counts in cases:
        plain = "sampler" not in knobs  # the others draw in their one way, whatever genctl does
        for count in counts:
            lengths = plan.lengths
            yield Case(
                f"{key}-{count}", f"{title}, {count} row{'s' * (count > 1)}, float32", plan.causal,
                plan.rows(count, lengths.short, lengths.new, knobs),
                sides=(GENCTL, GENERATE, CTRANSLATE2) if plain else (GENCTL, GENERATE),
                equal=True if plain and count == 1 else None,
                baseline=plan.rows(count, lengths.short, lengths.new),
                targets={GENERATE: 2.5} if key == "topp" else {},
            )  # fmt: skip


def mixed(plan: Plan) -> Iterator[Case]:
    """Prompts of mixed lengths, in the order in which they come, 16 at once."""
    lengths, luck = plan.lengths, random.Random(0)
    asks = tuple(
        Ask(plan.prompt(luck.randint(*lengths.mixed_in), number), luck.randint(*lengths.mixed_out))
        for number in range(lengths.prompts)
    )
    (shortest, longest), (few, many) = lengths.mixed_in, lengths.mixed_out
    title = f"{lengths.prompts} prompts, {shortest}-{longest} in, {few}-{many} out, batch 16, float32"
    sides = (GENCTL, GENERATE, CTRANSLATE2, LLAMA, CONTINUOUS)
    yield Case("mixed", title, plan.causal, Work(asks, 16), sides=sides, equal=True, targets={GENERATE: 3.8})


def compare(plan: Plan) -> Iterator[Case]:
    """Several strategies on one long prompt; the others take them one after another."""
    strategies: Sequence[dict[str, Any]] = (
        {},
        {"do_sample": True, "top_k": 0, "top_p": 0.9, "seed": 1},
        {"do_sample": True, "top_k": 50, "temperature": 0.7, "seed": 2},
        {"repetition_penalty": 1.2},
    )
    with_beam = (*strategies[:3], {"num_beams": 5})
    prompt = plan.prompt(plan.lengths.long)
    title = f"compare: 4 strategies, {plan.lengths.long}-token prompt"
    for key, name, chosen, targets in (
        ("compare", f"{title}, float32", strategies, {GENERATE: 5.0}),
        ("compare-beam", f"{title}, beam 5 among them, float32", with_beam, {}),
    ):
        work = Work(tuple(Ask(prompt, plan.lengths.new, knobs) for knobs in chosen), 4, scores=True)
        yield Case(key, name, plan.causal, work, sides=(GENCTL, GENERATE), equal=True, targets=targets)


KINDS = (greedy, several, long, beams, sampling, mixed, compare)


def cases(plan: Plan, only: Sequence[str] = ()) -> list[Case]:
    """Every case in the order of the table, or those whose key begins with one of `only`."""
    found = [case for kind in KINDS for case in kind(plan)]
    return [case for case in found if not only or any(case.key.startswith(key) for key in only)]
