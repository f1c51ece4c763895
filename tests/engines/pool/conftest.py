"""Two kinds of workers, and rows of every kind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from genctl.engines.pool import cluster
from tests.engines.pool.object_ray import ObjectRay

WORDS = ("Once upon a time", "The little fox", "One day", "Déjà vu")


@pytest.fixture(params=["objects", pytest.param("processes", marks=pytest.mark.night)])
def workers_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--workers` uses objects in this process, which start at once, or real processes of Ray."""
    monkeypatch.setattr(cluster, "cores", lambda: 4)
    if request.param == "processes":
        pytest.importorskip("ray")
        return
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))  # workers set it
    monkeypatch.setitem(sys.modules, "ray", ObjectRay())  # type: ignore[arg-type]
    monkeypatch.setattr(cluster, "_init", lambda address, cpus: None)
    monkeypatch.setattr(cluster, "_apart", lambda call: call())


def mixed_row(number: int) -> dict[str, Any]:
    """Greedy search, sampling and beams in turn. Some rows fail when they are read, others when they are planned."""
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
