"""What is measured: one function for each kind of work, one row of the table for each case."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from . import gguf_files, limit
from .checkpoints import SPECIAL, Size, deep, gpt2, qwen2, t5
from .commands import BUILTIN
from .sides import CONTINUOUS, CTRANSLATE2, GENCTL, GENERATE, LLAMA, UNDRAFTED
from .texts import TEXTS, excerpt, file_of_rows
from .work import Ask, Ran, Work

Figure = Literal["tokens/s", "tokens/s after the first", "s to the first token", "s", "MiB"]
Manner = Literal["session", "command", "fresh"]
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
    manner: Manner = "session"  # one process for all rounds; a command for each round; a process for each round
    equal: bool | None = (
        True  # whether genctl must write the tokens of generate(); None: other weights, so not compared
    )
    beside: int = 0  # of a command: other processes that keep a core busy meanwhile
    limited: bool = False  # whether reading weights and cache bounds it: one step after another
    other_dtypes: Mapping[str, str] = field(default_factory=dict)  # sides that take another type, said in the table
    targets: Mapping[str, float] = field(default_factory=dict)  # side -> least ratio

    def dtype_of(self, side: str) -> str:
        return self.other_dtypes.get(side, self.dtype)

    @property
    def less_is_better(self) -> bool:
        return not self.figure.startswith("tokens")

    def value(self, ran: Ran) -> float | None:
        """The case's figure; None where the side cannot tell."""
        if self.figure == "tokens/s":
            return self.work.new_tokens / ran.seconds
        if self.figure == "s":
            return ran.seconds
        if self.figure == "MiB":
            return None if ran.peak is None else ran.peak / 2**20
        if self.figure == "s to the first token":
            return ran.first_s
        if ran.first_s is None:
            return None
        return (self.work.new_tokens - len(self.work.asks)) / (ran.seconds - ran.first_s)

    def share(self, ran: Ran, bandwidth: float) -> float | None:
        """How much of what `bandwidth` (bytes a second) allows the steps after the first reach; None if not bounded."""
        steps = max(ask.new for ask in self.work.asks) - 1
        if not self.limited or ran.first_s is None or not steps:
            return None
        return limit.share(self.size, self.dtype, self.work, (ran.seconds - ran.first_s) / steps, bandwidth)

    def above_weights(self, mebibytes: float) -> float:
        """How much more memory than the weights, as a share of them."""
        return mebibytes * 2**20 / (limit.parameters(self.size) * limit.BYTES[self.dtype]) - 1


@dataclass(frozen=True)
class Lengths:
    """How much of everything: the table's own lengths, or short ones for a quick look."""

    new: int = 64
    new_large: int = 24  # of the larger checkpoint, whose steps take three times as long
    long: int = 512  # tokens of a long prompt
    short: int = 32
    source: int = 128
    text: int = 960  # tokens of a text that a checkpoint knows by heart
    prompts: int = 32  # of mixed lengths, from `mixed_in` tokens to `mixed_out`
    mixed_in: tuple[int, int] = (8, 256)
    mixed_out: tuple[int, int] = (8, 128)


QUICK = Lengths(new=16, new_large=8, prompts=16, mixed_in=(8, 96), mixed_out=(8, 32))


