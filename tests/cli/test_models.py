"""`genctl models` lists local checkpoints, even if the cache is damaged; shells complete their names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import genctl, ok

FIELDS = ["name", "path", "bytes", "architecture", "dtype", "runtime", "why_not_native", "context", "error"]


def cached(cache: Path, name: str, source: Path | None, **config: Any) -> Path:
    """Put a checkpoint into a cache as the Hub's client does: blobs, a snapshot of links, and a ref."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "blobs").mkdir()
    for file in sorted(source.iterdir()) if source else ():
        blob = folder / "blobs" / file.name
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    if config:
        blob = folder / "blobs" / "config.json"
        blob.write_text(json.dumps({**json.loads(blob.read_text()), **config}))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def full(cache: Path, gpt2: Path) -> Path:
    """A cache with a native checkpoint, one that is not, and several that are damaged."""
    cached(cache, "someone/whole", gpt2)
    cached(cache, "someone/other-positions", gpt2, scale_attn_by_inverse_layer_idx="odd")
    (cached(cache, "someone/bad-json", gpt2) / "blobs" / "config.json").write_text("{")
    (cached(cache, "someone/list", gpt2) / "blobs" / "config.json").write_text("[1]")
    (cached(cache, "someone/odd", gpt2, architectures=7, n_positions="many") / "blobs").touch()
    (cached(cache, "someone/no-weights", gpt2) / "blobs" / "model.safetensors").unlink()
    blob = cached(cache, "someone/cut", gpt2) / "blobs" / "model.safetensors"
    blob.write_bytes(blob.read_bytes()[:100])
    cached(cache, "someone/empty", None)
    (cache / "models--a\nb--c").mkdir()
    (cache / "datasets--x--y").mkdir()
    (cache / "models--file").write_text("no folder")
    return cache


def by_name(*arguments: str) -> dict[str, dict[str, Any]]:
    done = genctl("models", "--format", "json", *arguments)
    assert (done.status, done.err) == (0, "")
    return {record["name"]: record for record in json.loads(done.out)}


def test_without_a_cache_there_are_the_built_in_ones(cache: Path) -> None:
    models = by_name()
    assert list(models) == ["builtin:numbers", "builtin:stories"]
    stories = models["builtin:stories"]
    assert list(stories) == FIELDS
    assert (stories["architecture"], stories["runtime"], stories["context"]) == ("LlamaForCausalLM", "native", 512)
    folder = Path(stories["path"])
    assert stories["bytes"] == sum(file.stat().st_size for file in folder.iterdir())


def test_cached_checkpoints_and_what_is_wrong_with_them(full: Path) -> None:
    models = by_name()
    whole = models["someone/whole"]
    assert whole["error"] is None
    assert (whole["architecture"], whole["dtype"], whole["context"]) == ("GPT2LMHeadModel", "float32", 256)
    assert whole["runtime"] == "native"
    size = sum(file.stat().st_size for file in (full / "models--someone--whole" / "blobs").iterdir())
    assert 0 < whole["bytes"] - size < 10_000  # links and the ref
    other = models["someone/other-positions"]
    assert (other["runtime"], other["error"]) == ("transformers", None)
    assert "scale_attn_by_inverse_layer_idx" in other["why_not_native"]
    wrong = {name.removeprefix("someone/"): model["error"] for name, model in models.items() if model["error"]}
    assert set(wrong) >= {"bad-json", "list", "no-weights", "cut", "empty", "a\nb/c", "file"}
    assert "config.json" in wrong["bad-json"]
    assert "config.json" in wrong["list"]
    assert "model.safetensors" in wrong["cut"]
    assert wrong["empty"] == "the cache holds no whole snapshot of it with a config.json"
    assert not any("datasets" in name for name in models)
    assert models["someone/odd"]["context"] is None


def test_the_listed_runtime_is_the_one_that_runs(full: Path) -> None:
    """-m takes the listed names, and `--runtime native` refuses those listed for transformers."""
    for name, model in by_name().items():
        if name in ("someone/whole", "someone/other-positions"):
            done = genctl("run", "-m", name, "--runtime", "native", "-n", "1", "x")
            assert (done.status == 0) == (model["runtime"] == "native"), done.err


def test_every_format_has_a_line_for_each(full: Path) -> None:
    models = by_name()
    lines = genctl("models", "--format", "jsonl").records
    assert lines == list(models.values())
    tsv = genctl("models", "--format", "tsv").out.splitlines()
    assert tsv[0].split("\t") == [
        "name", "architecture", "bytes", "dtype", "runtime", "context", "why_not_native", "path", "error",
    ]  # fmt: skip
    assert len(tsv) == 1 + len(models)
    text = genctl("models").out.splitlines()
    assert len(text) == len(models)
    row = next(line for line in text if line.startswith("someone/whole")).split("\t")
    assert row[:2] + row[3:] == ["someone/whole", "GPT2LMHeadModel", "float32", "native", "256"]
    assert "not native: " not in "".join(text)
    verbose = genctl("models", "-v").out
    assert verbose.count("not native: ") == sum(model["why_not_native"] is not None for model in models.values())


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_it_fits_a_terminal(full: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for more in ((), ("-v",)):
        done = ok("models", *more, terminal=True, color="never")
        assert all(len(line) <= columns for line in done.out.splitlines())
        assert "someone/whole" in done.out
        assert "a\\nb/c" in done.out
        assert "damaged: " in done.out
        assert ("not native: " in done.out) == bool(more)
        assert "  GPT2LMHeadModel · 219.0 KiB · float32 · native · 256 tokens\n" in done.out or columns == 60


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
    "genctl run --repetition-": ["--repetition-penalty"],
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
        **os.environ, "PATH": path, "PYTHONPATH": f"{folder}{os.pathsep}{root}", "HF_HUB_CACHE": str(folder / "hub"),
        "FUNCTION": str(folder / "function"),
    }  # fmt: skip
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
