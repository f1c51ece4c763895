"""Parsing sides: where the model's name ends, which knobs are allowed, and all mistakes reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from genctl.commands.parity.options import SIDE_SETTINGS, is_prompt, read_side, read_sides
from genctl.config.layers import flags_layer
from genctl.errors import GenctlError, UsageError

pytestmark = pytest.mark.usefixtures("clean_environment")


def test_a_side_goes_above_the_flags_of_all_sides() -> None:
    flags = flags_layer({"dtype": "bfloat16", "threads": 2})
    first, second = read_sides(["m@dtype=float32", "m"], [flags])
    assert (first.early.runtime.dtype, first.early.runtime.threads) == ("float32", 2)
    assert second.early.runtime.dtype == "bfloat16"


def test_all_mistakes_of_all_sides_are_said_at_once() -> None:
    with pytest.raises(GenctlError) as caught:
        read_sides(["a@dtyp=float32,seed=1", "b@threads=0", "c@temperature=0.5,quantize=int4"], ())
    lines = caught.value.message.split("\n")
    assert lines[0] == "side a@dtyp=float32,seed=1: unknown setting dtyp; did you mean dtype?"
    assert lines[1].startswith("side a@dtyp=float32,seed=1: seed cannot matter to a comparison: greedy texts")
    assert lines[2].startswith("side c@temperature=0.5,quantize=int4: temperature cannot matter to a comparison: ")
    assert lines[3].startswith("side b@threads=0: threads = 0: ")
    assert len(lines) == 4
    assert "a side takes model, revision" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names neither a model nor a setting"),
        ("a@model=b", "the model is given twice, as a and as model = b"),
        ("m@threads=1,threads=2", "threads is given twice"),
        ("m@x=[1", "a bracket is not closed"),
        ("m@threads=1,two", "'two' is not setting=value"),
        ("openai:http://h@runtime=native", "a server cannot be a side"),
        ("m@backend=openai:http://h", "a server cannot be a side"),
        ("m@max_new_tokens=5", "--max-new-tokens holds for all sides"),
        ("m@repetition_penalty=1.2", "it only changes which token is chosen"),
        ("m@chat=true", "--chat holds for all sides"),
        ("m@tensor_parallel=true", "a side is one process"),
        ("beam", "side beam: greedy texts are compared here; genctl compare --strategy compares ways to decode"),
        ("golden.jsonl", "a file of results is the reference: give one, first"),
    ],
)
def test_what_no_side_can_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="side ") as caught:
        read_side(text, ())
    assert message in caught.value.message


def test_a_side_may_be_a_preset_and_have_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "genctl" / "presets"
    own.mkdir(parents=True)
    (own / "small.toml").write_text('dtype = "bfloat16"\nthreads = 1\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    small, named = read_sides(["small", "two=small@threads=2"], [flags_layer({"dtype": "float32"})])
    assert (small.name, small.early.runtime.dtype, small.early.runtime.threads) == ("small", "bfloat16", 1)
    assert (named.name, named.early.runtime.threads) == ("two", 2)
    (tmp_path / "small").mkdir()  # a checkpoint, then
    assert read_side("small", ()).early.runtime.model == "small"


def test_every_knob_that_a_side_takes_is_one() -> None:
    from genctl.config.check import known

    assert set(SIDE_SETTINGS) <= set(known())


def test_prompts_have_a_space_and_are_neither_sides_nor_files(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    assert is_prompt("The sea")
    assert not is_prompt("gpt2")
    assert not is_prompt(str(folder))
    assert not is_prompt("./my model@dtype=float32")
    assert is_prompt("a" * 5000 + " b")