@dataclass(frozen=True)
class Plan:
    """What the cases are made of."""

    lengths: Lengths = Lengths()
    causal: Size = field(default_factory=gpt2)
    large: Size = field(default_factory=qwen2)
    seq2seq: Size = field(default_factory=t5)
    deep: Size = field(default_factory=deep)
    by_position: Size = field(  # as large as Qwen2.5-0.5B, with positions that can know a text
        default_factory=lambda: gpt2("gpt2-0.5b", n_layer=24, n_head=20, n_embd=1280)
    )

    def prompt(self, tokens: int, number: int = 0, size: Size | None = None) -> tuple[int, ...]:
        """A prompt of random ids; equal arguments give the same one."""
        luck = random.Random(f"{tokens} {number}")
        return tuple(luck.randrange(len(SPECIAL), (size or self.causal).vocabulary) for _ in range(tokens))

    def rows(
        self, count: int, tokens: int, new: int, knobs: Mapping[str, Any] | None = None, size: Size | None = None
    ) -> Work:
        """`count` prompts of `tokens` tokens each, all at once."""
        asks = (Ask(self.prompt(tokens, number, size), new, knobs or {}) for number in range(count))
        return Work(tuple(asks), count)

    def by_heart(self, key: str, knobs: Mapping[str, Any], count: int, size: Size) -> tuple[Size, Work]:
        """A checkpoint that writes one of `texts`, and the last tokens of it, which rows 2 tokens apart write."""
        new = (2 if key == "summary" or count > 1 else 6) * self.lengths.new
        text = excerpt(key, self.lengths.text, size.vocabulary, len(SPECIAL))
        ends = (len(text) - new - 2 * number for number in range(count))
        asks = tuple(Ask(text[:end], new, knobs) for end in ends)
        return _knowing(size, key, text), Work(asks, count)

    def rows_of_a_file(self, knobs: Mapping[str, Any], size: Size) -> tuple[Size, Work]:
        """A checkpoint that knows the rows of a file, and its rows, one after another.

        What it writes depends on the position alone: before a row lie tokens that nothing repeats.
        """
        text, places = file_of_rows(self.lengths.text, size.vocabulary, len(SPECIAL))
        before = [*range(size.vocabulary - len(text), size.vocabulary)]
        asks = tuple(Ask((*before[:begin], *text[begin:answer]), end - answer, knobs) for begin, answer, end in places)
        return _knowing(size, "rows", text), Work(asks)


def _knowing(size: Size, key: str, text: tuple[int, ...]) -> Size:
    """The size, knowing a text; another text is another checkpoint in a folder that is kept."""
    digest = hashlib.sha256(repr(text).encode()).hexdigest()[:8]
    return replace(size, name=f"{size.name}-{key}-{digest}", by_heart=text)


def decoding(plan: Plan) -> Iterator[Case]:
    """Greedy search with one row in each type, then with several rows; both checkpoints."""
    yield from _decoding(plan, "", "GPT-2 small", plan.causal, plan.lengths.new)
    yield from _decoding(plan, "qwen-", "Qwen2.5-0.5B", plan.large, plan.lengths.new_large)


def _decoding(plan: Plan, prefix: str, name: str, size: Size, new: int) -> Iterator[Case]:
    for count, dtype in (
        *((1, dtype) for dtype in ("float32", "bfloat16", "int8", "int4")),
        *((count, "float32") for count in (5, 8, 16)),
        (5, "bfloat16"),
        *((count, "int8") for count in (5, 16)),
    ):
        key, words = (f"rows{count}", f"{count} rows") if count > 1 else ("greedy", "greedy")
        quantised = dtype.startswith("int")
        yield Case(
            f"{prefix}{key}-{dtype}", f"{name} size, {words}, {dtype}", size,
            plan.rows(count, plan.lengths.short, new, size=size), dtype,
            ALL if dtype != "int4" else (GENCTL, GENERATE, LLAMA),
            equal=True if dtype == "float32" else None, limited=True,
            other_dtypes={GENERATE: "float32"} if quantised else {},  # it has neither 8 nor 4 bits
            targets=TARGETS.get(f"{key}-{dtype}", {}) if not prefix else {},
        )  # fmt: skip


def gguf(plan: Plan) -> Iterator[Case]:
    """The same GGUF file for genctl and llama.cpp, in the numbers that it holds."""
    for prefix, name, size, new in (
        ("", "GPT-2 small", plan.causal, plan.lengths.new),
        ("qwen-", "Qwen2.5-0.5B", plan.large, plan.lengths.new_large),
    ):
        kinds = tuple(kind for kind in gguf_files.TYPES if size.hidden % 256 == 0 or not kind.endswith("K"))
        for count, dtype in ((count, kind) for count in (1, 5) for kind in kinds):
            key, words = (f"rows{count}", f"{count} rows") if count > 1 else ("greedy", "greedy")
            work = plan.rows(count, plan.lengths.short, new, size=size)
            yield Case(
                f"{prefix}{key}-{dtype}", f"{name} size, {words}, a GGUF file of {dtype}", size, work, dtype,
                (GENCTL, LLAMA), equal=None, limited=True,
            )  # fmt: skip


