"""`--tensor-parallel`: two ranks choose what one process does, rank 0 alone reads and writes, and all ranks end."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genctl.errors import ModelError, UsageError
from genctl.models import runtime_choice, with_transformers
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.engines.ranks.processes import SECONDS, alone, answer, ranks
from tests.planted import plant, script, what_ran
from tests.tiny import checkpoint, tiny

PROMPTS = "the cat\nthe dog sat on the log\nonce\n"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoint("llama", tmp_path_factory.mktemp("llama"))
    (folder / "prompts.txt").write_text(PROMPTS)
    return folder


def test_torchrun_writes_what_one_process_writes(llama: Path, tmp_path: Path) -> None:
    job = ["run", "-m", str(llama), "-i", str(llama / "prompts.txt"), "--scores", "--seed", "3", "-n", "12"]
    job += ["--set", "do_sample=true", "--set", "num_return_sequences=2"]
    one = genctl(*job, "--runtime", "transformers", "-o", str(tmp_path / "one.jsonl"))
    assert one.status == 0, one.err
    words = [*script(tmp_path / "bin"), *job, "--tensor-parallel", "-o", str(tmp_path / "two.jsonl")]
    torchrun = script(tmp_path / "torchrun", "torch.distributed.run")
    folder = plant(tmp_path / "folder")
    done = alone([*torchrun, "--standalone", "--nproc-per-node", "2", "--no-python", *words], cwd=folder)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert what_ran(folder) == []
    first, second = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("one.jsonl", "two.jsonl")
    )
    assert len(first) == len(second) == 6
    for theirs, ours in zip(first, second, strict=True):
        assert (ours["id"], ours["text"], ours["seed"]) == (theirs["id"], theirs["text"], theirs["seed"])
        for ours_token, theirs_token in zip(ours["tokens"], theirs["tokens"], strict=True):
            assert ours_token["id"] == theirs_token["id"]
            assert ours_token["logprob"] == pytest.approx(theirs_token["logprob"], abs=1e-4)


def test_a_rank_that_is_killed_ends_the_other_with_a_message(llama: Path) -> None:
    job = ("run", "-m", str(llama), "--tensor-parallel", "-n", "4", "--batch-size", "1", "--format", "jsonl", "-i", "-")
    with ranks("-m", "genctl", *job, stdin=subprocess.PIPE) as (first, second):
        assert answer(first, "the cat")["prompt"] == "the cat"
        second.send_signal(signal.SIGKILL)
        second.wait(timeout=SECONDS)
        _, said = first.communicate("the dog\n", timeout=SECONDS)
    assert first.returncode == 3, said
    assert "error: rank 0 of 2: another rank has ended or does not answer within 120 s" in said
    assert "Traceback" not in said


@pytest.mark.night
def test_the_others_end_with_rank_0(llama: Path) -> None:
    job = ("run", "-m", str(llama), "--tensor-parallel", "-n", "4", "--batch-size", "1", "--format", "jsonl", "-i", "-")
    with ranks("-m", "genctl", *job, stdin=subprocess.PIPE) as (first, second):
        assert answer(first, "the cat")["prompt"] == "the cat"
        first.kill()
        out, said = second.communicate(timeout=SECONDS)
    assert (second.returncode, out) == (3, "")
    assert "Traceback" not in said


@pytest.mark.night
def test_an_interrupt_ends_all_ranks_together(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("the cat\n" * 400)
    job = ("run", "-m", str(llama), "--tensor-parallel", "-n", "200", "-i", str(tmp_path / "many.txt"))
    with ranks("-m", "genctl", *job, "--format", "jsonl", "--batch-size", "2") as (first, second):
        assert first.stdout is not None
        records = [first.stdout.readline()]
        for process in (first, second):  # as a terminal does
            process.send_signal(signal.SIGINT)
        out, said = first.communicate(timeout=SECONDS)
        second.communicate(timeout=SECONDS)
    assert (first.returncode, second.returncode) == (130, 130), said
    records += out.splitlines()
    assert all(json.loads(record)["prompt"] == "the cat" for record in records)
    assert len(records) < 400


def test_copies_of_a_run_are_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    runs = ("--strategy", "a:temperature=0.5", "--strategy", "b:temperature=0.7")
    for command, *more in (["run"], ["beam"], ["score"], ["compare", *runs], ["inspect-cache"]):
        done = genctl(command, *more, "-m", str(llama), "the cat")
        assert done.status == 2, (command, done.err)
        assert "2 processes were started together (WORLD_SIZE), and each would decode every prompt" in done.err
        assert "--tensor-parallel" in done.err
    output = tmp_path / "out.txt"
    assert genctl("run", "-m", str(llama), "-o", str(output), "the cat").status == 2
    assert not output.exists()
    done = genctl("score", "-m", str(llama), "--tensor-parallel", "the cat")
    assert done.status == 2
    monkeypatch.setenv("RANK", "two")
    assert "RANK=two and WORLD_SIZE=2" in genctl("run", "-m", str(llama), "the cat").err
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert genctl("run", "-m", str(llama), "-n", "1", "the cat").status == 0


def test_one_process_has_nothing_to_share_a_model_with(llama: Path) -> None:
    done = genctl("run", "-m", str(llama), "--tensor-parallel", "the cat")
    assert done.status == 2
    assert "--tensor-parallel shares out a model over several processes" in done.err
    assert "torchrun --nproc-per-node 2 --no-python genctl run" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_map": "auto"}, "--tensor-parallel and --device-map auto"),
        ({"compile": True}, "--tensor-parallel and --compile"),
        ({"quantize": "int8"}, "--tensor-parallel and --quantize int8"),
        ({"adapter": "x"}, "--tensor-parallel and --adapter"),
        ({"prompt_cache": "x"}, "--tensor-parallel and --prompt-cache"),
    ],
)
def test_options_for_whole_models_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        runtime_choice.check_options(Runtime(tensor_parallel=True, **options))


def test_what_cannot_be_shared_out_is_refused_before_it_is_read(llama: Path) -> None:
    with_transformers.check_plan(tiny("llama").config, 2)
    with pytest.raises(ModelError, match="num_key_value_heads = 2 cannot be shared out evenly over 4 ranks"):
        with_transformers.check_plan(tiny("llama").config, 4)
    with pytest.raises(ModelError, match="num_attention_heads = 4 cannot be shared out evenly over 3 ranks"):
        with_transformers.check_plan(tiny("llama").config, 3)
    bare = SimpleNamespace(model_type="strange", base_model_tp_plan=None)
    bare.get_text_config = lambda decoder: bare
    with pytest.raises(ModelError, match="transformers has no plan for strange"):
        with_transformers.check_plan(bare, 2)
