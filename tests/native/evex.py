"""The variant `avxvnni` on CPUs that have AVX-512 instead: its compiled code, with one instruction re-encoded.

Only `vpdpbusd` differs: AVX-VNNI has it in the VEX encoding, AVX-512 VNNI with VL in the EVEX encoding, and both
compute the same. So the compiler writes assembly for `avxvnni`, and the assembler may choose the other encoding.
"""

from __future__ import annotations

import fcntl
import re
import tempfile
from pathlib import Path

from genctl.kernels import build

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = ROOT / ".pytest_cache" / "evex" / "avxvnni.so"  # for other processes of the tests, and for the next run
VEX = re.compile(r"\{vex\}\s+(?=vpdpbusd\b)")


def runnable() -> list[str]:
    """The variants of this installation that this CPU runs, best first; empty if none is used."""
    if not build.choice()[0]:
        return []
    cpu = build.Cpu(build.HERE / "cpu.so")
    return [name for name in cpu.variants if cpu.runs(name)]


def _all(commands: list[list[str]]) -> None:
    for status, output in build.run(commands):
        assert status == 0, output


def library() -> Path | None:
    """The library; None if no compiler supports the variant."""
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    with Path(KEPT.parent, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait for it
        return _made()


def _made() -> Path | None:
    if KEPT.is_file() and build.digest().encode() in KEPT.read_bytes():
        return KEPT
    compiler = next((one for one in build.compilers() if "avxvnni" in build.known(one)), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        files = [path for path in build.sources() if path.suffix == ".c" and path.stem != build.CPU]
        texts = [Path(folder, f"{path.stem}.s") for path in files]
        _all(
            [build.compile_command(compiler, "avxvnni", path, to, "-S") for path, to in zip(files, texts, strict=True)]
        )
        for text in texts:
            text.write_text(VEX.sub("", text.read_text()))
        assert "vpdpbusd" in "".join(text.read_text() for text in texts)
        mark = Path(folder, "cpu.o")
        sources = f'-DSOURCES="{build.mark_of([], [])}"'
        _all([build.compile_command(compiler, "avxvnni", build.HERE / "cpu.c", mark, sources, "-c")])
        objects = [text.with_suffix(".o") for text in texts]
        _all([build.compile_command(compiler, "avx512", text, to) for text, to in zip(texts, objects, strict=True)])
        made = Path(folder, KEPT.name)
        _all([build.link_command(compiler, "avx512", [*objects, mark], made)])
        with tempfile.TemporaryDirectory(dir=KEPT.parent) as beside:
            Path(beside, KEPT.name).write_bytes(made.read_bytes())
            Path(beside, KEPT.name).replace(KEPT)
    return KEPT
