"""A checkpoint larger than the memory it may take: the same text, from weights on the disk."""

from __future__ import annotations

from pathlib import Path

from tests.cli.tool import Done, genctl


def run(folder: Path) -> Done:
    flags = ["--device-map", "auto", "--max-memory", "cpu=1MiB", "--offload-folder", str(folder)]
    return genctl("run", "-m", "builtin:stories", *flags, "-n", "12", "Once upon a time")


def test_a_checkpoint_larger_than_its_memory_writes_the_same(tmp_path: Path) -> None:
    done = run(tmp_path / "off")
    assert done.status == 0, done.err
    assert done.out == genctl("run", "-m", "builtin:stories", "-n", "12", "Once upon a time").out


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = run(tmp_path / "file")
    assert (done.status, done.out, done.err.count("\n")) == (3, "", 1), done.err
