"""Every shipped preset runs on both built-in checkpoints, and what `--dry` prints is the same job again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tool import genctl

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "presets").glob("*.toml"))
PROMPTS = {"stories": "Once upon a time", "numbers": "1207"}


def test_there_are_at_least_twelve() -> None:
    assert len(PRESETS) >= 12


@pytest.mark.parametrize("model", PROMPTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_runs_and_its_dry_output_is_the_same_job(preset: str, model: str, tmp_path: Path) -> None:
    arguments = ("run", "-m", f"builtin:{model}", "--seed", "5", "--format", "jsonl", "-n", "12")
    prompt = PROMPTS[model]
    done = genctl(*arguments, "-p", preset, prompt)
    assert done.status == 0, done.err
    assert done.records[0]["token_ids"]
    dry = genctl(*arguments, "-p", preset, "--dry")
    assert dry.status == 0, dry.err
    job = tmp_path / "job.toml"
    job.write_text(dry.out)
    assert genctl("run", "--format", "jsonl", "-p", str(job), prompt).raw == done.raw
