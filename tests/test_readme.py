"""Every command in README.md and docs/*.md runs, every link leads somewhere, and the tables match the program."""

from __future__ import annotations

import dataclasses
import json
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
COMMANDS = [line for text in TEXTS.values() for line in re.findall(r"^\$ (.+)$", text, re.MULTILINE)]
PYTHON = re.findall(r"```python\n(.*?)```", TEXTS["usage.md"], re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: files that they name, and a `genctl` that is this checkout's."""
    folder = tmp_path_factory.mktemp("readme")
    rows = [{"id": "a", "prompt": "One day", "params": {"do_sample": True}}, {"prompt": "The little fox"}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tool = folder / "bin" / "genctl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {shlex.join(python())} -m genctl "$@"\n')
    tool.chmod(0o755)
    return folder


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GENCTL_")}
    path = f"{folder / 'bin'}{os.pathsep}{kept['PATH']}"
    home = {"XDG_CONFIG_HOME": str(folder / "config"), "PYTHONPATH": str(README.parent)}
    return {**kept, "PATH": path, **home, "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In page order, since some commands read what an earlier one wrote; in this process unless the shell is needed."""
    from genctl.cli.app import run

    if re.search(r" [|<>] ", command):
        check_in_bash(command, folder)
        return
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        program, *arguments = shlex.split(command)
        assert program == "genctl"
        assert run(arguments) == 0
    printed = capfd.readouterr()
    assert "error" not in printed.err
    assert printed.out or " -o " in command or command.startswith("genctl report ")


def check_in_bash(command: str, folder: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("pipes are for bash")
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert done.stdout or " -o " in command or " > " in command


@pytest.mark.parametrize("code", PYTHON)
def test_every_python_example_runs(code: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=180,
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
