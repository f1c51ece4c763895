"""Compile the products: one shared library per instruction set, and one that detects the CPU's features (cpu.c).

    python genctl/kernels/build.py

builds them beside the sources, as `pip install` does through `hatch_build.py`. `GENCTL_BUILD` selects the CPUs:

    (not set)   this one: only the fastest variant for it
    runnable    this one: all variants that it can run, for tests
    all         every CPU of the platform, for a portable wheel

The compiler is clang from the package `ziglang` if installed, else the machine's own (CC, or cc). Compiling
needs no other module of genctl, and nothing here needs torch.

`choice` returns the variant to use. GENCTL_PRODUCTS names another one (a slower instruction set), or `torch` for none.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
VARIABLE = "GENCTL_BUILD"
EXTENTS = ("", "runnable", "all")  # its allowed values
PRODUCTS = "GENCTL_PRODUCTS"
LIBRARIES = HERE  # where they are loaded from
AGAIN = f"python {shlex.quote(str(HERE / 'build.py'))} compiles them again"
OUTDATED = f"the compiled products are older than their sources; {AGAIN}"
CPU = "cpu"  # the library of cpu.c
FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-s", "-D_GNU_SOURCE")

# machine -> variant, best first -> the flags of cc, zig's name of the CPU, and an instruction that older CPUs lack.
# The last variant runs on every CPU of its machine.
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


def machine() -> str:
    """The architecture of this CPU: a key of VARIANTS, or another name."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def wheel_tag() -> str:
    """The platform tag of a portable wheel, as ziglang compiles it (see `_flags`); "" for a wheel for this machine."""
    if extent() != "all" or not variants():
        return ""
    apple = "arm64" if machine() == "aarch64" else machine()
    return f"manylinux_2_17_{machine()}" if sys.platform == "linux" else f"macosx_11_0_{apple}"


def variants() -> dict[str, tuple[tuple[str, ...], str, str]]:
    """The variants of this platform, best first; empty if there are none: on Windows, threads.c needs POSIX threads."""
    return {} if sys.platform == "win32" else VARIANTS.get(machine(), {})


def sources() -> list[Path]:
    """The files that are compiled, headers included."""
    return sorted(path for path in HERE.iterdir() if path.suffix in (".c", ".h"))


def digest() -> str:
    """A hash of a library's inputs: it changes with any source or flag."""
    whole = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for path in sources():
        whole.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def compilers() -> list[tuple[str, ...]]:
    """Candidate C compilers: the first that can compile the last variant is used."""
    ziglang = [(sys.executable, "-m", "ziglang", "cc")] if importlib.util.find_spec("ziglang") is not None else []
    named = [tuple(shlex.split(os.environ["CC"]))] if os.environ.get("CC") else []
    return [*ziglang, *named, *((path,) for name in ("clang", "cc", "gcc") if (path := shutil.which(name)))]


def _flags(compiler: tuple[str, ...], name: str) -> tuple[str, ...]:
    flags, cpu, _ = variants()[name]
    if "ziglang" not in compiler:
        return flags
    flags = (f"-mcpu={cpu}", "-fno-sanitize=all")
    if sys.platform == "linux":  # an old C library, so a wheel also runs on other distributions
        flags += ("-target", f"{machine()}-linux-gnu.2.17")
        flags += () if machine() == "x86_64" else ("-mno-outline-atomics",)  # they need a library that is not linked
    elif extent() == "all":
        flags += ("-target", f"{machine()}-macos.11.0-none")
    return flags


def compile_command(compiler: tuple[str, ...], name: str, source: Path, to: Path, *how: str) -> list[str]:
    """The command that compiles a source for a variant: `how` is -c, or flags for another output than an object."""
    return [*compiler, *FLAGS, *_flags(compiler, name), *(how or ("-c",)), str(source), "-o", str(to)]


def link_command(compiler: tuple[str, ...], name: str, objects: Iterable[Path], to: Path) -> list[str]:
    """The command that links objects. Without zig's run-time library: compiling it takes longer than all else."""
    alone = ("-Wl,-z,defs", "-nostdlib", "-lc") if "ziglang" in compiler and sys.platform == "linux" else ()
    return [
        *(*compiler, "-shared", "-s", *_flags(compiler, name), "-o", str(to), *map(str, objects)),
        *(*alone, "-lpthread", "-lm"),
    ]


