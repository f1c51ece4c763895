"""Integers 0..999999 and their English words, with the split into training and held-out numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

LIMIT = 1_000_000
HELD_OUT_FROM = 10_000
HELD_OUT_ONE_IN = 20

_UNIT_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
UNITS = tuple(_UNIT_WORDS.split())
TENS = tuple(_TENS_WORDS.split())


def below_thousand(number: int) -> list[str]:
    """Words for 1..999; nothing at all for 0."""
    words: list[str] = []
    hundreds, rest = divmod(number, 100)
    if hundreds:
        words += [UNITS[hundreds], "hundred"]
    if rest >= 20:
        words.append(TENS[rest // 10 - 2])
        rest %= 10
    if rest:
        words.append(UNITS[rest])
    return words


def to_words(number: int) -> str:
    """English words without "and", hyphens or commas: 1207 is "one thousand two hundred seven"."""
    if not 0 <= number < LIMIT:
        raise ValueError(f"number out of range: {number}")
    if number == 0:
        return "zero"
    thousands, rest = divmod(number, 1000)
    words = [*below_thousand(thousands), "thousand"] if thousands else []
    return " ".join(words + below_thousand(rest))


def is_held_out(number: int) -> bool:
    """A fixed hash rule, so that no seed can move a number from one side to the other.

    Numbers below 10000 and multiples of 1000 are always training numbers: there are few of them
    and each one is its own case.
    """
    if number < HELD_OUT_FROM or number % 1000 == 0:
        return False
    digest = hashlib.sha256(str(number).encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def held_out_numbers(count: int, seed: int) -> list[int]:
    """`count` different held-out numbers in a random but fixed order."""
    candidates = [number for number in range(HELD_OUT_FROM, LIMIT) if is_held_out(number)]
    return random.Random(seed).sample(candidates, count)


def _candidate(generator: random.Random) -> int:
    """One number; short and round ones come far more often than their share of the range."""
    kind = generator.random()
    if kind < 0.12:
        return generator.randrange(1_000)
    if kind < 0.24:
        return generator.randrange(1_000, 10_000)
    if kind < 0.29:
        return 1_000 * generator.randrange(1, 1_000)
    if kind < 0.55:
        # Zeros in random places: these are the numbers whose words leave parts out.
        length = generator.randint(1, 6)
        zero_share = generator.choice((0.4, 0.7))
        digits = [0 if generator.random() < zero_share else generator.randrange(10) for _ in range(length)]
        return int("".join(map(str, digits)))
    if kind < 0.70:
        return generator.randrange(10_000, 100_000)
    return generator.randrange(100_000, LIMIT)


def training_numbers(seed: int) -> Iterator[int]:
    """An endless seeded stream of training numbers."""
    generator = random.Random(seed)
    while True:
        number = _candidate(generator)
        if not is_held_out(number):
            yield number
