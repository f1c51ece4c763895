"""Causes of an audit one by one: the sign, direction and size of each, compared with other projects' code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from genctl.parity import ggml, numbers, ways
from genctl.parity.arithmetic import Weights
from genctl.parity.causes import FORMS, Form
from genctl.parity.forms import Coded, rounded
from genctl.parity.numbers import Entries, Kept, in_order
from genctl.parity.ways import changes
from scripts import make_traces

pytestmark = pytest.mark.usefixtures("clean_environment")
POSITIONS, VOCABULARY, LISTED = 48, 200, 12
Write = Callable[[list[Tensor], list[list[int]], list[int]], list[Tensor | None]]


def each(number: make_traces.Number) -> Write:
    """Every number by itself."""
    return lambda rows, before, tokens: [number(row, [], list(own)) for row, own in zip(rows, before, strict=True)]


def kept_first(name: str, value: float, temperature: float) -> make_traces.Number:
    """llama.cpp's order: a filter, then the temperature."""

    def number(logits: Tensor, before: list[int], written: list[int]) -> Tensor:
        return (make_traces.kept(name, value)(logits, before, written) / temperature).log_softmax(-1)

    return number


def of(change: Callable[[Tensor], Tensor]) -> make_traces.Number:
    return lambda logits, before, written: change(logits.log_softmax(-1))


def moved(by: int) -> Write:
    """At each position the numbers of another one."""

    def write(rows: list[Tensor], before: list[list[int]], tokens: list[int]) -> list[Tensor | None]:
        plain = [row.log_softmax(-1) for row in rows]
        return [plain[place + by] if 0 <= place + by < len(plain) else None for place in range(len(plain))]

    return write


def trace(write: Write, *, moves: int = 0) -> tuple[Tensor, Entries]:
    """Logits [M, V] and numbers for them, for one text. `moves`: positions from an entry to the token it describes."""
    random = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(POSITIONS, VOCABULARY, generator=random, dtype=torch.float64)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0].tolist()
    tokens[::5] = [tokens[0]] * len(tokens[::5])  # some are repeated
    before = [tokens[:place] for place in range(POSITIONS)]
    found = []
    for place, written in enumerate(write([*logits], before, tokens)):
        there = place + moves
        if written is None or not 0 <= there < POSITIONS:
            continue
        best = [id for id in logits[there].topk(LISTED).indices.tolist() if id != tokens[there]]
        for entry, own in ((tokens[place], tokens[there]), *((id, id) for id in best)):
            found.append((place, entry, entry == tokens[place] and own == tokens[there], float(written[own])))
    position, entry, chosen, value = (torch.tensor(part) for part in zip(*found, strict=True))
    keep = value.isfinite()
    follows = torch.arange(POSITIONS) > 0
    ids = tuple(((), tuple(part)) for part in before)
    return logits, Entries(
        torch.tensor(tokens), follows, position[keep], entry[keep], chosen[keep], value[keep].double(), ids
    )


