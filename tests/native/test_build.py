"""How the products are compiled: what a compiler does not know is left out, and nothing is compiled twice."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from genctl.errors import UsageError
from genctl.native.products import build, library

VARIANTS = list(build.variants())
pytestmark = pytest.mark.skipif("avxvnni" not in VARIANTS, reason="flags of x86-64 compilers")
COMPILER = """#!{python}
import sys
if "-mavxvnni" in sys.argv and {old}:
    sys.exit("error: unrecognized option")
if "-march=x86-64-v4" in sys.argv and "-c" not in sys.argv and {broken}:
    sys.exit("lanes.h: error: it fails")
if "-march=x86-64" in sys.argv and {foreign}:
    sys.exit("error: unknown CPU")
mark = [one.replace(chr(34), "") for one in sys.argv if one.startswith("-DSOURCES=")]
with open(sys.argv[sys.argv.index("-o") + 1], "w") as file:
    print({name!r}, *mark, "\\0", file=file, sep="")
"""


def use(folder: Path, monkeypatch: pytest.MonkeyPatch, **kinds: str) -> None:
    """Compilers by name, each with what it cannot do; they write what they were told to remember."""
    commands = []
    for name, cannot in kinds.items():
        path = folder / name
        flags = {word: word in cannot.split() for word in ("old", "broken", "foreign")}
        text = COMPILER.format(python=sys.executable, name=name, **flags)
        path.write_text(text)
        path.chmod(0o755)
        commands.append((str(path),))
    monkeypatch.setattr(build, "compilers", lambda: commands)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def made_by(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text().split("-D")[0] for path in folder.glob("*.so")}


def test_a_variant_that_the_compiler_does_not_know_is_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, gcc10="old")
    (folder / "avxvnni.so").write_text("of older sources")
    others = [name for name in VARIANTS if name != "avxvnni"]
    assert build.build(folder) == ""
    assert sorted(made_by(folder)) == sorted(others)
    assert build.built(folder) == others
    assert build.is_built(folder)


@pytest.mark.parametrize("lost", ["amx", VARIANTS[-1]] if VARIANTS else [])
def test_a_variant_that_was_compiled_has_to_stay(
    lost: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, gcc10="old")
    build.build(folder)
    (folder / f"{lost}.so").unlink()
    assert not build.is_built(folder)
    assert build.build(folder) == ""
    assert build.is_built(folder)


def test_the_compiler_that_knows_the_most_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, gcc10="old", gcc13="", clang18="")
    assert build.build(folder) == ""
    assert made_by(folder) == dict.fromkeys(VARIANTS, "gcc13")


def test_a_compiler_that_fails_at_what_it_knows_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, bad="broken", gcc10="old")
    assert build.build(folder) == ""
    assert set(made_by(folder).values()) == {"gcc10"}
    use(tmp_path, monkeypatch, bad="broken")
    assert build.build(folder) == f"{tmp_path / 'bad'} failed: lanes.h: error: it fails"


def test_a_compiler_for_another_machine_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, cross="foreign")
    assert build.build(folder) == f"{tmp_path / 'cross'} compiles nothing for this CPU"
    assert not build.built(folder)
    assert not list(folder.iterdir())


def test_what_was_left_out_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "avxvnni" not in build.built():
        pytest.skip("THE PRODUCTS ARE NOT COMPILED HERE: run python genctl/native/products/build.py")
    with_it = " ".join([build.digest(), *build.built()]).encode()
    without = with_it.replace(b"avxvnni", b" " * len("avxvnni"))
    for name in build.built():
        if name != "avxvnni":
            whole = (library.FOLDER / f"{name}.so").read_bytes()
            (tmp_path / f"{name}.so").write_bytes(whole.replace(with_it, without))
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library._choice.cache_clear()
    try:
        monkeypatch.setenv("GENCTL_PRODUCTS", "avxvnni")
        with pytest.raises(UsageError, match="GENCTL_PRODUCTS=avxvnni: the compiler of this installation did not know"):
            library.library()
        library._choice.cache_clear()
        monkeypatch.delenv("GENCTL_PRODUCTS")
        assert "avxvnni" not in library.runnable()
        assert library.runnable()[-1] == VARIANTS[-1]
    finally:
        library._choice.cache_clear()


def test_dot_products_of_avxvnni_need_no_avx512() -> None:
    """VEX encodings alone: C4, three inverted bits and map 2, 256 bits with prefix 66, opcode 50."""
    if "avxvnni" not in build.built():
        pytest.skip("THE PRODUCTS ARE NOT COMPILED HERE, or by a compiler that does not know avxvnni")
    file = library.FOLDER / "avxvnni.so"
    found = re.findall(
        rb"\xc4[\x42\x62\xc2\xe2][\x05\x0d\x15\x1d\x25\x2d\x35\x3d\x45\x4d\x55\x5d\x65\x6d\x75\x7d]\x50",
        file.read_bytes(),
    )
    assert len(found) > 100
    if shutil.which("objdump") is None:
        return
    done = subprocess.run(["objdump", "-d", str(file)], capture_output=True, text=True, check=True)
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") > 1]
    codes = [code for _, code, text in (line[:3] for line in lines) if "vpdpbusd" in text]
    assert all(code.startswith("c4 ") for code in codes)
    assert not [code for _, code, _ in (line[:3] for line in lines) if code.startswith("62 ")]  # EVEX
