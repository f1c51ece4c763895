"""Ways to spoil the folder of a checkpoint. Each is a function of the folder."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], object]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def all_of(*damages: Damage) -> Damage:
    """One after the other."""
    return lambda folder: [damage(folder) for damage in damages]


def write(name: str, content: bytes | str) -> Damage:
    """A file with this content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def remove(name: str) -> Damage:
    """The file is gone."""
    return lambda folder: (folder / name).unlink()


def folder_instead(name: str) -> Damage:
    """A folder stands where a file should."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def pipe_instead(name: str) -> Damage:
    """A named pipe that nobody writes to: reading it never ends."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def link(name: str, to: str) -> Damage:
    """A symbolic link stands where the file was."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return damage


def sparse(name: str, size: int) -> Damage:
    """A file that claims `size` bytes and holds none."""

    def damage(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return damage


def cut(name: str, share: float, *, by: int = 0) -> Damage:
    """Only the first `share` of the file, less `by` bytes."""

    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share) - by])

    return damage


def flip(name: str, at: int, bit: int) -> Damage:
    """One bit of the file turned over; `at` counts from the end where it is negative."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1 << bit
        (folder / name).write_bytes(data)

    return damage


def edit(name: str, **changes: Any) -> Damage:
    """Other values in a JSON file; `...` takes a key away. `a__b` is `b` in `a`."""

    def damage(folder: Path) -> None:
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        for key, value in changes.items():
            *above, last = key.split("__")
            part = data
            for each in above:
                part = part[each]
            if value is ...:
                part.pop(last)
            else:
                part[last] = value
        (folder / name).write_text(json.dumps(data), encoding="utf-8")

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another header on the same numbers."""

    def damage(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        parsed = json.loads(raw[8 : 8 + length])
        change(parsed)
        text = json.dumps(parsed).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return damage


def first(parsed: dict[str, Any], at: int = 0) -> dict[str, Any]:
    """An entry of a header, by its place among the sorted names."""
    found: dict[str, Any] = parsed[sorted(name for name in parsed if name != "__metadata__")[at]]
    return found


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """A sound file of other tensors."""

    def damage(folder: Path) -> None:
        held = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        change(held)
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def put(name: str, value: float, at: int = 5) -> Damage:
    """One number of a tensor replaced."""
    return tensors(lambda held: held[name].view(-1).__setitem__(at, value))


def sharded(shards: dict[str, str], **more: Any) -> Damage:
    """The weights under the name of a first shard, with an index that says what it likes."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": shards, **more}), encoding="utf-8")

    return damage
