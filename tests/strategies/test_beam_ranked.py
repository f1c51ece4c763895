"""The best continuations of all rows are found without adding up the whole vocabulary of each."""

from __future__ import annotations

import pytest
import torch

from genctl.strategies import beam
from genctl.strategies.beam import ranked


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("size", [6, 300, 9000])
@pytest.mark.parametrize("kind", ["fine", "coarse", "forbidden"])
def test_they_are_those_of_topk_in_its_order(rows: int, size: int, kind: str) -> None:
    """`coarse` has equal sums, in torch's order; `forbidden` has fewer possible tokens than are requested."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        logprobs = (torch.randn(rows, size, generator=generator) * 2).log_softmax(-1)
        totals = torch.randn(rows, generator=generator) * 3
        if kind == "coarse":
            logprobs, totals = logprobs.bfloat16().float(), totals.round()
        elif kind == "forbidden":
            logprobs[:, 2:] = -torch.inf
        count = 2 * rows
        expected = (logprobs + totals[:, None]).flatten().topk(min(count, logprobs.numel()))
        values, places = ranked(logprobs, totals, count)
        assert torch.equal(values, expected.values)
        assert torch.equal(places, expected.indices)


def test_a_sum_that_rounding_makes_equal_to_one_left_out_is_left_to_torch() -> None:
    """With a total of -1000, the third best token's sum is the same float32 as that of the second."""
    logprobs = torch.full((2, 5000), -20.0)
    logprobs[0, :4] = torch.tensor([-0.5, -2.0, -2.000001, -2.000002])
    totals = torch.tensor([-1000.0, -1100.0])
    assert beam._ranked(logprobs, totals, 2) is None
    expected = (logprobs + totals[:, None]).flatten().topk(2)
    assert torch.equal(ranked(logprobs, totals, 2)[1], expected.indices)


def test_ordinary_rows_are_ranked_without_the_whole() -> None:
    """Otherwise nothing would be saved, and no other test would notice."""
    logprobs = torch.randn(4, 9000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert beam._ranked(logprobs, torch.tensor([0.0, -1.0, -2.0, -3.0]), 8) is not None
