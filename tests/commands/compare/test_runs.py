"""The names and settings of a comparison's runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from genctl.commands.compare.options import read_runs, split_models
from genctl.config.layers import Layer, flags_layer
from genctl.config.sides import check
from genctl.errors import PresetError, UsageError


def test_precedence_is_files_then_the_runs_own_then_flags() -> None:
    files = [Layer("job.toml", {"max_new_tokens": 1, "num_beams": 7, "length_penalty": 0.5})]
    flags = [flags_layer({"length_penalty": 2.0})]
    (run,) = read_runs([], ["own:num_beams=3,length_penalty=1.5"], [], flags, files=files)
    generation = run.early.generation
    assert (generation.max_new_tokens, generation.num_beams, generation.length_penalty) == (1, 3, 2.0)


def test_a_decoding_mode_is_taken_by_name_and_refined_by_flags() -> None:
    runs = read_runs([], ["beam", "greedy", "contrastive"], [], [flags_layer({"max_new_tokens": 3})])
    found = [(run.name, run.mode, run.early.generation) for run in runs]
    assert [(name, mode, one.num_beams, one.penalty_alpha, one.max_new_tokens) for name, mode, one in found] == [
        ("beam", "beam", 4, None, 3), ("greedy", "greedy", 1, None, 3), ("contrastive", "contrastive", 1, 0.6, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sentence", "hint"),
    [
        ("nonsense", "there is no such strategy", "there are: greedy, sample, beam"),
        ("beem", "there is no such strategy; did you mean beam?", "there are: greedy"),
        ("gpt2", "there is no such strategy", "or @model=NAME"),
    ],
)
def test_a_name_that_is_no_decoding_mode_is_refused(name: str, sentence: str, hint: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        read_runs([], [name], [], [])
    assert hint in caught.value.hint


def test_an_inline_strategy_may_extend_presets_and_goes_above_them() -> None:
    (run,) = read_runs([], ["own:extends=nucleus,top_p=0.5"], [], [])
    generation = run.early.generation
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
    both = split_models(["builtin:stories,builtin:numbers"])
    names = [run.name for run in read_runs(["greedy", "nucleus"], [], both, [])]
    assert names == [
        "greedy@builtin:stories", "greedy@builtin:numbers", "nucleus@builtin:stories", "nucleus@builtin:numbers",
    ]  # fmt: skip
    runs = read_runs([], [], both, [flags_layer({"model": "elsewhere"})])
    assert [run.name for run in runs] == ["builtin:stories", "builtin:numbers"]
    assert [run.early.runtime.model for run in runs] == ["builtin:stories", "builtin:numbers"]


def test_a_checkpoint_or_server_that_a_run_names_goes_above_the_flags() -> None:
    flags = [flags_layer({"model": "elsewhere", "max_new_tokens": 5})]
    texts = ["./a@max_new_tokens=9", "openai:http://h", "far=openai:http://h@model=b", "greedy", "here:model=c"]
    runs = [run.early for run in read_runs([], texts, [], flags)]
    assert [(one.runtime.model, one.runtime.backend) for one in runs] == [
        ("./a", None), ("elsewhere", "openai:http://h"), ("b", "openai:http://h"), ("elsewhere", None),
        ("c", None),
    ]  # fmt: skip
    assert [one.generation.max_new_tokens for one in runs] == [5] * 5


def test_models_have_settings_that_flags_may_not_contradict() -> None:
    models = split_models(["a,here=./b@dtype=bfloat16,threads=2"])
    runs = read_runs([], [], models, [])
    assert [(run.name, run.early.runtime.dtype, run.early.runtime.threads) for run in runs] == [
        ("a", "auto", None), ("here", "bfloat16", 2),
    ]  # fmt: skip
    with pytest.raises(PresetError, match='dtype = "bfloat16" contradicts "float32"'):
        _ = read_runs([], [], models, [flags_layer({"dtype": "float32"})])[1].early


@pytest.mark.parametrize("texts", [["a,,b"], ["a", "a"], [""]])
def test_models_that_are_empty_or_said_twice_are_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="--models"):
        split_models(texts)


def test_a_mistake_names_its_run() -> None:
    runs = read_runs([], ["own:num_beens=3", "right:num_beams=3", "other:top_q=1"], [], [])
    with pytest.raises(PresetError) as caught:
        check(runs)
    assert caught.value.message.split("\n") == [
        "run own: --strategy own: unknown key num_beens; did you mean num_beams?",
        "run other: --strategy other: unknown key top_q; did you mean top_p?",
    ]


def test_inline_runs_that_cannot_be_read_are_reported_with_the_mistakes_of_the_others() -> None:
    with pytest.raises(UsageError) as caught:
        read_runs([], ["=1", "own:num_beens=3", "open:regex=("], [], [])
    lines = caught.value.message.split("\n")
    assert [line.split(": ")[0] for line in lines] == ["--strategy '=1'", "--strategy open", "run own"]
