"""`--strategy NAME` selects its mode, a preset runs, and a sampling flag turns sampling on with a note."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import genctl as package
from genctl.config.modes import NAMED
from genctl.errors import PresetError
from tests.cli.tool import genctl, ok
from tests.tiny import tiny

MORE = {
    "constrained-beam": ["--set", 'force_words=["bridge"]'],
    "assisted": ["--assistant-model", "builtin:stories"],
    "early-exit": ["--assistant-early-exit", "2"],
    "contrastive-decoding": ["--amateur-model", "builtin:stories"],
}


@pytest.mark.parametrize("name", NAMED)
def test_every_name_runs_as_what_it_is_called(name: str) -> None:
    shape = ["-n", "6", "--seed", "1", "--format", "jsonl", "One day"]
    done = ok("run", "--strategy", name, *MORE.get(name, []), *shape)
    assert done.records[0]["strategy"] == name


def test_flags_refine_a_named_strategy() -> None:
    shape = ["-n", "6", "--format", "jsonl", "One day"]
    two = genctl("run", "--strategy", "beam", "--num-beams", "2", *shape).records[0]
    assert two["token_ids"] == genctl("run", "--num-beams", "2", *shape).records[0]["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--strategy", "beem"), "there is no such strategy"),
        (("--strategy", "greedy", "--do-sample"), "make it sample"),
        (("--strategy", "beam", "--num-beams", "1"), "make it greedy"),
        (("--strategy", "assisted"), "it needs assistant_model"),
        (("--strategy", "constrained-beam"), "it needs force_words"),
    ],
)
def test_what_contradicts_a_name_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    done = genctl("run", *arguments, "-n", "4", "One day")
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err


PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "presets").glob("*.toml"))
PROMPTS = {"stories": "Once upon a time", "numbers": "1207"}


@pytest.mark.parametrize("model", PROMPTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_runs_and_its_dry_output_is_the_same_job(preset: str, model: str, tmp_path: Path) -> None:
    arguments = ("run", "-m", f"builtin:{model}", "--seed", "5", "--format", "jsonl", "-n", "12")
    prompt = PROMPTS[model]
    done = ok(*arguments, "-p", preset, prompt)
    assert done.records[0]["token_ids"]
    dry = ok(*arguments, "-p", preset, "--dry")
    job = tmp_path / "job.toml"
    job.write_text(dry.out)
    assert genctl("run", "--format", "jsonl", "-p", str(job), prompt).raw == done.raw


NOTE = "note: --temperature turns sampling on\n"


def test_a_sampling_flag_samples_as_with_do_sample(gpt2: Path) -> None:
    shape = ("run", "-m", str(gpt2), "-n", "12", "--seed", "5", "--format", "jsonl", "hello there")
    done = genctl(*shape, "--temperature", "0.7")
    assert (done.status, done.err) == (0, NOTE)
    assert done.records[0]["strategy"] == "sample"
    written = genctl(*shape, "--temperature", "0.7", "--do-sample")
    assert written.err == ""
    assert done.raw == written.raw
    assert done.records[0]["token_ids"] != genctl(*shape).records[0]["token_ids"]  # else the test shows nothing
    quiet = genctl(*shape, "--temperature", "0.7", "--quiet")
    assert (quiet.err, quiet.raw) == ("", done.raw)


def test_dry_says_where_sampling_comes_from_and_do_sample_false_contradicts_it() -> None:
    done = genctl("run", "--dry", "--top-p", "0.9")
    line = next(line for line in done.out.splitlines() if line.startswith("do_sample"))
    assert line.split() == ["do_sample", "=", "true", "#", "implied", "by", "flag", "--top-p"]
    Path("job.toml").write_text("do_sample = false\n")
    done = genctl("run", "-p", "job.toml", "--temperature", "0.7", "x")
    assert done.status == 2
    assert "temperature = 0.7 (flag --temperature) has no effect while do_sample is false (job.toml:1)" in done.err


def test_with_beams_do_sample_must_be_written(gpt2: Path) -> None:
    command = ("run", "-m", str(gpt2), "-n", "4", "--num-beams", "3", "--temperature", "0.7", "--format", "jsonl", "x")
    done = genctl(*command)
    assert done.status == 2
    assert "no effect in the search of num_beams = 3 (flag --num-beams) while do_sample is false" in done.err
    assert "hint: add --do-sample\n" in done.err
    assert genctl(*command, "--do-sample").records[0]["strategy"] == "beam-sample"


def test_temperature_zero_is_greedy_even_with_do_sample(gpt2: Path) -> None:
    command = ("run", "-m", str(gpt2), "-n", "8", "--format", "jsonl", "x")
    done = ok(*command, "--temperature", "0", "--do-sample")
    assert done.err.startswith("note: temperature = 0.0 (flag --temperature) is greedy: do_sample = true")
    assert done.records[0]["token_ids"] == genctl(*command).records[0]["token_ids"]
    assert done.records[0]["strategy"] == "greedy"


def test_runs_of_a_comparison(gpt2: Path) -> None:
    runs = ("--strategy", "plain:", "--strategy", "warm:temperature=0.7")
    command = ("compare", "-m", str(gpt2), *runs, "-n", "6", "--seed", "1", "x")
    done = ok(*command, "--format", "jsonl")
    assert "note: run warm: temperature (--strategy warm) turns sampling on\n" in done.err
    assert "run plain" not in done.err
    dry = genctl(*command[:-1], "--dry")
    assert "implied by --strategy warm" in dry.out


def test_in_python(gpt2: Path) -> None:
    (began, *_) = package.load(str(gpt2), max_new_tokens=2).stream("x", temperature=0.7)
    assert began.strategy == "sample"  # type: ignore[union-attr]
    with pytest.raises(PresetError, match="do_sample is false"):
        list(package.load(str(gpt2), do_sample=False).stream("x", temperature=0.7))


@pytest.mark.parametrize(
    ("flags", "is_noted"),
    [
        ((), True),
        (("--seed", "3"), True),
        (("-q",), False),
        (("--no-do-sample",), False),
        (("--do-sample",), False),
        (("--temperature", "0"), False),
        (("--top-p", "0.5"), False),
    ],
    ids=str,
)
def test_a_pipe_is_told_once_that_the_checkpoint_samples(
    flags: tuple[str, ...], is_noted: bool, tmp_path: Path
) -> None:
    tiny("llama", tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": True}))
    done = genctl("run", "-m", str(tmp_path), "the cat", "a dog", "-n", "3", *flags)
    note = f"do_sample = true (generation_config of {tmp_path}): tokens are drawn; --no-do-sample decodes greedily"
    assert done.err.count("tokens are drawn") == done.err.count(note) == is_noted
    assert note not in genctl("run", "-m", str(tmp_path), "the cat", "-n", "3", *flags, terminal=True).err