def sampling(plan: Plan) -> Iterator[Case]:
    """One row, sampled from the most probable tokens."""
    knobs = {"do_sample": True, "top_k": 0, "top_p": 0.9, "seed": 1}
    work = plan.rows(1, plan.lengths.short, plan.lengths.new, knobs)
    title = "GPT-2 small size, top-p 0.9, float32"
    yield Case(
        "top-p", title, plan.causal, work, sides=(GENCTL, GENERATE, CTRANSLATE2), targets=TARGETS["top-p"]
    )  # fmt: skip


def reading(plan: Plan) -> Iterator[Case]:
    """A long prompt up to its first token."""
    long, sizes = plan.lengths.long, (("", "GPT-2 small", plan.causal), ("qwen-", "Qwen2.5-0.5B", plan.large))
    for start, name, size in sizes:
        for dtype in ("float32", "bfloat16", "int8", "int4", *gguf_files.TYPES):
            if dtype.endswith("K") and size.hidden % 256:
                continue
            of_file = dtype in gguf_files.TYPES
            yield Case(
                f"{start}prompt-{dtype}",
                f"{name} size, {long}-token prompt to the first token, {'a GGUF file of ' * of_file}{dtype}",
                size, plan.rows(1, long, 1, size=size), dtype,
                ALL if dtype in ("float32", "bfloat16") else (GENCTL, LLAMA),
                figure="s", equal=True if dtype == "float32" else None,
            )  # fmt: skip


def beams(plan: Plan) -> Iterator[Case]:
    """Beam search, causal and encoder-decoder."""
    lengths, sides = plan.lengths, (GENCTL, GENERATE, CTRANSLATE2)
    yield Case(
        "beam5-float32", f"GPT-2 small size, beam 5, {lengths.long}-token prompt, {lengths.new} new, float32",
        plan.causal, plan.rows(1, lengths.long, lengths.new, {"num_beams": 5}), sides=sides,
        targets=TARGETS["beam5-float32"],
    )  # fmt: skip
    yield Case(
        "beam5-command", f"beam 5, {lengths.long}-token prompt, from the shell, start to end, GPT-2 small size",
        plan.causal, plan.rows(1, lengths.long, lengths.new, {"num_beams": 5}), sides=sides[:2],
        manner="command", figure="s", targets=TARGETS["beam5-command"],
    )  # fmt: skip
    source = plan.prompt(lengths.source, size=plan.seq2seq)
    work = Work((Ask(source, lengths.new, {"num_beams": 4}),))
    title = f"T5-small size, beam 4, {lengths.source} in, {lengths.new} new, float32"
    yield Case("t5-beam4", title, plan.seq2seq, work, sides=sides, targets=TARGETS["t5-beam4"])


def drafts(plan: Plan) -> Iterator[Case]:
    """Drafts of what was written before, in texts that a checkpoint knows by heart, and by a tenth of a model."""
    lengths, sides = plan.lengths, (GENCTL, UNDRAFTED)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 1}
    small, large = ("", "GPT-2 small size", plan.causal), ("large-", "24 layers of 1,280", plan.by_position)
    titles = {**{key: words for key, (words, *_) in TEXTS.items()}, "rows": "rows of one file"}
    for (key, words), (prefix, name, base), (count, dtype, knobs) in itertools.product(
        titles.items(),
        (small, large),
        (
            *((1, dtype, {}) for dtype in ("float32", "int8", "int4")),
            (1, "float32", sampled), (8, "float32", {}), (8, "int8", {}),
        ),
    ):  # fmt: skip
        if (prefix and (knobs or dtype == "int4")) or (count > 1 and (prefix or key == "rows")):
            continue
        manner, at_once = "-sampled" if knobs else "", f"{count} row{'s' * (count > 1)} at once"
        size, work = (
            plan.rows_of_a_file({"draft": True, **knobs}, base)
            if key == "rows"
            else plan.by_heart(key, {"draft": True, **knobs}, count, base)
        )
        yield Case(
            f"{prefix}drafts-{key}-{count}-{dtype}{manner}",
            f"{name}, drafts in {words}, {at_once}, {dtype}{manner.replace('-', ', ')}",
            size, work, dtype, sides,
            figure="tokens/s after the first", equal=None,
        )  # fmt: skip
    work = plan.rows(1, lengths.short, lengths.new, {"assistant_early_exit": 2}, plan.deep)
    title = f"{plan.deep.layers} layers of {plan.deep.hidden}, early exit after 2, float32"
    yield Case("early-exit", title, plan.deep, work, sides=(GENCTL, GENERATE, UNDRAFTED))


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
    yield Case("mixed", title, plan.causal, Work(asks, 16), sides=sides, targets=TARGETS["mixed"])


