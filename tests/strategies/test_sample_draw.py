"""Drawing a token: the draws of torch.multinomial without its cost, and inverse-cdf with one random number per row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import genctl
from genctl.config.modes import mode_of
from genctl.decode.types import RowsOfLane
from genctl.errors import GenctlError, UsageError
from genctl.params import Generation
from genctl.strategies import sampling
from genctl.strategies.factory import choose
from genctl.strategies.sample import Sample, best
from genctl.strategies.sampling import draw_distinct, inverse_cdf, inverse_cdf_on_device, multinomial
from tests.tiny import checkpoint


def scores(seed: int, rows: int, size: int, spread: float, keep: int = 0, coarse: bool = False) -> Tensor:
    made = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread
    if coarse:
        made = made.bfloat16().float()
    return made.masked_fill(made < made.topk(keep).values[:, -1:], -torch.inf) if keep else made


SHAPES: list[tuple[int, int, float, int, bool]] = [
    (1, 2, 1.0, 0, False),
    (2, 17, 3.0, 0, False),
    (3, 300, 0.0, 0, False),  # all equal
    (2, 300, 2.0, 50, False),
    (1, 6000, 2.0, 0, False),  # so many that tokens without a chance are skipped
    (2, 6000, 0.1, 0, True),
    (1, 6000, 40.0, 0, False),
    (1, 6000, 2.0, 4500, True),
    (1, 6000, 3.0, 50, True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draws_are_those_of_torch_multinomial(shape: tuple[int, int, float, int, bool]) -> None:
    """For every seed, and for several draws in a row: the generator ends in the state in which torch leaves it."""
    rows, size, spread, keep, coarse = shape
    for seed in range(60):
        logits = scores(seed, rows, size, spread, keep, coarse)
        ours, theirs = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        for _ in range(3):
            expected = torch.multinomial(logits.softmax(-1), 1, generator=theirs)[:, 0]
            assert torch.equal(multinomial(logits, range(rows), rows, ours), expected)
        assert torch.equal(ours.get_state(), theirs.get_state())


def test_a_draw_that_failed_in_the_middle_is_repeated_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out at the second of two lanes, when the first one has already drawn."""
    logits, real, calls = scores(0, 4, 50, 2.0), sampling.multinomial, 0

    def failing(*given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        drawn = real(*given)
        if calls == 2:
            raise torch.OutOfMemoryError("for this test")
        return drawn

    def lanes() -> list[RowsOfLane]:
        return [RowsOfLane(torch.Generator().manual_seed(seed), [0, 1], 2, 0) for seed in (1, 2)]

    expected = Sample(True).tokens(logits, lanes(), None)
    monkeypatch.setattr(sampling, "multinomial", failing)
    again = lanes()
    with pytest.raises(torch.OutOfMemoryError):
        Sample(True).tokens(logits, again, None)
    assert torch.equal(Sample(True).tokens(logits, again, None), expected)


def test_a_row_draws_the_same_whether_or_not_others_have_ended() -> None:
    logits = scores(0, 4, 500, 2.0)
    all_rows = multinomial(logits, range(4), 4, torch.Generator().manual_seed(3))
    assert torch.equal(multinomial(logits[[1, 3]], [1, 3], 4, torch.Generator().manual_seed(3)), all_rows[[1, 3]])
    all_rows = inverse_cdf(logits, range(4), 4, torch.Generator().manual_seed(3))
    assert torch.equal(inverse_cdf(logits[[1, 3]], [1, 3], 4, torch.Generator().manual_seed(3)), all_rows[[1, 3]])


@pytest.mark.parametrize("keep", [0, 30, 3])
def test_distinct_draws_are_those_of_torch_multinomial(keep: int) -> None:
    for seed in range(60):
        totals = scores(seed, 1, 900, 2.0, keep)[0]
        ours, theirs = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        # transformers draws from 1200 places; those of the last rows, which are not alive, are impossible
        whole = torch.cat([totals, torch.full((300,), -torch.inf)])
        if keep == 3:  # fewer than are drawn: torch raises, and generate() never reaches this
            assert set(draw_distinct(totals, 8, 1200, ours)[:3].tolist()) == set(totals.topk(3).indices.tolist())
            continue
        expected = torch.multinomial(whole.softmax(-1), 8, generator=theirs)
        assert torch.equal(draw_distinct(totals, 8, 1200, ours), expected)
        assert torch.equal(ours.get_state(), theirs.get_state())


def test_a_torch_whose_noise_is_made_otherwise_still_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = scores(0, 2, 700, 2.0)
    with monkeypatch.context() as patched:
        patched.setattr(sampling, "bits_are_known", lambda: False)
        slow = [multinomial(logits, [0, 1], 2, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert sampling.bits_are_known()
    fast = [multinomial(logits, [0, 1], 2, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert all(map(torch.equal, slow, fast))


@pytest.mark.parametrize("draw", [multinomial, inverse_cdf])
def test_frequencies_are_those_of_the_distribution(draw: Callable[..., Tensor]) -> None:
    """Pearson's chi-square of 6000 draws; with 7 degrees of freedom one seed in a thousand exceeds 24.3."""
    p = np.array([0.3, 0.0, 0.2, 0.15, 0.15, 0.1, 0.05, 0.03, 0.02])
    logits = torch.tensor(p, dtype=torch.float32).log().expand(6000, -1)
    drawn = draw(logits, range(6000), 6000, torch.Generator().manual_seed(5)).tolist()
    counts = np.array([Counter(drawn)[token] for token in range(len(p))])
    assert counts[1] == 0
    there = p > 0
    assert ((counts[there] - 6000 * p[there]) ** 2 / (6000 * p[there])).sum() < 24.3


def test_inverse_cdf_takes_one_number_a_row_and_no_token_without_probability() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    rng, other = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    luck = torch.rand(3, dtype=torch.float64, generator=other)
    assert inverse_cdf(logits, range(3), 3, rng).tolist() == [1 if share < 0.5 else 3 for share in luck]
    assert torch.equal(rng.get_state(), other.get_state())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_device_the_same_numbers_find_the_same_tokens(shape: tuple[int, int, float, int, bool]) -> None:
    rows, size, spread, keep, coarse = shape
    for seed in range(20):
        logits = scores(seed, rows, size, spread, keep, coarse)
        luck = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        expected = inverse_cdf(logits, range(rows), rows, torch.Generator().manual_seed(seed))
        assert torch.equal(inverse_cdf_on_device(logits, luck), expected)


def test_the_best_token_is_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-torch.inf, -torch.inf, 0.0]])
    assert torch.equal(best(logits), logits.argmax(-1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("gpt2")
    checkpoint("gpt2", folder)
    return genctl.load(str(folder))


def test_the_knob_reaches_the_text(model: Any) -> None:
    def texts(**knobs: Any) -> list[tuple[int, ...]]:
        (result,) = model.generate([[5, 9, 11]], seed=4, do_sample=True, max_new_tokens=12, **knobs)
        return [sequence.token_ids for sequence in result.sequences]

    assert texts(sampler="inverse-cdf") == texts(sampler="inverse-cdf") != texts()
    assert texts(sampler="multinomial") == texts()
    assert texts(best_of=3, sampler="inverse-cdf") != texts(best_of=3)
    assert texts(sampler="counter") == texts(sampler="counter") not in (texts(), texts(sampler="inverse-cdf"))


@pytest.mark.parametrize("knobs", [{"do_sample": False}, {"do_sample": True, "num_beams": 2}])
def test_where_nothing_is_drawn_so_the_knob_is_refused_by_name(model: Any, knobs: dict[str, Any]) -> None:
    with pytest.raises(GenctlError, match="sampler"):
        model.generate([[5, 9]], max_new_tokens=2, sampler="inverse-cdf", **knobs)


def test_strategies_that_draw_in_their_own_way_name_themselves() -> None:
    with pytest.raises(UsageError, match="num_beams = 3"):
        choose(Generation(do_sample=True, sampler="inverse-cdf", num_beams=3))
    with pytest.raises(UsageError, match="dola_layers"):
        mode_of(Generation(do_sample=True, sampler="inverse-cdf", dola_layers="low"))
