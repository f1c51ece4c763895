"""`--fsdp`: ranks share the parameters and have prompts of their own; the results are those of one process."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import genctl
from tests.engines.ranks.processes import SECONDS, ranks, run
from tests.tiny import checkpoint

WAYS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("llama"))


def rows(path: Path, count: int) -> Path:
    """Greedy search, sampling and beams in turn; lengths that differ a lot; one row that fails."""
    made: list[dict[str, Any]] = [
        {
            "prompt": "the cat " * (1 + 9 * (number % 3)),
            "params": {"max_new_tokens": 2 + number * 13 % 29, **WAYS[number % 3]},
        }
        for number in range(count)
    ]
    made += [{"prompt": "once", "params": {"top_p": 7}}] if count > 1 else []
    path.write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("count", [1, 7])
def test_two_ranks_write_what_one_process_writes(llama: Path, tmp_path: Path, count: int) -> None:
    """With one row, the second rank has none."""
    job = ["run", "-m", str(llama), "-i", str(rows(tmp_path / "rows.jsonl", count)), "--seed", "3", "--batch-size", "2"]
    one = genctl(*job, "--runtime", "transformers", "--no-pack", "-o", str(tmp_path / "one.jsonl"))
    (status, out, err), (other, silent, _) = run(*job, "--fsdp", "-o", str(tmp_path / "two.jsonl"))
    assert (status, out) == (one.status, ""), err
    assert (other, silent) == (0, "")
    first, second = records(tmp_path / "one.jsonl"), records(tmp_path / "two.jsonl")
    assert len(first) == len(second)
    for theirs, ours in zip(first, second, strict=True):
        for name in ("id", "sequence", "text", "token_ids", "finish_reason", "seed", "error"):
            assert ours.get(name) == theirs.get(name)
        assert ours.get("logprob") == (pytest.approx(theirs["logprob"], abs=1e-4) if "logprob" in theirs else None)


def test_a_rank_that_is_killed_ends_the_other_with_a_message(llama: Path) -> None:
    job = ("run", "-m", str(llama), "--fsdp", "-n", "4", "--batch-size", "1", "--format", "jsonl", "-i", "-")
    with ranks("-m", "genctl", *job, stdin=subprocess.PIPE) as (first, second):
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write("the cat\nthe dog\n")  # a row for each rank
        first.stdin.flush()
        assert json.loads(first.stdout.readline())["prompt"] == "the cat"
        second.send_signal(signal.SIGKILL)
        second.wait(timeout=SECONDS)
        _, said = first.communicate("once\ntwice\n", timeout=SECONDS)
    assert first.returncode == 3, said
    assert "error: rank 0 of 2: another rank has ended or does not answer within 120 s" in said
    assert "Traceback" not in said


@pytest.mark.night
def test_an_interrupt_ends_all_ranks_together(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("the cat\n" * 400)
    job = ("run", "-m", str(llama), "--fsdp", "-n", "200", "-i", str(tmp_path / "many.txt"))
    with ranks("-m", "genctl", *job, "--format", "jsonl", "--batch-size", "1") as (first, second):
        assert first.stdout is not None
        written = [first.stdout.readline()]
        for process in (first, second):  # as a terminal does
            process.send_signal(signal.SIGINT)
        out, said = first.communicate(timeout=SECONDS)
        second.communicate(timeout=SECONDS)
    assert (first.returncode, second.returncode) == (130, 130), said
    written += out.splitlines()
    assert all(json.loads(record)["prompt"] == "the cat" for record in written)
    assert len(written) < 400


def test_what_cannot_be_shared_out_is_refused(llama: Path, tmp_path: Path) -> None:
    alone = genctl("run", "-m", str(llama), "x", "--fsdp")
    assert (alone.status, "--fsdp shares out a model over several processes" in alone.err) == (2, True)
    both = genctl("run", "-m", str(llama), "x", "--fsdp", "--tensor-parallel")
    assert (both.status, "leave out one of them" in both.err) == (2, True)
    for words in (("--quantize", "int8"), ("--compile",), ("--runtime", "native")):
        done = genctl("run", "-m", str(llama), "x", "--fsdp", *words)
        assert done.status == 2, words
        assert "--fsdp" in done.err
    (status, _, said), _ = run("run", "-m", "builtin:numbers", "twelve", "--fsdp")
    assert status == 3
    assert "error: --fsdp: an encoder-decoder's parts are called apart from it" in said
