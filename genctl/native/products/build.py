"""Compile the products: one shared library for each instruction set that the platform's CPUs may have.

    python genctl/native/products/build.py

builds them beside the sources, as `pip install` does through `hatch_build.py`. The compiler is clang of the package
`ziglang` where it is installed, else that of the machine (CC, or cc). Nothing here needs another module of genctl.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-s", "-D_GNU_SOURCE")

# machine -> variant, best first -> the flags of cc, and the CPU as zig names it. The last one runs on every such CPU.
VARIANTS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "x86_64": {
        "amx": (
            ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
            "x86_64_v4+avx512vnni+amx_tile+amx_bf16",
        ),
        "avx512bf16": (("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), "x86_64_v4+avx512vnni+avx512bf16"),
        "avx512": (("-march=x86-64-v4", "-mavx512vnni"), "x86_64_v4+avx512vnni"),
        "avx2": (("-march=x86-64-v3",), "x86_64_v3"),
        "plain": (("-march=x86-64",), "x86_64"),
    },
    "aarch64": {
        "dotprod": (("-march=armv8.2-a+dotprod",), "generic+dotprod"),
        "neon": (("-march=armv8-a",), "generic"),
    },
}
_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def variants() -> dict[str, tuple[tuple[str, ...], str]]:
    """The variants of this machine, best first; empty where there are none."""
    machine = platform.machine().lower()
    return {} if sys.platform == "win32" else VARIANTS.get(_NAMES.get(machine, machine), {})


def sources() -> list[Path]:
    """The files that are compiled, headers included."""
    return sorted(path for path in HERE.iterdir() if path.suffix in (".c", ".h"))


def digest() -> str:
    """What a library is built from: it changes with any source or flag."""
    whole = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for path in sources():
        whole.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def compilers() -> list[tuple[str, ...]]:
    """Commands that may compile C, in the order in which they are tried."""
    found: list[tuple[str, ...]] = []
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "cc"))
    named = os.environ.get("CC")
    found += [tuple(shlex.split(named))] if named else []
    paths = {os.path.realpath(path): path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))}
    return found + [(path,) for path in reversed(paths.values())]


def _command(compiler: tuple[str, ...], flags: tuple[str, ...], cpu: str, out: Path) -> list[str]:
    if "ziglang" in compiler:
        flags = (f"-mcpu={cpu}", "-fno-sanitize=all")
        if sys.platform == "linux":  # an old C library, so that a wheel runs on other distributions
            machine = platform.machine()
            flags += ("-target", f"{machine}-linux-gnu.2.{'17' if machine == 'x86_64' else '28'}")
    files = [str(path) for path in sources() if path.suffix == ".c"]
    return [*compiler, *FLAGS, f'-DSOURCES="{digest()}"', *flags, "-o", str(out), *files, "-lpthread", "-lm"]


def build(folder: Path = HERE) -> str:
    """Compile all variants into `folder`, one file each; returns "", or why there are none.

    Either all are there afterwards or none is: a compiler that fails for one variant is not used.
    """
    wanted = variants()
    if not wanted:
        return f"there are none for {platform.machine()} on {sys.platform}"
    why = "no C compiler was found (ziglang, CC, cc)"
    for compiler in compilers():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            running = []
            for name, (flags, cpu) in wanted.items():
                command = _command(compiler, flags, cpu, Path(temporary) / f"{name}.so")
                try:
                    running.append(
                        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                    )
                except OSError as error:
                    why = f"{shlex.join(compiler)} does not run: {error}"
                    break
            outputs = [(process.communicate()[0], process.returncode) for process in running]
            failed = [output for output, status in outputs if status != 0]
            if failed:
                lines = [line for line in failed[0].splitlines() if "error" in line] or failed[0].splitlines()
                why = f"{shlex.join(compiler)} failed: {lines[0] if lines else 'no message'}"
            if failed or len(running) < len(wanted):
                continue
            for name in wanted:
                (Path(temporary) / f"{name}.so").replace(folder / f"{name}.so")
        return ""
    return why


def is_built(folder: Path = HERE) -> bool:
    """Whether all variants are there and made from the sources as they are."""
    mark = digest().encode()
    files = [folder / f"{name}.so" for name in variants()]
    return bool(files) and all(file.is_file() and mark in file.read_bytes() for file in files)


if __name__ == "__main__":
    sys.exit(None if is_built() else build() or None)
