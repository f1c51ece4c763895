"""scripts/release: which platforms there are, and that what does not fit its wheel's tag is found."""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path

import pytest

from genctl.kernels import build
from scripts import release

ROOT = Path(__file__).resolve().parent.parent
TAGS = {name: row[2] for name, row in build.TARGETS.items()}


def elf(machine: int, glibc: str) -> bytes:
    return b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", machine) + b"\0GLIBC_2.2.5\0GLIBC_%s\0" % glibc.encode()


def macho(machine: int, version: int) -> bytes:
    head = struct.pack("<IIIIIIII", 0xFEEDFACF, machine, 0, 6, 2, 32, 0, 0)
    return (
        head + struct.pack("<IIII", 0x2, 16, 0, 0) + struct.pack("<IIII", release.BUILD_VERSION, 16, 1, version << 16)
    )


@pytest.mark.parametrize(
    ("library", "target", "why"),
    [
        (elf(62, "2.14"), "linux-x86_64", ""),
        (elf(183, "2.17"), "linux-aarch64", ""),
        (elf(62, "2.34"), "linux-x86_64", "it needs glibc 2.34"),
        (elf(62, "2.14"), "linux-aarch64", "it is for x86_64 on Linux"),
        (elf(62, "2.14"), "macos-x86_64", "it is for x86_64 on Linux"),
        (macho(0x0100000C, 11), "macos-arm64", ""),
        (macho(0x0100000C, 13), "macos-arm64", "it needs macOS 13.0"),
        (macho(0x01000007, 11), "macos-arm64", "it is for x86_64 on macOS"),
        (b"MZ", "windows-x86_64", "it is neither ELF nor Mach-O"),
    ],
)
def test_a_library_that_does_not_fit_the_tag_is_found(library: bytes, target: str, why: str) -> None:
    assert release.belongs(library, TAGS[target]) == why


def test_a_wheel_without_a_library_or_with_tests_is_found(tmp_path: Path) -> None:
    wheel = tmp_path / f"genctl-1-py3-none-{TAGS['linux-aarch64']}.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("genctl/kernels/cpu.so", elf(183, "2.17"))
        file.writestr("tests/test_x.py", "")
    assert release.faults(wheel, 0) == [
        f"{wheel.name}: there are 1 libraries for 0 variants",
        f"{wheel.name}: tests or scripts are in it",
    ]


@pytest.mark.parametrize("name", build.TARGETS)
def test_a_target_is_compiled_by_zig_alone_and_always_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system, machine, _ = build.TARGETS[name]
    monkeypatch.setenv("GENCTL_TARGET", name)
    monkeypatch.setenv("CC", "cc")
    assert not build.is_built()
    assert all("ziglang" in compiler for compiler in build.compilers())
    if system == "win32":
        assert build.variants() == {}
        assert build.build() == "there are none for x86_64 on win32"
        return
    assert build.variants() == build.VARIANTS[machine]
    zig = (sys.executable, "-m", "ziglang", "cc")
    words = build.compile_command(zig, list(build.variants())[-1], Path("a.c"), Path("a.o"))
    assert words[words.index("-target") + 1].startswith(f"{machine}-{'linux' if system == 'linux' else 'macos'}")


def test_a_target_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENCTL_TARGET", "linux-riscv64")
    with pytest.raises(ValueError, match="GENCTL_TARGET=linux-riscv64: it may be linux-x86_64, "):
        build.build()


def test_workflows_run_scripts_that_are_there() -> None:
    yaml = pytest.importorskip("yaml")
    found = {}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        (job,) = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        (found[path.stem],) = (step["run"].split()[0] for step in job["steps"] if "run" in step)
    assert found == {"test": "scripts/test", "nightly": "scripts/test", "release": "scripts/release"}
    assert all((ROOT / script).is_file() for script in found.values())
