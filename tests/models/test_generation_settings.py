"""The settings that a checkpoint's own files bring, against `generate()` of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import genctl
from genctl.config.names import FIELDS
from genctl.errors import GenctlError
from genctl.models import check
from tests.cli.tool import genctl as tool
from tests.tiny import BOS, EOS, PAD, save, tiny

PROMPT = [5, 60, 7, 81, 60, 7, 12]
NEW = 12


def checkpoint(folder: Path, architecture: str, *, nested: bool = False, **fields: Any) -> Path:
    """A folder without generation_config.json, whose config.json has these fields too."""
    save(tiny(architecture), folder)
    (folder / "generation_config.json").unlink()
    file = folder / "config.json"
    config = json.loads(file.read_text())
    part = config["decoder"] if nested else config
    part.update(fields)
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "left out"}))
    return folder


def theirs(folder: Path, sources: bool) -> tuple[list[int], Any]:
    kind = transformers.AutoModelForSeq2SeqLM if sources else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder).eval()
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
    tokens = made[0, 1 if sources else len(PROMPT) :].tolist()
    return tokens, model.generation_config


def ours(folder: Path, runtime: str = "auto") -> list[int]:
    model = genctl.load(str(folder), device="cpu", runtime=runtime)
    result = model.generate([PROMPT], max_new_tokens=NEW)[0]
    return [token.id for token in result.sequences[0].tokens]


def unpadded(tokens: list[int]) -> list[int]:
    while tokens and tokens[-1] == PAD:
        tokens = tokens[:-1]
    return tokens


DECODER: list[dict[str, Any]] = [
    {},
    {"forced_eos_token_id": 9},
    {"forced_bos_token_id": 11},
    {"num_beams": 3},
    {"num_beams": 4, "length_penalty": 3.0, "early_stopping": True, "eos_token_id": [2, 60, 7, 81, 140, 150]},
    {"no_repeat_ngram_size": 2},
    {"min_length": 15, "eos_token_id": list(range(2, 150))},
    {"suppress_tokens": list(range(20, 180))},
    {"begin_suppress_tokens": list(range(2, 290))},
    {"repetition_penalty": 1.8},
    {"bad_words_ids": [[token] for token in range(30, 160)]},
    {"exponential_decay_length_penalty": [2, 3.0]},
    {"renormalize_logits": True, "num_beams": 2},
    {"max_length": 10},
    {"eos_token_id": "left out"},
    {"pad_token_id": "left out", "bos_token_id": "left out"},
    {"eos_token_id": None},
]
SOURCES: list[dict[str, Any]] = [
    *(fields for fields in DECODER if not {"begin_suppress_tokens", "min_length"} & {*fields}),
    {"min_length": 9, "eos_token_id": list(range(2, 150))},
    {"encoder_no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.9},
    {"force_bos_token_to_be_generated": True},
    {"decoder_start_token_id": "left out"},
    {"decoder_start_token_id": None, "bos_token_id": 17},
]


def name_of(value: Any) -> str:
    return "+".join(value) or "nothing" if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("fields", DECODER, ids=name_of)
def test_a_decoder_without_generation_config_takes_the_settings_in_config_json(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, "gpt2", **fields)
    assert ours(folder) == unpadded(theirs(folder, False)[0])


@pytest.mark.parametrize("fields", SOURCES, ids=name_of)
@pytest.mark.parametrize("architecture", ["bart", "t5"])
def test_an_encoder_decoder_without_generation_config_takes_the_settings_in_config_json(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, architecture, **fields)
    assert ours(folder) == unpadded(theirs(folder, True)[0])


@pytest.mark.parametrize("fields", [*DECODER, *SOURCES], ids=name_of)
@pytest.mark.parametrize("architecture", ["gpt2", "bart"])
def test_both_runtimes_and_transformers_have_the_same_special_ids(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, architecture, **fields)
    kind = transformers.AutoModelForSeq2SeqLM if architecture == "bart" else transformers.AutoModelForCausalLM
    wanted = kind.from_pretrained(folder).generation_config
    config = json.loads((folder / "config.json").read_text())
    found = check.read_settings(folder, config)
    assert found.file == "config.json"
    assert found.values == {name: getattr(wanted, name) for name in FIELDS if getattr(wanted, name) is not None}


def test_a_nested_decoder_adds_what_the_outer_config_lacks(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "encoder_decoder", nested=True, repetition_penalty=1.7, decoder_start_token_id=33)
    tokens, config = theirs(folder, True)
    assert config.repetition_penalty == 1.7
    assert ours(folder) == unpadded(tokens)


def test_the_fields_are_those_of_the_installed_transformers() -> None:
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert {*FIELDS} == known


@pytest.mark.parametrize("runtime", ["native", "transformers"])
def test_a_generation_config_without_a_decoder_start_begins_with_bos(runtime: str, tmp_path: Path) -> None:
    folder = save(tiny("bart"), tmp_path)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    assert settings.pop("decoder_start_token_id") != BOS
    file.write_text(json.dumps(settings))
    assert ours(folder, runtime) == unpadded(theirs(folder, True)[0])


def test_a_special_id_of_config_json_that_the_model_lacks_is_passed_over_with_a_note(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "gpt2", eos_token_id=50256)
    assert ours(folder) == unpadded(theirs(folder, False)[0])
    assert "config.json: eos_token_id = 50256 is not used" in tool("run", "-m", str(folder), "-v", "-n", "2", "a").err


def test_of_several_eos_ids_in_config_json_only_those_that_the_model_lacks_are_dropped() -> None:
    settings = check.GenerationSettings({"eos_token_id": [EOS, 50256]}, "config.json")
    known, notes = check.known_ids(settings, 300)
    assert known.values == {"eos_token_id": [EOS]}
    assert len(notes) == 1


def test_a_length_penalty_without_an_eos_id_of_the_model_is_refused(tmp_path: Path) -> None:
    model = genctl.load(str(checkpoint(tmp_path, "gpt2", eos_token_id=50256)), device="cpu")
    with pytest.raises(GenctlError, match="there is no EOS id"):
        model.generate([PROMPT], max_new_tokens=NEW, exponential_decay_length_penalty=[2, 1.5])


@pytest.mark.parametrize("runtime", ["native", "transformers"])
@pytest.mark.parametrize("value", [[7], [7, 8], []], ids=str)
def test_a_list_of_ids_to_begin_with_is_one_line(value: list[int], runtime: str, tmp_path: Path) -> None:
    """`generate()` takes one for each row of its batch."""
    file = save(tiny("t5"), tmp_path) / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder_start_token_id": value}))
    done = tool("run", "-m", str(tmp_path), "--runtime", runtime, "-n", "2", "the cat")
    assert done.status == 3
    assert f"generation_config.json: decoder_start_token_id = {value} is a list" in " ".join(done.err.split())


def test_eos_of_generation_config_alone_counts_where_that_file_exists(tmp_path: Path) -> None:
    folder = save(tiny("gpt2"), tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 60, "num_beams": 3}))
    assert check.read_settings(folder, json.loads(file.read_text())).values.get("eos_token_id") == EOS
    assert ours(folder) == unpadded(theirs(folder, False)[0])
