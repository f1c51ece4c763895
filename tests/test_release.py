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


def test_a_wheel_without_a_library_or_with_tests_is_found(tmp_path: Path) -> None:
    wheel = tmp_path / f"genctl-1-py3-none-{ARM}.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("genctl/kernels/cpu.so", elf(183, "2.17"))
        file.writestr("tests/test_x.py", "")
    assert release.faults(wheel, 0) == [
        f"{wheel.name}: there are 1 libraries for 0 variants",
        f"{wheel.name}: tests or scripts are in it",
    ]


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
