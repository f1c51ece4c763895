from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.chat import templates


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint for each kind of template, and one without a template ("plain")."""
    folder = tmp_path_factory.mktemp("chats")
    kinds = {**templates.KINDS, "plain": None}
    return {name: str(templates.stories(folder / name, template)) for name, template in kinds.items()}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the state of a user."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"
