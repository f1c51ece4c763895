"""The table, an explicit list, a user's own processors, and every message for what cannot be built."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from genctl import params
from genctl.config.listed_knobs import PROCESSORS
from genctl.config.names import BOOKKEEPING, REFUSED
from genctl.decode.processors.build import build
from genctl.errors import UsageError
from tests.decode.processors.plain import material

OWN = "tests.decode.processors.own_processors"
HISTORY, SCORES = torch.tensor([[5, 6]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])


def names(**knobs: Any) -> list[str]:
    return [processor.name for processor in build(material(**knobs))]


def listed(*entries: dict[str, Any], allow: bool = True, **knobs: Any) -> Any:
    return build(material(explicit=entries, allow_plugins=allow, vocab_size=4, **knobs))


def test_every_field_of_generation_config_is_a_knob_or_refused_by_name() -> None:
    said = [set(params.knobs()), set(REFUSED), BOOKKEEPING - set(REFUSED)]
    assert set(GenerationConfig().__dict__) <= set.union(*said)
    for place, these in enumerate(said):
        assert not these & set().union(*said[place + 1 :])
    for reason in REFUSED.values():
        assert len(reason.split()) > 3


def test_defaults_are_the_effective_ones_of_transformers() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    ours = params.Generation()
    differ = {
        name: value for name, value in defaults.items() if name in params.knobs() and getattr(ours, name) != value
    }
    # genctl sets its length once it knows the context, and the number of drafts once it knows what pays
    assert differ == {"max_length": 20, "num_assistant_tokens": 20}
    assert differ["num_assistant_tokens"] == params.MOST_DRAFTED


def test_the_table_knows_each_knob_and_each_name_once() -> None:
    for entry in PROCESSORS.values():
        assert set(entry.knobs) <= set(params.knobs())
        assert entry.source


def test_what_transformers_lacks_stands_where_the_table_says() -> None:
    everything = {
        "do_sample": True, "temperature": 0.7, "top_k": 5, "min_p": 0.1, "top_n_sigma": 1.0, "xtc_probability": 0.5,
        "mirostat_tau": 5.0, "presence_penalty": 0.1, "frequency_penalty": 0.1, "dry_multiplier": 0.8,
        "dry_sequence_breakers": [], "logit_bias": {"#3": 1.0}, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3,
        "renormalize_logits": True, "bad_words_ids": [[7]],
    }  # fmt: skip
    assert names(**everything) == [
        "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "no_repeat_ngram_size",
        "bad_words_ids", "top_n_sigma", "temperature", "top_k", "min_p", "xtc", "mirostat", "renormalize_logits",
    ]  # fmt: skip
    assert "dynatemp" in names(**everything, dynatemp_range=0.5)
    assert "temperature" not in names(**everything, dynatemp_range=0.5)
    greedy = names(**{**everything, "do_sample": False})
    assert greedy == [name for name in names(**everything) if not PROCESSORS[name].sampling]
    assert names(**{**everything, "temperature": 0.0}) == greedy, "a temperature of 0 is greedy"


def test_a_list_sets_the_order_and_the_values() -> None:
    made = listed({"use": "min_p", "min_p": 0.2}, {"use": "temperature", "temperature": 2}, {"use": "top_k"}, top_k=3)
    assert [(p.name, p.settings) for p in made] == [
        ("min_p", {"min_p": 0.2}),
        ("temperature", {"temperature": 2.0}),
        ("top_k", {"top_k": 3}),
    ]
    twice = listed({"use": "temperature", "temperature": 2.0}, {"use": "temperature", "temperature": 0.5})
    assert [p.settings["temperature"] for p in twice] == [2.0, 0.5]
    assert listed({"use": "top_p"}) == (), "at its neutral setting it changes nothing"
    both = listed({"use": "dynatemp", "dynatemp_range": 0.3}, {"use": "temperature", "temperature": 0.5})
    assert [p.name for p in both] == ["dynatemp", "temperature"]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"use": "temperature", "temperature": 0}, "processors, item 1: temperature: must be above 0 in a list"),
        ({"use": "temperature", "temperature": float("inf")}, "temperature: must be a finite number"),
        ({"use": "logit_bias", "logit_bias": {"#9": 1}}, "item 1: logit_bias: 9 is not one of the 4 ids"),
    ],
)
def test_a_wrong_entry_is_refused_in_a_sentence(entry: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        listed(entry)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"sequence_bias": [([400], 1.0)]}, "sequence_bias: 400 is not one of the 300 ids"),
        ({"bad_words_ids": [[-1]]}, "bad_words_ids: -1 is not one of the 300 ids"),
        ({"bad_words_ids": [[]]}, "bad_words_ids: a sequence of ids is empty"),
        ({"bad_words_ids": []}, "bad_words_ids: the list is empty; expected at least one sequence of ids"),
        ({"sequence_bias": []}, "sequence_bias: the list is empty; expected at least one sequence of ids"),
        ({"forced_bos_token_id": 300}, "forced_bos_token_id: 300 is not one of the 300 ids"),
        ({"forced_eos_token_id": [2, 300]}, "forced_eos_token_id: 300 is not one of the 300 ids"),
        ({"exponential_decay_length_penalty": (1, 1.1), "eos": ()}, "there is no EOS id"),
        ({"encoder_repetition_penalty": 1.2, "encoder_ids": None}, "encoder_repetition_penalty: there are no ids"),
        ({"encoder_no_repeat_ngram_size": 2, "encoder_ids": None}, "encoder_no_repeat_ngram_size: there are no ids"),
        ({"guidance_scale": 1.5}, "guidance_scale: this strategy cannot read a second prompt"),
        ({"watermarking_config": {"biass": 2.0}}, "unexpected keyword argument 'biass'"),
        ({"watermarking_config": {"bias": "x"}}, "bias = 'x': must be a number, not a string"),
        ({"watermarking_config": {"seeding_scheme": "x"}}, "seeding_scheme = 'x': must be one of selfhash, lefthash"),
        ({"watermarking_config": {"seeding_scheme": "self-hash"}}, "did you mean selfhash"),
        ({"watermarking_config": {"greenlist_ratio": 1.0}}, "greenlist_ratio = 1.0: must be below 1"),
        ({"watermarking_config": {"ngram_len": 3}}, "watermarking_config: missing .* 'keys'"),
        ({"watermarking_config": {"ngram_len": 1, "keys": [3]}}, "ngram_len = 1: must be at least 2"),
        ({"watermarking_config": {"seeding_scheme": "selfhash"}, "vocab_size": 20}, "selfhash needs a vocabulary"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: must be a finite number, but is nan"),
    ],
)
def test_what_cannot_be_built_is_said_in_a_sentence(knobs: dict[str, Any], sentence: str) -> None:
    fields = {name: knobs[name] for name in ("encoder_ids",) if name in knobs}
    rest = {name: value for name, value in knobs.items() if name not in fields}
    made = material(**rest)
    made = dataclasses.replace(made, **fields)
    with pytest.raises(UsageError, match=sentence) as caught:
        build(made)
    assert "\n" not in caught.value.message


def test_a_users_class_and_function_are_built_with_leave() -> None:
    shift, double = listed({"use": f"{OWN}:Shift", "by": 5.0}, {"use": f"{OWN}:double", "factor": 3.0})
    assert shift(HISTORY, SCORES).tolist() == [[6.0, 2.0, 3.0, 4.0]]
    assert double(HISTORY, SCORES).tolist() == [[3.0, 6.0, 9.0, 12.0]]
    with pytest.raises(UsageError, match="code from outside needs --allow-plugins"):
        listed({"use": f"{OWN}:Shift"}, allow=False)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"use": "no_such_module:Thing"}, "module no_such_module could not be loaded: ModuleNotFoundError"),
        ({"use": f"{OWN}:Nobody"}, f"module {OWN} has no Nobody"),
        ({"use": f"{OWN}:Shift", "by": 0}, "could not be made: ValueError: by must not be 0"),
        ({"use": f"{OWN}:Shift", "width": 0}, "could not be made: TypeError"),
        ({"use": f"{OWN}:NUMBER"}, "int cannot be called"),
    ],
)
def test_a_users_own_that_cannot_be_built(entry: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        listed(entry)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("narrow", r"returned a tensor of shape \(1, 2\) instead of scores of shape \(1, 4\)"),
        ("nothing", "returned NoneType instead of scores"),
        ("broken", "failed: KeyError: 'where is"),
        ("alone", "failed: TypeError: alone"),
    ],
)
def test_a_users_own_that_fails_is_named(name: str, sentence: str) -> None:
    (made,) = listed({"use": f"{OWN}:{name}"})
    with pytest.raises(UsageError, match=f"processor {OWN}:{name} {sentence}") as caught:
        made(HISTORY, SCORES)
    assert "\n" not in caught.value.message
