"""Both sides read the same texts, each in its own way of running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from genctl.kernels.ops import library
from genctl.parity.measure import measure
from genctl.parity.sides import Forced, ReceiveLogits
from genctl.parity.values import Text
from tests.parity.sides import requests, side

SAME_BITS: dict[str, dict[str, Any]] = {
    "batch": {"width": 3},
    "speculation": {"generation": {"prompt_lookup_num_tokens": 3}},
    "static cache": {"generation": {"cache_implementation": "static"}},
    "no cache": {"generation": {"use_cache": False}},
}


@pytest.mark.skipif(library() is None, reason="nothing is compiled: sums depend on the batch")
@pytest.mark.parametrize("way", SAME_BITS)
def test_native_ways_of_running_read_the_same_bits(way: str) -> None:
    reference = side()
    found = measure(reference, side(**SAME_BITS[way]), requests(reference))
    assert found.summary.positions == 4 * 24
    assert found.summary.kl.max == 0.0
    assert all(position.shift == 0.0 and position.same for position in found.positions)
    assert not found.failed


def test_figures_are_those_of_the_texts() -> None:
    """The figures of each position, from its logits."""
    reference, other = side(), side(quantize="int4")
    found = measure(reference, other, requests(reference))
    text = found.texts[2]
    logits = []
    for each in (reference, other):
        rows: list[torch.Tensor] = []
        each.read([text], lambda place, index, row, rows=rows: rows.append(row.double()))
        logits.append(torch.stack(rows).log_softmax(-1))
    p, q = logits
    positions = [position for position in found.positions if position.text == text.id]
    assert [position.index for position in positions] == list(range(len(text.token_ids)))
    for index, position in enumerate(positions):
        first, theirs = int(p[index].argmax()), int(q[index].argmax())
        token = text.token_ids[index]
        assert position.kl == pytest.approx(float((p[index].exp() * (p[index] - q[index])).sum()), rel=1e-6)
        assert (position.first_reference, position.first_other) == (first, theirs)
        assert position.same == (first == theirs)
        assert position.regret == pytest.approx(float(p[index, first] - p[index, theirs]), abs=1e-9)
        assert position.rank_in_reference == int((p[index] > p[index, theirs]).sum()) + 1
        assert position.rank_in_other == int((q[index] > q[index, first]).sum()) + 1
        assert position.logprob_reference == pytest.approx(float(p[index, token]), abs=1e-6)
        assert position.logprob_other == pytest.approx(float(q[index, token]), abs=1e-6)


def test_drafts_of_a_given_text_are_taken_back() -> None:
    """Drafts hold a wrong token, so that a pass reads several tokens and the cache removes one."""
    speculating = side(generation={"prompt_lookup_num_tokens": 4})
    text = Text("0", (5, 6, 7), tuple(range(20, 40)))
    before = speculating.session.done.passes
    seen: list[int] = []
    assert speculating.read([text], lambda place, index, logits: seen.append(index)) == {}
    assert seen == list(range(20))
    assert speculating.session.done.passes - before < 10
    assert Forced(text.token_ids, lambda index, logits: None, 4).traits.drafts


def test_a_text_that_a_side_cannot_read_is_reported() -> None:
    reference, other = side(), side()
    context = reference.session.planner.context
    assert context is not None
    long = Text("long", (5,) * (context + 1), (6, 7))
    found = measure(reference, other, texts=[long, Text("short", (5, 6), (7, 8))])
    assert list(found.failed) == ["long"]
    assert {position.text for position in found.positions} == {"short"}


def test_messages_name_a_text_by_its_name() -> None:
    """They used to show its id, which counts from 0, while views count from 1."""
    reference, other = side(name="reference"), side(name="other")
    read = other.read

    def faulty(texts: Sequence[Text], receive: ReceiveLogits, *, interrupted: Any = None) -> dict[str, str]:
        def swapped(place: int, index: int, logits: torch.Tensor) -> None:
            receive(place, index, logits * 2 if (place, index) == (1, 5) else logits)

        return read(texts, swapped)

    other.read = faulty  # type: ignore[method-assign]
    texts = [Text("0", (5, 6), tuple(range(20, 40)), name="1"), Text("1", (7, 6), tuple(range(20, 40)), name="2")]
    found = measure(reference, other, texts=texts)
    assert found.verdict == "defect"
    assert found.reason.startswith("text 2, token 6: ")