def compare(plan: Plan) -> Iterator[Case]:
    """Several strategies on one long prompt; the others take them one after another."""
    strategies: Sequence[dict[str, Any]] = (
        {},
        {"do_sample": True, "top_k": 0, "top_p": 0.9, "seed": 1},
        {"do_sample": True, "top_k": 50, "temperature": 0.7, "seed": 2},
        {"repetition_penalty": 1.2},
    )
    prompt = plan.prompt(plan.lengths.long)
    work = Work(tuple(Ask(prompt, plan.lengths.new, knobs) for knobs in strategies), 4, scores=True)
    title = f"compare: 4 strategies, {plan.lengths.long}-token prompt, float32"
    yield Case("compare", title, plan.causal, work, sides=(GENCTL, GENERATE), targets=TARGETS["compare"])


def processes(plan: Plan) -> Iterator[Case]:
    """What a process costs: its first token, its memory, a whole run. generate() is a plain script there."""
    lengths, pair = plan.lengths, (GENCTL, GENERATE)
    first: Figure = "s to the first token"
    builtin, one = Size(BUILTIN, "builtin"), plan.rows(1, lengths.short, 1)
    yield Case(
        "first-token-builtin", f"start of the process to the first token, {BUILTIN}", builtin, one,
        manner="command", sides=pair, figure=first, equal=None,
    )  # fmt: skip
    yield Case(
        "first-token", "start of the process to the first token, GPT-2 small size", plan.causal, one,
        manner="command", sides=pair, figure=first,
    )  # fmt: skip
    yield Case(
        "run", f"{lengths.new} tokens from the shell, start to end, GPT-2 small size", plan.causal,
        plan.rows(1, lengths.short, lengths.new), manner="command", sides=pair, figure="s",
    )  # fmt: skip
    yield Case(
        "busy", f"{lengths.new} tokens from the shell beside a busy process, start to end, {BUILTIN}", builtin,
        plan.rows(1, lengths.short, lengths.new), manner="command", sides=pair, figure="s", equal=None, beside=1,
    )  # fmt: skip
    for prefix, name, size, new in (
        ("", "GPT-2 small", plan.causal, lengths.new),
        ("qwen-", "Qwen2.5-0.5B", plan.large, lengths.new_large),
    ):
        work = plan.rows(1, lengths.short, new, size=size)
        title = f"peak memory, {name} size, greedy, float32 (weights + …%)"
        yield Case(f"{prefix}memory", title, size, work, manner="fresh", figure="MiB")


# what a row is meant to reach: side -> least ratio
TARGETS: dict[str, dict[str, float]] = {
    "greedy-float32": {GENERATE: 2.3, CTRANSLATE2: 1.0, LLAMA: 0.95},
    "greedy-bfloat16": {GENERATE: 3.3},
    "rows5-float32": {CTRANSLATE2: 1.0, LLAMA: 1.0},
    "rows16-float32": {GENERATE: 2.7, CTRANSLATE2: 1.0, LLAMA: 1.0},
    "beam5-float32": {GENERATE: 5.0, CTRANSLATE2: 1.0},
    "beam5-command": {GENERATE: 5.0},
    "top-p": {GENERATE: 2.0},
    "t5-beam4": {GENERATE: 2.7, CTRANSLATE2: 1.0},
    "mixed": {GENERATE: 3.8},
    "compare": {GENERATE: 5.0},
}
KINDS = (decoding, gguf, sampling, reading, beams, drafts, mixed, compare, processes)


def cases(plan: Plan, only: Sequence[str] = ()) -> list[Case]:
    """Every case in the order of the table, or those whose key begins with one of `only`."""
    found = [case for kind in KINDS for case in kind(plan)]
    return [case for case in found if not only or any(case.key.startswith(key) for key in only)]
