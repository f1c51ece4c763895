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
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-s", "-D_GNU_SOURCE")

# machine -> variant, best first -> the flags of cc, the CPU as zig names it, and an instruction that no older one has.
# The last one runs on every such CPU.
VARIANTS: dict[str, dict[str, tuple[tuple[str, ...], str, str]]] = {
    "x86_64": {
        "amx": (
            ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            "x86_64_v4+avx512vnni+amx_tile+amx_bf16+amx_int8",
            "tdpbf16ps %tmm0, %tmm1, %tmm2",
        ),
        "avx512bf16": (
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
            "x86_64_v4+avx512vnni+avx512bf16",
            "vdpbf16ps %zmm0, %zmm0, %zmm0",
        ),
        "avx512": (("-march=x86-64-v4", "-mavx512vnni"), "x86_64_v4+avx512vnni", "vpdpbusd %zmm0, %zmm0, %zmm0"),
        "avxvnni": (("-march=x86-64-v3", "-mavxvnni"), "x86_64_v3+avxvnni", "{vex} vpdpbusd %ymm0, %ymm0, %ymm0"),
        "avx2": (("-march=x86-64-v3",), "x86_64_v3", "vpaddd %ymm0, %ymm0, %ymm0"),
        "plain": (("-march=x86-64",), "x86_64", "nop"),
    },
    "aarch64": {
        "dotprod": (("-march=armv8.2-a+dotprod",), "generic+dotprod", "sdot v0.4s, v0.16b, v0.16b"),
        "neon": (("-march=armv8-a",), "generic", "nop"),
    },
}
_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def variants() -> dict[str, tuple[tuple[str, ...], str, str]]:
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


def _flags(compiler: tuple[str, ...], name: str) -> tuple[str, ...]:
    flags, cpu, _ = variants()[name]
    if "ziglang" not in compiler:
        return flags
    flags = (f"-mcpu={cpu}", "-fno-sanitize=all")
    if sys.platform == "linux":  # an old C library, so that a wheel runs on other distributions
        machine = platform.machine()
        flags += ("-target", f"{machine}-linux-gnu.2.{'17' if machine == 'x86_64' else '28'}")
    return flags


def command(
    compiler: tuple[str, ...], name: str, out: Path, files: list[Path], names: list[str], to: str = "-shared"
) -> list[str]:
    """How a variant is compiled. It holds the names of all that are compiled with it."""
    mark = f'-DSOURCES="{" ".join([digest(), *names])}"'
    return [*compiler, *FLAGS, to, mark, *_flags(compiler, name), "-o", str(out), *map(str, files), "-lpthread", "-lm"]


def run(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Run them side by side: of each the status, and what it wrote. Raises OSError where one does not start."""
    running = [
        subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        for one in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    return [(process.returncode, output) for process, output in zip(running, outputs, strict=True)]


def known(compiler: tuple[str, ...]) -> list[str]:
    """The variants whose flags and instructions a compiler knows, best first. Raises OSError where it does not run."""
    with tempfile.TemporaryDirectory() as temporary:
        commands = []
        for name, (_, _, instruction) in variants().items():
            file = Path(temporary, f"{name}.c")
            file.write_text(f'__asm__("{instruction}");\n')
            commands.append([*compiler, *_flags(compiler, name), "-c", str(file), "-o", str(file.with_suffix(".o"))])
        return [name for name, (status, _) in zip(variants(), run(commands), strict=True) if status == 0]


def _compile(compiler: tuple[str, ...], names: list[str], folder: Path) -> str:
    """Compile some variants into `folder`, all or none; returns "", or what failed."""
    files = [path for path in sources() if path.suffix == ".c"]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        outs = [Path(temporary, f"{name}.so") for name in names]
        done = run([command(compiler, name, out, files, names) for name, out in zip(names, outs, strict=True)])
        for status, output in done:
            if status != 0:
                lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
                return f"{shlex.join(compiler)} failed: {lines[0] if lines else 'no message'}"
        for out in outs:
            out.replace(folder / out.name)
    for name in set(variants()) - set(names):
        (folder / f"{name}.so").unlink(missing_ok=True)
    return ""


def build(folder: Path = HERE) -> str:
    """Compile the variants into `folder`, one file each; returns "", or why there are none.

    The compiler that knows the most of them is used, and what it does not know is left out; the last one must be there.
    Where a variant that it knows fails, another compiler is tried.
    """
    if not variants():
        return f"there are none for {platform.machine()} on {sys.platform}"
    able: list[tuple[tuple[str, ...], list[str]]] = []
    why = "no C compiler was found (ziglang, CC, cc)"
    for compiler in compilers():
        try:
            names = known(compiler)
        except OSError as error:
            why = f"{shlex.join(compiler)} does not run: {error}"
            continue
        if list(variants())[-1] in names:
            able.append((compiler, names))
        else:
            why = f"{shlex.join(compiler)} compiles nothing for this CPU"
    for compiler, names in sorted(able, key=lambda one: -len(one[1])):
        why = _compile(compiler, names, folder)
        if not why:
            return ""
    return why


def built(folder: Path = HERE) -> list[str]:
    """The variants in `folder`, best first; empty where one is missing that was compiled, or has other sources."""
    names = list(variants())
    base = folder / f"{names[-1]}.so" if names else folder
    mark = digest().encode()
    found = re.search(mark + rb"((?: [a-z0-9]+)+)\0", base.read_bytes()) if base.is_file() else None
    made = found[1].decode().split() if found else []
    files = [folder / f"{name}.so" for name in made]
    return made if all(file.is_file() and mark in file.read_bytes() for file in files) else []


def is_built(folder: Path = HERE) -> bool:
    """Whether all variants that the compiler knew are there, made from the sources as they are."""
    return bool(built(folder))


if __name__ == "__main__":
    sys.exit(None if is_built() else build() or None)
