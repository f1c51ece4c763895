"""Workers import what the driver imported, and nothing from the folder in which it was started."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from genctl.engines.pool import cluster
from genctl.engines.pool.cluster import worker_env
from tests.planted import plant, script, what_ran

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_workers_run_nothing_of_the_working_directory_and_ray_leaves_nothing(tmp_path: Path) -> None:
    """Regression: it came first on the workers' path, so every worker imported `./genctl.py` as genctl."""
    folder = plant(tmp_path / "folder")
    with tempfile.TemporaryDirectory(prefix="g", dir="/tmp") as temporary:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": temporary}
        environment["XDG_CONFIG_HOME"] = str(tmp_path)
        command = [*script(tmp_path / "bin"), "run", "-m", "builtin:stories", "Once", "-n", "3", "-q"]
        done = [
            subprocess.run(
                [*command, *more],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd=folder,
                env=environment,
                check=False,
            )
            for more in ([], ["--workers", "1"])
        ]
        assert [(one.returncode, one.stderr) for one in done] == [(0, b""), (0, b"")], done
        assert done[0].stdout == done[1].stdout != b""
        assert what_ran(folder) == []
        assert not [*Path(temporary).glob("ray*"), *Path(temporary).glob("genctl*")]
        left = [one for one in psutil.process_iter(["cmdline"]) if temporary in " ".join(one.info["cmdline"] or ())]
        assert not psutil.wait_procs(left, timeout=20)[1]


def test_ray_is_given_an_empty_folder_in_place_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with worker_env(here=True) as made:
        empty = Path(made["working_dir"])
        assert empty.is_absolute()
        assert list(empty.iterdir()) == []
        assert made["env_vars"]["PYTHONSAFEPATH"] == "1"
    assert not empty.exists()


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
    """`python -m genctl` in a checkout: the driver imports genctl from there, so the workers must do so, too."""
    home = str(Path(cluster.__file__).parents[3])
    monkeypatch.setattr(sys, "path", [home, *(entry for entry in sys.path if entry != home)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with worker_env(here=True) as made:
        assert made["env_vars"]["PYTHONPATH"] == home


def test_a_job_that_was_submitted_keeps_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit --working-dir` has set a working directory, and Ray refuses a second one."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "gcs://job.zip"}}')
    with worker_env(here=False) as made:
        assert "working_dir" not in made
