"""What the runs of a comparison are called and made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genctl.commands.compare.runs import parse_strategy, read_runs, split_models
from genctl.config.layers import RunSpec, each, flags_layer
from genctl.errors import PresetError, UsageError


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("beam5:num_beams=5,length_penalty=0.6", "beam5", {"num_beams": 5, "length_penalty": 0.6}),
        ("plain:", "plain", {}),
        ('a:stop_strings=["x, y", "z"],do_sample=true', "a", {"stop_strings": ["x, y", "z"], "do_sample": True}),
        ("a:stop_strings='x,y'", "a", {"stop_strings": "x,y"}),
        ("a:stop_strings=don't,num_beams=2", "a", {"stop_strings": "don't", "num_beams": 2}),
        ('a:logit_bias={" yes": 2.0, "#12": -1},top-k=3', "a", {"logit_bias": {" yes": 2.0, "#12": -1}, "top_k": 3}),
        ('a:logit_bias={" yes" = 2.0}', "a", {"logit_bias": {" yes": 2.0}}),
        ("a:max_time=null", "a", {"max_time": None}),
        (r'a:stop_strings="say \"a,b\"",num_beams=2', "a", {"stop_strings": 'say "a,b"', "num_beams": 2}),
        ("a:early_stopping=never", "a", {"early_stopping": "never"}),
    ],
)
def test_an_inline_strategy_is_a_name_and_knobs(text: str, name: str, values: dict[str, Any]) -> None:
    found, extended, layer = parse_strategy(text)
    assert (found, extended, dict(layer.values)) == (name, (), values)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("num_beams=5", "begins with no name"),
        (":num_beams=5", "begins with no name"),
        ("a/b:num_beams=5", "a name has"),
        ("a:num_beams", "not setting=value"),
        ("a:num_beams=1,,top_k=2", "not setting=value"),
        ("a:num_beams=5,num_beams=6", "said twice"),
        ("a:stop_strings=[1,2", "bracket is not closed"),
        ('a:stop_strings="x', "quote is not closed"),
        ("a:extends=3", "extends must be"),
    ],
)
def test_a_strategy_that_cannot_be_read_says_why(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_strategy(text)


def test_precedence_is_files_then_the_runs_own_then_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "genctl.toml").write_text("max_new_tokens = 1\nnum_beams = 7\nlength_penalty = 0.5\n")
    monkeypatch.chdir(tmp_path)
    flags = [flags_layer({"length_penalty": 2.0})]
    (run,) = read_runs([], ["own:num_beams=3,length_penalty=1.5"], [], flags)
    generation = run.early().generation
    assert (generation.max_new_tokens, generation.num_beams, generation.length_penalty) == (1, 3, 2.0)


def test_a_decoding_mode_is_taken_by_name_and_refined_by_flags() -> None:
    runs = read_runs([], ["beam", "greedy", "contrastive"], [], [flags_layer({"max_new_tokens": 3})])
    found = [(run.name, run.mode, run.early().generation) for run in runs]
    assert [(name, mode, one.num_beams, one.penalty_alpha, one.max_new_tokens) for name, mode, one in found] == [
        ("beam", "beam", 4, None, 3), ("greedy", "greedy", 1, None, 3), ("contrastive", "contrastive", 1, 0.6, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sentence", "hint"),
    [
        ("nonsense", "there is no such strategy", "there are: greedy, sample, beam"),
        ("beem", "there is no such strategy; did you mean beam?", "there are: greedy"),
        ("nucleus", "there is no such strategy", "-p nucleus takes the preset of this name"),
    ],
)
def test_a_name_that_is_no_decoding_mode_is_refused(name: str, sentence: str, hint: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        read_runs([], [name], [], [])
    assert hint in caught.value.hint


def test_an_inline_strategy_may_extend_presets_and_goes_above_them() -> None:
    (run,) = read_runs([], ["own:extends=nucleus,top_p=0.5"], [], [])
    generation = run.early().generation
    assert (generation.do_sample, generation.top_k, generation.top_p) == (True, 0, 0.5)


def test_a_preset_given_by_path_is_called_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("num_beams = 2\n")
    assert [run.name for run in read_runs([str(path), "greedy"], [], [], [])] == ["mine", "greedy"]


def test_runs_keep_the_order_of_presets_and_strategies() -> None:
    order = ["strategies", "presets", "strategies", "presets"]
    runs = read_runs(["greedy", "nucleus"], ["one:num_beams=2", "two:"], [], [], order)
    assert [run.name for run in runs] == ["one", "greedy", "two", "nucleus"]


def test_models_multiply_runs_and_alone_are_runs_themselves() -> None:
    names = [run.name for run in read_runs(["greedy", "nucleus"], [], ["builtin:stories", "builtin:numbers"], [])]
    assert names == [
        "greedy@builtin:stories", "greedy@builtin:numbers", "nucleus@builtin:stories", "nucleus@builtin:numbers",
    ]  # fmt: skip
    runs = read_runs([], [], ["builtin:stories", "builtin:numbers"], [flags_layer({"model": "elsewhere"})])
    assert [run.name for run in runs] == ["builtin:stories", "builtin:numbers"]
    assert [run.early().runtime.model for run in runs] == ["builtin:stories", "builtin:numbers"]


@pytest.mark.parametrize("texts", [["a,,b"], ["a", "a"], [""]])
def test_models_that_are_empty_or_said_twice_are_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="--models"):
        split_models(texts)


def test_a_mistake_names_its_run() -> None:
    runs = read_runs([], ["own:num_beens=3", "right:num_beams=3", "other:top_q=1"], [], [])
    with pytest.raises(PresetError) as caught:
        each(runs, RunSpec.early)
    assert caught.value.message.split("\n") == [
        "run own: --strategy own: unknown key num_beens; did you mean num_beams?",
        "run other: --strategy other: unknown key top_q; did you mean top_p?",
    ]


def test_inline_runs_that_cannot_be_read_are_reported_with_the_mistakes_of_the_others() -> None:
    with pytest.raises(UsageError) as caught:
        read_runs([], ["=1", "own:num_beens=3", "open:regex=("], [], [])
    lines = caught.value.message.split("\n")
    assert [line.split(": ")[0] for line in lines] == ["--strategy '=1'", "--strategy open", "run own"]
