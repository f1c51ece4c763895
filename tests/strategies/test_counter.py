"""Counter-based noise: known bits, the same on every device, and the frequencies of the distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import genctl
from genctl.decode.types import RowsOfLane
from genctl.strategies import counter as module
from genctl.strategies.counter import counter, philox


def lane(seed: int, indices: list[int], position: int) -> RowsOfLane:
    return RowsOfLane(torch.Generator().manual_seed(seed), indices, max(indices) + 1, position)


def scores(seed: int, rows: int, size: int, keep: int = 0) -> Tensor:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2.0
    return logits.masked_fill(logits < logits.topk(keep).values[:, -1:], -torch.inf) if keep else logits


@pytest.mark.parametrize(
    ("block", "key", "words"),
    [  # the known answers of Random123 1.09, kat_vectors
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_bits_are_those_of_philox(block: Any, key: Any, words: tuple[int, ...]) -> None:
    assert philox(block, key) == words
    for array in (lambda word: np.array([word], np.int64), lambda word: torch.tensor([word])):
        found = philox(tuple(map(array, block)), tuple(map(array, key)))  # type: ignore[arg-type]
        assert tuple(int(word[0]) for word in found) == words


@pytest.mark.parametrize(("size", "keep"), [(7, 0), (1000, 0), (1001, 40), (4099, 3), (20_003, 0), (20_003, 9)])
def test_a_device_draws_what_the_host_draws(monkeypatch: pytest.MonkeyPatch, size: int, keep: int) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 3 * size)  # three rows at once
    for seed in (0, 5, 2**40 + 3, 2**63, 2**64 - 1):
        logits = scores(seed % 1000, 5, size, keep)
        lanes = [lane(seed, [0, 2], 7), lane(seed ^ 1, [0, 1, 4], 0)]
        places = [(each.seed, index, each.position) for each in lanes for index in each.indices]
        assert torch.equal(counter(logits, lanes), module._on_device(logits, places))


@pytest.mark.parametrize("size", [3, 8192, 8193, 40_001])
def test_the_word_of_a_token_is_that_of_its_block_in_any_vocabulary(size: int) -> None:
    """On the host, blocks are computed 2,048 at a time, or only those of a few tokens."""
    every = np.arange(size)
    words = module._words_of(every, size, 2**40 + 3, 5, 7)
    for token in {0, size // 2, max(size - 8193, 0), size - 1}:
        block = philox((token >> 2, 5, 7, 0), (3, 2**8))
        assert words[token] == block[token & 3]
    few = every[:: size // 3 * 2 + 1]
    assert np.array_equal(module._words_of(few, size, 2**40 + 3, 5, 7), words[few])


def test_a_draw_depends_on_its_place_alone() -> None:
    logits = scores(1, 4, 500)
    together = counter(logits, [lane(3, [0, 1, 2, 3], 9)])
    assert [counter(logits[[row]], [lane(3, [row], 9)]).item() for row in range(4)] == together.tolist()
    same = logits[:1].expand(64, -1)
    assert len(set(counter(same, [lane(3, list(range(64)), 9)]).tolist())) > 8  # by sequence
    assert len({counter(same[:1], [lane(3, [0], position)]).item() for position in range(64)}) > 8
    assert len({counter(same[:1], [lane(seed, [0], 9)]).item() for seed in range(64)}) > 8
    assert len({counter(same[:1], [lane(seed << 32, [0], 9)]).item() for seed in range(64)}) > 8


def test_frequencies_are_those_of_the_distribution() -> None:
    """Pearson's chi-square of 6000 draws; with 7 degrees of freedom one seed in a thousand exceeds 24.3."""
    p = np.array([0.3, 0.0, 0.2, 0.15, 0.15, 0.1, 0.05, 0.03, 0.02])
    logits = torch.tensor(p, dtype=torch.float32).log().expand(6000, -1)
    by_sequence = counter(logits, [lane(5, list(range(6000)), 0)])
    by_position = counter(logits, [lane(5, [0], position) for position in range(6000)])
    there = p > 0
    for drawn in (by_sequence, by_position):
        counts = np.array([Counter(drawn.tolist())[token] for token in range(len(p))])
        assert counts[1] == 0
        assert ((counts[there] - 6000 * p[there]) ** 2 / (6000 * p[there])).sum() < 24.3


def test_nothing_that_can_be_drawn_is_left_to_the_loop() -> None:
    assert counter(torch.full((1, 5), -torch.inf), [lane(0, [0], 0)]).tolist() == [0]
    assert counter(torch.full((1, 5), torch.nan), [lane(0, [0], 0)]).tolist() == [0]


def test_a_seed_keeps_its_text_from_version_to_version() -> None:
    (result,) = genctl.load("builtin:stories").generate(
        ["Once upon a time"], seed=3, do_sample=True, sampler="counter", max_new_tokens=12
    )
    assert result.text == ", there was a gentle kitten named Luna who lived beside a"
