"""The processors that transformers lacks, against references written from the paper or the tool, and properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from genctl.config.listed_knobs import PROCESSORS
from genctl.decode.processors import penalties
from genctl.decode.processors.build import build
from genctl.decode.processors.mirostat import AdaptiveP, Mirostat
from genctl.params import knobs
from tests.decode.processors.plain import material

Array = NDArray[np.float64]
V = 12
PROMPT = [3, 4, 5]


def softmax(scores: Array) -> Array:
    weights: Array = np.exp(scores - scores.max())
    return weights / weights.sum()


def top_n_sigma(row: Array, n: float) -> Array:
    """arXiv:2411.07641, Algorithm 1: keep l_i >= M - n * sigma."""
    there = row[np.isfinite(row)]
    sigma = math.sqrt(((there - there.mean()) ** 2).mean())
    return np.where(row >= there.max() - n * sigma, row, -np.inf)


def dynatemp(row: Array, temperature: float, spread: float, exponent: float) -> Array:
    """llama.cpp, llama_sampler_temp_ext_apply."""
    there = np.isfinite(row)
    if there.sum() < 2:
        return row
    low, high = max(0.0, temperature - spread), temperature + spread
    probabilities = softmax(row)[there]
    positive = probabilities[probabilities > 0]
    entropy = -(positive * np.log(positive)).sum() / math.log(there.sum())
    return row / (low + (high - low) * entropy**exponent)


def quadratic(row: Array, factor: float, curve: float) -> Array:
    """oobabooga/text-generation-webui#5403 and #5551, token by token."""
    best, made = float(row.max()), row.copy()
    for token, score in enumerate(row):
        if math.isfinite(score):
            near = score - best
            made[token] = -((3 - curve) / 2 * factor * near**2) + (curve - 1) / 2 * factor * near**3 + best
    return made


def xtc(row: Array, threshold: float) -> Array:
    """oobabooga/text-generation-webui#6335: sorted, a token goes if the next one is above the threshold too."""
    order = np.argsort(-row, kind="stable")
    probabilities = softmax(row)[order]
    made = row.copy()
    for place in range(len(order) - 1):
        if probabilities[place + 1] >= threshold:
            made[order[place]] = -np.inf
    return made


def dry(row: Array, written: list[int], multiplier: float, base: float, allowed: int, breakers: set[int]) -> Array:
    """oobabooga/text-generation-webui#5677, as described: for each earlier end, walk back while the tokens agree."""
    made, longest = row.copy(), dict[int, int]()
    for end in range(len(written) - 1):
        length = 0
        while length <= end and written[end - length] == written[-1 - length] and written[end - length] not in breakers:
            length += 1
        follower = written[end + 1]
        if follower not in breakers:
            longest[follower] = max(longest.get(follower, 0), length)
    for token, length in longest.items():
        if length >= allowed:
            made[token] -= multiplier * base ** (length - allowed)
    return made


def openai(row: Array, new: list[int], presence: float, frequency: float) -> Array:
    """platform.openai.com: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence."""
    counts = np.array([new.count(token) for token in range(len(row))])
    return row - counts * frequency - (counts > 0) * presence


def mirostat(steps: list[Array], new: list[int], tau: float, eta: float) -> list[Array]:
    """llama.cpp, llama_sampler_mirostat_v2: the truncated rows, given what was drawn from them."""
    mu, made = 2 * tau, []
    for row, token in zip(steps, [*new, -1], strict=True):
        surprise = -np.log2(np.maximum(softmax(row), 1e-300))
        kept = np.where((surprise <= mu) | (np.arange(len(row)) == row.argmax()), row, -np.inf)
        made.append(kept)
        if token >= 0:
            mu -= eta * (-math.log2(softmax(kept)[token]) - tau)
    return made


def p_less(row: Array, kind: str) -> Array:
    """arXiv:2509.23234: keep p >= L, the sum of all p ** 2; or, relaxed, L = (V * L - 1) / (V - 1)."""
    probabilities, size = softmax(row), len(row)
    likelihood = (probabilities**2).sum()
    limit = likelihood if kind == "plain" else (size * likelihood - 1) / (size - 1)
    return np.where((probabilities >= limit - 1e-9) & np.isfinite(row), row, -np.inf)


