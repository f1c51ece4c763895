"""Every console block in README.md and docs/*.md runs as printed, in an empty folder; links and tables are right."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import python

README = Path(__file__).resolve().parent.parent / "README.md"
DOCS = README.parent / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
BLOCKS = [
    pytest.param(re.findall(r"^\$ (.+)$", block, re.MULTILINE), id=f"{name}-{number}")
    for name, text in TEXTS.items()
    for number, block in enumerate(re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL), 1)
]
PYTHON = re.findall(r"```python\n(.*?)```", TEXTS["usage.md"], re.DOTALL)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `genctl` that is this checkout's."""
    tool = tmp_path_factory.mktemp("bin") / "genctl"
    tool.write_text(f'#!/bin/sh\nexec {shlex.join(python())} -m genctl "$@"\n')
    tool.chmod(0o755)
    return tool.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for the commands, as a reader of the page has it."""
    place = tmp_path / "empty"
    place.mkdir()
    return place


def environment(programs: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GENCTL_")}
    path = f"{programs}{os.pathsep}{kept['PATH']}"
    home = {"XDG_CONFIG_HOME": str(programs / "config"), "PYTHONPATH": str(README.parent)}
    return {**kept, "PATH": path, **home, "HF_HUB_OFFLINE": "1"}


def test_every_command_of_the_pages_is_in_a_console_block() -> None:
    stated = [line for text in TEXTS.values() for line in re.findall(r"^\$ (.+)$", text, re.MULTILINE)]
    assert [command for block in BLOCKS for command in block.values[0]] == stated
    assert len(BLOCKS) > 20
    assert all(block.values[0] for block in BLOCKS)


@pytest.mark.parametrize("commands", BLOCKS)
def test_every_console_block_runs_in_an_empty_folder(
    commands: list[str],
    folder: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One command after the other: a block makes the files that it reads."""
    for command in commands:
        if re.search(r" [|<>] ", command):
            check_in_bash(command, folder, programs)
        else:
            check_here(command, folder, programs, monkeypatch, capfd)


def check_here(
    command: str, folder: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, since the shell is not needed."""
    from genctl.cli.app import run

    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(programs / "config"))
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        program, *arguments = shlex.split(command)
        assert program == "genctl", command
        assert run(arguments) == 0, f"{command}: {capfd.readouterr().err}"
    printed = capfd.readouterr()
    assert "error" not in printed.err, command
    assert printed.out or " -o " in command or command.startswith("genctl report "), command


def test_the_rank_table_of_the_readme_is_what_a_terminal_shows(tmp_path: Path) -> None:
    """In a picture of a terminal, since the table is for people. A pipe gets lines with tabs."""
    from html import unescape
    from xml.etree import ElementTree

    from tests.cli.tool import genctl

    command, shown = re.findall(r"^\$ genctl (score .*--rank.*)\n((?:.+\n)+?)```", TEXTS["README.md"], re.MULTILINE)[0]
    picture = tmp_path / "rank.svg"
    assert genctl(*shlex.split(command), "--svg", str(picture)).status == 0
    lines: dict[float, str] = {}
    for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        y = float(text.get("y", "0"))
        lines[y] = lines.get(y, "") + unescape("".join(text.itertext())).replace("\xa0", " ")
    drawn = [line.split() for _, line in sorted(lines.items()) if line.strip()]
    expected = [line.split() for line in shown.splitlines()]
    assert [line for line in drawn if line in expected] == expected


def check_in_bash(command: str, folder: Path, programs: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("pipes are for bash")
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env=environment(programs),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert "error" not in done.stderr, command
    assert done.stdout or " -o " in command or " > " in command, command


@pytest.mark.parametrize("code", PYTHON)
def test_every_python_example_runs(code: str, folder: Path, programs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder, env=environment(programs), capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_order_of_processors_is_the_one_that_runs() -> None:
    from genctl.decode.processors.build import ORDER

    section = TEXTS["presets.md"].split("## Logits processors")[1].split("| processor |")[0]
    arrows = "→".join(line for line in section.splitlines() if "→" in line or line.startswith("`"))
    names = [name for name in re.findall(r"`(\w+)`", arrows)]
    expected = [entry.name for entry in ORDER]
    assert names[: len(expected)] == expected


def test_exit_statuses_are_those_of_the_program() -> None:
    from genctl.errors import Exit

    rows = re.findall(r"^\| ([\d, ]+) \|", TEXTS["records.md"], re.MULTILINE)
    stated = {int(number) for row in rows for number in row.split(",")}
    assert stated == {int(code) for code in Exit} | {143}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXTS[page.name]):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_readme_is_short_and_its_speeds_are_those_of_the_whole_table() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 150
    rows = [line for line in text.splitlines() if line.startswith("| GPT-2") or line.startswith("| T5")]
    assert len(rows) == 5
    whole = {line.split(" | ")[0]: line.strip("| ").split(" | ") for line in TEXTS["performance.md"].splitlines()}
    for row in rows:
        work, *speeds = row.strip("| ").split(" | ")
        assert speeds == whole[f"| {work}"][2:6], work


def test_the_events_section_has_the_fields_of_every_event() -> None:
    from genctl import events

    parts = {"a row": events.Row, "a token": events.Token, "a trace": events.Trace, "a hypothesis": events.Hypothesis}
    section = TEXTS["records.md"].split("\n## Events")[1].split("\n## ")[0]
    stated = dict(re.findall(r"^\| `?([^`|]+?)`? \| (.+) \|$", section, re.MULTILINE))
    for name, kind in (events.KINDS | parts).items():
        fields_cell = re.sub(r"\([^)]*\)", "", stated[name]).split(";")[0]
        assert re.findall(r"`(\w+)`", fields_cell) == [field.name for field in dataclasses.fields(kind)], name
    assert stated.keys() == events.KINDS.keys() | parts.keys() | {"event", "part"}
