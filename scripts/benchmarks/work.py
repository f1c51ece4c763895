"""What a side is asked to do, and what came of it. No torch: these cross process boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Unavailable(Exception):
    """A side cannot do this here; the text says why."""


@dataclass(frozen=True)
class Setup:
    """A checkpoint as a side loads it."""

    folders: Mapping[str, Path]  # form ("transformers", "ctranslate2", "gguf", …) -> where it lies
    dtype: str = "float32"  # bfloat16, int8, int4, or the type of a GGUF file: BF16, F16, Q8_0, Q4_0
    device: str = "cpu"
    threads: int = 1
    encoder_decoder: bool = False
    cores: tuple[int, ...] = ()  # the CPUs that a side of its own process is pinned to; () leaves it as it is
    programs: Path | None = None  # the folder of llama.cpp's programs

    def folder(self, form: str) -> Path:
        """Where the checkpoint lies in a form. Raises Unavailable where it was not made."""
        if form not in self.folders:
            raise Unavailable(f"no checkpoint in the form of {form}")
        return self.folders[form]


@dataclass(frozen=True)
class Ask:
    """One prompt: its ids, how many tokens to write, and with which knobs (names as in GenerationConfig)."""

    prompt: tuple[int, ...]
    new: int
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def beams(self) -> int:
        return int(self.knobs.get("num_beams", 1))

    @property
    def samples(self) -> bool:
        return bool(self.knobs.get("do_sample", False))


@dataclass(frozen=True)
class Work:
    """Prompts to be continued, at most `width` of them at once."""

    asks: tuple[Ask, ...]
    width: int = 1
    scores: bool = False  # genctl: rank and entropy of each token too, as `genctl compare` wants them

    @property
    def samples(self) -> bool:
        """Whether any prompt is sampled."""
        return any(ask.samples for ask in self.asks)

    @property
    def new_tokens(self) -> int:
        """Tokens asked for, all prompts together."""
        return sum(ask.new for ask in self.asks)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ask.prompt) for ask in self.asks)

    def groups(self) -> Iterator[tuple[Ask, ...]]:
        """Neighbours with equal knobs, at most `width` at a time: what a padded batch can hold."""
        group: list[Ask] = []
        for ask in self.asks:
            if group and (len(group) == self.width or ask.knobs != group[0].knobs):
                yield tuple(group)
                group = []
            group.append(ask)
        if group:
            yield tuple(group)


@dataclass(frozen=True)
class Ran:
    """What a side made of a Work."""

    tokens: tuple[tuple[int, ...], ...]  # of each ask, prompts and padding not included; () where the side has none
    seconds: float
    first_s: float | None = None  # until every prompt had its first token, where the side can tell; one by one: summed
    peak: int | None = None  # bytes, where the side was asked for nothing else


class Side(Protocol):
    """A library that generates, with one checkpoint loaded.

    The constructor takes a Setup; it and `run` raise Unavailable, with the reason, for what the library cannot do.
    """

    def run(self, work: Work) -> Ran:
        """Do the work and time it; the device is idle at both ends of the clock."""
        ...


def checked(work: Work, ran: Ran) -> Ran:
    """Refuse a comparison of unlike work. Raises ValueError when a prompt got fewer or more tokens than asked."""
    asked = [ask.new for ask in work.asks]
    got = [len(tokens) for tokens in ran.tokens]
    if asked != got:
        raise ValueError(f"{asked} tokens were asked for, {got} came")
    return ran