def min_k(row: Array, tau: float) -> Array:
    """arXiv:2604.11012, algorithm 1, on the tokens that are there."""
    ordered = sorted(row[np.isfinite(row)], reverse=True)
    span = ordered[0] - ordered[-1]
    if span == 0:
        return row
    best, cliff = -1.0, 1
    for rank in range(1, len(ordered)):
        drop = (ordered[rank - 1] - ordered[rank]) / span / rank
        if drop > best + 1e-12:
            best, cliff = drop, rank
    keep = min(max(cliff, math.floor(tau / span)), len(ordered))
    return np.where(row >= ordered[keep - 1], row, -np.inf)


def adaptive_p(steps: list[Array], new: list[int], target: float, decay: float) -> list[Array]:
    """llama.cpp, llama_sampler_adaptive_p_apply and _accept: the changed rows, given what was drawn from them."""
    weighted_sum, total_weight = target / (1 - decay), 1 / (1 - decay)
    made = []
    for row, token in zip(steps, [*new, -1], strict=True):
        probabilities = softmax(row)
        adapted = min(max(2 * target - weighted_sum / total_weight, 0.0), 1.0)
        dist = np.abs((probabilities - adapted) * (1 / 0.3))
        made.append(np.where(np.isfinite(row), 5.0 - 10.0 * dist * dist / (1 + dist), row))
        if token >= 0:
            weighted_sum = probabilities[token] + decay * weighted_sum
            total_weight = 1 + decay * total_weight
    return made


def tensor(row: Array) -> torch.Tensor:
    return torch.tensor(row, dtype=torch.float32)[None]


def same(made: torch.Tensor, expected: Array) -> None:
    np.testing.assert_allclose(made[0].numpy(), expected, rtol=2e-5, atol=2e-5)


rows = st.lists(st.one_of(st.integers(-40, 40).map(lambda n: n / 4), st.just(-math.inf)), min_size=V, max_size=V)
rows = rows.filter(lambda row: any(map(math.isfinite, row)))
histories = st.lists(st.integers(0, 3), min_size=1, max_size=30)
HISTORY = torch.tensor([PROMPT])


@given(rows, st.floats(0.1, 3.0))
def test_top_n_sigma_keeps_what_the_paper_keeps(values: list[float], n: float) -> None:
    row = np.array(values) + np.linspace(0, 0.011, V) ** 2  # no score exactly on the edge
    same(made_of({"top_n_sigma": n})(HISTORY, tensor(row)), top_n_sigma(tensor(row)[0].double().numpy(), n))


@given(rows, st.floats(0.2, 2.0), st.floats(0.1, 1.5), st.floats(0.3, 3.0))
def test_dynamic_temperature_is_that_of_llama_cpp(
    values: list[float], at: float, spread: float, exponent: float
) -> None:
    row = np.array(values)
    with np.errstate(divide="ignore"):
        expected = dynatemp(row, at, spread, exponent)
    if np.abs(expected[np.isfinite(expected)]).max() < 100:  # float32 has few digits of an entropy near 0
        made = made_of({"temperature": at, "dynatemp_range": spread, "dynatemp_exponent": exponent})(
            HISTORY, tensor(row)
        )
        np.testing.assert_allclose(made[0].numpy(), expected, rtol=2e-3, atol=1e-3)


@given(rows, st.floats(0.01, 2.0), st.floats(1.0, 5.0))
def test_quadratic_sampling_is_that_of_its_author(values: list[float], factor: float, curve: float) -> None:
    made = made_of({"smoothing_factor": factor, "smoothing_curve": curve})(HISTORY, tensor(np.array(values)))
    same(made, quadratic(np.array(values), factor, curve))


@given(rows, st.sampled_from([0.03, 0.11, 0.21, 0.5]))
def test_xtc_removes_all_top_choices_but_the_least(values: list[float], threshold: float) -> None:
    row = np.array(values)
    if np.abs(softmax(row) - threshold).min() < 1e-5:
        return
    made = xtc_of(1.0, threshold)(HISTORY, tensor(row))[0].numpy()
    # among equals, which one stays is a matter of sorting: compare scores, not places
    np.testing.assert_allclose(np.sort(made), np.sort(xtc(row, threshold)), rtol=1e-6)


