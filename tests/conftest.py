"""What holds for every test: one thread (tiny models gain nothing from more), and hypothesis without the clock.

The zoo is a tier of its own: `-m zoo` runs it, `--everything` runs it besides all else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("genctl", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("genctl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="run the zoo too: every text architecture")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--everything") or "zoo" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("zoo") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("zoo") is None]


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing is remembered in the cache of the person who runs the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
