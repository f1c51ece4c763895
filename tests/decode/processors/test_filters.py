"""Filters without a sort: they remove exactly the tokens that transformers' own remove."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as theirs

from genctl.decode.processors import Processor, filters
from genctl.decode.processors.build import build
from genctl.decode.processors.filters import Filter
from genctl.decode.processors.trace import run_checked, run_traced
from tests.decode.processors.plain import material

# (share, tokens that stay at least) -> the filter's setting, and transformers' own filter
KINDS: dict[str, Callable[[float, int], tuple[float, Processor]]] = {
    "top_k": lambda share, least: (
        k := max(int(1 + 60 * share), least),
        theirs.TopKLogitsWarper(k, min_tokens_to_keep=least),
    ),
    "top_p": lambda share, least: (share, theirs.TopPLogitsWarper(share, min_tokens_to_keep=least)),
    "min_p": lambda share, least: (share, theirs.MinPLogitsWarper(share, min_tokens_to_keep=least)),
    "typical_p": lambda share, least: (share, theirs.TypicalLogitsWarper(share, min_tokens_to_keep=least)),
    "epsilon_cutoff": lambda share, least: (share / 5, theirs.EpsilonLogitsWarper(share / 5, min_tokens_to_keep=least)),
    "eta_cutoff": lambda share, least: (share / 2, theirs.EtaLogitsWarper(share / 2, min_tokens_to_keep=least)),
}
NARROW = ("top_k", "top_p", "min_p", "typical_p")  # those that decide about a row themselves


def made(kind: str, setting: float, least: int) -> Filter:
    context = SimpleNamespace(min_tokens_to_keep=least, half=False, device="cpu")
    found: Filter = getattr(filters, kind)(context, setting)
    return found


def agree(kind: str, share: float, least: int, scores: Tensor) -> None:
    setting, exact = KINDS[kind](share, least)
    history = torch.zeros(len(scores), 1, dtype=torch.long)
    expected = exact(history, scores.clone())
    before = scores.clone()
    ours = made(kind, setting, least)
    for processor in (ours, ours.exact):
        output = processor(history, scores)
        assert output.dtype == expected.dtype
        assert torch.equal(output, expected)
        assert torch.equal(scores, before), "written in place"


def certain(row: list[float]) -> bool:
    return max(row) > -float("inf")


# Quarters have many ties, sixteenths few; tenths have sums that end on a threshold.
value = st.one_of(
    st.integers(-20, 8).map(lambda n: n / 4),
    st.integers(-90, 30).map(lambda n: n / 16),
    st.integers(-50, 20).map(lambda n: n / 10),
    st.just(-float("inf")),
)


@st.composite
def batches(draw: st.DrawFn) -> Tensor:
    """Up to three rows of 1 to 40 tokens; at least one token of each is there."""
    size = draw(st.integers(1, 40))
    row = st.lists(value, min_size=size, max_size=size).filter(certain)
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=3)), dtype=torch.float32)


shares = st.one_of(st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99]), st.floats(0.01, 0.99))


@pytest.mark.parametrize("kind", KINDS)
@given(scores=batches(), share=shares, least=st.integers(1, 4))
@settings(max_examples=60)
def test_small_rows_keep_what_transformers_keeps(kind: str, scores: Tensor, share: float, least: int) -> None:
    agree(kind, share, least, scores)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_half_precision_are_left_to_transformers(kind: str, dtype: torch.dtype) -> None:
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    agree(kind, 0.6, 1, scores)


def language(size: int, seed: int, spread: float) -> Tensor:
    """Scores as a language model has them, f32 [1, size]: Zipf's law with some noise."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randperm(size, generator=generator).float() + 1
    return (-spread * ranks.log() + 0.5 * torch.randn(size, generator=generator))[None]


LARGE: dict[str, Tensor] = {
    "sure": language(9000, 0, 2.2),
    "unsure": language(9000, 1, 1.3),
    "nearly flat": language(9000, 2, 0.5),
    "flat": torch.zeros(1, 9000),
    "many ties": language(9000, 3, 1.2).bfloat16().float(),
    "two rows": torch.cat([language(9000, 4, 1.8), language(9000, 5, 1.1)]),
    "half missing": language(9000, 6, 1.4).masked_fill(torch.arange(9000) % 2 == 0, -torch.inf),
    "few left": language(9000, 7, 1.4).masked_fill(torch.arange(9000) % 180 > 0, -torch.inf),
    "lowest floats": language(9000, 8, 1.4).masked_fill(torch.arange(9000) % 3 == 0, torch.finfo(torch.float32).min),
    "far apart": language(9000, 9, 30.0),
}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.6, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("kind", KINDS)
def test_large_rows_keep_what_transformers_keeps(kind: str, share: float) -> None:
    for scores in LARGE.values():
        for least in (1, 3):
            agree(kind, share, least, scores)


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("name", ["sure", "unsure", "few left"])
def test_an_ordinary_row_is_decided_without_transformers(kind: str, name: str) -> None:
    """Otherwise nothing would be saved, and no other test would notice."""

    def exact(history: Tensor, scores: Tensor) -> Tensor:
        raise AssertionError("asked")

    setting, _ = KINDS[kind](0.4, 1)
    Filter(exact, made(kind, setting, 1).keep)(torch.zeros(1, 1, dtype=torch.long), LARGE[name])


def test_of_equal_scores_on_the_edge_half_precision_keeps_all() -> None:
    """1/2 and four times 1/8: 0.7 takes two of the four, transformers those that its sort has last; here all stay."""
    scores = torch.tensor([[0.5, 0.125, 0.125, 0.125, 0.125]]).log()
    history = torch.zeros(1, 1, dtype=torch.long)
    for half, kept in ((False, 3), (True, 5)):
        output = run_checked(build(material(do_sample=True, top_p=0.7, vocab_size=5, half=half)), history, scores)
        assert int(output.isfinite().sum()) == kept


CHAIN = {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 0.001, "eta_cutoff": 0.002}


@pytest.mark.parametrize("left_out", ["", "top_k", "top_p", "typical_p"])
@pytest.mark.parametrize("name", LARGE)
def test_filters_in_a_row_do_together_what_they_do_one_by_one(name: str, left_out: str) -> None:
    knobs = {key: value for key, value in CHAIN.items() if key != left_out}
    scores = LARGE[name]
    processors = build(material(do_sample=True, vocab_size=scores.shape[1], top_n_sigma=4.0, temperature=0.8, **knobs))
    history = torch.zeros(len(scores), 1, dtype=torch.long)
    together = run_checked(processors, history, scores)
    one_by_one, stages = run_traced(processors, history, scores, timing=False)
    assert torch.equal(together, one_by_one)
    assert len(stages) == len(processors)


def test_a_row_that_is_no_number_is_left_as_it_was_beside_one_that_is() -> None:
    scores = torch.cat([LARGE["sure"], torch.full((1, 9000), torch.nan)])
    history = torch.zeros(2, 1, dtype=torch.long)
    output, expected = made("top_p", 0.9, 1)(history, scores), KINDS["top_p"](0.9, 1)[1](history, scores)
    assert torch.equal(output[0], expected[0])
    assert torch.equal(output[1].isnan(), expected[1].isnan())
