"""The wheel holds everything: installed alone and run from elsewhere, presets and built-in checkpoints are there."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from genctl.kernels import build

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_holds_presets_checkpoints_and_the_type_marker(wheel: Path, tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    presets = {f"genctl/_presets/{path.name}" for path in (ROOT / "presets").glob("*.toml")}
    assert len(presets) >= 12
    assert presets <= names
    for checkpoint in ("stories", "numbers"):
        for file in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
            assert f"genctl/models/builtin/{checkpoint}/{file}" in names
    assert {"genctl/py.typed", "genctl/commands/skill.md"} <= names
    compiled = {Path(name).stem for name in names if name.endswith(".so")}
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path, [name for name in names if name.endswith(".so")])
    if not compiled and "GENCTL_TEST_INSTALLED" not in os.environ:
        pytest.skip("nothing compiles C here: the wheel is pure Python")
    assert compiled == {build.CPU, *build.built(tmp_path / "genctl" / "kernels")}
    assert "py3-none-any" not in wheel.name
    assert not any(name.startswith(("tests", "scripts")) for name in names)


def test_the_page_of_an_index_has_absolute_links_and_says_whose_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (one for one in file.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(name))
    links = re.findall(r"\]\(([^)]+)", str(metadata.get_payload()))
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://github.com/genctl/genctl/")] == []
    assert [link for link in links if link.endswith((".svg", ".png")) and "/raw/main/docs/images/" not in link] == []
    assert (metadata["Author"], metadata["Description-Content-Type"]) == ("genctl contributors", "text/markdown")
    assert {"Source", "Documentation", "Changes", "Issues"} == {
        one.split(",")[0] for one in metadata.get_all("Project-URL", [])
    }


def test_it_runs_from_the_wheel_in_any_folder(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(home)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import genctl;"
        "assert genctl.__file__.startswith(sys.argv[1]), genctl.__file__;"
        "from genctl.commands.app import run;"
        "sys.exit(run(['run', '-m', 'builtin:numbers', '-p', 'greedy', '42']))"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(home)],
        cwd=elsewhere,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "forty two\n"), done.stderr


@pytest.mark.parametrize("name", ["stories", "numbers"])
def test_built_in_checkpoints_are_small(name: str) -> None:
    assert (ROOT / "genctl" / "models" / "builtin" / name / "model.safetensors").stat().st_size <= 4_000_000
