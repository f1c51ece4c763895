"""One Ray for all tests of this folder, and rows of every kind."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genctl.engines.pool.cluster import RayCluster, start_cluster
from tests.engines.pool.object_ray import ObjectRay

WORDS = ("Once upon a time", "The little fox", "One day", "Déjà vu")


@pytest.fixture(scope="session")
def ray_here() -> Iterator[RayCluster]:
    """Ray, started once; `--workers` uses one that runs in its process."""
    if importlib.util.find_spec("ray") is None:  # not imported here: `start_cluster` has to silence it first
        pytest.skip("Ray is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = start_cluster(None, None, gpu=False)
        yield cluster
        cluster.end(hurried=False)


@pytest.fixture(params=["objects", pytest.param("processes", marks=pytest.mark.night)])
def workers_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`--workers` uses objects of this process, which start at once; or processes of Ray, as it does anywhere."""
    if request.param == "processes":
        request.getfixturevalue("ray_here")
        yield
        return
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))  # workers set it
    ray = ObjectRay()
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    yield
    ray.close()


def mixed_row(number: int) -> dict[str, Any]:
    """Greedy search, sampling and beams in turn; some rows fail when they are read, others when they are planned."""
    row: dict[str, Any] = {"id": f"row {number}", "prompt": f"{WORDS[number % 4]} {number}"}
    params: dict[str, Any] = {"max_new_tokens": 3 + number * 7 % 11}
    if number % 3 == 1:
        params |= {"do_sample": True, "num_return_sequences": 1 + number % 2}
    if number % 6 == 2:
        params |= {"num_beams": 3}
    if number % 12 == 0:
        params |= {"prompt_lookup_num_tokens": 3}
    if number % 10 == 4:
        params = {"temprature": 1}
    if number % 10 == 7:
        row["prompt"] = "too long " * 300
    if number % 3:
        row["label"] = {"number": number}
    return {**row, "params": params}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Forty rows: ten groups of four at `--batch-size 1`, and three of sixteen at 2."""
    lines = [json.dumps(mixed_row(number)) for number in range(40)]
    lines[12] = lines[12][:-4]
    lines[33] = json.dumps({"id": "row 1", "prompt": "the same id again"})
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