def run(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Run commands in parallel, one per core: exit status and output of each. Raises OSError if one does not start."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # `python -m ziglang` ignores the working directory

    def perform(command: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", env=environment, check=False
        )
        return done.returncode, done.stdout

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as cores:
        return list(cores.map(perform, commands))


def known(compiler: tuple[str, ...]) -> list[str]:
    """The variants whose flags and instructions a compiler knows, best first. Raises OSError if it does not run."""
    with tempfile.TemporaryDirectory() as temporary:
        commands = []
        for name, (_, _, instruction) in variants().items():
            file = Path(temporary, f"{name}.c")
            file.write_text(f'__asm__("{instruction}");\n')
            commands.append([*compiler, *_flags(compiler, name), "-c", str(file), "-o", str(file.with_suffix(".o"))])
        return [name for name, (status, _) in zip(variants(), run(commands), strict=True) if status == 0]


def mark_of(made: Iterable[str], names: Iterable[str]) -> str:
    """The mark in a library: the digest of its sources, the compiled variants, and all variants the compiler knew."""
    return " ".join([digest(), *made, "of", *names])


def read_mark(mark: str) -> tuple[str, list[str], list[str]]:
    """The parts of a mark."""
    whole, *words = mark.split()
    end = words.index("of") if "of" in words else len(words)
    return whole, words[:end], words[end + 1 :]


class Cpu:
    """The library of cpu.c: which variants this CPU runs, and which were compiled beside it.

    `built_from` is its sources' digest; `variants` were compiled, `known` are all that the compiler knew; best first.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError if the file is not such a library."""
        loaded = ctypes.CDLL(str(path))
        loaded.built_from.restype = ctypes.c_char_p
        self.built_from, self.variants, self.known = read_mark(loaded.built_from().decode())
        self._runs, self._suits = loaded.runs, loaded.suits
        for function in (self._runs, self._suits):
            function.argtypes, function.restype = (ctypes.c_char_p,), ctypes.c_int

    def runs(self, variant: str) -> bool:
        """Whether this CPU has the instructions of a variant."""
        return bool(self._runs(variant.encode()))

    def suits(self, variant: str) -> bool:
        """Whether a variant that this CPU runs is faster on it than the next one."""
        return bool(self._suits(variant.encode()))


def extent() -> str:
    """The value of GENCTL_BUILD. Raises ValueError if it is unknown."""
    value = os.environ.get(VARIABLE, "")
    if value not in EXTENTS:
        raise ValueError(f"{VARIABLE}={value}: it may be {' or '.join(EXTENTS[1:])}, or not set")
    return value


def wanted(cpu: Cpu, names: Iterable[str]) -> list[str]:
    """The variants among `names`, best first, that GENCTL_BUILD selects for this CPU. Raises ValueError."""
    if extent() == "all":
        return list(names)
    able = [name for name in names if cpu.runs(name)]
    return able if extent() else next(([name] for name in able if cpu.suits(name)), [])


def _run_all(commands: list[list[str]]) -> None:
    """Run commands. Raises RuntimeError for the first that failed."""
    for command, (status, output) in zip(commands, run(commands), strict=True):
        if status != 0:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
            named = command[: command.index("ziglang") + 2] if "ziglang" in command else command[:1]
            raise RuntimeError(f"{shlex.join(named)} failed: {lines[0] if lines else 'no message'}")


def _cpu_library(compiler: tuple[str, ...], mark: str, folder: Path) -> tuple[Path, Path]:
    """Compile cpu.c with a mark, for any CPU; returns the object and the library. Raises RuntimeError."""
    plainest, made, library = list(variants())[-1], folder / f"{CPU}.o", folder / f"{CPU}.so"
    _run_all([compile_command(compiler, plainest, HERE / f"{CPU}.c", made, f'-DSOURCES="{mark}"', "-c")])
    _run_all([link_command(compiler, plainest, [made], library)])
    return made, library


def _compile(compiler: tuple[str, ...], names: list[str], folder: Path) -> None:
    """Compile the wanted variants among `names` into `folder`, all or nothing. Raises RuntimeError or OSError."""
    files = [path for path in sources() if path.suffix == ".c" and path.stem != CPU]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        here, probe = Path(temporary), Path(temporary, "probe")
        probe.mkdir()
        chosen = wanted(Cpu(_cpu_library(compiler, mark_of([], names), probe)[1]), names)
        mark, cpu = _cpu_library(compiler, mark_of(chosen, names), here)
        objects = {name: [here / f"{name}-{file.stem}.o" for file in files] for name in chosen}
        _run_all(
            [
                compile_command(compiler, name, file, to)
                for name, outs in objects.items()
                for file, to in zip(files, outs, strict=True)
            ]
        )
        libraries = [here / f"{name}.so" for name in chosen]
        _run_all([link_command(compiler, to.stem, [*objects[to.stem], mark], to) for to in libraries])
        for out in (*libraries, cpu):
            out.replace(folder / out.name)
    for name in set(variants()) - set(chosen):
        (folder / f"{name}.so").unlink(missing_ok=True)


def build(folder: Path = HERE) -> str:
    """Compile the variants that GENCTL_BUILD selects into `folder`, one file each; returns "", or why there are none.

    Variants that the compiler does not know are left out, but it must know the last one. Raises ValueError.
    """
    extent()
    if not variants():
        return f"there are none for {machine()} on {sys.platform}"
    why = "no C compiler was found (ziglang, CC, cc)"
    for compiler in compilers():
        try:
            names = known(compiler)
        except OSError as error:
            why = f"{shlex.join(compiler)} does not run: {error}"
            continue
        if list(variants())[-1] in names:
            try:
                _compile(compiler, names, folder)
            except (RuntimeError, OSError) as error:
                return str(error)
            return ""
        why = f"{shlex.join(compiler)} compiles nothing for this CPU"
    return why


def built(folder: Path = HERE) -> list[str]:
    """The variants in `folder`, best first; empty if a compiled one is missing or was built from other sources."""
    file, mark = folder / f"{CPU}.so", digest().encode()
    found = re.search(mark + rb"(?: [a-z0-9]+)+\0", file.read_bytes()) if file.is_file() else None
    made = read_mark(found[0][:-1].decode())[1] if found else []
    files = [folder / f"{name}.so" for name in made]
    return made if all(file.is_file() and mark in file.read_bytes() for file in files) else []


def is_built(folder: Path = HERE) -> bool:
    """Whether the variants that GENCTL_BUILD selects are built from the current sources. Raises ValueError."""
    made = built(folder)
    if not made:
        extent()
        return False
    cpu = Cpu(folder / f"{CPU}.so")
    chosen = wanted(cpu, cpu.known)
    return bool(chosen) and set(chosen) <= set(made)


@cache
def choice() -> tuple[str, str]:
    """The variant to use, or "" and why there is none. Raises UsageError if a named one is not available."""
    from genctl.errors import UsageError

    named, all_names = os.environ.get(PRODUCTS, ""), list(variants())
    if named and named not in (*all_names, "torch"):
        raise UsageError(f"{PRODUCTS}={named}: this platform has {', '.join([*all_names, 'torch'])}")
    if named == "torch":
        return "", f"{PRODUCTS}=torch"
    if not all_names:
        return "", "no products are compiled for this platform"
    try:
        cpu = Cpu(LIBRARIES / f"{CPU}.so")
    except OSError:
        return "", "the products of this installation are not compiled"
    except AttributeError:  # an older cpu.so without one of today's functions
        return "", OUTDATED
    if cpu.built_from != digest():
        return "", OUTDATED
    there = [name for name in cpu.variants if cpu.runs(name)]
    if named and named not in there:
        raise UsageError(
            f"{PRODUCTS}={named}: this installation has {', '.join(there) or 'nothing'} for this CPU",
            hint=f"{VARIABLE}=runnable compiles all that this CPU runs, when genctl is installed",
        )
    if not there:
        return "", f"the products of this installation are for another CPU ({', '.join(cpu.variants)}); {AGAIN}"
    return named or next((name for name in there if cpu.suits(name)), there[0]), ""


def main() -> str | None:
    """Compile what is missing; returns an error message, or None."""
    if len(sys.argv) > 1:
        return f"{sys.argv[1]}: build.py takes no arguments; {VARIABLE} says for which CPUs it compiles"
    try:
        return None if is_built() else build() or None
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
