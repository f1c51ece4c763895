"""A checkpoint's fingerprint sees every byte that decides what is generated, and reads no large file twice."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from genctl.errors import ModelError
from genctl.models.check import Checkpoint, inspect
from genctl.models.fingerprint import fingerprint, stamps
from tests.tiny import tiny

WEIGHTS = "model.safetensors"
LARGE = (1 << 20) + 3


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "genctl" / "digests"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(os.urandom(LARGE))
    return folder


def checked(folder: Path, *, code: bool = False) -> Checkpoint:
    return inspect(folder, allow_pickle=True, trust_remote_code=code, need_tokenizer=False)


def of(folder: Path, *, code: bool = False) -> str:
    return checked(folder, code=code).fingerprint()


def later() -> float:
    """An hour from now, when a file that was just written has settled."""
    return time.time() + 3600


def of_weights(folder: Path, clock: object = later) -> str:
    return fingerprint(folder, stamps(folder, [folder / WEIGHTS], code=False), clock=clock)  # type: ignore[arg-type]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_it_follows_the_checkpoint_not_the_folder(llama: Path, copy: Path, tmp_path: Path) -> None:
    assert of(copy) == of(llama)
    assert of(copy).startswith("sha256:")
    other = tmp_path / "other"
    tiny("llama", other, eos=7)
    assert of(other) != of(llama)


def test_every_byte_of_the_weights_counts(llama: Path, copy: Path) -> None:
    """The first version looked at 192 bytes of each tensor: most of these places were none of them."""
    size = (copy / WEIGHTS).stat().st_size
    tensors = checked(copy).weights.tensors.values()
    biggest = max(tensors, key=lambda tensor: tensor.end - tensor.begin)
    quarter = biggest.begin + (biggest.end - biggest.begin) // 4
    for at in (0, 9, quarter, quarter + 4096, size - 1):
        before = of(llama)
        flip(copy / WEIGHTS, at)
        state = stamps(copy, [copy / WEIGHTS], code=False)
        assert fingerprint(copy, state) != before
        flip(copy / WEIGHTS, at)
    assert of(copy) == of(llama)


def test_every_shard_and_the_index_count(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    tiny("llama").save_pretrained(folder, max_shard_size="60KB")
    before = of(folder)
    for shard in folder.glob("model-*.safetensors"):
        middle = shard.stat().st_size - 1500
        flip(shard, middle)
        assert of(folder) != before
        flip(shard, middle)
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    index.write_text(json.dumps({**told, "metadata": {"total_size": 1}}))
    assert of(folder) != before


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "processor_config.json",
        "vocab-tgt.json",
        "bpe.codes",
        "target.spm",
        "spiece.model",
    ],
)
def test_everything_else_that_is_read_counts(name: str, copy: Path) -> None:
    before = of(copy)
    path = copy / name
    path.parent.mkdir(exist_ok=True)
    held = path.read_bytes() if path.is_file() else b"{}"
    path.write_bytes(held + b"\n")
    assert of(copy) != before


@pytest.mark.parametrize("name", ["README.md", "out.jsonl", "results.json", "prompts.txt", "modeling_own.py"])
def test_what_is_not_read_does_not_count(name: str, copy: Path) -> None:
    before = of(copy)
    (copy / name).write_text("{}")
    assert of(copy) == before


def test_code_that_is_trusted_counts(copy: Path) -> None:
    before = of(copy, code=True)
    (copy / "modeling_own.py").write_text("one = 1\n")
    with_code = of(copy, code=True)
    (copy / "modeling_own.py").write_text("one = 2\n")
    assert len({before, with_code, of(copy, code=True)}) == 3


def test_files_that_change_after_they_were_read_are_refused(copy: Path) -> None:
    """The weights in memory are not those on disk then, and a digest of the disk would vouch for them."""
    found = checked(copy)
    flip(copy / WEIGHTS, 5000)
    with pytest.raises(ModelError, match=r"model\.safetensors in .* has changed since it was read"):
        found.fingerprint()
    found = checked(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json in .* has changed since it was read"):
        found.fingerprint()


def test_a_file_longer_than_one_chunk_counts_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(bytes(40 << 20))
    seen = {of_weights(folder)}
    for at in (0, (16 << 20) - 1, 16 << 20, (40 << 20) - 1):
        flip(folder / WEIGHTS, at)
        seen.add(of_weights(folder))
    assert len(seen) == 5


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_a_large_file_is_read_once(large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of_weights(large)
    assert oct(cache.stat().st_mode)[-3:] == "700"
    opened: list[str] = []
    whole = Path.open

    def watched(path: Path, *args: Any, **more: Any) -> Any:
        opened.append(path.name)
        return whole(path, *args, **more)

    monkeypatch.setattr(Path, "open", watched)
    assert of_weights(large) == first
    assert WEIGHTS not in opened


def test_a_change_is_seen_although_size_and_time_are_the_same(large: Path, cache: Path) -> None:
    first = of_weights(large)
    state = (large / WEIGHTS).stat()
    flip(large / WEIGHTS, 77)
    os.utime(large / WEIGHTS, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert of_weights(large) != first


@pytest.mark.parametrize("ahead", [0, 10**6])
def test_what_was_written_a_moment_ago_or_in_the_future_is_not_remembered(ahead: int, large: Path, cache: Path) -> None:
    """It could be written again within the same tick of the file system's clock."""
    os.utime(large / WEIGHTS, (time.time() + ahead,) * 2)
    of_weights(large, clock=later if ahead else time.time)
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"sha256:12", b"\xff\xfe"])
def test_a_damaged_cache_is_of_no_effect(content: bytes, large: Path, cache: Path) -> None:
    first = of_weights(large)
    (stored,) = cache.iterdir()
    stored.write_bytes(content)
    assert of_weights(large) == first
    assert stored.read_text() == first


def test_a_cache_that_cannot_be_written_is_of_no_effect(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = of_weights(large)
    for home in (tmp_path / "a-file", Path("/proc/nowhere"), Path("relative"), Path("/dev/null")):
        if home.name == "a-file":
            home.write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        monkeypatch.setenv("HOME", str(tmp_path))
        assert of_weights(large) == expected
    assert not Path("relative").exists()
