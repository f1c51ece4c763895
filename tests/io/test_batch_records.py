"""The record of DESIGN section 7, key by key, and the seeds that stand in it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genctl import events
from genctl.io.records import error_record, record, token_entry
from genctl.io.rows import InputRow, random_seed, row_seed

TRACE = events.Trace("top_k", removed=5, moved=0.25, changed=True, before=0.5, after=float("nan"), seconds=0.1)
TOKEN = events.Token(
    5, -0.5, " a", rank=2, entropy=1.25, top=((7, " b", -0.25), (5, " a", float("-inf"))), trace=(TRACE,)
)


def make(**more: Any) -> dict[str, Any]:
    hypothesis = events.Hypothesis((5, 2), -12.3, -1.5, "eos", score=-0.75, text=" a")
    named = {"prompt_text": "p", "model": "builtin:stories", "strategy": "beam", "seed": 7, "prompt_tokens": 4}
    return record(InputRow("x", 3, prompt="p"), 1, more.pop("hypothesis", hypothesis), **{**named, **more})


def test_a_record_has_its_keys_in_order() -> None:
    assert json.dumps(make()) == (
        '{"schema": "genctl/1", "id": "x", "sequence": 1, "prompt": "p", "text": " a", "token_ids": [5, 2], '
        '"finish_reason": "eos", "logprob": -12.3, "score": -0.75, "strategy": "beam", "seed": 7, '
        '"model": "builtin:stories", "usage": {"prompt_tokens": 4, "new_tokens": 2}}'
    )
    more = make(tokens=[], timing={"load_s": 1.0}, extra={"stop": "\n"})
    assert list(more)[-4:] == ["usage", "tokens", "timing", "stop"]
    with pytest.raises(ValueError, match="already has 'seed'"):
        make(extra={"seed": 8})


def test_an_error_record_has_no_more_than_its_error() -> None:
    assert json.dumps(error_record("x", "input", "line 1: no")) == (
        '{"schema": "genctl/1", "id": "x", "error": {"code": "input", "message": "line 1: no"}}'
    )


def test_a_token_entry_has_all_that_is_known_of_the_token() -> None:
    assert token_entry(TOKEN) == {
        "id": 5,
        "text": " a",
        "logprob": -0.5,
        "rank": 2,
        "entropy": 1.25,
        "top": [[7, " b", -0.25], [5, " a", None]],
        "trace": [{"processor": "top_k", "removed": 5, "moved": 0.25, "changed": True, "before": 0.5, "after": None}],
    }
    assert list(token_entry(events.Token(1, -1.0))) == ["id", "text", "logprob", "rank", "entropy"]


def test_clock_values_appear_only_with_timing() -> None:
    assert "seconds" not in make(tokens=[TOKEN])["tokens"][0]["trace"][0]
    assert make(tokens=[TOKEN], timing={"decode_s": 1.0})["tokens"][0]["trace"][0]["seconds"] == 0.1


@given(st.floats(), st.floats())
def test_numbers_are_exact_or_null(logprob: float, score: float) -> None:
    made = make(hypothesis=events.Hypothesis((1,), logprob, 0.0, "length", score=score))
    back = json.loads(json.dumps(made, allow_nan=False))
    for name, value in (("logprob", logprob), ("score", score)):
        assert back[name] == (value if abs(value) < float("inf") else None)


@given(st.integers(0, 2**64 - 1), st.text(st.characters()), st.integers(1, 10**9))
def test_the_first_row_has_the_seed_itself_and_the_others_depend_on_seed_and_id_alone(
    seed: int, id: str, index: int
) -> None:
    assert row_seed(seed, id, 0) == seed
    mixed = row_seed(seed, id, index)
    assert 0 <= mixed < 2**53
    assert mixed == row_seed(seed, id, index + 1)
    assert row_seed(mixed, "0", 0) == mixed  # repeated alone


def test_row_seeds_stay_what_they_are() -> None:
    assert row_seed(7, "1", 1) == 7740062739260201  # a recorded run must be repeatable by later versions


def test_row_seeds_differ() -> None:
    seeds = {row_seed(seed, str(id), 1) for seed, id in itertools.product(range(50), range(200))}
    assert len(seeds) == 50 * 200
    assert row_seed(1, "1", 1) != row_seed(11, "", 1)


def test_a_random_seed_can_be_typed() -> None:
    seeds = {random_seed() for _ in range(20)}
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len(seeds) > 1


def test_a_stop_says_which_criterion_it_was_behind_the_finish_reason() -> None:
    stopped = events.Hypothesis((5, 2), -12.3, -1.5, "stop", stop=" girl", kind="string", text=" a")
    made = make(hypothesis=stopped)
    assert made["stop"] == {"kind": "string", "what": " girl"}
    assert list(made)[6:8] == ["finish_reason", "stop"]
    assert "stop" not in make()
