from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiny import checkpoint


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No settings and no secrets of the person who runs the tests, and nothing in the current folder."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith(("GENCTL_", "HF_", "HUGGING_FACE_")):
            monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(home)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of sound tiny checkpoints: to be copied, never changed."""
    root = tmp_path_factory.mktemp("sound")
    return {arch: checkpoint(arch, root / arch) for arch in ("gpt2", "llama")}
