"""Weight files are read ahead: all of every file, in pieces, or nothing where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from genctl.models import hub
from genctl.params import Runtime
from tests.tiny import checkpoint


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Bytes that the system was asked to read: start and length."""
    told: list[tuple[int, int]] = []

    def advise(descriptor: int, start: int, length: int, kind: int) -> None:
        os.fstat(descriptor)  # it is open
        assert kind == 3
        told.append((start, length))

    monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    return told


def test_all_of_every_file_is_read_in_pieces(
    advised: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_PIECE", 10)
    for name, size in (("a", 25), ("b", 10), ("c", 0)):
        (tmp_path / name).write_bytes(b"x" * size)
    thread = hub.read_ahead([tmp_path / name for name in "abc"])
    assert thread is not None
    thread.join()
    assert advised == [(0, 10), (10, 10), (20, 10), (0, 10)]


def test_a_checkpoint_is_read_ahead_before_its_weights_are_read(
    advised: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("gpt2", tmp_path)
    monkeypatch.setattr(hub.runtime_choice, "plan", lambda *_, **__: pytest.fail("stop"))
    with pytest.raises(pytest.fail.Exception):
        hub.load(Runtime(model=str(folder)))
    for thread in hub.threading.enumerate():
        if thread.name == "read-ahead":
            thread.join()
    assert advised == [(0, hub._PIECE)]
