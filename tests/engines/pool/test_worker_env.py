"""Workers import what the driver imported, and nothing from the folder in which it was started."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genctl.engines.pool import cluster
from genctl.engines.pool.cluster import RayCluster, RayGroup, worker_env
from tests.planted import plant, script, what_ran

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_workers_run_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """Theirs was on their path, first: `./genctl.py` was the genctl of every worker."""
    folder = plant(tmp_path / "folder")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(tmp_path)}
    command = [*script(tmp_path / "bin"), "run", "-m", "builtin:stories", "Once", "-n", "3", "-q"]
    done = [
        subprocess.run(
            [*command, *more], stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, env=environment, check=False
        )
        for more in ([], ["--workers", "1"])
    ]
    assert [one.returncode for one in done] == [0, 0], done
    assert done[0].stdout == done[1].stdout != b""
    assert what_ran(folder) == []


def test_ray_is_given_an_empty_folder_in_place_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with worker_env(here=True) as made:
        empty = Path(made["working_dir"])
        assert empty.is_absolute()
        assert list(empty.iterdir()) == []
        assert made["env_vars"]["PYTHONSAFEPATH"] == "1"
    assert not empty.exists()


@pytest.mark.parametrize(("named", "used"), [("", True), ("/named", False)])
def test_a_folder_for_temporary_files_that_the_user_names_is_used(
    named: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", named)
    given: dict[str, Any] = {}
    fake = SimpleNamespace(init=given.update, exceptions=SimpleNamespace(RayError=OSError))
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    cluster._init(None, 1, SimpleNamespace(folder="ours", number=0))  # type: ignore[arg-type]
    assert given.get("_temp_dir") == ("ours/r" if used else None)


def test_workers_elsewhere_have_paths_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/this/machine")
    monkeypatch.setenv("GENCTL_PRODUCTS", "torch")
    with worker_env(here=False) as made:
        assert made["env_vars"] == {"PYTHONSAFEPATH": "1", "GENCTL_PRODUCTS": "torch"}


def test_relative_and_empty_entries_of_pythonpath_do_not_lead_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["lib", "", str(tmp_path / "other"), ""]))
    with worker_env(here=True) as made:
        path = made["env_vars"]["PYTHONPATH"].split(os.pathsep)
    assert path[:2] == [str(tmp_path / "lib"), str(tmp_path / "other")]
    assert str(tmp_path) not in path


def test_a_genctl_that_python_alone_does_not_find_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m genctl` in a checkout: that of the driver comes from there, so those of the workers do."""
    home = str(Path(cluster.__file__).parents[3])
    monkeypatch.setattr(sys, "path", [home, *(entry for entry in sys.path if entry != home)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with worker_env(here=True) as made:
        assert made["env_vars"]["PYTHONPATH"] == home


def test_a_job_that_names_its_own_folder_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit --working-dir`: Ray refuses two."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "gcs://job.zip"}}')
    with worker_env(here=False) as made:
        assert "working_dir" not in made
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {}}')
    with worker_env(here=False) as made:
        assert "working_dir" in made


def test_ray_keeps_its_files_in_a_folder_that_nobody_else_can_enter(ray_here: RayCluster) -> None:
    """Ray lets everybody write to the folder that it is given, so that one lies in ours."""
    assert ray_here.group is not None
    assert list(Path(ray_here.group.folder).glob("r/session_*"))
    assert Path(ray_here.group.folder).stat().st_mode & 0o777 == 0o700


def test_a_folder_of_ray_ends_with_it_and_has_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = RayGroup()
    assert Path(group.folder).stat().st_mode & 0o777 == 0o700
    group.end(keep_logs=False)
    assert not Path(group.folder).exists()
    long = tmp_path / ("long" * 20)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(long))
    group = RayGroup()
    group.end(keep_logs=False)
    assert Path(group.folder).parent == Path("/tmp")
