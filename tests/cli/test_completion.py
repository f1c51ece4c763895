"""The shell completes names that are at hand: bash is driven, zsh and fish are asked as their scripts ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINES = {
    "genctl ru": ["run"],
    "genctl run -p nuc": ["nucleus"],
    "genctl run --preset grammar-nothing": [],
    "genctl run --strategy contras": ["contrastive", "contrastive-decoding"],
    "genctl run --model builtin": ["builtin:numbers", "builtin:stories"],
    "genctl run -m cached": ["cached/tiny"],
    "genctl tokens -m cached": ["cached/tiny"],
    "genctl help tok": ["tokens"],
    "genctl run --assistant-model cached": ["cached/tiny"],
    "genctl beam --num-beam-g": ["--num-beam-groups"],
    "genctl compare -p greed": ["greedy"],
    "genctl presets show nuc": ["nucleus"],
    "genctl run --cache qu": ["quantized"],
    "genctl run --device c": ["cpu", "cuda"],
    "genctl run --smoothing-": ["--smoothing-factor"],
    "genctl run --set smoothing_": ["smoothing_factor=", "smoothing_curve="],
    "genctl run --set temp": ["temperature="],
    "genctl run --set early_stopping": ["early_stopping="],
    "genctl run --set do_sample=": ["do_sample=true", "do_sample=false"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a `genctl` on its path, its function for Bash in a file, and a cache with one checkpoint."""
    folder = tmp_path_factory.mktemp("completion")
    tool = folder / "bin" / "genctl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m genctl "$@"\n')
    tool.chmod(0o755)
    cached = folder / "hub" / "models--cached--tiny"
    snapshot = cached / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    builtin = Path(__file__).resolve().parents[2] / "genctl" / "models" / "builtin" / "stories"
    shutil.copytree(builtin, snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('completion imports torch')\n")
    root = Path(__file__).resolve().parents[2]
    path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
    made = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": f"{folder}{os.pathsep}{root}",
        "HF_HUB_CACHE": str(folder / "hub"),
        "FUNCTION": str(folder / "function"),
    }
    with (folder / "function").open("w") as function:
        subprocess.run([str(tool)], env={**made, "_GENCTL_COMPLETE": "source_bash"}, stdout=function, check=True)
    return made


@pytest.mark.parametrize("line", LINES)
def test_bash_completes(line: str, place: dict[str, str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    words = line.split(" ")
    script = f"""
        source "$FUNCTION"
        COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
        _genctl_completion genctl "{words[-1]}" "{words[-2]}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], env=place, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == LINES[line]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_answered(shell: str, place: dict[str, str]) -> None:
    asked = {"_GENCTL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "genctl run -p nuc"}
    asked["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    tool = [sys.executable, "-m", "genctl"]
    done = subprocess.run(tool, env={**place, **asked}, capture_output=True, text=True, check=False)
    assert "nucleus" in done.stdout
    assert done.stderr == ""
