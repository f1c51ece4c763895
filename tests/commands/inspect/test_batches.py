"""--check-batch: whether a batch changes what its prompts receive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genctl import events
from genctl.commands.run.checks import differences
from genctl.engines.local.session import Session
from genctl.engines.protocol import Flow
from genctl.results import Result, Sequence
from tests.cli.tool import genctl


def result(*ids: int, top: tuple[tuple[int, str, float], ...] = ()) -> Result:
    tokens = tuple(events.Token(token, -0.5, f"<{token}>", top=top) for token in ids)
    hypothesis = events.Hypothesis(ids, -1.0, -1.0, "length")
    return Result("a", "p", "greedy", 0, "m", (Sequence(hypothesis, tokens),))


def test_the_first_difference_is_told_with_its_gap() -> None:
    (found,) = differences(result(5, 9, 3), result(5, 8, 4, top=((8, "x", -0.5), (9, "y", -0.75))), "a")
    assert found == "prompt a, sequence 1, token 2: 9 '<9>' in the batch, 8 '<8>' alone (gap 2.50e-01 nats)"


def test_an_end_is_a_difference_too() -> None:
    (found,) = differences(result(5, 6), result(5, 6, 7), "a")
    assert "token 3: the end in the batch, 7 '<7>' alone" in found
    assert "gap" not in found


def test_a_sequence_that_only_one_of_them_has_is_a_difference() -> None:
    one = result(5, 6)
    two = replace(one, sequences=(*one.sequences, *result(5, 7).sequences))
    (found,) = differences(one, two, "a")
    assert found == "prompt a, sequence 2, token 1: the end in the batch, 5 '<5>' alone"


def test_equal_tokens_are_no_difference() -> None:
    assert not list(differences(result(5, 6), result(5, 6), "a"))


PROMPTS = ["Once upon a time", "One day", "The old fox"]
BATCH = ["run", "-i", "prompts.txt", "--check-batch", "--format", "jsonl", "-n", "6", "--seed", "3"]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))


@pytest.mark.usefixtures("prompts")
def test_equal_batches_pass_and_write_what_a_plain_run_writes() -> None:
    done = genctl(*BATCH)
    assert done.status == 0, done.err
    assert done.out == genctl(*[option for option in BATCH if option != "--check-batch"]).out


@pytest.mark.usefixtures("prompts")
def test_a_difference_is_told_and_the_exit_status_is_4(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Session.stream

    def changed(self: Session, requests: Any, report: Any, flow: Flow) -> Iterator[Any]:
        requests = list(requests)
        if flow.width == 1 and requests[0].id == "1":  # alone: as if from another prompt
            requests = [type(requests[0])("1", requests[0].resolved, requests[0].seed, "Far away there")]
        return stream(self, requests, report, flow)

    monkeypatch.setattr(Session, "stream", changed)
    done = genctl(*BATCH)
    assert done.status == 4
    assert done.out.count("\n") == 3  # the batch's rows are written all the same
    assert "check: prompt 2, sequence 1, token" in done.err
    assert "--check-batch: 1 sequence differs" in done.err
    assert "check: the same texts read alone and in a batch: tie: " in done.err  # the fault is that of the test
