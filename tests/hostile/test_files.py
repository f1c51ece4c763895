"""Spoilt files of checkpoints, GGUF and adapters: the program generates, or ends with one clear line."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from tests.hostile import files
from tests.hostile.sound import Sound, folders

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited as on Linux"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sound]:
    return folders(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("name", ["gpt2", "t5", "templates", "gguf", "adapter", "prompt", "prompt-source"])
def test_spoilt_files_are_refused_or_harmless(name: str, sound: dict[str, Sound], tmp_path: Path) -> None:
    if name not in sound:
        pytest.skip("its package is not installed")
    assert files.outcome(sound[name].arguments(sound[name].folder)) == files.RAN
    for number in range(2):
        spoilt = Path(shutil.copytree(sound[name].folder, tmp_path / f"{number}"))
        what = sound[name].spoil(spoilt, Random(number))
        assert files.outcome(sound[name].arguments(spoilt)) in (files.REFUSED, files.RAN), what


def test_equal_numbers_spoil_equally(sound: dict[str, Sound], tmp_path: Path) -> None:
    made = [Path(shutil.copytree(sound["gpt2"].folder, tmp_path / side)) for side in "ab"]
    assert files.spoil(made[0], Random(5)) == files.spoil(made[1], Random(5))
    left, right = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in made)
    assert left == right


@pytest.mark.parametrize(
    ("status", "err", "fault"),
    [
        (1, "error: unexpected KeyError: 'a'\nhint: this is a bug", "this is a bug"),
        (3, "error: x: not enough memory", "not enough memory"),
        (4, "error: x", "exit status 4"),
        (3, "error: " + "x" * 5000, "5007 characters"),
        (3, "error: \x1b[2J", "cannot be shown"),
        (3, "", "no error is said"),
    ],
)
def test_a_breach_is_noticed(status: int, err: str, fault: str) -> None:
    assert fault in files.judged(status, err)
    assert files.judged(3, "error: a is damaged\n") == files.REFUSED
