"""A workplace of its own for each test: an empty project, an empty home, no GENCTL_* variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; `home/` beside it holds the user's files."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "config"))
    for name in [name for name in os.environ if name.startswith("GENCTL_")]:
        monkeypatch.delenv(name)
    return folder
