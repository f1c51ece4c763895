"""The name of --output decides on the format, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tool import genctl

RUN = ("run", "-m", "builtin:numbers", "1")


@pytest.mark.parametrize("name", ["out.csv", "out.CSV", "out.xlsx", "out.html", "out.yaml", "out.parquet"])
def test_a_name_of_a_format_that_nobody_writes_is_refused(name: str, tmp_path: Path) -> None:
    done = genctl(*RUN, "-o", str(tmp_path / name))
    assert done.status == 2
    assert f"{name}: {name[4:].lower()} is not a format of this command" in done.err
    assert not list(tmp_path.iterdir())


def test_format_text_writes_under_any_name(tmp_path: Path) -> None:
    assert genctl(*RUN, "-o", str(tmp_path / "out.csv"), "--format", "text").status == 0
    assert (tmp_path / "out.csv").read_text() == "one\n"


@pytest.mark.parametrize("name", ["out", "out.txt", "out.md", "out.v2"])
def test_other_names_are_text(name: str, tmp_path: Path) -> None:
    assert genctl(*RUN, "-o", str(tmp_path / name)).status == 0
    assert (tmp_path / name).read_text() == "one\n"


@pytest.mark.parametrize(
    "command",
    [RUN, ("score", "hello"), ("compare", "-p", "greedy", "-p", "beam5", "-n", "2", "hello")],
    ids=lambda command: command[0],
)
def test_every_command_writes_what_the_name_says(command: tuple[str, ...], tmp_path: Path) -> None:
    assert genctl(*command, "-o", str(tmp_path / "out.jsonl")).status == 0
    assert (tmp_path / "out.jsonl").read_text().startswith('{"schema"')


def test_a_format_of_another_command_is_refused(tmp_path: Path) -> None:
    done = genctl("inspect-cache", "hello", "-o", str(tmp_path / "out.jsonl"))
    assert done.status == 2
    assert "jsonl is not a format of this command\nhint: --format json or --format tsv" in done.err
