"""Build and check what a release uploads: the wheel of this platform and the source distribution."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
MACHO_MACHINES = {0x01000007: "x86_64", 0x0100000C: "arm64"}
BUILD_VERSION = 0x32  # LC_BUILD_VERSION of a Mach-O file


def products() -> Any:
    """Import genctl/kernels/build.py, which needs no other module."""
    spec = importlib.util.spec_from_file_location("products_build", ROOT / "genctl/kernels/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(out: Path) -> list[Path]:
    """Build the wheel of this platform and the source distribution. Returns the new files, sorted by name."""
    before = set(out.glob("*"))
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "GENCTL_BUILD": "all"}, check=True)
    return sorted(set(out.glob("*")) - before)


def belongs(library: bytes, tag: str) -> str:
    """Why a library does not fit the tag of its wheel; "" if it does."""
    if library[:4] == b"\x7fELF":
        machine = ELF_MACHINES.get(struct.unpack_from("<H", library, 18)[0], "another machine")
        needed = max((tuple(map(int, one)) for one in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)), default=(0, 0))
        most = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag)
        if most is None or machine != most[3]:
            return f"it is for {machine} on Linux"
        return "" if needed <= (int(most[1]), int(most[2])) else f"it needs glibc {needed[0]}.{needed[1]}"
    if library[:4] == b"\xcf\xfa\xed\xfe":
        machine = MACHO_MACHINES.get(struct.unpack_from("<I", library, 4)[0], "another machine")
        most = re.fullmatch(r"macosx_(\d+)_(\d+)_(\w+)", tag)
        if most is None or machine != most[3]:
            return f"it is for {machine} on macOS"
        needed = macos_of(library)
        return "" if needed <= (int(most[1]), int(most[2])) else f"it needs macOS {needed[0]}.{needed[1]}"
    return "it is neither ELF nor Mach-O"


def macos_of(library: bytes) -> tuple[int, int]:
    """The oldest macOS version for a 64-bit Mach-O file; (99, 0) if it names none."""
    at = 32
    for _ in range(struct.unpack_from("<I", library, 16)[0]):
        kind, length = struct.unpack_from("<II", library, at)
        if kind == BUILD_VERSION:
            version = struct.unpack_from("<I", library, at + 12)[0]
            return version >> 16, version >> 8 & 0xFF
        at += length
    return 99, 0


def faults(wheel: Path, variants: int) -> list[str]:
    """The faults of a wheel, which must have cpu.so and one library per variant (none without variants)."""
    tag = wheel.stem.split("-")[-1]
    with zipfile.ZipFile(wheel) as file:
        libraries = {name: file.read(name) for name in file.namelist() if name.endswith(".so")}
        names = file.namelist()
    wrong = [f"{name}: {why}" for name, data in libraries.items() if (why := belongs(data, tag))]
    if len(libraries) != (variants + 1 if variants else 0):
        wrong.append(f"there are {len(libraries)} libraries for {variants} variants")
    if any(name.startswith(("tests/", "scripts/")) for name in names):
        wrong.append("tests or scripts are in it")
    return [f"{wheel.name}: {one}" for one in wrong]


def run(wheel: Path, pip: list[str]) -> str:
    """Install the wheel into an empty environment, run it in an empty folder, and return its output."""
    with tempfile.TemporaryDirectory() as temporary:
        home, empty = Path(temporary, "env"), Path(temporary, "empty")
        empty.mkdir()
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin/python", "-m", "pip", "install", "--quiet", *pip, str(wheel)], check=True)
        command = [home / "bin/genctl", "run", "-m", "builtin:numbers", "42"]
        return subprocess.run(command, cwd=empty, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout


def main() -> str | None:
    """Build and check. Returns the faults, or None."""
    known = products()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of what is built (default: dist)")
    parser.add_argument("--pip", action="append", default=[], metavar="OPTION", help="of pip, where the wheel is tried")
    given = parser.parse_args()
    made = build(given.out)
    (wheel,) = (path for path in made if path.suffix == ".whl")
    wrong = faults(wheel, len(known.variants()))
    if (text := run(wheel, given.pip)) != "forty two\n":
        wrong.append(f"{wheel.name}: in an empty environment it writes {text!r}")
    if subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made]).returncode:
        wrong.append("twine check fails")
    return "\n".join(wrong) or None


if __name__ == "__main__":
    sys.exit(main())
