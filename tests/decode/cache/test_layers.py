"""Layers of a cache against transformers' own, under random sequences of the loop's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from genctl.decode.cache.forms import QuantizedLayer, SlidingLayer, StaticLayer
from genctl.decode.cache.growing import GrowingLayer

HEADS, SIZE, WINDOW = 2, 3, 5

# Operations on a layer: write so many tokens, select rows into a copy, take rows in place (both modulo the rows).
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 7)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        st.tuples(st.just("take"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    ),
    max_size=12,
)


class Numbers:
    """Keys and values that are never the same twice."""

    def __init__(self) -> None:
        self.next = 0

    def __call__(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        count = rows * HEADS * length * SIZE
        keys = torch.arange(self.next, self.next + count, dtype=torch.float32).view(rows, HEADS, length, SIZE)
        self.next += count
        return keys, -keys


def same(layer: GrowingLayer, oracle: Any) -> None:
    keys, values = layer.content()
    assert torch.equal(keys, oracle.keys)
    assert torch.equal(values, oracle.values)
    assert torch.equal(layer.keys, oracle.keys)  # what transformers' code looks at
    assert layer.get_seq_length() == oracle.get_seq_length()
    for query in (1, 3):
        assert layer.get_mask_sizes(query) == oracle.get_mask_sizes(query)


@settings(max_examples=200, deadline=None)
@given(first=st.integers(1, 12), actions=ACTIONS, room=st.integers(0, 9))
@pytest.mark.parametrize("kind", [GrowingLayer, StaticLayer, SlidingLayer])
def test_a_layer_holds_what_transformers_layer_holds(
    kind: type[GrowingLayer], first: int, actions: list[Any], room: int
) -> None:
    window = (WINDOW,) if kind is SlidingLayer else ()
    layer, oracle = kind(*window, room), DynamicSlidingWindowLayer(WINDOW) if window else DynamicLayer()
    numbers, rows = Numbers(), 1
    for name, what in [("write", first), *actions]:
        if name == "write":
            new = numbers(rows, what)
            met, theirs = layer.update(*new), oracle.update(*new)
            assert torch.equal(met[0], theirs[0])
            assert torch.equal(met[1], theirs[1])
        else:
            index = torch.tensor([place % rows for place in what])
            rows = len(what)
            if name == "select":
                before = layer.content()[0].clone()
                forked = layer.select(index, room=room)
                assert torch.equal(layer.content()[0], before)  # the old one stays
                layer = forked
            else:
                layer.reorder_cache(index)
            oracle.reorder_cache(index)
        same(layer, oracle)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.integers(1, 12), turns=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6)
)
def test_a_recording_window_takes_tokens_back_as_if_they_had_never_come(
    prompt: int, turns: list[tuple[int, int]]
) -> None:
    layer, numbers = SlidingLayer(WINDOW), Numbers()
    keys, values = numbers(1, prompt)
    layer.update(keys, values)
    layer.activate_past_recording()
    for drafted, rejected in turns:
        rejected = min(rejected, drafted)
        new = numbers(1, drafted)
        met, _ = layer.update(*new)
        everything = torch.cat([keys, new[0]], 2)
        assert torch.equal(met, everything[:, :, -(WINDOW - 1 + drafted) :])
        layer.crop(-rejected)
        kept = drafted - rejected
        keys = torch.cat([keys, new[0][:, :, :kept]], 2)
        values = torch.cat([values, new[1][:, :, :kept]], 2)
        assert layer.get_seq_length() == keys.shape[2]
        assert torch.equal(layer.content()[0], keys[:, :, -(WINDOW - 1) :])
        assert torch.equal(layer.content()[1], values[:, :, -(WINDOW - 1) :])


def test_a_window_refuses_to_restore_what_it_has_dropped() -> None:
    layer, numbers = SlidingLayer(WINDOW), Numbers()
    layer.update(*numbers(1, 9))
    with pytest.raises(ValueError, match="has dropped"):
        layer.crop(-1)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=2, max_size=4))
@pytest.mark.parametrize("window", [None, WINDOW])
def test_lanes_are_merged_aligned_to_the_right_over_zeros(window: int | None, lengths: list[tuple[int, int]]) -> None:
    numbers = Numbers()
    numbers.next = 1  # no zero of its own
    layers, expected = [], []
    for rows, length in lengths:
        layer = GrowingLayer() if window is None else SlidingLayer(window)
        new = numbers(rows, length)
        layer.update(*new)
        layers.append(layer)
        expected.append(new[0] if window is None else new[0][:, :, -(window - 1) :])
    merged = layers[0].merge(layers[1:])
    keys, _ = merged.content()
    longest = max(part.shape[2] for part in expected)
    at = 0
    for part in expected:
        mine = keys[at : at + part.shape[0]]
        assert torch.equal(mine[:, :, longest - part.shape[2] :], part)
        assert not mine[:, :, : longest - part.shape[2]].any()
        at += part.shape[0]
    assert merged.get_seq_length() == max(length for _, length in lengths)


# Changes of a batch: rows at these places leave, a lane with so many tokens joins, so many steps run.
TRAFFIC = st.lists(
    st.tuples(st.sets(st.integers(0, 5), max_size=3), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=8
)


@settings(max_examples=200, deadline=None)
@given(traffic=TRAFFIC, room=st.integers(0, 9))
@pytest.mark.parametrize("window", [None, WINDOW])
def test_rows_leave_and_others_take_their_places(window: int | None, traffic: list[Any], room: int) -> None:
    def new_layer(keys: Tensor) -> GrowingLayer:
        layer = GrowingLayer() if window is None else SlidingLayer(window)
        layer.update(keys, -keys)
        return layer

    numbers = Numbers()
    numbers.next = 1  # no zero of its own
    texts = [numbers(1, 4)[0] for _ in range(4)]  # the keys of each row, [1, heads, length, size]
    layer = new_layer(texts[0]).merge([new_layer(text) for text in texts[1:]], room)
    for leaving, joining, steps in traffic:
        left = [row for row in range(len(texts)) if row not in leaving]
        if left:
            late = [row for row in left if row >= len(left)]
            rows = [row if row in left else late.pop() for row in range(len(left))]  # the last ones fill the holes
            longest = max(text.shape[2] for text in texts)
            texts = [texts[row] for row in rows]
            layer.keep(rows, torch.tensor(rows), drop=longest - max(text.shape[2] for text in texts))
        if joining:
            texts.append(numbers(1, joining)[0])
            layer = layer.merge([new_layer(texts[-1])], room)
        for _ in range(steps):
            new, _ = numbers(len(texts), 1)
            layer.update(new, -new)
            texts = [torch.cat([text, row[None]], 2) for text, row in zip(texts, new, strict=True)]
        longest = max(text.shape[2] for text in texts)
        assert layer.get_seq_length() == longest
        padded = torch.cat([torch.nn.functional.pad(text, (0, 0, longest - text.shape[2], 0)) for text in texts])
        keys, values = layer.content()
        assert torch.equal(keys, padded[:, :, longest - keys.shape[2] :])
        assert torch.equal(values, -keys)
        if window is not None:
            assert keys.shape[2] >= min(window - 1, longest)


def test_a_row_that_joins_takes_the_place_of_one_that_left_without_a_copy_of_the_others() -> None:
    numbers = Numbers()
    layer, newcomer = GrowingLayer(), GrowingLayer()
    layer.update(*numbers(3, 5))
    layer.update(*numbers(3, 1))
    where = layer.buffers[0].data_ptr()
    last = layer.content()[0][2].clone()
    layer.keep([0, 2], torch.tensor([0, 2]))
    newcomer.update(*numbers(1, 4))
    merged = layer.merge([newcomer])
    assert merged.buffers[0].data_ptr() == where
    assert torch.equal(merged.content()[0][1], last)
    assert torch.equal(merged.content()[0][2, :, 2:], newcomer.content()[0][0])


def test_a_static_layer_is_allocated_once() -> None:
    numbers = Numbers()
    layer = StaticLayer()
    layer.hold(*numbers(1, 4), room=10)
    where = [buffer.data_ptr() for buffer in layer.buffers]
    for _ in range(10):
        layer.update(*numbers(1, 1))
        assert [buffer.data_ptr() for buffer in layer.buffers] == where
        assert [part.shape[2] for part in layer.buffers] == [14, 14]
    layer.reorder_cache(torch.tensor([0]))
    assert layer.get_seq_length() == 14


def test_a_growing_layer_copies_what_it_has_only_when_its_room_is_used_up() -> None:
    numbers = Numbers()
    layer = GrowingLayer(room=8)
    layer.update(*numbers(1, 2))
    seen = {layer.buffers[0].data_ptr()}
    for _ in range(8):
        layer.update(*numbers(1, 1))
        seen.add(layer.buffers[0].data_ptr())
    assert len(seen) == 1
    layer.update(*numbers(1, 1))
    assert layer.buffers[0].shape[2] > 11  # by more than what was needed


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(1e-30, 1e30),
    rows=st.integers(1, 3),
    writes=st.lists(st.integers(1, 3)),
)
def test_eight_bits_are_off_by_at_most_half_a_step(seed: int, scale: float, rows: int, writes: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = QuantizedLayer()
    parts: list[Tensor] = []
    for length in [2, *writes]:
        states = torch.randn(rows, HEADS, length, SIZE, generator=generator) * scale
        layer.update(states, -states)
        parts.append(states)
        written = torch.cat(parts, 2)
        keys, values = layer.content()
        step = written.abs().amax(-1, keepdim=True) / 127
        assert bool(((keys - written).abs() <= step * 0.5001).all())
        assert bool(((values + written).abs() <= step * 0.5001).all())
    stored = layer.buffers
    assert [part.dtype for part in stored] == [torch.int8, torch.float32, torch.int8, torch.float32]


def test_eight_bit_codes_are_not_rounded_again_by_what_the_loop_does() -> None:
    layer, other = QuantizedLayer(), QuantizedLayer()
    states = torch.randn(2, HEADS, 6, SIZE, generator=torch.Generator().manual_seed(1))
    layer.update(states, states)
    other.update(states[:1, :, :2], states[:1, :, :2])
    before, _ = layer.content()
    moved = layer.select(torch.tensor([1, 0, 1]), room=4)
    assert torch.equal(moved.content()[0], before[[1, 0, 1]])
    merged = layer.merge([other])
    assert torch.equal(merged.content()[0][:2], before)
    assert torch.equal(merged.content()[0][2, :, 4:], before[0, :, :2])
    assert not merged.content()[0][2, :, :4].any()
    layer.crop(-2)
    assert torch.equal(layer.content()[0], before[:, :, :4])


def test_zeros_stay_zeros_in_eight_bits() -> None:
    layer = QuantizedLayer()
    nothing = torch.zeros(1, HEADS, 2, SIZE)
    layer.update(nothing, nothing)
    assert torch.equal(layer.content()[0], nothing)
