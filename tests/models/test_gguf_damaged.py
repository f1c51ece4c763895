"""GGUF files that lie: each is refused with one line that names it, and nothing is allocated that it only claims."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from genctl.errors import ModelError
from genctl.models.gguf import read
from genctl.models.hub import load
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.models.test_gguf import written

gguf = pytest.importorskip("gguf")
Change = Callable[[bytes], bytes]
FIRST = "blk.0.attn_q.weight"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def at(data: bytes, text: str) -> int:
    """Where the string ends that a key or the name of a tensor is."""
    return data.index(string(text)) + len(string(text))


def put(data: bytes, place: int, form: str, value: int) -> bytes:
    return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


def key(name: str, value: int) -> Change:
    """A u32 of the metadata with another value."""
    return lambda data: put(data, at(data, name) + 4, "<I", value)


def kind(name: str, number: int) -> Change:
    """A key or a matrix of another type."""
    return lambda data: put(data, at(data, name) + (20 if name.endswith(".weight") else 0), "<I", number)


def shape(name: str, size: int) -> Change:
    return lambda data: put(data, at(data, name) + 4, "<Q", size)


def offset(name: str, place: int) -> Change:
    """A matrix at another place."""
    return lambda data: put(data, at(data, name) + 24, "<Q", place)


BOMB = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 0, 1 << 40)
REFUSED: dict[str, tuple[Change, str]] = {
    "57 bytes that claim 2^40 items": (lambda data: BOMB, "claims 1,099,511,627,776 items of a, more than fit"),
    "2^40 keys": (lambda data: put(data, 16, "<Q", 1 << 40), "claims 1,099,511,627,776 keys"),
    "2^40 tensors": (lambda data: put(data, 8, "<Q", 1 << 40), "claims 1,099,511,627,776 tensors"),
    "a key of 2^62 bytes": (lambda data: put(data, 24, "<Q", 1 << 62), "a key claims 4,611,686,018,427,387,904 bytes"),
    "a key that is no text": (lambda data: put(data, 32, "<B", 255), "a key is not UTF-8 text"),
    "an unknown type": (kind("qwen2.block_count", 77), "qwen2.block_count has the unknown type 77"),
    "version 9": (lambda data: put(data, 4, "<I", 9), "its format has version 9; known are 2 and 3"),
    "data cut in half": (lambda data: data[: len(data) // 2], "bytes of tensor .* lie beyond its end"),
    "a tensor between places": (offset(FIRST, 1), "does not lie at a multiple of 32 bytes"),
    "a tensor of 2^40 columns": (shape(FIRST, 1 << 40), f"bytes of tensor {FIRST} lie beyond its end"),
    "a tensor of 2^63 columns": (shape(FIRST, 1 << 63), f"tensor {FIRST} has an impossible shape"),
    "a row of half a block": (shape(FIRST, 31), f"tensor {FIRST} has an impossible shape"),
    "4 billion dimensions": (
        lambda data: put(data, at(data, FIRST), "<I", 0xFFFFFFFF),
        f"tensor {FIRST} has 4,294,967,295 dimensions",
    ),
    "whole numbers": (kind(FIRST, 26), f"tensor {FIRST} has the type 26, which is none of weights"),
    "no layers": (key("qwen2.block_count", 0), "holds 27 tensors, but qwen2.block_count is 0"),
    "a layer less": (key("qwen2.block_count", 1), "has no place: blk.1.attn_k.bias"),
    "a layer more": (key("qwen2.block_count", 3), "hold nothing as blk.2.attn_norm.weight"),
    "4 billion layers": (key("qwen2.block_count", 0xFFFFFFFF), "but qwen2.block_count is 4294967295"),
    **{
        f"{name} = {value:,}": (key(f"qwen2.{name}", value), said)
        for name, value, said in (
            ("embedding_length", 4_000_000, "hidden_size = 4000000, far above"),
            ("embedding_length", 0, "qwen2.embedding_length is 0; known here is a size"),
            ("feed_forward_length", 0xFFFFFFFF, "intermediate_size = 4294967295, far above"),
            ("attention.head_count", 1_000_000, "qwen2.attention.key_length is 'missing'"),
            ("context_length", 0xFFFFFFFF, "max_position_embeddings = 4294967295, far above"),
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("little_memory")
def test_a_file_that_lies_is_refused_with_one_line(name: str, sound: bytes, tmp_path: Path) -> None:
    change, said = REFUSED[name]
    path = tmp_path / "lies.gguf"
    path.write_bytes(change(sound))
    done = genctl("run", "-m", str(path), "-n", "3", "the cat")
    (line,) = done.err.splitlines()
    assert (done.status, done.out) == (3, "")
    assert re.match(r"error: \S*lies\.gguf:? ", line)
    assert re.search(said, line), line
    assert len(line) < 300


def test_a_file_cut_anywhere_in_its_header_is_refused(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in range(4, len(sound), 997):
        path.write_bytes(sound[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf is damaged: "):
            read(path)


def test_the_header_is_read_as_its_library_reads_it(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(sound)
    header, theirs = read(path), gguf.GGUFReader(path)
    assert header.metadata["qwen2.block_count"] == 2
    assert {tensor.name for tensor in theirs.tensors} == set(header.tensors)
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (ours.begin, ours.end) == (tensor.data_offset, tensor.data_offset + tensor.n_bytes)
        assert ours.dtype == tensor.tensor_type.name


def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    def bias(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_output.bias", numpy.ones(32, dtype=numpy.float32))

    path = written(tmp_path / "more.gguf", more=bias)
    with pytest.raises(ModelError, match=r"more\.gguf holds 1 tensors .* has no place: blk\.0\.attn_output\.bias"):
        load(Runtime(model=str(path)))