def test_xtc_acts_as_often_as_it_is_told_and_draws_again_for_equal_rows() -> None:
    scores = torch.tensor([[2.0, 1.9, 0.0]]).expand(4000, 3)
    made = xtc_of(0.3, 0.1, seed=11)(HISTORY.expand(4000, -1), scores)
    acted = (made[:, 0] == -torch.inf).float().mean()
    assert abs(float(acted) - 0.3) < 0.03
    assert torch.equal(made, xtc_of(0.3, 0.1, seed=11)(HISTORY.expand(4000, -1), scores))
    assert not torch.equal(made, xtc_of(0.3, 0.1, seed=12)(HISTORY.expand(4000, -1), scores))


def test_xtc_leaves_a_row_that_beams_need() -> None:
    scores = torch.tensor([[2.0, 1.9, -torch.inf]])
    assert torch.equal(xtc_of(1.0, 0.1, num_beams=2)(HISTORY, scores), scores)


@given(histories, st.integers(1, 4), st.sets(st.integers(0, 3), max_size=1))
@settings(max_examples=300)
def test_dry_is_that_of_its_author(written: list[int], allowed: int, breakers: set[int]) -> None:
    row = np.linspace(-1, 1, V)
    made = penalties.dry(0.8, 1.2, allowed, {(token,) for token in breakers})(torch.tensor([written]), tensor(row))
    same(made, dry(row, written, 0.8, 1.2, allowed, breakers))


def test_dry_by_hand() -> None:
    """1 2 3 | 1 2: two tokens repeat and 3 followed; with 0.8 * 1.75 ** (2 - 2) it loses 0.8. 9 breaks, 7 8 breaks."""
    zeros = torch.zeros(1, V)
    assert penalties.dry(0.8, 1.75, 2, ())(torch.tensor([[1, 2, 3, 1, 2]]), zeros)[0, 3] == pytest.approx(-0.8)
    assert penalties.dry(0.8, 1.75, 2, ())(torch.tensor([[5, 1, 2, 3, 5, 1, 2]]), zeros)[0, 3] == pytest.approx(-1.4)
    broken = torch.tensor([[1, 9, 3, 1, 9]])
    assert torch.equal(penalties.dry(0.8, 1.75, 1, {(9,)})(broken, zeros), zeros)
    phrase = torch.tensor([[7, 8, 1, 3, 7, 8, 1]])
    assert penalties.dry(0.8, 1.75, 1, {(7, 8)})(phrase, zeros)[0, 3] == pytest.approx(-0.8)
    assert penalties.dry(0.8, 1.75, 1, ())(phrase, zeros)[0, 3] == pytest.approx(-0.8 * 1.75**2)


def test_dry_stays_finite_however_long_the_repetition() -> None:
    made = penalties.dry(0.8, 1.75, 2, ())(torch.tensor([[1] * 3000]), torch.zeros(1, V))
    assert bool(made.isfinite().all())
    assert made[0, 1] < -1e20


