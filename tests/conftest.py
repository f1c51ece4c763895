"""What holds for every test: one thread (tiny models gain nothing from more), and hypothesis without the clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("genctl", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("genctl")


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing is remembered in the cache of the person who runs the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
