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


def test_a_folder_that_cannot_be_written_to_is_refused_early(tmp_path: Path) -> None:
    def refused(folder: str) -> str:
        done = genctl(
            "run", "-m", "builtin:stories", "--device-map", "auto", "--offload-folder", folder, "-n", "3", "a"
        )
        assert (done.status, done.out) == (2, "")
        return done.err

    (tmp_path / "file").write_bytes(b"")
<<<<<<< HEAD
    done = run(tmp_path / "file")
    assert (done.status, done.out, done.err.count("\n")) == (3, "", 1), done.err
=======
    problem = f"error: --offload-folder {tmp_path}/file cannot be written to"
    assert refused(str(tmp_path / "file")) == f"{problem}: File exists\n"
    assert "/file/below cannot be written to: Not a directory" in refused(str(tmp_path / "file" / "below"))
    assert "--offload-folder /proc/nowhere cannot be written to: No such file or directory" in refused("/proc/nowhere")
    assert "--offload-folder is empty" in refused("")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of a file's size stands for a full disk")
def test_a_full_disk_is_reported_with_the_flag(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        done = genctl("run", "-m", "builtin:stories", "--device-map", "auto", "--offload-folder", str(tmp_path), "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (done.status, done.err) == (2, f"error: --offload-folder {tmp_path} cannot be written to: File too large\n")
    assert not list(tmp_path.iterdir())
>>>>>>> parent of 42ac8a25 (Strike: writing a test file to the offload folder)