@given(histories, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_count_new_tokens_only(new: list[int], presence: float, frequency: float) -> None:
    row, history = np.linspace(-1, 1, V), torch.tensor([[*PROMPT, *new]])
    made = made_of({"presence_penalty": presence, "frequency_penalty": frequency})(history, tensor(row))
    same(made, openai(row, new, presence, frequency))


@given(st.lists(rows, min_size=2, max_size=6), st.floats(0.5, 3.0), st.floats(0.05, 1.0), st.randoms())
def test_mirostat_is_that_of_llama_cpp(steps: list[list[float]], tau: float, eta: float, chooser: Any) -> None:
    arrays = [np.array(values) for values in steps]
    processor, history, new = Mirostat(material(prompt=PROMPT, mirostat_eta=eta), tau), [*PROMPT], []
    for row in arrays:
        made = processor(torch.tensor([history]), tensor(row))
        new.append(chooser.choice(made[0].isfinite().nonzero()[:, 0].tolist()))
        history.append(new[-1])
        expected = mirostat(arrays[: len(new)], new[:-1], tau, eta)[-1]
        surprise = -np.log2(np.maximum(softmax(row), 1e-300))
        kept = np.isfinite(made[0].numpy())
        differ = kept != np.isfinite(expected)
        assert not differ.any() or surprise[differ].std() < 1e-4  # equal scores on the very edge may round either way
        if differ.any():
            return


@given(rows, st.sampled_from(["plain", "norm"]))
def test_p_less_keeps_what_the_paper_keeps(values: list[float], kind: str) -> None:
    row = np.array(values)
    same(made_of({"p_less": kind})(HISTORY, tensor(row)), p_less(row, kind))


@given(rows, st.sampled_from([0.0, 0.7, 3.0, 40.0]))
def test_min_k_keeps_what_the_paper_keeps(values: list[float], tau: float) -> None:
    row = np.array(values)
    same(made_of({"min_k": tau})(HISTORY, tensor(row)), min_k(row, tau))


@given(st.lists(rows, min_size=2, max_size=6), st.floats(0.0, 1.0), st.floats(0.0, 0.99), st.randoms())
def test_adaptive_p_is_that_of_llama_cpp(steps: list[list[float]], target: float, decay: float, chooser: Any) -> None:
    arrays = [np.array(values) for values in steps]
    processor, history, new = AdaptiveP(material(prompt=PROMPT, adaptive_decay=decay), target), [*PROMPT], []
    for row in arrays:
        made = processor(torch.tensor([history]), tensor(row))
        expected = adaptive_p(arrays[: len(new) + 1], new, target, decay)[-1]
        np.testing.assert_allclose(made[0].numpy(), expected, rtol=1e-3, atol=1e-3)
        new.append(chooser.choice(np.isfinite(row).nonzero()[0].tolist()))
        history.append(new[-1])


@pytest.mark.parametrize(("score", "expected"), [(-200.0, 5 - 10 * (5 / 6) ** 2 / (11 / 6)), (-math.inf, 5.0)])
def test_a_token_of_probability_0_counts_and_a_removed_one_does_not(score: float, expected: float) -> None:
    """Target 1/2, decay 1/2: the mean 1/2 becomes (0 + 1/2 * 1) / (1 + 1/2 * 2) = 1/4, so the goal is 3/4."""
    processor = AdaptiveP(material(prompt=PROMPT, adaptive_decay=0.5), 0.5)
    processor(torch.tensor([PROMPT]), torch.tensor([[0.0, score]]))
    made = processor(torch.tensor([[*PROMPT, 1]]), torch.zeros(1, 2))
    assert made[0].tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize(
    ("kind", "value", "knobs"), [(Mirostat, 2.0, {"mirostat_eta": 0.4}), (AdaptiveP, 0.4, {"adaptive_decay": 0.8})]
)
def test_what_steers_follows_rows_that_move_fork_and_roll_back(kind: Any, value: float, knobs: dict[str, Any]) -> None:
    def make() -> Any:
        return kind(material(prompt=PROMPT, **knobs), value)

    generator = torch.Generator().manual_seed(1)
    scores = [torch.randn(2, 60, generator=generator) * 2 for _ in range(4)]

    def alone(new: list[int], lines: list[int]) -> torch.Tensor:
        processor, history = make(), [*PROMPT]
        for step, line in enumerate(lines):
            made = processor(torch.tensor([history]), scores[step][line : line + 1])
            if step < len(new):
                history.append(new[step])
        return made

    shared = make()
    shared(torch.tensor([PROMPT, PROMPT]), scores[0][[0, 0]])
    shared(torch.tensor([[*PROMPT, 7], [*PROMPT, 9]]), scores[1])
    shared(torch.tensor([[*PROMPT, 9, 4], [*PROMPT, 9, 6]]), scores[2])  # row 1 forks, row 0 dies
    made = shared(torch.tensor([[*PROMPT, 9, 6, 1], [*PROMPT, 9, 4, 2]]), scores[3])  # and they change places
    assert torch.equal(made[:1], alone([9, 6, 1], [0, 1, 1, 0]))
    assert torch.equal(made[1:], alone([9, 4, 2], [0, 1, 0, 1]))
    again = shared(torch.tensor([[*PROMPT, 9, 6]]), scores[2][1:])  # rolled back by a token
    assert torch.equal(again, alone([9, 6], [0, 1, 1]))


NEW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top_n_sigma": ({"top_n_sigma": 0.7}, {"top_n_sigma": 1e9}),
    "dynatemp": ({"dynatemp_range": 0.6, "temperature": 0.9}, {"dynatemp_range": 1e-9}),
    "xtc": ({"xtc_probability": 0.5, "xtc_threshold": 0.05}, {"xtc_probability": 1e-12}),
    "mirostat": ({"mirostat_tau": 1.5}, {"mirostat_tau": 1e6}),
    "min_k": ({"min_k": 3.0}, {"min_k": 1e9}),
    "presence_penalty": ({"presence_penalty": 0.8}, {"presence_penalty": 0.0}),
    "frequency_penalty": ({"frequency_penalty": 0.4}, {"frequency_penalty": 0.0}),
    "dry": ({"dry_multiplier": 0.8, "dry_sequence_breakers": []},
     {"dry_multiplier": 1e-30, "dry_sequence_breakers": []}),
    "logit_bias": ({"logit_bias": {"#3": 2.0, "#1": -math.inf}}, {"logit_bias": {"#3": 0.0}}),
}  # fmt: skip