@pytest.mark.parametrize(
    ("write", "causes"),
    [
        (each(make_traces.warm(0.7)), "temperature 0.7"),
        (each(make_traces.warm(1.3)), "temperature 1.3"),
        (each(make_traces.kept("top-k", 7)), "top-k 7"),
        (each(make_traces.kept("top-p", 0.6)), "top-p 0.6"),
        (each(make_traces.kept("min-p", 0.1)), "min-p 0.1"),
        (each(make_traces.kept("top-p", 0.6, 0.7)), "temperature 0.7, top-p 0.6"),
        (each(kept_first("top-p", 0.6, 0.7)), "top-p 0.6, temperature 0.7"),
        (each(kept_first("min-p", 0.1, 1.3)), "temperature 1.3, min-p 0.17"),  # 0.1 ** (1 / 1.3): the same
        (each(make_traces.penalised(1.3)), "repetition 1.3"),
        (each(make_traces.penalised(0.8)), "repetition 0.8"),
        (each(of(lambda value: value / math.log(2))), "base-2 "),
        (each(of(lambda value: value / math.log(10))), "base-10 "),
        (each(of(torch.exp)), "probability "),
        (each(of(lambda value: 100 * value.exp())), "percent "),
        (each(of(torch.neg)), "negated "),
        (moved(1), "shifted later"),
        (moved(-1), "shifted earlier"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_number_is_named_with_its_parameter(write: Write, causes: str) -> None:
    """A temperature of 1.3 must not be reported as 0.77, nor a token too late as one too early."""
    logits, places = trace(write, moves={"shifted later": 1, "shifted earlier": -1}.get(causes, 0))
    left = {
        one: float(places.sizes(numbers.remains(one, logits, places)).median()) + 1e-3 * len(one.fitted)
        for one in numbers.numbers(logits, places)
    }
    found = min(left, key=lambda one: left[one])
    assert ", ".join(" ".join(part) for part in found.causes) == causes


@pytest.mark.parametrize(
    ("first", "drawn", "filters", "count"),
    [
        (False, 1.0, {"top-k": 3.0}, 3),
        (False, 1.0, {"top-p": 0.6}, 2),
        (False, 0.5, {"top-p": 0.6}, 1),  # the temperature makes the first token 68% likely
        (True, 0.5, {"top-p": 0.6}, 2),
        (False, 1.0, {"min-p": 0.2}, 3),
        (False, 2.0, {"min-p": 0.4}, 3),
        (True, 2.0, {"min-p": 0.4}, 2),
        (True, 1.0, {"top-k": 2.0, "top-p": 0.6}, 1),  # of what is kept: 0.5 is more than 0.6 of 0.8
        (True, 1.0, {"top-k": 3.0, "top-p": 0.5}, 1),
    ],
)
def test_filters_keep_what_they_keep_by_hand(first: bool, drawn: float, filters: dict[str, float], count: int) -> None:
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64).log()
    nothing = torch.zeros(1, dtype=torch.long)
    places = Entries(nothing, nothing > 0, nothing, nothing + 1, nothing == 0, nothing.double())
    kept = Kept(logits, in_order(logits), places, drawn, first=first)
    assert kept.counts(filters).tolist() == [[count]]
    best = (logits[0] / drawn).exp().sort(descending=True).values
    assert float(kept.predicted(filters)) == pytest.approx(math.log(float(best[0] / best[:count].sum())))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def attention(form: Form, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with Coded(Weights([], torch.float64), form, parts={}):
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("key", "parameter", "rounds"),
    [("cache-q8_0", "", "kv"), ("cache-q8_0", ", keys alone", "qk"), ("cache-q8_0", ", values alone", "v")],
)
def test_keys_and_values_of_a_cache_are_told_apart(key: str, parameter: str, rounds: str) -> None:
    random = torch.Generator().manual_seed(1)
    parts = [torch.randn(1, 2, 6, 64, generator=random, dtype=torch.float64) for _ in range(3)]
    kept = [rounded(part, "q8_0") if name in rounds else part for name, part in zip("qkv", parts, strict=True)]
    plain, expected = (F.scaled_dot_product_attention(own[0], own[1], own[2]) for own in (parts, kept))
    forms = [form for form in FORMS[key] if form.parameter == parameter]
    assert forms
    off = [float((attention(form, *parts) - expected).norm() / (plain - expected).norm()) for form in forms]
    assert min(off) < 0.3


def test_flash_attention_adds_up_in_float16() -> None:
    """A token of weight 1 and 2,000 of 2^-11 each, one by one: the sum stays at 1 in float16."""
    scores = torch.cat([torch.zeros(1, 1, 1), torch.full((1, 1, 2000), -math.log(2**11))], -1).double()
    value = torch.ones(1, 2001, 1, dtype=torch.float64)
    whole = 1 + 2000 / 2**11
    assert float(ggml.flash(scores, value)) == pytest.approx(1 / whole, rel=1e-3)
    assert float(ggml.flash(scores.flip(-1), value)) > 1.5 / whole  # the small ones first: they count


def test_flash_attention_sees_what_a_mask_leaves() -> None:
    random = torch.Generator().manual_seed(2)
    scores = torch.randn(2, 5, 5, generator=random).double().masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
    value = torch.randn(2, 5, 8, generator=random).double()
    torch.testing.assert_close(ggml.flash(scores, value).double(), scores.softmax(-1) @ value, rtol=0, atol=4e-3)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_blocks_are_those_of_gguf(name: str) -> None:
    """Against llama.cpp's own Python code: only numbers between two codes may differ."""
    quants: Any = pytest.importorskip("gguf.quants")
    kind = pytest.importorskip("gguf").GGMLQuantizationType[name.upper()]
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(rows.numpy(), kind), kind))
    assert float((rounded(rows, name) - theirs).abs().gt(1e-6).float().mean()) < 1e-3


@pytest.mark.parametrize(("name", "most"), [("q6_k", 0.02), ("q5_k", 0.045), ("q4_k", 0.09)])
def test_blocks_that_are_searched_for_are_near(name: str, most: float) -> None:
    rows = torch.randn(16, 512, generator=torch.Generator().manual_seed(3))
    off = float((rounded(rows, name) - rows).norm() / rows.norm())
    assert most / 2 < off < most


@pytest.mark.parametrize(
    ("file", "part", "types"),
    [
        ("q4_k_m", "ffn_down", "64464466"),
        ("q4_k_m", "attn_q", "4" * 8),
        ("q5_k_m", "attn_v", "65565566"),
        ("q4_k_s", "attn_v", "55554444"),
        ("q4_0", "output", "6" * 8),
    ],
)
def test_a_mixture_has_more_bits_in_some_layers(file: str, part: str, types: str) -> None:
    layers = len(types)
    found = [ggml.type_in(file, part, layer, layers, 256) for layer in range(layers)]
    assert "".join(kind[1] for kind in found) == types


# -- prompts and models ------------------------------------------------------------------------------------------------


def test_a_cut_prompt_keeps_its_end() -> None:
    assert ways.cut((1, 5, 6, 7), 2, keeps_first=False) == (6, 7)
    assert ways.cut((1, 5, 6, 7), 2, keeps_first=True) == (1, 7)


def test_scaling_of_positions_is_added_by_its_factor() -> None:
    found = {
        (key, parameter): config
        for key, parameter, config in changes({"rope_theta": 10000.0, "max_position_embeddings": 512})
    }
    linear = found["rope-scaling-added", "linear by 2"]["rope_parameters"]
    assert (linear["rope_type"], linear["factor"]) == ("linear", 2.0)
    yarn = found["rope-scaling-added", "yarn by 4"]["rope_parameters"]
    assert (yarn["factor"], yarn["original_max_position_embeddings"]) == (4.0, 512)
    assert found["rope-theta-ignored", "500000"] == {"rope_theta": 500000.0}
