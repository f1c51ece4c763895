"""The setup of all tests: one thread, hypothesis without deadlines, a clean environment, tiny checkpoints, tiers."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import tiers
from tests.tiny import checkpoint

torch.set_num_threads(1)  # tiny models gain nothing from more
hypothesis.settings.register_profile("genctl", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("genctl")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="also run the tests of every night (tests/tiers.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect nightly tests unless requested: with --everything, with `-m night`, or by name."""
    counted: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if not tiers.is_everyday(item.path, item.name, counted[test]):
            item.add_marker("night")
        counted[test] += 1
    wanted = config.getoption("--everything") or "night" in config.getoption("-m")
    named = any("::" in argument for argument in config.args)
    left_out = [] if wanted or named else [item for item in items if item.get_closest_marker("night")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    """Imports and collected tests live to the end: exempt them from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests write nothing to the user's own cache, nor to the user's chats."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield folder


@pytest.fixture(scope="session")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> Iterator[None]:
    """No settings and no secrets of the user; the current folder and the folder of settings are empty."""
    for name in list(os.environ):
        ours = name.startswith("GENCTL_") and not name.startswith("GENCTL_TEST_")
        if ours or name.startswith(("HF_", "HUGGING_FACE_")) or name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(empty_folder))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(empty_folder)
    yield
    for path in empty_folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.fixture(autouse=True)
def program_environment(request: pytest.FixtureRequest) -> None:
    """Tests of the whole program run in the clean environment without requesting it."""
    if request.path.parent.name in ("cli", "compare", "hostile", "inspect", "score", "workers", "backend"):
        request.getfixturevalue("clean_environment")


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a valid tiny checkpoint, made once per architecture: copy it, never change it."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def folder_of(arch: str) -> Path:
        return checkpoint(arch, root / arch)

    return folder_of


@pytest.fixture(scope="session")
def gpt2(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("gpt2")


@pytest.fixture(scope="session")
def llama(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("llama")


@pytest.fixture(scope="session")
def t5(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("t5")


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit memory to 3 GiB more than is used now (on systems that have such a limit)."""
    resource = pytest.importorskip("resource")
    status = Path("/proc/self/statm")
    if not status.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(status.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="session", autouse=os.environ.get("GENCTL_TEST_DEVICE") == "fake")
def device_of_the_tests() -> Iterator[None]:
    """See `runtimes`."""
    from tests.fake_cuda import fake_gpu

    with pytest.MonkeyPatch.context() as patch, fake_gpu(patch):
        yield