def made_of(setting: dict[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    processors = build(material(prompt=PROMPT, do_sample=True, vocab_size=V, eos=(), **setting))

    def run(history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in processors:
            scores = processor(history, scores)
        return scores

    return run


def xtc_of(probability: float, threshold: float, **others: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return made_of({"xtc_probability": probability, "xtc_threshold": threshold, **others})


def several() -> st.SearchStrategy[tuple[torch.Tensor, torch.Tensor]]:
    """Distinct histories [R, T] of equal length, and scores [R, V]."""
    body = st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4, unique_by=tuple)
    return body.flatmap(
        lambda new: st.tuples(
            st.just(torch.tensor([PROMPT + line for line in new])),
            st.lists(rows, min_size=len(new), max_size=len(new)).map(lambda r: torch.tensor(r, dtype=torch.float32)),
        )
    )


LAWFUL = {name: setting for name, (setting, _) in NEW.items()} | {
    "p_less": {"p_less": "plain"},
    "p_less norm": {"p_less": "norm"},
    "adaptive_p": {"adaptive_target": 0.4},
}


@pytest.mark.parametrize("name", LAWFUL)
@given(case=several())
@settings(max_examples=40)
def test_new_processors_keep_the_laws(name: str, case: tuple[torch.Tensor, torch.Tensor]) -> None:
    """No removed token comes back, the mass is one, rows do not see each other nor their place, nothing is changed."""
    history, scores = case
    given_scores = scores.clone()
    made = made_of(LAWFUL[name])(history, scores)
    assert torch.equal(scores, given_scores), "written in place"
    assert not bool((scores.isinf() & ~made.isinf()).any())
    if name != "logit_bias":
        assert bool(((made.softmax(-1).sum(-1) - 1).abs() < 1e-5).all())
    for order in ([*reversed(range(len(history)))], [0]):
        assert torch.equal(made_of(LAWFUL[name])(history[order], scores[order]), made[order])


@pytest.mark.parametrize("name", NEW)
@given(case=several())
@settings(max_examples=15)
def test_new_processors_change_nothing_at_their_neutral_setting(
    name: str, case: tuple[torch.Tensor, torch.Tensor]
) -> None:
    history, scores = case
    torch.testing.assert_close(made_of(NEW[name][1])(history, scores), scores)


NEUTRAL = [name for name in PROCESSORS if knobs()[PROCESSORS[name].knobs[0]].metadata["neutral"] is not None]


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_knob_builds_nothing(name: str) -> None:
    knob = PROCESSORS[name].knobs[0]
    assert build(material(do_sample=True, **{knob: knobs()[knob].metadata["neutral"]})) == ()
