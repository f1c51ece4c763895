"""The README is a promise: every command in it runs, and its tables are true."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.+)$", TEXT, re.MULTILINE)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: files that they name, and a `genctl` that is this checkout's."""
    folder = tmp_path_factory.mktemp("readme")
    rows = [{"id": "a", "prompt": "One day", "params": {"do_sample": True}}, {"prompt": "The little fox"}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tool = folder / "bin" / "genctl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m genctl "$@"\n')
    tool.chmod(0o755)
    return folder


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GENCTL_")}
    path = f"{folder / 'bin'}{os.pathsep}{kept['PATH']}"
    home = {"XDG_CONFIG_HOME": str(folder / "config"), "PYTHONPATH": str(README.parent)}
    return {**kept, "PATH": path, **home, "HF_HUB_OFFLINE": "1"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="the README's commands are for bash")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command: str, folder: Path) -> None:
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

    section = TEXT.split("### Logits processors")[1].split("| processor |")[0]
    arrows = "→".join(line for line in section.splitlines() if "→" in line or line.startswith("`"))
    names = [name for name in re.findall(r"`(\w+)`", arrows)]
    expected = [entry.name for entry in ORDER]
    assert names[: len(expected)] == expected


def test_exit_statuses_are_those_of_the_program() -> None:
    from genctl.errors import Exit

    rows = re.findall(r"^\| ([\d, ]+) \|", TEXT, re.MULTILINE)
    stated = {int(number) for row in rows for number in row.split(",")}
    assert stated == {int(code) for code in Exit} | {143}
