"""Workers that die, checkpoints that cannot be loaded, options that do not fit."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genctl.engines.pool import cluster
from genctl.engines.pool.worker import Worker, WorkerSetup
from genctl.errors import ModelError, UsageError
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.engines.pool.dying import POISON
from tests.engines.pool.fake_ray import FakeRay


@pytest.mark.night
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_group_that_kills_its_worker_again_and_again_fails_alone(llama: Path, tmp_path: Path) -> None:
    rows = [{"id": f"row {number}", "prompt_ids": [5, 6, 7 + number]} for number in range(12)]
    rows[2]["prompt_ids"] = [5, POISON]
    prompts, out, expected = tmp_path / "rows.jsonl", tmp_path / "out.jsonl", tmp_path / "expected.jsonl"
    processor = 'processors=[{use="tests.engines.pool.dying:at_the_poison"}]'
    arguments = ["run", "-m", str(llama), "-i", str(prompts), "-n", "4", "--batch-size", "1", "--allow-plugins"]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = genctl(*arguments, "--set", processor, "-o", str(out), "--workers", "2", stdin="")
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["prompt_ids"] != [5, POISON]))
    assert genctl(*arguments, "--set", processor, "-o", str(expected), stdin="").status == 0
    assert (done.status, done.err) == (1, "")
    lines = out.read_text().splitlines(keepends=True)
    error = json.loads(lines.pop(2))
    assert error["id"] == "row 2"
    assert error["error"]["code"] == "worker"
    assert error["error"]["message"].startswith("workers died 2 times, worker ")
    assert f"on {platform.node()} last, each time with this row" in error["error"]["message"]
    assert "".join(lines) == _with_other_seeds(expected.read_text(), lines)


def _with_other_seeds(text: str, lines: list[str]) -> str:
    """The records with the seeds of `lines`: rows after the omitted one move up, and a seed depends on the place."""
    records = [json.loads(line) for line in text.splitlines()]
    for record, line in zip(records, lines, strict=True):
        record["seed"] = json.loads(line)["seed"]
    return "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)


@pytest.mark.usefixtures("workers_here")
def test_a_checkpoint_that_cannot_be_loaded_ends_the_run_with_its_message(llama: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(llama, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    alone = genctl("run", "-m", str(damaged), "hi", stdin="")
    done = genctl("run", "-m", str(damaged), "hi", "--workers", "2", stdin="")
    assert (done.status, done.out, done.err) == (alone.status, alone.out, alone.err)
    assert done.status == 3


def test_a_folder_that_a_node_lacks_is_named_with_the_node(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    setup = WorkerSetup(Runtime(model="gone"), (), 1, str(tmp_path), local=str(gone))
    before = os.environ.get("OMP_NUM_THREADS"), Path.cwd()
    try:
        with pytest.raises(ModelError) as caught:
            Worker(setup).open()
    finally:
        os.environ["OMP_NUM_THREADS"] = before[0] or "1"
        os.chdir(before[1])
    assert caught.value.message == f"gone is a local folder, and there is no {gone} on {platform.node()}"


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    for flags in (("--workers", "2"), ("--address", "auto")):
        for command in ("run", "beam", "score"):
            done = genctl(command, "hi", *flags, stdin="")
            line = f'error: {flags[0]} needs Ray, which is not installed\nhint: pip install "genctl[ray]"\n'
            assert (done.status, done.out, done.err) == (2, "", line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers 0: must be a whole number from 1, or auto"),
        (["--workers", "many"], "--workers many: must be a whole number from 1, or auto"),
        (
            ["--workers", "2", "--stream"],
            "--workers decodes groups of rows elsewhere, but --stream writes text while it is decoded",
        ),
        (
            ["--workers", "2", "--device-map", "auto"],
            "--workers gives each worker a device, but device_map = auto (flag --device-map) is one",
        ),
        (
            ["--workers", "2", "--device", "cuda:1"],
            "--workers gives each worker a GPU of its own, but device = cuda:1 (flag --device) names one for all\n"
            "hint: say --device cuda",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_both_options(arguments: list[str], message: str) -> None:
    done = genctl("run", "hi", *arguments, stdin="")
    assert (done.status, done.out, done.err) == (2, "", f"error: {message}\n")


def test_rows_from_a_keyboard_are_refused() -> None:
    done = genctl("run", "--input", "-", "--workers", "2")
    message = "error: --workers gives whole groups of rows to workers, but --input - reads them from a keyboard\n"
    assert (done.status, done.err) == (2, message)


def ray_with(gpus: int) -> Any:
    """A cluster with two live machines of eight cores each, and `gpus` GPUs in total."""
    ray = FakeRay(lambda number, method, arguments: None)
    ray.resources, ray.alive = {"CPU": 16.0, **({"GPU": float(gpus)} if gpus else {})}, [True, True, False]
    return ray


@pytest.mark.parametrize(
    ("workers", "gpus", "gpu", "expected"),
    [
        (None, 8, True, (8, 1, 2)), (None, 0, True, (2, 0, 8)), (None, 8, False, (2, 0, 8)), (4, 8, True, (4, 1, 4)),
        (16, 0, True, (16, 0, 1)),
    ],
)  # fmt: skip
def test_there_is_a_worker_for_each_gpu_or_else_for_each_machine(
    workers: int | None, gpus: int, gpu: bool, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_with(gpus))
    monkeypatch.setattr(cluster, "_init", lambda address, cpus: None)
    found = cluster.start_cluster("auto", workers, gpu=gpu)
    assert (found.workers, found.gpus, found.threads) == expected
    assert found.about == "at auto, 2 machines"


@pytest.mark.parametrize(
    ("address", "workers", "gpus", "there"),
    [
        (None, 2, 1, "there is 1 GPU, and each worker takes one"),
        ("auto", 17, 0, "there are 16 cores, and each worker takes one"),
    ],
)
def test_more_workers_than_gpus_or_cores_are_refused_with_the_number_that_fits(
    address: str | None, workers: int, gpus: int, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_with(gpus))
    monkeypatch.setattr(cluster, "_init", lambda address, cpus: None)
    with pytest.raises(UsageError) as caught:
        cluster.start_cluster(address, workers, gpu=True)
    assert caught.value.message == f"--workers {workers}: {there}"
    assert caught.value.hint == f"--workers {workers - 1} fits"


# -- Ray does not start, or is not installed ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "score"])
def test_more_workers_than_cores_are_refused_before_ray_starts(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(__spec__=ModuleSpec("ray", None))
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setattr(cluster, "cores", lambda: 2)
    done = genctl(command, "hi", "--workers", "200", stdin="")
    message = "error: --workers 200: there are 2 cores, and each worker takes one\nhint: --workers 2 fits\n"
    assert (done.status, done.out, done.err) == (2, "", message)


def test_a_ray_that_does_not_start_is_one_line_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def init(**arguments: Any) -> None:
        given.update(arguments)
        os.write(2, b"lines of Ray's own")
        raise Exception("\nThe current node timed out during startup.\nMore lines")

    ray = SimpleNamespace(init=init, __spec__=ModuleSpec("ray", None))
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    done = genctl("run", "hi", "--workers", "1", stdin="")
    line = "error: Ray does not start: The current node timed out during startup.\n"
    assert (done.status, done.out, done.err) == (2, "", line)
    folder = Path(given["_temp_dir"]).parent
    assert len(f"{folder}") < 40, "names of sockets in it are limited"
    assert not folder.exists()
    monkeypatch.setenv("RAY_TMPDIR", "/named/by/the/user")
    given.clear()
    assert genctl("run", "hi", "--workers", "1", stdin="").status == 2
    assert "_temp_dir" not in given


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_one_line(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(__spec__=ModuleSpec("ray", None))
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
    done = genctl("run", "hi", "--workers", "1", "--address", there, stdin="")
    message = f"error: --address {there}: there is no Ray cluster to join: Connection refused\n"
    assert (done.status, done.out, done.err) == (2, "", message)


def test_an_address_that_accepts_but_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    init = threading.Event()
    ray = SimpleNamespace(init=lambda **arguments: init.wait(), __spec__=ModuleSpec("ray", None))
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setattr(cluster, "JOIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        done = genctl("run", "hi", "--workers", "1", "--address", there, stdin="")
    init.set()
    message = f"error: --address {there}: there is no Ray cluster to join: no answer within 0.1 s\n"
    assert (done.status, done.out, done.err) == (2, "", message)


STAND_IN = """
import ctypes, os, signal, sys, time, types
def shutdown():
    ctypes.CDLL(None).signal(signal.SIGTERM, None)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
sys.modules["ray"] = types.SimpleNamespace(shutdown=shutdown)
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
from genctl.engines.pool.cluster import RayCluster
RayCluster(1, 0, 1, True, "").end(hurried=False)
"""


def test_a_signal_while_ray_ends_finds_our_handler() -> None:
    """Ray's C++ part restores the default handler, which Python does not notice."""
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", STAND_IN], cwd=root, timeout=60).returncode == 128 + signal.SIGTERM
