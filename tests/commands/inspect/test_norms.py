"""Norms of keys and values, position by position, against what a plain forward pass of transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.commands.inspect.cache_norms import norms, observed_cache
from genctl.decode.cache_observer import CacheObserver
from tests import runtimes
from tests.tiny import SEQ2SEQ, WINDOW, tiny
from tests.versions import cache_of

IDS = tuple(range(5, 19))


def expected(states: Any) -> list[float]:
    """states [rows, heads, length, size] -> one number for each position, the slow way."""
    rows, heads, length, _ = states.shape
    return [
        sum(float(states[row, head, place].square().sum().sqrt()) for row in range(rows) for head in range(heads))
        / (rows * heads)
        for place in range(length)
    ]


@pytest.mark.parametrize("form", ["dynamic", "static"])
def test_norms_are_those_of_the_models_own_keys_and_values(form: str) -> None:
    model = tiny("llama")
    cache = runtimes.forward(model).prefill(IDS, None).cache
    assert cache is not None
    cache.convert(form)
    with torch.no_grad():
        theirs = cache_of(model(torch.tensor([IDS]), use_cache=True))
    total, found = norms(cache)
    assert total == len(IDS)
    assert [one["layer"] for one in found] == [0, 1]
    for one, layer in zip(found, theirs.layers, strict=True):
        assert one["keys"] == pytest.approx(expected(layer.keys), rel=1e-4)
        assert one["values"] == pytest.approx(expected(layer.values), rel=1e-4)


def test_eight_bits_are_read_as_a_query_meets_them() -> None:
    prefix = runtimes.forward(tiny("llama")).prefill(IDS, None)
    plain = norms(prefix.cache)[1][0]["keys"]
    prefix.cache.convert("quantized")
    rounded = norms(prefix.cache)[1][0]["keys"]
    assert rounded != plain
    assert rounded == pytest.approx(plain, rel=0.02)


def test_a_window_has_no_number_for_what_it_let_go() -> None:
    total, (sliding, full) = norms(runtimes.forward(tiny("gemma2")).prefill(IDS, None).cache)
    assert total == len(IDS)
    assert sliding["keys"][: -(WINDOW - 1)] == [None] * (len(IDS) - WINDOW + 1)
    assert all(value > 0 for value in sliding["keys"][-(WINDOW - 1) :])
    assert None not in full["keys"]


@pytest.mark.parametrize("arch", SEQ2SEQ)
def test_cross_attention_has_the_positions_of_the_source(arch: str) -> None:
    forward = runtimes.forward(tiny(arch))
    cache = forward.prefill((2,), forward.encode(IDS)).cache
    assert norms(cache)[0] == 1
    total, layers = norms(cache, cross=True)
    assert total == len(IDS)
    assert {len(layer["values"]) for layer in layers} == {len(IDS)}


def test_states_are_left_out() -> None:
    assert norms(runtimes.forward(tiny("mamba")).prefill(IDS, None).cache) == (0, [])
    total, layers = norms(runtimes.forward(tiny("jamba")).prefill(IDS, None).cache)
    assert total == len(IDS)
    assert [layer["layer"] for layer in layers] == [1]


def test_rows_are_averaged() -> None:
    cache = runtimes.forward(tiny("gpt2")).prefill(IDS, None).cache
    alone = norms(cache)[1]
    several = norms(cache.select(torch.tensor([0, 0, 0])))[1]
    assert several[0]["keys"] == pytest.approx(alone[0]["keys"], rel=1e-5)


def test_the_cache_can_be_had_only_while_it_is_observed_cache(tmp_path: Path) -> None:
    forward = runtimes.forward(tiny("gpt2"))
    assert observed_cache(forward) is None
    watcher = CacheObserver(forward)
    assert observed_cache(forward) is None
    prefix = forward.prefill(IDS, None)
    assert observed_cache(forward) is prefix.cache
    watcher.close()
    assert observed_cache(forward) is None
