"""The wheel is complete and runs from elsewhere; scripts/release finds contents that contradict the wheel's tag."""

from __future__ import annotations

import email
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from genctl.kernels import build
from scripts import release

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
        [sys.executable, "-c", code, str(home)], cwd=elsewhere, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "forty two\n"), done.stderr


@pytest.mark.parametrize("name", ["stories", "numbers"])
def test_built_in_checkpoints_are_small(name: str) -> None:
    assert (ROOT / "genctl" / "models" / "builtin" / name / "model.safetensors").stat().st_size <= 4_000_000


LINUX, ARM = "manylinux_2_17_x86_64", "manylinux_2_17_aarch64"
MAC, INTEL_MAC = "macosx_11_0_arm64", "macosx_11_0_x86_64"


def elf(machine: int, glibc: str) -> bytes:
    return b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", machine) + b"\0GLIBC_2.2.5\0GLIBC_%s\0" % glibc.encode()


def macho(machine: int, version: int) -> bytes:
    head = struct.pack("<IIIIIIII", 0xFEEDFACF, machine, 0, 6, 2, 32, 0, 0)
    return (
        head + struct.pack("<IIII", 0x2, 16, 0, 0) + struct.pack("<IIII", release.BUILD_VERSION, 16, 1, version << 16)
    )


@pytest.mark.parametrize(
    ("library", "tag", "why"),
    [
        (elf(62, "2.14"), LINUX, ""),
        (elf(183, "2.17"), ARM, ""),
        (elf(62, "2.34"), LINUX, "it needs glibc 2.34"),
        (elf(62, "2.14"), ARM, "it is for x86_64 on Linux"),
        (elf(62, "2.14"), INTEL_MAC, "it is for x86_64 on Linux"),
        (macho(0x0100000C, 11), MAC, ""),
        (macho(0x0100000C, 13), MAC, "it needs macOS 13.0"),
        (macho(0x01000007, 11), MAC, "it is for x86_64 on macOS"),
        (b"MZ", "win_amd64", "it is neither ELF nor Mach-O"),
    ],
)
def test_a_library_that_does_not_fit_the_tag_is_found(library: bytes, tag: str, why: str) -> None:
    assert release.belongs(library, tag) == why


@pytest.mark.parametrize(
    ("system", "machine", "tag"),
    [
        ("linux", "x86_64", LINUX),
        ("linux", "aarch64", ARM),
        ("darwin", "arm64", MAC),
        ("darwin", "x86_64", INTEL_MAC),
        ("win32", "AMD64", ""),
        ("linux", "riscv64", ""),
    ],
)
def test_a_wheel_that_travels_is_for_old_systems_too(
    system: str, machine: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert build.wheel_tag() == ""  # compiled for this machine alone
    monkeypatch.setenv("GENCTL_BUILD", "all")
    assert build.wheel_tag() == tag
    if not tag:
        assert build.build() == f"there are none for {build.machine()} on {system}"
        return
    zig = (sys.executable, "-m", "ziglang", "cc")
    words = build.compile_command(zig, list(build.variants())[-1], Path("a.c"), Path("a.o"))
    assert (
        words[words.index("-target") + 1]
        == {
            LINUX: "x86_64-linux-gnu.2.17",
            ARM: "aarch64-linux-gnu.2.17",
            MAC: "aarch64-macos.11.0-none",
            INTEL_MAC: "x86_64-macos.11.0-none",
        }[tag]
    )


def test_workflows_run_scripts_that_are_there() -> None:
    yaml = pytest.importorskip("yaml")
    found = {}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        (job,) = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        (found[path.stem],) = (step["run"].split()[0] for step in job["steps"] if "run" in step)
    assert found == {"test": "scripts/test", "nightly": "scripts/test", "release": "scripts/release"}
    assert all((ROOT / script).is_file() for script in found.values())
