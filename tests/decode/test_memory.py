"""Batches sized by memory: by what a row will need, and by what is free."""

from __future__ import annotations

import pytest

from genctl.decode import batch_cache as memory
from genctl.decode.types import Lane
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.tiny import HEADS, HIDDEN, LAYERS, WINDOW, tiny

COLUMN = 2 * LAYERS * HIDDEN * 4  # bytes of a token's keys and values in float32


def fitting(monkeypatch: pytest.MonkeyPatch, free: int | None, arch: str = "gpt2", **given: object) -> int:
    monkeypatch.setattr(memory, "available", lambda device: free)
    lane = Lane("a", (5, 6), given.pop("strategy", Sample()), 8, **given)  # type: ignore[arg-type]
    return memory.fitting(runtimes.forward(tiny(arch)), lane, 100)


def test_half_of_what_is_free_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting(monkeypatch, 2 * 7 * 100 * COLUMN) == 7
    assert fitting(monkeypatch, 2 * 7 * 100 * COLUMN, strategy=Beam(3)) == 2
    assert fitting(monkeypatch, 1) == 1
    assert fitting(monkeypatch, 1 << 50) == memory.MOST["cpu"]


def test_a_window_holds_no_more_than_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = COLUMN * 2 // HEADS
    assert fitting(monkeypatch, 2 * 9 * WINDOW * grouped, "mistral") == 9


def test_recurrent_states_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting(monkeypatch, 1 << 20, "mamba") == memory.MOST["cpu"]


def test_without_a_cache_or_a_figure_there_is_still_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting(monkeypatch, None) == 16
    assert 1 <= fitting(monkeypatch, 1 << 22, use_cache=False) <= memory.MOST["cpu"]
