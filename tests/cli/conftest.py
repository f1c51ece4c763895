"""For separate processes: an environment without settings, and a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.cli.tool import ROOT
from tests.warm import python


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def terminal(tmp_path: Path, environment: dict[str, str]) -> Callable[..., Any]:
    """Start Python with these arguments in a terminal: by default one with torch already imported."""

    def start(*words: str, program: list[str] | None = None, size: tuple[int, int] = (24, 80), **options: Any) -> Any:
        first, *rest = [*(program or python()), *words]
        environ = {**environment, "TERM": "xterm-256color", **options.pop("env", {})}
        return pexpect.spawn(first, rest, env=environ, cwd=str(tmp_path), dimensions=size, timeout=90, **options)

    return start
