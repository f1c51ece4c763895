"""Readings in float64: what they compute, and that no copy of a model is made for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from genctl.parity.arithmetic import SLICE, Exact, Weights


def test_a_product_in_slices_is_that_of_the_rounded_weight() -> None:
    weight, x = torch.randn(9000, 512), torch.randn(1, 3, 512, dtype=torch.float64)
    with Exact(Weights([weight], torch.bfloat16)):
        found = F.linear(x, weight)
    torch.testing.assert_close(found, x @ weight.bfloat16().double().T)


def test_all_slices_are_widened_in_the_same_place() -> None:
    """Separate slices stayed in the heap of the C library: a head of 136 million numbers took another gigabyte."""
    weights = [torch.randn(9000, 512), torch.randn(300, 700), torch.randn(3, SLICE + 5)]
    with Exact(Weights(weights, torch.bfloat16)) as exact:
        for weight in weights:
            F.linear(torch.randn(1, 2, weight.shape[1], dtype=torch.float64), weight)
    assert sorted(space.numel() for space in exact._spaces.values()) == [SLICE + 5, SLICE + 5]
