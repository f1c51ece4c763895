"""Processes that genctl and its libraries start run nothing from the working directory or another user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from genctl import process
from genctl.errors import UsageError
from genctl.models import runtime_choice
from tests.planted import plant, script, what_ran
from tests.tiny import checkpoint

ROOT = Path(__file__).parents[1]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    changed = {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    unset = (process.COMPILED, process.SAFE)
    return {name: value for name, value in {**os.environ, **changed}.items() if name not in unset}


@pytest.mark.compile
@pytest.mark.skipif(runtime_choice.cpp_compiler() is None, reason="no C++ compiler")
def test_the_compiler_runs_nothing_of_the_working_directory(tmp_path: Path, environment: dict[str, str]) -> None:
    """torch probes the CPU's instructions in `python -c`, which used to run `./ctypes.py`."""
    folder, model = plant(tmp_path / "folder"), checkpoint("gpt2", tmp_path)
    done = subprocess.run(
        [*script(tmp_path / "bin"), "run", "-m", str(model), "--device", "cpu", "-n", "4", "the cat", "--compile"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=folder, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "note: compiling the step" in done.stderr
    assert what_ran(folder) == []
    cache = tmp_path / "cache" / "genctl" / "compiled"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert list(cache.iterdir())


@pytest.mark.parametrize("start", [["-c", "import ctypes"], ["-m", "json.tool", "--help"]], ids=["-c", "-m"])
def test_children_of_a_program_run_nothing_of_the_working_directory(
    tmp_path: Path, environment: dict[str, str], start: list[str]
) -> None:
    folder = plant(tmp_path / "folder")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys\nfrom genctl import process\nprocess.protect_children()\n"
        "for path in (os.environ['PYTHONPATH'], os.pathsep.join(sys.path)):\n"
        "    subprocess.run([sys.executable, *sys.argv[1:]], env={**os.environ, 'PYTHONPATH': path}, check=True)\n"
    )
    subprocess.run(
        [sys.executable, str(program), *start], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    assert what_ran(folder) == []


@pytest.mark.parametrize("module", ["genctl", "genctl.lm_eval"])
def test_started_by_name_as_little_as_possible_comes_from_the_working_directory(
    tmp_path: Path, environment: dict[str, str], module: str
) -> None:
    """`python -m` itself imports from there; genctl's own imports do not. The safe way is the script."""
    folder = plant(tmp_path / "folder")
    for name in ("genctl.py", "genctl", "__future__.py", "__future__", "runpy.py", "runpy"):
        path = folder / name
        if path.is_file():
            path.unlink()
        elif path.is_dir():
            (path / "__init__.py").unlink()
            path.rmdir()
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=folder, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert what_ran(folder) == []


def test_a_library_leaves_the_environment_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(process.SAFE, raising=False)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    with process.ProtectedChildren():
        assert os.environ[process.SAFE] == "1"
    assert process.SAFE not in os.environ
    assert os.environ["PYTHONPATH"] == "/mine"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache would be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(process.COMPILED, "")  # so that it is restored afterwards
    return tmp_path / "genctl" / "compiled"


def test_it_is_a_folder_of_the_user_alone_and_closed_to_others(cache: Path) -> None:
    process.use_own_compile_cache()
    assert os.environ[process.COMPILED] == str(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    process.use_own_compile_cache()


def test_one_that_others_can_read_is_closed(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o755)
    cache.chmod(0o755)
    process.use_own_compile_cache()
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("which", ["compiled", "genctl"])
@pytest.mark.parametrize("kind", ["link", "foreign", "group", "everybody"])
def test_one_that_others_could_have_written_into_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, kind: str
) -> None:
    folder = cache if which == "compiled" else cache.parent
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.parent.mkdir(exist_ok=True, mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        cache.mkdir(parents=True)
        cache.parent.chmod(0o700)
        folder.chmod({"group": 0o770, "everybody": 0o707}.get(kind, 0o700))
    if kind == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(UsageError) as caught:
        process.use_own_compile_cache()
    what = {"link": "is a link", "foreign": "belongs to another user"}.get(kind, "can be written to by others")
    where = cache.parent if kind == "foreign" else folder
    assert caught.value.message == f"{where} {what}, and code is run from there"
    assert caught.value.hint == "TORCHINDUCTOR_CACHE_DIR=FOLDER names another"


def test_torchs_own_choice_is_none_of_the_user(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch writes its choice to the variable when it is imported."""
    monkeypatch.setenv(process.COMPILED, os.path.join(tempfile.gettempdir(), "torchinductor_somebody"))  # noqa: PTH118
    process.use_own_compile_cache()
    assert os.environ[process.COMPILED] == str(cache)


def test_one_that_the_user_names_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process.COMPILED, "/named")
    process.use_own_compile_cache()
    assert os.environ[process.COMPILED] == "/named"
    assert not cache.exists()


@pytest.mark.parametrize("home", ["file", "none"])
def test_without_a_home_it_is_a_folder_for_this_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    if home == "file":
        cache.parent.write_text("")
    else:
        monkeypatch.setattr(process, "cache_folder", lambda: None)
    process.use_own_compile_cache()
    made = Path(os.environ[process.COMPILED])
    assert made.stat().st_mode & 0o777 == 0o700
    assert not made.is_relative_to(tmp_path)
    made.rmdir()
