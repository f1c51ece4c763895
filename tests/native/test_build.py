"""How the products are compiled: for which CPUs, by which compiler, and each only once."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from genctl.errors import UsageError
from genctl.kernels import build, ops
from tests.native.evex import runnable
from tests.native.test_products import plainest

VARIANTS = list(build.variants())
pytestmark = pytest.mark.skipif("avxvnni" not in VARIANTS, reason="flags of x86-64 compilers")
HERE = ["avx512", "avxvnni", "avx2", "plain"]  # what the CPU of these tests runs, best first


@dataclass
class Compilers:
    """Fake compilers by name, each with what it cannot do. They write their name, and the mark in `-DSOURCES`."""

    kinds: dict[str, str]

    def run(self, commands: list[list[str]]) -> list[tuple[int, str]]:
        return [self._perform(*command) for command in commands]

    def _perform(self, name: str, *words: str) -> tuple[int, str]:
        out = Path(words[words.index("-o") + 1])
        cannot, march = self.kinds[name], next(one for one in words if one.startswith("-march"))
        files = [Path(one) for one in words if one.endswith((".c", ".o")) and one != str(out)]
        if "old" in cannot and "-mavxvnni" in words:
            return 1, "error: unrecognized option"
        if "broken" in cannot and march == "-march=x86-64-v4" and "-O2" in words:
            return 1, "lanes.h: error: it fails"
        if "foreign" in cannot and march == "-march=x86-64":
            return 1, "error: unknown CPU"
        if "-shared" in words:
            text = "".join(file.read_text() for file in files)
        else:
            mark = [one.partition("=")[2].strip('"') for one in words if one.startswith("-DSOURCES=")]
            text = f"{name} {' '.join(mark)}\0"
        out.write_text(text)
        return 0, ""


class FakeCpu:
    """A CPU that runs the variants of `HERE`, with the library that a fake compiler linked for it."""

    slow: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        mark = re.search(build.digest() + r"[^\0]*", path.read_text())
        assert mark
        self.built_from, self.variants, self.known = build.read_mark(mark[0])

    def runs(self, name: str) -> bool:
        return name in HERE

    def suits(self, name: str) -> bool:
        return name not in self.slow


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build, "Cpu", FakeCpu)
    monkeypatch.setenv("GENCTL_BUILD", "all")
    build.choice.cache_clear()
    yield
    build.choice.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, **kinds: str) -> None:
    monkeypatch.setattr(build, "compilers", lambda: [(name,) for name in kinds])
    monkeypatch.setattr(build, "run", Compilers(kinds).run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def made_by(folder: Path) -> dict[str, str]:
    """The compiler of each library."""
    return {path.stem: path.read_text().split()[0] for path in folder.glob("*.so") if path.stem != "cpu"}


@pytest.mark.parametrize(
    ("extent", "slow", "wanted"),
    [
        ("", (), ["avx512"]),
        ("", ("avx512",), ["avxvnni"]),
        ("runnable", (), HERE),
        ("all", (), VARIANTS),
    ],
)
def test_what_is_compiled(
    extent: str,
    slow: tuple[str, ...],
    wanted: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default the variant that this CPU runs fastest, and no other."""
    monkeypatch.setattr(FakeCpu, "slow", slow)
    monkeypatch.setenv("GENCTL_BUILD", extent)
    use(monkeypatch, gcc13="")
    assert build.build(folder) == ""
    assert build.built(folder) == wanted
    assert build.is_built(folder)
    assert {path.stem for path in folder.iterdir()} == {"cpu", *wanted}


def test_more_is_compiled_where_more_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, gcc10="old")
    monkeypatch.setenv("GENCTL_BUILD", "")
    build.build(folder)
    monkeypatch.setenv("GENCTL_BUILD", "runnable")
    assert not build.is_built(folder)
    build.build(folder)
    assert build.built(folder) == ["avx512", "avx2", "plain"]
    assert build.is_built(folder)
    monkeypatch.setenv("GENCTL_BUILD", "")
    assert build.is_built(folder)
    monkeypatch.setenv("GENCTL_BUILD", "fastest")
    with pytest.raises(ValueError, match="GENCTL_BUILD=fastest: it may be runnable or all, or not set"):
        build.is_built(folder)


def test_another_cpu_needs_another_variant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, gcc13="")
    monkeypatch.setenv("GENCTL_BUILD", "")
    build.build(folder)
    monkeypatch.setattr(FakeCpu, "runs", lambda self, name: name in ("avx2", "plain"))
    assert not build.is_built(folder)
    monkeypatch.setattr(build, "LIBRARIES", folder)
    assert ops.library() is None
    assert ops.why_not().startswith("the products of this installation are for another CPU (avx512); python ")
    assert ops.is_unusable()  # so that it is reported without --verbose


def test_a_compiler_that_fails_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, bad="broken", gcc10="")
    assert build.build(folder) == "bad failed: lanes.h: error: it fails"
    assert not build.built(folder)


def test_the_first_compiler_for_this_machine_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, cross="foreign")
    assert build.build(folder) == "cross compiles nothing for this CPU"
    assert not list(folder.iterdir())
    use(monkeypatch, cross="foreign", gcc13="", clang18="")
    assert build.build(folder) == ""
    assert made_by(folder) == dict.fromkeys(VARIANTS, "gcc13")


@pytest.mark.parametrize(
    ("extent", "named", "message"),
    [
        ("all", "avxvnni", "GENCTL_PRODUCTS=avxvnni: this installation has avx512, avx2, plain for this CPU"),
        ("all", "sse9", "GENCTL_PRODUCTS=sse9: this platform has "),
        ("", "plain", "GENCTL_PRODUCTS=plain: this installation has avx512 for this CPU"),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(
    extent: str, named: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENCTL_BUILD", extent)
    use(monkeypatch, gcc10="old")
    build.build(folder)
    monkeypatch.setattr(build, "LIBRARIES", folder)
    monkeypatch.setenv("GENCTL_PRODUCTS", named)
    with pytest.raises(UsageError, match=message):
        ops.library()


def test_what_the_cpu_library_names_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    build.choice.cache_clear()
    assert plainest().built_from == build.digest()
    assert set(runnable()) <= set(build.built())


def test_dot_products_of_avxvnni_need_no_avx512(tmp_path: Path) -> None:
    """Only VEX encodings: C4, three inverted bits and map 2, 256 bits with prefix 66, opcode 50."""
    compiler = next((one for one in build.compilers() if "avxvnni" in build.known(one)), None)
    if compiler is None:
        pytest.skip("no compiler here knows avxvnni")
    files = {name: tmp_path / f"{name}.o" for name in ("codes", "blocks")}
    commands = [build.compile_command(compiler, "avxvnni", build.HERE / f"{name}.c", to) for name, to in files.items()]
    assert [status for status, _ in build.run(commands)] == [0, 0]
    for file in files.values():
        found = re.findall(
            rb"\xc4[\x42\x62\xc2\xe2][\x05\x0d\x15\x1d\x25\x2d\x35\x3d\x45\x4d\x55\x5d\x65\x6d\x75\x7d]\x50",
            file.read_bytes(),
        )
        assert len(found) > 20
        if shutil.which("objdump") is None:
            continue
        done = subprocess.run(["objdump", "-d", str(file)], capture_output=True, text=True, check=True)
        lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") > 1]
        codes = [code for _, code, text in (line[:3] for line in lines) if "vpdpbusd" in text]
        assert all(code.startswith("c4 ") for code in codes)
        assert not [code for _, code, _ in (line[:3] for line in lines) if code.startswith("62 ")]  # EVEX
