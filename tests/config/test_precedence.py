"""Which layer wins, what becomes moot, and which contradictions are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from genctl import params
from genctl.config.conflicts import REFINES, settle
from genctl.config.layers import Layer, Resolved, flags_layer, model_layer, overlay, resolve, row_layer
from genctl.config.names import OUTWARD, UNSAFE
from genctl.config.presets import parse_sets
from genctl.config.settings import environment_layer
from genctl.errors import PresetError

SAMPLED = {"do_sample": True}


def layers(*values: dict[str, Any]) -> list[Layer]:
    return [Layer(f"layer{number}.toml", value) for number, value in enumerate(values)]


def wrong(layers: Sequence[Layer]) -> str:
    with pytest.raises(PresetError) as caught:
        resolve(layers)
    return caught.value.message


def test_nothing_said_gives_the_built_in_defaults_and_a_flag_is_named_as_typed() -> None:
    job = resolve([])
    assert job.generation == params.Generation()
    assert job.runtime == params.Runtime()
    assert set(job.origins.values()) == {"default"}
    job = resolve([flags_layer({"do_sample": True, "pack": False, "top_p": 0.5}, {"top_p": "flag -P"})])
    assert job.origins["do_sample"] == "flag --do-sample"
    assert job.origins["pack"] == "flag --no-pack"
    assert job.origins["top_p"] == "flag -P"


@pytest.mark.parametrize("name", ["params.toml", "flag.toml", "generation_config.toml", "row 1.toml"])
def test_a_file_is_a_file_whatever_its_name(name: str) -> None:
    with pytest.raises(PresetError):
        resolve([Layer(name, {"nonsense": 1}, declared="user")])
    assert Layer(name, {}).kind == "user"


SAMPLING_KNOBS = [key for key, item in params.knobs().items() if item.metadata["sampling"]]
NOT_DEFAULT = {
    "sampler": "inverse-cdf", "top_k": 7, "xtc_threshold": 0.2, "mirostat_tau": 3.0, "top_n_sigma": 2.0,
    "assistant_model": "small", "p_less": "norm",
}  # fmt: skip


def other_value(key: str) -> Any:
    for value in (NOT_DEFAULT.get(key), 0.5, 2.0, 2):
        if value is not None and value not in (params.knobs()[key].default, params.knobs()[key].metadata["neutral"]):
            try:
                resolve(
                    layers(
                        {**SAMPLED, "penalty_alpha": 0} if "penalty_alpha" in params.knobs() else SAMPLED, {key: value}
                    )
                )
            except PresetError as error:
                if "must be" in error.message:
                    continue
            return value
    raise AssertionError(f"no value found for {key}")


@pytest.mark.parametrize("key", SAMPLING_KNOBS)
def test_a_sampling_knob_needs_sampling(key: str) -> None:
    assert f"{key} = " in wrong(layers({key: other_value(key)}))
    assert "has no effect while do_sample is false (default)" in wrong(layers({key: other_value(key)}))


@pytest.mark.parametrize("key", SAMPLING_KNOBS)
def test_a_sampling_knob_at_its_neutral_setting_needs_nothing(key: str) -> None:
    neutral = params.knobs()[key].metadata["neutral"]
    if neutral is not None:
        resolve(layers({key: neutral}))
    if params.knobs()[key].default is not None:
        resolve(layers({key: params.knobs()[key].default}))


def test_what_a_layer_says_of_sampling_is_moot_where_a_later_one_turns_it_off() -> None:
    job = resolve([*layers(SAMPLED | {"temperature": 0.7, "top_k": 5}), flags_layer({"do_sample": False})])
    assert job.generation == params.Generation()
    assert job.origins["temperature"] == "default"
    job = resolve([model_layer({"temperature": 0.6, "top_p": 0.9, "top_k": 20})])
    assert job.generation == params.Generation()
    job = resolve([model_layer({"temperature": 0.6}), *layers(SAMPLED)])
    assert job.generation.temperature == 0.6
    job = resolve([model_layer({"do_sample": False}), flags_layer({"top_p": 0.5})])
    assert (job.generation.do_sample, job.generation.top_p) == (True, 0.5)
    job = resolve([*layers(SAMPLED | {"temperature": 1.2, "min_p": 0.05}), flags_layer({"temperature": 0})])
    assert job.generation.do_sample is False
    assert job.generation.min_p is None


@pytest.mark.parametrize("key", SAMPLING_KNOBS)
def test_a_sampling_flag_turns_sampling_on(key: str) -> None:
    item = params.knobs()[key]
    refined = REFINES.get(key, ())[:1]
    extra = {base: other_value(base) for base in refined}
    job = resolve([flags_layer({key: other_value(key), **extra})])
    assert job.generation.do_sample is True
    assert job.origins["do_sample"].startswith("implied by flag --")
    assert f"--{params.spelled(key)}" in job.notices[0]
    # a sweep over values must not turn greedy where it meets the default or the value that is off
    for value in (item.default, item.metadata["neutral"]):
        if value is not None and not refined:
            assert resolve([flags_layer({key: value})]).generation.do_sample is True


def test_the_notice_names_all_flags_that_turn_sampling_on() -> None:
    assert resolve([flags_layer({"temperature": 0.7})]).notices == ("--temperature turns sampling on",)
    both = [flags_layer({"temperature": 0.7}), *parse_sets(["top_p=0.9"])]
    assert resolve(both).notices == ("--temperature and --set top_p turn sampling on",)
    assert resolve([flags_layer({"temperature": 0.7, "do_sample": True})]).notices == ()
    assert resolve([*layers(SAMPLED), flags_layer({"temperature": 0.7})]).notices == ()


@pytest.mark.parametrize("place", ["layer0.toml", "GENCTL_DO_SAMPLE", "flag --no-do-sample", "--set do_sample"])
def test_do_sample_false_that_somebody_wrote_contradicts_a_sampling_flag(place: str) -> None:
    said = [flags_layer({"temperature": 0.7})]
    if place == "layer0.toml":
        said = [*layers({"do_sample": False}), *said]
    elif place == "GENCTL_DO_SAMPLE":
        said = [Layer("GENCTL_DO_SAMPLE", {"do_sample": False}), *said]
    elif place == "--set do_sample":
        said += parse_sets(["do_sample=false"])
    else:
        said = [flags_layer({"temperature": 0.7, "do_sample": False})]
    assert wrong(said) == f"temperature = 0.7 (flag --temperature) has no effect while do_sample is false ({place})"


@pytest.mark.parametrize("search", [{"num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 4}, {"force_words": ["a"]}])
def test_a_search_does_not_sample_unless_do_sample_is_written(search: dict[str, Any]) -> None:
    """In transformers as well, num_beams = 3 with temperature = 0.7 is beam search, which ignores the temperature."""
    message = wrong([flags_layer({"temperature": 0.7, **search})])
    key = next(iter(search))
    assert message.startswith(f"temperature = 0.7 (flag --temperature) has no effect in the search of {key} = ")
    assert message.endswith("while do_sample is false (default)")
    with pytest.raises(PresetError):
        resolve([*layers(search), flags_layer({"temperature": 0.7})])
    job = resolve([flags_layer({"temperature": 0.7, "num_beams": 3, "do_sample": True})])
    assert (job.generation.temperature, job.generation.num_beams) == (0.7, 3)


def test_a_row_may_turn_off_what_a_flag_has_implied_and_does_not_imply_it_itself() -> None:
    base = resolve([flags_layer({"temperature": 0.7})])
    assert overlay(base, row_layer({"top_p": 0.9})).generation.do_sample is True
    assert overlay(base, row_layer({"do_sample": False})).generation == params.Generation()
    assert overlay(base, row_layer({"temperature": 0})).generation == params.Generation(temperature=0)
    with pytest.raises(PresetError, match="has no effect in the search of num_beams"):
        overlay(base, row_layer({"num_beams": 2}))
    with pytest.raises(PresetError, match="has no effect while do_sample is false"):
        overlay(resolve([]), row_layer({"temperature": 0.7}))


@pytest.mark.parametrize("zero_first", [True, False])
def test_temperature_zero_means_greedy_in_whatever_order(zero_first: bool) -> None:
    pair = [{"temperature": 0}, SAMPLED]
    job = resolve(layers(*(pair if zero_first else pair[::-1])))
    assert job.generation.do_sample is False
    assert bool(job.notes) == zero_first


def test_the_same_knob_as_flag_and_set_contradicts_itself() -> None:
    message = wrong([flags_layer({"seed": 1}), *parse_sets(["seed=2"])])
    assert message == "--set seed: seed = 2 contradicts 1 (flag --seed)"
    assert resolve([flags_layer({"seed": 2}), *parse_sets(["seed=2"])]).runtime.seed == 2


def test_several_sequences_need_sampling() -> None:
    assert resolve(layers(SAMPLED | {"num_return_sequences": 3})).generation.num_return_sequences == 3
    assert "would return identical sequences while temperature is 0 (layer1.toml)" in wrong(
        layers(SAMPLED | {"num_return_sequences": 3}, {"temperature": 0})
    )


def test_numbers_of_a_checkpoint_give_way() -> None:
    job = resolve([model_layer({"num_return_sequences": 3})])
    assert job.generation.num_return_sequences == 1
    assert job.notes == ("num_return_sequences = 3 (generation_config) is not used while do_sample is false (default)",)
    job = resolve([model_layer({"max_length": 20, "max_new_tokens": 5})])
    assert (job.generation.max_new_tokens, job.generation.max_length) == (5, None)
    job = resolve([model_layer({"min_new_tokens": 50}), flags_layer({"max_new_tokens": 5})])
    assert (job.generation.min_new_tokens, job.generation.max_new_tokens) == (5, 5)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [({"max_new_tokens": 5}, {"max_length": 9}, (None, 9)), ({"max_length": 9}, {"max_new_tokens": 5}, (5, None))],
)
def test_of_two_lengths_the_later_holds(low: dict[str, Any], high: dict[str, Any], expected: tuple[Any, Any]) -> None:
    job = resolve(layers(low, high))
    assert (job.generation.max_new_tokens, job.generation.max_length) == expected


def test_a_system_message_begins_a_chat_unless_a_later_layer_forbids_it() -> None:
    assert resolve(layers({"system": "hi"})).runtime.chat is True
    assert resolve(layers({"chat": False}, {"system": "hi"})).runtime.chat is True
    assert resolve(layers({"system": "hi"}, {"chat": False})).runtime.system is None


def test_a_knob_that_refines_one_switched_off_later_is_moot() -> None:
    low = SAMPLED | {"mirostat_tau": 4.0, "mirostat_eta": 0.3}
    assert resolve(layers(low)).generation.mirostat_eta == 0.3
    assert "has no effect without xtc_probability" in wrong(layers(SAMPLED | {"xtc_threshold": 0.3}))
    for key, bases in (
        ("max_matching_ngram_size", "prompt_lookup_num_tokens"),
        ("num_assistant_tokens", "assistant_model or assistant_early_exit"),
        ("assistant_lookbehind", "assistant_model"),
    ):
        assert wrong(layers({key: 3})) == f"{key} = 3 (layer0.toml) has no effect without {bases}"
    job = resolve(layers(SAMPLED | {"xtc_threshold": 0.3, "xtc_probability": 0.5}, {"xtc_probability": 0.0}))
    assert job.generation.xtc_threshold == params.Generation().xtc_threshold


def test_before_the_model_is_known_what_rests_on_a_default_is_left_open() -> None:
    said = [flags_layer({"temperature": 0.7})]
    assert resolve(said, tentative=True).runtime.model == "builtin:stories"
    assert resolve([model_layer(SAMPLED), *said]).generation.temperature == 0.7
    with pytest.raises(PresetError):
        resolve([*layers({"do_sample": False}), *said], tentative=True)


def test_a_generation_config_is_read_with_lenience_and_what_it_holds_besides_is_told() -> None:
    job = resolve(
        [
            model_layer(
                {
                    "transformers_version": "5.0.0", "_from_model_config": True, "temperature": None,
                    "output_attentions": False, "unheard_of": 3, "top_p": 7, "max_new_tokens": 12,
                }
            )
        ]
    )  # fmt: skip
    assert job.generation.max_new_tokens == 12
    assert job.notes == (
        "generation_config: unknown key unheard_of; not used",
        "generation_config: top_p = 7: must be at most 1; not used",
    )


def test_a_checkpoint_cannot_choose_where_it_runs() -> None:
    job = resolve([model_layer({"device": "cuda", "trust_remote_code": True})])
    assert job.runtime.device == "auto"
    assert job.notes == ("generation_config: device is not for a checkpoint to choose; not used",)


BASE = layers(SAMPLED | {"temperature": 0.7, "max_new_tokens": 9})


def test_a_row_changes_what_it_names_alone() -> None:
    base = resolve(BASE)
    assert overlay(base, row_layer({})) is base
    base = resolve([*BASE, *layers({"do_sample": False})])
    assert base.generation.temperature == 1.0
    assert overlay(base, row_layer(SAMPLED)).generation.temperature == 0.7
    base = resolve(BASE)
    assert overlay(base, row_layer({"max_new_tokens": None})).generation.max_new_tokens is None
    with pytest.raises(PresetError, match="must be a number, not null"):
        overlay(base, row_layer({"temperature": None}))


@pytest.mark.parametrize(
    "row",
    [
        {"temperature": 1.5},
        {"do_sample": False},
        {"max_length": 7},
        {"seed": 3},
        {"num_return_sequences": 2},
        {"temperature": 0},
    ],
)
def test_a_row_laid_on_top_is_the_same_as_all_layers_resolved(row: dict[str, Any]) -> None:
    whole = resolve([*BASE, row_layer(row)])
    assert overlay(resolve(BASE), row_layer(row)) == whole
    assert settle(whole.settings).clashes == []


@pytest.mark.parametrize("key", ["model", "device", "dtype", "revision", "offline", "batch_size", "trust_remote_code"])
def test_a_row_cannot_choose_the_checkpoint_nor_where_it_runs(key: str) -> None:
    with pytest.raises(PresetError, match=r"row|only the flag"):
        overlay(resolve([]), row_layer({key: "cpu"}, "row 3"))


def test_a_rows_mistake_names_the_row() -> None:
    with pytest.raises(PresetError) as caught:
        overlay(resolve([]), row_layer({"top_k": "5", "nope": 1}, "line 3"))
    assert caught.value.message.splitlines() == [
        'params of line 3: top_k = "5": must be a whole number, not a string',
        "params of line 3: unknown key nope",
    ]


def processors(job: Resolved) -> list[str] | None:
    return None if job.processors is None else [item["use"] for item in job.processors]


def test_a_later_list_of_processors_replaces_the_earlier() -> None:
    one = {"do_sample": True, "processors": [{"use": "top_k"}, {"use": "top_p", "top_p": 0.9}]}
    two = {"processors": [{"use": "min_p", "min_p": 1}]}
    assert processors(resolve([])) is None
    assert processors(resolve(layers(one))) == ["top_k", "top_p"]
    assert processors(resolve(layers(one, two))) == ["min_p"]
    assert processors(resolve(layers(one, {"processors": []}))) == []


DRAWS = {"processors": [{"use": "repetition_penalty"}, {"use": "temperature", "temperature": 0.7}, {"use": "xtc"}]}


def test_a_list_that_draws_is_refused_where_the_best_token_is_taken_as_a_setting_is() -> None:
    for below, why in (({}, "do_sample is false (default)"), ({"temperature": 0}, "temperature is 0 (layer0.toml)")):
        sentence = f"temperature in the list of processors (layer0.toml) has no effect while {why}"
        assert sentence in wrong(layers({**below, **DRAWS}))
    with pytest.raises(PresetError) as error:
        overlay(resolve(layers({})), row_layer({"processors": [{"use": "top_p", "top_p": 0.9}]}))
    assert "top_p in the list of processors (params) has no effect" in str(error.value)
    searching = resolve(layers({"num_beams": 3, **DRAWS}))  # a search ranks by changed scores
    assert processors(searching) == ["repetition_penalty", "temperature", "xtc"]


def test_a_list_that_draws_is_switched_off_by_a_later_layer_and_turns_sampling_on_where_it_is_typed() -> None:
    sampled = {"do_sample": True, **DRAWS}
    for later in ({"do_sample": False}, {"temperature": 0}):
        job = resolve(layers(sampled, later))
        assert (processors(job), job.generation.draws) == (["repetition_penalty", "xtc"], False)
    typed = resolve([Layer("argument", DRAWS, {}, "command", typed=True)])
    assert (processors(typed), typed.generation.draws) == (["repetition_penalty", "temperature", "xtc"], True)


@pytest.mark.parametrize("key", sorted(OUTWARD))
def test_a_checkpoint_names_no_other_file_and_no_code(key: str) -> None:
    job = resolve([Layer("generation_config.json", {key: "x"}, declared="model")])
    (note,) = job.notes
    assert note.startswith(f"generation_config.json: {key} names {OUTWARD[key]}, which a checkpoint may not choose")
    assert job.origins.get(key, "default") == "default"


@pytest.mark.parametrize("key", sorted(UNSAFE))
def test_what_runs_the_code_of_others_is_a_flag_and_nothing_else(key: str) -> None:
    assert "only the flag" in wrong(parse_sets([f"{key}=true"]))
    variable = environment_layer({f"GENCTL_{key.upper()}": "true"})
    assert wrong([variable]).startswith(f"GENCTL_{key.upper()}: {key} runs code that others wrote; only the flag")
