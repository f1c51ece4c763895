"""Long texts: which window scores which token, and that the sum equals the plain one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genctl.engines.scorer import windows
from tests.cli.tool import genctl
from tests.commands.score.oracle import plain
from tests.tiny import CONTEXT, tiny, tokenizer

LONG = "the cat sat on the mat and the dog sat on the log, said the girl. " * 20


@given(st.integers(2, 200), st.integers(2, 60), st.integers(1, 59), st.integers(1, 40))
def test_each_token_is_scored_once_with_the_promised_context(total: int, window: int, stride: int, first: int) -> None:
    stride = 1 + (stride - 1) % (window - 1)
    first = min(first, total - 1)
    seen: list[int] = []
    for begin, end, scored in windows(total, window, stride, first):
        assert end - begin <= window
        for place in range(scored, end):
            assert place - begin >= min(place, window - stride)
            assert place > begin  # a token with nothing before it has no score
        seen += range(scored, end)
    assert seen == list(range(first, total))


def test_windows_by_hand() -> None:
    assert list(windows(10, 6, 2)) == [(0, 6, 1), (2, 8, 6), (4, 10, 8)]
    assert list(windows(5, 6, 2)) == [(0, 5, 1)]
    assert list(windows(10, 6, 2, first=7)) == [(2, 8, 7), (4, 10, 8)]


def reference(ids: list[int], window: int, stride: int) -> float:
    """The loop of transformers' guide to perplexity, rewritten: nats over all tokens but the first."""
    model = tiny("gpt2")
    total, done = 0.0, 1
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        logprobs = plain(model, ids[begin:end])
        total -= sum(logprobs[len(logprobs) - (end - done) :]) if end > done else 0.0
        done = max(done, end)
        if end == len(ids):
            break
    return total


@pytest.mark.parametrize(("flags", "window", "stride"), [((), CONTEXT, 100), (("--window", "50"), 50, 20)])
def test_a_long_text_equals_a_plain_reference(gpt2: Path, flags: tuple[str, ...], window: int, stride: int) -> None:
    ids = tokenizer()(LONG)["input_ids"]
    assert len(ids) > CONTEXT
    done = genctl("score", "-m", str(gpt2), LONG, "--stride", str(stride), *flags, "--format", "jsonl")
    assert done.status == 0, done.err
    (record,) = done.records
    assert record["tokens"] == len(ids) - 1
    assert record["token_ids"] == ids
    assert record["nll"] == pytest.approx(reference(ids, window, stride), rel=1e-5)
    assert record["ppl"] == pytest.approx(math.exp(record["nll"] / record["tokens"]))


def test_a_text_that_fits_is_not_changed_by_a_stride(gpt2: Path) -> None:
    plainly = genctl("score", "-m", str(gpt2), "the cat sat", "--format", "jsonl").out
    assert genctl("score", "-m", str(gpt2), "the cat sat", "--stride", "9", "--format", "jsonl").out == plainly


def test_a_long_context_is_read_but_not_scored(gpt2: Path) -> None:
    done = genctl("score", "-m", str(gpt2), " the end", "--context", LONG, "--stride", "16", "--format", "jsonl")
    own = tokenizer()(" the end")["input_ids"]
    whole = tokenizer()(LONG + " the end")["input_ids"]
    assert done.records[0]["token_ids"] == own
    begin = next(begin for begin in range(0, len(whole), 16) if begin + CONTEXT >= len(whole))
    (expected,) = {-math.fsum(plain(tiny("gpt2"), whole[begin:])[-len(own) :])}
    assert whole[-len(own) :] == own
    assert done.records[0]["nll"] == pytest.approx(expected, abs=1e-4)


def test_without_a_stride_both_lengths_are_said_and_the_others_go_on(gpt2: Path) -> None:
    done = genctl("score", "-m", str(gpt2), "the cat", LONG, "the dog", "--format", "jsonl")
    length = len(tokenizer()(LONG)["input_ids"])
    assert done.status == 1
    assert ["error" in record for record in done.records] == [False, True, False]
    message = done.records[1]["error"]["message"]
    assert message.startswith(f"the text has {length} tokens, but the model's context is {CONTEXT}")
    assert "--stride" in message


@pytest.mark.parametrize(
    ("arch", "flags", "why"),
    [
        ("gpt2", ("--stride", "256"), "--stride 256 must be less than the window of 256 tokens"),
        ("gpt2", ("--stride", "9", "--window", "300"), "--window 300 is more than the context of"),
        ("mamba", ("--stride", "9"), "--window N"),
        ("t5", ("--stride", "9", "--target", "x"), "is an encoder-decoder"),
    ],
)
def test_strides_that_cannot_be_are_refused(arch: str, flags: tuple[str, ...], why: str, tmp_path: Path) -> None:
    tiny(arch, tmp_path)
    done = genctl("score", "-m", str(tmp_path), "the cat", *flags)
    assert done.status in (2, 3)
    assert (done.out, why in done.err) == ("", True), done.err


def test_an_unbounded_model_takes_a_window(tmp_path: Path) -> None:
    tiny("bloom", tmp_path)
    done = genctl("score", "-m", str(tmp_path), LONG, "--stride", "40", "--window", "80", "--format", "jsonl")
    assert done.records[0]["tokens"] == len(tokenizer()(LONG)["input_ids"]) - 1
