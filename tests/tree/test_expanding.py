"""All continuations, against an enumeration on four tokens."""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from genctl.config.layers import Layer
from genctl.decode.processors import trace
from genctl.engines.protocol import Report, Request
from genctl.engines.session import Session
from genctl.params import Runtime
from genctl.tree.commands import Continuation, Covered
from genctl.tree.explorer import Explorer
from genctl.tree.writing import BLOCK
from tests import tiny
from tests.tree.trees import explorer

PROMPT, EOS = (1, 3), 2


@cache
def four(arch: str) -> Session:
    folder = Path(mkdtemp()) / arch
    tiny.tiny(arch, vocab_size=4).save_pretrained(folder)
    return Session.load(Runtime(model=str(folder)))


def expand(arch: str, line: str, **knobs: Any) -> tuple[list[Continuation], Covered, Explorer]:
    layers = [Layer("flag", knobs, declared="command", typed=True)] if knobs else []
    made = Explorer.begin(four(arch), "", PROMPT, layers, seed=7)
    results = list(made.do(line))
    (covered,) = [result for result in results if isinstance(result, Covered)]
    return [result for result in results if isinstance(result, Continuation)], covered, made


def enumerated(arch: str, depth: int, **knobs: Any) -> dict[tuple[int, ...], float]:
    """The log-probability of every continuation, each text read on its own."""
    session = four(arch)
    resolved = session.resolve([Layer("flag", knobs, declared="command", typed=True)])
    lane = session.planner.plan(Request("", resolved, 7, prompt_ids=PROMPT), Report()).lane
    found: dict[tuple[int, ...], float] = {}

    @cache
    def after(text: tuple[int, ...]) -> torch.Tensor:
        prefix = session.forward.prefill((*PROMPT, *text), None, use_cache=False)
        scores = trace.run_checked(lane.processors, torch.tensor([[*PROMPT, *text]]), prefix.logits)
        return scores.log_softmax(-1)[0]

    for length in range(1, depth + 1):
        for text in itertools.product(range(4), repeat=length):
            if EOS in text[:-1] or (length < depth and text[-1] != EOS):
                continue
            total = 0.0
            for at, token in enumerate(text):
                total += float(after(text[:at])[token])
            found[text] = total
    return {text: total for text, total in found.items() if total > -float("inf")}


@pytest.mark.parametrize("arch", ["llama", "mamba"])
@pytest.mark.parametrize(
    "knobs",
    [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "temperature": 0.7, "top_k": 3}, {"min_new_tokens": 2}],
    ids=["model", "history", "filters", "eos held back"],
)
def test_they_are_those_of_an_enumeration(arch: str, knobs: dict[str, Any]) -> None:
    expected = enumerated(arch, 4, **knobs)
    found, covered, made = expand(arch, "expand depth=4", **knobs)
    assert {one.token_ids for one in found} == expected.keys()
    for one in found:
        assert one.total == pytest.approx(expected[one.token_ids], abs=1e-4)
        assert one.ended == (one.token_ids[-1] == EOS)
        path = [made.tree.nodes[node].id for node in made.tree.path(one.node)]
        assert tuple(path) == one.token_ids
        assert made.tree.joints[one.node] == pytest.approx(one.logprob, abs=1e-9)
    totals = [one.total for one in found]
    assert totals == sorted(totals, reverse=True)
    assert found[-1].mass == pytest.approx(1.0, abs=1e-4)
    assert covered.complete
    assert covered.mass == found[-1].mass


@pytest.mark.parametrize("mass", [0.2, 0.5, 0.9])
def test_a_mass_is_covered_by_the_fewest_texts(mass: float) -> None:
    every = sorted(enumerated("llama", 4).values(), reverse=True)
    found, covered, _ = expand("llama", f"expand mass={mass},depth=4")
    sums = list(itertools.accumulate(map(math.exp, every)))
    assert len(found) == 1 + sum(total < mass for total in sums)
    assert covered.mass == found[-1].mass >= mass


def test_the_work_is_bounded() -> None:
    found, covered, _ = expand("llama", "expand depth=4,nodes=5")
    assert covered.nodes <= 5
    assert not covered.complete
    assert covered.reason == f"{covered.nodes} texts were continued, which is the most"
    every, _, _ = expand("llama", "expand depth=4")
    assert [one.token_ids for one in found] == [one.token_ids for one in every[: len(found)]]


def test_a_vocabulary_of_more_than_a_block_is_gone_through() -> None:
    made = explorer()
    found = [one for one in list(made.do("expand depth=1")) if isinstance(one, Continuation)]
    assert len(found) == made.session.forward.vocab_size > BLOCK
    assert len({one.token_ids for one in found}) == len(found)
    assert found[-1].mass == pytest.approx(1.0, abs=1e-6)
    assert made.session.forward.vocab_size == len(made.tree)
    assert [one.token_ids[0] for one in found[:5]] == made.distribution(0).order[:5].tolist()


def test_siblings_share_a_pass() -> None:
    made = explorer()
    before = made.session.forward.forwards
    (covered,) = [one for one in list(made.do("expand mass=0.5,depth=4")) if isinstance(one, Covered)]
    assert made.session.forward.forwards - before < covered.nodes / 2
