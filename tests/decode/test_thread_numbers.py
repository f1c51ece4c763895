"""The number of threads: chosen from the work of a step and the free cores, set in one place, shown with --verbose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import genctl
from genctl.decode import step_costs as threads
from genctl.decode.step_costs import Threads
from tests.cli.tool import genctl as command

SMALL, LARGE = 3_600_000, 500_000_000  # bytes: builtin:stories, and GPT-2 in float32


@pytest.fixture(autouse=True)
def _own_number(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four free cores, nothing in the environment; restores torch's number at the end."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    yield
    torch.set_num_threads(before)


def chosen(made: Threads, weights: int, rows: int = 1, **more: object) -> int:
    made.apply(weights, rows, **more)  # type: ignore[arg-type]
    return torch.get_num_threads()


def test_a_small_model_has_work_for_one_thread_and_a_large_one_for_all() -> None:
    assert [chosen(Threads(), SMALL, rows) for rows in (1, 5, 16, 80)] == [1, 1, 1, 1]
    assert chosen(Threads(), SMALL, 512) == 4
    assert chosen(Threads(), LARGE) == 4


def test_a_worker_has_its_share_of_the_cores() -> None:
    assert chosen(Threads(share=2), LARGE) == 2
    assert chosen(Threads(share=2), SMALL) == 1


def test_a_number_that_is_given_wins_over_the_environment_and_both_over_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert chosen(Threads(), SMALL, recorded=4) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert chosen(Threads(), SMALL) == 3
    assert chosen(Threads(2), SMALL) == 2
    made = Threads(8)
    assert chosen(made, SMALL) == 8
    assert made.note == "threads: 8 (as set)"
    monkeypatch.delenv("MKL_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert chosen(Threads(), SMALL) == 1


def test_ranks_and_other_devices_keep_what_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    assert chosen(Threads(), SMALL, device="cuda") == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert chosen(Threads(), SMALL) == 3


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
        ("1:cpu:/x\n0::/\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/../..\n", {}, None),
        ("", {}, None),
    ],
)
def test_a_quota_of_time_counts_as_cores(
    groups: str, files: dict[str, str], limit: float | None, tmp_path: Path
) -> None:
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{key}": files[key] for key in files}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.quota(tmp_path) == limit


def test_verbose_says_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ("run", "One day", "-n", "2", "-v")
    found = re.search(r"^note: threads: 1 \(4 cores, 3\.\d MiB of weights, 1 row at a step\)$", command(*run).err, re.M)
    assert found
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "note: threads: 2 (OMP_NUM_THREADS)\n" in command(*run).err
    assert torch.get_num_threads() == 2
    assert "note: threads: 3 (as set)\n" in command(*run, "--threads", "3").err
    assert torch.get_num_threads() == 3


def test_python_changes_the_number_only_where_it_is_asked_to() -> None:
    torch.set_num_threads(3)
    genctl.load("builtin:numbers")
    assert torch.get_num_threads() == 3
    genctl.load("builtin:numbers", threads=2)
    assert torch.get_num_threads() == 2


def test_an_output_goes_on_with_as_many_threads_as_it_was_begun_with(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "One day"}\n{"note": "a mistake"}\n')
    job = f"run -i {rows} -o {out} --resume --strict --batch-size 1 -n 2 -v --no-pack".split()
    assert "threads: 2 (as set)" in command(*job, "--threads", "2").err
    header = json.loads(out.with_name("out.jsonl.journal").read_text().splitlines()[0])
    assert header["threads"] == 2
    assert "threads" not in header["settings"]
    again = command(*job)
    assert again.status == 1
    assert "note: threads: 2 (as the output was begun)" in again.err
    other = command(*job, "--threads", "1")
    assert "was begun with 2 threads, and continues with 1" in other.err
